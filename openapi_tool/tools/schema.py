"""Validation of a call's arguments by the JSON Schema of its tool, within limits of time and memory.

Each problem is a line for the model, such as `count: must be an integer from 1 to 20`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jsonschema_rs
import orjson

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, levels, object_at
from openapi_tool.tools.argument_hints import MAIN_NAMES, one_of_several
from openapi_tool.tools.argument_names import fold, not_taken, probably_meant
from openapi_tool.tools.bounds import count_values
from openapi_tool.tools.compiled_schema import CompiledSchema, compiled_schema
from openapi_tool.tools.problems import MAX_PROBLEMS, Problem, argument_path, listed
from openapi_tool.tools.rule_text import rule_text
from openapi_tool.tools.wording import short

_TYPE_OF_KEYWORD = {
    "type": None,
    "enum": None,
    **dict.fromkeys(("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum"), "number"),
    **dict.fromkeys(("maxLength", "minLength", "pattern"), "string"),
    **dict.fromkeys(("maxItems", "minItems"), "array"),
}
"""Keywords whose message is the whole rule in words, and the type of values that each applies to (None: any)."""

_MESSAGE_OF_KEYWORD = {
    "anyOf": "must be of one of the forms in the tool's parameters",
    "oneOf": "must be of exactly one of the forms in the tool's parameters",
    "not": "must not be of this form",
    "uniqueItems": "must have no item twice",
}

_MAX_MATCHED_BYTES = 50_000
"""Bytes of the arguments times costly patterns of the schema. Each takes up to 1 µs, so all of them 50 ms."""

_MAX_EXPLAINED_BYTES = 6_000_000
"""Bytes of copies in the validator's errors. They take up to 4 times as much memory, and 5 ms per MB."""

_BYTES_PER_ERROR = 2_000
"""Bytes that an error counts in addition, so that there are at most 3,000 errors of 15 µs each."""


