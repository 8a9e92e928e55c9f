"""Validation of arguments by JSON Schema within limits of time and memory; validators are cached."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jsonschema_rs
import orjson
from cachetools import LRUCache

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, levels, object_at
from openapi_tool.tools.argument_hints import MAIN_NAMES, one_of_several
from openapi_tool.tools.argument_names import fold, not_taken, probably_meant
from openapi_tool.tools.bounds import count_values, patterns
from openapi_tool.tools.problems import MAX_PROBLEMS, Problem, argument_path, listed
from openapi_tool.tools.wording import short

_MAX_CHOICES_CHARS = 160
_PATTERN_PHRASES: Mapping[object, str] = {None: "", r"\S": ", not blank"}
_EXAMPLE = re.compile(r"such as .{1,40}?(?=;|\.(?:\s|$)|$)")
_NOUNS = {"boolean": "true or false", "object": "an object", "null": "null"}


def _rule_text(rule: Mapping[str, JsonValue]) -> str | None:
    """Return what a value must be, with an example of the description; None if the rule has no type."""
    choices = rule.get("enum")
    if isinstance(choices, list):
        return f"must be one of {short(', '.join(map(str, choices)), _MAX_CHOICES_CHARS)}"
    types = rule.get("type")
    if not types:
        return None
    wanted = types if isinstance(types, list) else [types]
    kinds = " or ".join(_type_text(str(wanted_type), rule) for wanted_type in wanted)
    description = rule.get("description")
    example = _EXAMPLE.search(description) if isinstance(description, str) else None
    return f"must be {kinds}, {example[0]}" if example else f"must be {kinds}"


def _type_text(wanted: str, rule: Mapping[str, JsonValue]) -> str:
    """Return `an integer from 1 to 20`, `a number above 0 and at most 5`, `a list of 1 to 10 texts`."""
    if wanted in ("integer", "number"):
        return ("an integer" if wanted == "integer" else "a number") + _limits_text(rule)
    if wanted == "string":
        size = _range_text(_number(rule, "minLength"), _number(rule, "maxLength"), "of ", "character")
        return f"a text{size}{_PATTERN_PHRASES.get(rule.get('pattern'), ' that fits its pattern')}"
    if wanted == "array":
        items = rule.get("items")
        noun = "text" if isinstance(items, dict) and items.get("type") == "string" else "item"
        size = _range_text(_number(rule, "minItems"), _number(rule, "maxItems"), "of ", noun)
        return f"a list{size or f' of {noun}s'}"
    return _NOUNS.get(wanted, wanted)


def _limits_text(rule: Mapping[str, JsonValue]) -> str:
    above = _number(rule, "exclusiveMinimum")
    below = _number(rule, "exclusiveMaximum")
    text = ""
    if above is not None:
        text += f" above {_number_text(above)}"
        if rule.get("maximum") is not None:
            text += " and"
    if below is not None:
        text += f" below {_number_text(below)}"
    return text + _range_text(_number(rule, "minimum"), _number(rule, "maximum"), "of " if above is None else "")


def _number(rule: Mapping[str, JsonValue], keyword: str) -> float | None:
    limit = rule.get(keyword)
    return limit if isinstance(limit, int | float) else None


def _range_text(minimum: float | None, maximum: float | None, of: str, noun: str = "") -> str:
    """Return a range in words, of a number, or, with `noun`, of a size."""
    if minimum is None and maximum is None:
        return ""
    if maximum is None:
        limit, words = minimum, f" {of}at least {_number_text(minimum)}"
    elif minimum is None:
        limit, words = maximum, f" {of}at most {_number_text(maximum)}"
    elif minimum == maximum:
        limit, words = maximum, f" {of}{_number_text(maximum)}"
    else:
        limit, words = maximum, f" {of if noun else 'from '}{_number_text(minimum)} to {_number_text(maximum)}"
    return f"{words} {noun}{'' if limit == 1 else 's'}" if noun else words


def _number_text(number: float | None) -> str:
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return short(f"{number:,}")


MAX_CACHE_BYTES = 32_000_000
"""Memory of all compiled validators, by the estimate of `_Compiled.memory`."""

# The linear-time engine, without look-around. A larger compiled pattern would take too long per character.
_LINEAR = jsonschema_rs.RegexOptions(size_limit=16_000, dfa_size_limit=200_000)
_CHEAP_PATTERN = r"\S"  # of the built-in tools; found at the first character that is not white space
_TYPE_OF_KEYWORD = {
    "type": None,
    "enum": None,
    **dict.fromkeys(("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum"), "number"),
    **dict.fromkeys(("maxLength", "minLength", "pattern"), "string"),
    **dict.fromkeys(("maxItems", "minItems"), "array"),
}
"""Type that a keyword applies to (None: any). Its message is the whole rule: `must be an integer from 1 to 20`."""
_MESSAGE_OF_KEYWORD = {
    "anyOf": "must be of one of the forms in the tool's parameters",
    "oneOf": "must be of exactly one of the forms in the tool's parameters",
    "not": "must not be of this form",
    "uniqueItems": "must have no item twice",
}
_MAX_MATCHED_BYTES = 50_000  # bytes of the arguments times patterns; at up to 1 µs each, 50 ms
# Bytes of copies in the validator's errors. They take up to 4 times as much memory, and 5 ms per MB.
_MAX_EXPLAINED_BYTES = 6_000_000
_BYTES_PER_ERROR = 2_000  # in addition, so that there are at most 3,000 errors of 15 µs each

# Memory of a compiled validator in bytes: the minimum, and for each value, byte and costly pattern of its schema.
_MIN_MEMORY_BYTES = 5_000
_MEMORY_PER_VALUE = 1_000
_MEMORY_PER_BYTE = 2
_MEMORY_PER_PATTERN = 250_000


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled validator, and the number of bytes (`size`), values and costly patterns of its schema."""

    validator: jsonschema_rs.Draft202012Validator
    size: int
    values: int
    patterns: int

    @property
    def memory(self) -> int:
        """Estimate its memory in bytes, with factors that fit measured resident sizes."""
        return (
            _MIN_MEMORY_BYTES
            + self.size * _MEMORY_PER_BYTE
            + self.values * _MEMORY_PER_VALUE
            + self.patterns * _MEMORY_PER_PATTERN
        )