def schema_problems(schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return a line for each offending path of the arguments, as `listed`.

    Raises UnusableSchema if `schema` itself is not usable. References are never fetched.
    """
    if not schema:
        return []
    compiled = compiled_schema(schema)
    instance = dict(arguments)
    unsuitable = unsuitable_values(instance)
    if unsuitable:
        return listed(unsuitable)
    if _json_bytes(instance) * compiled.patterns > _MAX_MATCHED_BYTES:
        max_bytes = _MAX_MATCHED_BYTES // compiled.patterns
        return [f"arguments: have more than {max_bytes:,} bytes together, the limit of this tool; give less"]
    if compiled.validator.is_valid(instance):
        return []
    return listed(_explain(schema, compiled, instance))


def fits(schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> bool:
    """Return whether `schema_problems` would find no problem, without the cost of describing one."""
    if not schema:
        return True
    compiled = compiled_schema(schema)
    instance = dict(arguments)
    try:
        matched_bytes = _json_bytes(instance) * compiled.patterns
    except orjson.JSONEncodeError:
        return False
    return matched_bytes <= _MAX_MATCHED_BYTES and compiled.validator.is_valid(instance)


def unsuitable_values(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return a line for each argument that JSON cannot hold exactly; its depth must be limited."""
    found = []
    for name, value in sorted(arguments.items()):
        if _has_infinite_number(value):
            found.append(f"{short(name)}: contains a number that is not finite; give another one")
            continue
        try:
            orjson.dumps({name: value})
        except orjson.JSONEncodeError as error:
            if "surrogate" in str(error):
                found.append(f"{short(name)}: contains half of a surrogate pair, which is no character; leave it out")
            else:  # an integer, for whose digits the validator may take milliseconds
                found.append(f"{short(name)}: contains a number beyond 64 bits")
    return found


def _has_infinite_number(value: JsonValue) -> bool:
    for level in levels([value]):
        for member in level:
            if isinstance(member, float) and not math.isfinite(member):
                return True
    return False


def _explain(schema: Mapping[str, JsonValue], compiled: CompiledSchema, instance: JsonObject) -> list[str]:
    """Return the problems of an invalid instance, without arguments whose errors would take too much memory.

    Each error of jsonschema-rs copies the value and the choices of its rule: 500 branches and a text of 250 kB took
    500 MB.
    """
    within_memory, left_out = _within_memory(compiled, instance)
    lines: dict[str, None] = {}  # each once, in order
    for error in compiled.validator.iter_errors(within_memory):
        for problem in _problems_of(error, schema, within_memory):
            path = problem.path
            # Without the arguments left out, `required` and rules of the whole object may fail falsely: ignore these.
            is_false = left_out and (not path or path[0] in left_out)
            if not is_false:
                lines[f"{argument_path(path)}: {problem.message}"] = None
    if lines:
        return list(lines)
    names = ", ".join(listed(sorted(left_out)))
    return [f"{names}: too large to say what is wrong; call again with less"]


def _within_memory(compiled: CompiledSchema, instance: JsonObject) -> tuple[JsonObject, frozenset[str]]:
    """Return the arguments whose errors fit into memory, smallest first, and the names of the others."""
    costs = {name: _error_bytes(compiled, value) for name, value in instance.items()}
    free_bytes = _MAX_EXPLAINED_BYTES
    within = set[str]()
    for name in sorted(costs, key=lambda name: costs[name]):
        free_bytes -= costs[name]
        if free_bytes < 0:
            break
        within.add(name)
    return {name: instance[name] for name in instance if name in within}, frozenset(instance.keys() - within)


def _error_bytes(compiled: CompiledSchema, value: JsonValue) -> int:
    """Return the bytes that an argument's errors copy at most.

    That is the argument for each value of the schema, and the schema for each value of the argument.
    """
    values = count_values(value) + 1
    return (_json_bytes(value) + values * _BYTES_PER_ERROR) * compiled.values + values * compiled.size


def _json_bytes(value: JsonValue) -> int:
    return len(orjson.dumps(value))


def _problems_of(
    error: jsonschema_rs.ValidationError, schema: Mapping[str, JsonValue], instance: JsonObject
) -> Iterator[Problem]:
    """Yield each mistake that an error is about. Other names are suggested at the top level only."""
    path = tuple(error.instance_path)
    match error.kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name):
            yield Problem((*path, name), _missing_text(name, schema, {} if path else instance))
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            known = [] if path else sorted(object_at(schema, "properties").keys() - instance.keys())
            for number, name in enumerate(names):
                is_reported = number < MAX_PROBLEMS  # the search of a similar name takes long
                yield Problem((*path, name), not_taken(name, known if is_reported else ()))
        case jsonschema_rs.ValidationErrorKind.Type() if path and error.instance is None:
            # A model means by null that it omits the argument; tools/arguments.py has omitted optional ones.
            yield Problem(path, "is required")
        case kind:
            is_main = len(path) == 1 and fold(str(path[0])) in MAIN_NAMES
            hint = one_of_several(error.instance) if is_main else ""
            yield Problem(path, _violated_rule_text(kind, error, schema) + hint)


def _missing_text(name: str, schema: Mapping[str, JsonValue], instance: JsonObject) -> str:
    """Return the problem of a missing argument; if another one was probably meant as it, name that."""
    declared = object_at(schema, "properties")
    undeclared = [other for other in instance if other not in declared]
    for other in undeclared[:MAX_PROBLEMS]:
        if probably_meant(other, [name]) is not None:
            return f"is required; give it in place of {short(other)}"
    return "is required"


def _violated_rule_text(
    kind: jsonschema_rs.ValidationErrorKind, error: jsonschema_rs.ValidationError, schema: Mapping[str, JsonValue]
) -> str:
    """Return the text of the rule that a value violates."""
    keyword = kind.name
    if keyword in _TYPE_OF_KEYWORD:
        rule = object_at(schema, *error.schema_path[:-1])
        if "type" not in rule:
            rule = {**rule, "type": _TYPE_OF_KEYWORD[keyword]}
        text = rule_text(rule)
        if text is not None:
            return text
    return _MESSAGE_OF_KEYWORD.get(keyword) or short(error.message)


def visible_schema(schema: Mapping[str, JsonValue], hidden: frozenset[str]) -> Mapping[str, JsonValue]:
    """Return the schema without arguments that are hidden from the model."""
    if not hidden:
        return schema
    visible = dict(schema)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        visible["properties"] = {name: rule for name, rule in properties.items() if name not in hidden}
    if isinstance(required, list):
        visible["required"] = [name for name in required if not isinstance(name, str) or name not in hidden]
    return visible