_compiled: LRUCache[bytes, _Compiled] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda compiled: compiled.memory)


def schema_problems(schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return a line for each offending path of the arguments, as `listed`.

    Raises UnusableSchema if `schema` itself is not usable. References are never fetched.
    """
    if not schema:
        return []
    compiled = _compiled_schema(schema)
    instance = dict(arguments)
    if unsuitable := unsuitable_values(instance):
        return listed(unsuitable)
    size = _size(instance)
    if size * compiled.patterns > _MAX_MATCHED_BYTES:
        max_bytes = _MAX_MATCHED_BYTES // compiled.patterns
        return [f"arguments: have more than {max_bytes:,} bytes together, the limit of this tool; give less"]
    if compiled.validator.is_valid(instance):
        return []
    return listed(_explained(schema, compiled, instance))


def fits(schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> bool:
    """Return whether `schema_problems` would find no problem, without the cost of describing one."""
    if not schema:
        return True
    compiled = _compiled_schema(schema)
    instance = dict(arguments)
    try:
        size = _size(instance)
    except orjson.JSONEncodeError:
        return False
    return size * compiled.patterns <= _MAX_MATCHED_BYTES and compiled.validator.is_valid(instance)


def _explained(schema: Mapping[str, JsonValue], compiled: _Compiled, instance: JsonObject) -> list[str]:
    """Return the problems of an invalid instance, without arguments whose errors would take too much memory.

    Each error of jsonschema-rs copies the value and the choices of its rule: 500 branches and a text of 250 kB took
    500 MB.
    """
    within, left_out = _within_memory(compiled, instance)
    # Without the arguments left out, `required` and rules of the whole object may fail falsely: ignore these.
    problems = {
        f"{argument_path(path)}: {message}": None
        for error in compiled.validator.iter_errors(within)
        for path, message in _located(error, schema, within)
        if not left_out or (path and path[0] not in left_out)
    }
    if problems:
        return list(problems)
    named = ", ".join(listed(sorted(left_out)))
    return [f"{named}: too large to say what is wrong; call again with less"]


def _within_memory(compiled: _Compiled, instance: JsonObject) -> tuple[JsonObject, frozenset[str]]:
    """Return the arguments whose errors fit into memory, smallest first, and the names of the others."""
    costs = {name: _cost(compiled, value) for name, value in instance.items()}
    free_bytes = _MAX_EXPLAINED_BYTES
    within = set[str]()
    for name in sorted(costs, key=lambda name: costs[name]):
        free_bytes -= costs[name]
        if free_bytes < 0:
            break
        within.add(name)
    return {name: instance[name] for name in instance if name in within}, frozenset(instance.keys() - within)


def _cost(compiled: _Compiled, value: JsonValue) -> int:
    """Return the bytes of copies: the argument for each value of the schema, the schema for each of the argument."""
    values = count_values(value) + 1
    return (_size(value) + values * _BYTES_PER_ERROR) * compiled.values + values * compiled.size


def _size(value: JsonValue) -> int:
    return len(orjson.dumps(value))


def unsuitable_values(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return a line for each argument that JSON cannot hold exactly; its depth must be limited."""
    found = []
    for name, value in sorted(arguments.items()):
        if any(isinstance(one, float) and not math.isfinite(one) for level in levels([value]) for one in level):
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


def _located(
    error: jsonschema_rs.ValidationError, schema: Mapping[str, JsonValue], instance: Mapping[str, JsonValue]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield path and message of each mistake; other names are suggested at the top level only."""
    match error.kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name):
            yield (*error.instance_path, name), _missing(name, schema, {} if error.instance_path else instance)
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            known = () if error.instance_path else object_at(schema, "properties").keys() - instance.keys()
            for number, name in enumerate(names):  # only the first MAX_PROBLEMS are reported
                yield (*error.instance_path, name), not_taken(name, sorted(known) if number < MAX_PROBLEMS else ())
        case jsonschema_rs.ValidationErrorKind.Type() if error.instance is None and error.instance_path:
            # A model means by null that it omits the argument; tools/arguments.py has omitted optional ones.
            yield tuple(error.instance_path), "is required"
        case kind:
            hint = one_of_several(error.instance) if _is_main(error) else ""
            yield tuple(error.instance_path), _violated_rule(kind, error, schema) + hint


def _is_main(error: jsonschema_rs.ValidationError) -> bool:
    """Return whether an error is about the query or address of a call."""
    path = list(error.instance_path)
    return len(path) == 1 and fold(str(path[0])) in MAIN_NAMES


def _missing(name: str, schema: Mapping[str, JsonValue], instance: Mapping[str, JsonValue]) -> str:
    unknown = [other for other in instance if other not in object_at(schema, "properties")][:MAX_PROBLEMS]
    other = next((other for other in unknown if probably_meant(other, [name])), None)
    return f"is required; give it in place of {short(other)}" if other else "is required"


def _violated_rule(
    kind: jsonschema_rs.ValidationErrorKind, error: jsonschema_rs.ValidationError, schema: Mapping[str, JsonValue]
) -> str:
    """Return the text of the rule that a value violates."""
    keyword = kind.name
    if keyword in _TYPE_OF_KEYWORD:
        rule = object_at(schema, *error.schema_path[:-1])
        if text := _rule_text(rule if "type" in rule else {**rule, "type": _TYPE_OF_KEYWORD[keyword]}):
            return text
    return _MESSAGE_OF_KEYWORD.get(keyword) or short(error.message)


def schema_defect(schema: Mapping[str, JsonValue]) -> Problem | None:
    """Return why a schema cannot be compiled."""
    try:
        _compiled_schema(schema)
    except UnusableSchema as defect:
        return defect.problem
    return None


class UnusableSchema(ToolMisconfigured):
    """The `parameters` of a definition are not a supported JSON Schema."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"The tool's definition is not usable; an operator must correct it: {problem}")
        self.problem = problem


def _compiled_schema(schema: Mapping[str, JsonValue]) -> _Compiled:
    try:
        content = orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise UnusableSchema(Problem(("parameters",), str(error))) from error
    key = hashlib.sha256(content).digest()
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(dict(schema), len(content))
    return compiled


def _compile(schema: JsonObject, size: int) -> _Compiled:
    try:
        validator = jsonschema_rs.Draft202012Validator(schema, offline=True, pattern_options=_LINEAR)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise UnusableSchema(_defect(error)) from error
    costly = sum(pattern != _CHEAP_PATTERN for pattern in patterns(schema))
    return _Compiled(validator, size, count_values(schema), costly)


def _defect(error: Exception) -> Problem:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return Problem(("parameters",), short(str(error)))
    path = ("parameters", *error.instance_path)
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Format):  # in a schema only `regex` is checked
        return Problem(path, "is no supported regular expression: too large, or with look-around or back-references")
    return Problem(path, short(error.message))


def visible_schema(schema: Mapping[str, JsonValue], hidden: frozenset[str]) -> Mapping[str, JsonValue]:
    """Return the schema without arguments that are hidden from the model."""
    properties, required = schema.get("properties"), schema.get("required")
    if not hidden:
        return schema
    visible = dict(schema)
    if isinstance(properties, dict):
        visible["properties"] = {name: rule for name, rule in properties.items() if name not in hidden}
    if isinstance(required, list):
        visible["required"] = [name for name in required if not (isinstance(name, str) and name in hidden)]
    return visible
