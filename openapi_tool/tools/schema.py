"""Arguments against the definition's JSON Schema: every problem at once, validators compiled once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import orjson
from cachetools import LRUCache

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.bounds import parts, patterns
from openapi_tool.tools.problems import listed, short

MAX_CACHE_BYTES = 32_000_000
"""Memory of all compiled validators of the process, by the estimate of `_Compiled.memory`."""

# The engine without look-around takes linear time; beyond these sizes its steps per character grow too large.
_LINEAR = jsonschema_rs.RegexOptions(size_limit=16_000, dfa_size_limit=200_000)
_FREE_PATTERN = r"\S"  # of the built-in tools: ends at the first character that is no blank
_MAX_MATCHED_BYTES = 50_000  # times patterns: at up to 1 µs each, 50 ms
_MAX_EXPLAINED_BYTES = 6_000_000  # of copies in errors: up to 4 times as much memory, and 5 ms a MB
_BYTES_A_VALUE = 60  # what the copy of a value costs beside its text

_BYTES_A_PART, _BYTES_A_BYTE, _BYTES_A_PATTERN, _BYTES_AT_LEAST = 1_000, 2, 250_000, 5_000


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A validator with its schema's size in bytes, number of values, and number of patterns that are not free."""

    validator: jsonschema_rs.Draft202012Validator
    size: int
    parts: int
    patterns: int

    @property
    def memory(self) -> int:
        """About how many bytes it takes; most are Rust's, which only the resident size of the process shows."""
        return (
            _BYTES_AT_LEAST + self.size * _BYTES_A_BYTE + self.parts * _BYTES_A_PART + self.patterns * _BYTES_A_PATTERN
        )


_compiled: LRUCache[bytes, _Compiled] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda compiled: compiled.memory)


def schema_problems(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Return a line for each offending path of the arguments, at most 21; none when they are valid.

    Raises UnusableSchema when `schema` itself is not usable. References are never fetched.
    """
    if not schema:
        return []
    compiled = _validator(schema)
    instance = dict(arguments)
    try:
        size = _size(instance)
    except orjson.JSONEncodeError:  # arithmetic on one number of 4,000 digits takes milliseconds
        return listed([f"{short(name)}: holds a number beyond 64 bits" for name in sorted(_huge(instance))])
    if size * compiled.patterns > _MAX_MATCHED_BYTES:
        most = _MAX_MATCHED_BYTES // compiled.patterns
        return [f"arguments: are longer than {most:,} bytes together, which this tool does not take; give less"]
    if compiled.validator.is_valid(instance):
        return []
    return listed(_explained(compiled, instance))


def _explained(compiled: _Compiled, instance: dict[str, Any]) -> list[str]:
    """Return every problem of an invalid instance whose errors fit into memory.

    The library's errors hold a copy of the value and of its choices, so all of them take the product of schema and
    instance: 500 branches and a text of 250 kB took 500 MB. Arguments that are too large are left out.
    """
    kept, left_out = _tellable(compiled, instance)
    problems = [
        f"{'.'.join(short(str(part)) for part in path) or 'arguments'}: {says}"
        for error in compiled.validator.iter_errors(kept)
        for path, says in _described(error)
        if not left_out or (path and path[0] not in left_out)
    ]
    if problems:
        return problems
    named = ", ".join(listed(sorted(left_out)))
    return [f"{named}: too large to say what is wrong; call again with less"]


def _tellable(compiled: _Compiled, instance: dict[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Split the arguments into those whose errors fit into memory, smallest first, and the names of the others."""
    costs = {name: _cost(compiled, value) for name, value in instance.items()}
    room, kept = _MAX_EXPLAINED_BYTES, set[str]()
    for name in sorted(costs, key=lambda name: costs[name]):
        room -= costs[name]
        if room < 0:
            break
        kept.add(name)
    return {name: instance[name] for name in instance if name in kept}, frozenset(instance.keys() - kept)


def _cost(compiled: _Compiled, value: Any) -> int:
    """Bytes that errors may copy for one argument: each schema part copies it, each of its values the choices."""
    values = parts(value) + 1
    return (_size(value) + values * _BYTES_A_VALUE) * compiled.parts + values * compiled.size


def _size(value: Any) -> int:
    return len(orjson.dumps(value))


def _huge(instance: dict[str, Any]) -> Iterator[str]:
    for name, value in instance.items():
        try:
            _size(value)
        except orjson.JSONEncodeError:
            yield name


def _described(error: jsonschema_rs.ValidationError) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each offending path of an error, and what is wrong there; what is missing or too much has a path of its own."""
    match error.kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name):
            yield (*error.instance_path, name), "is required"
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            yield from (((*error.instance_path, name), "is not an argument that this tool takes") for name in names)
        case _:
            yield tuple(error.instance_path), error.message


def schema_defect(schema: Mapping[str, Any]) -> str | None:
    """Compile a schema; return why it cannot be used, None where it can."""
    try:
        _validator(schema)
    except UnusableSchema as defect:
        return defect.reason
    return None


class UnusableSchema(ToolMisconfigured):
    """A definition's `parameters` are no JSON Schema that is read; `reason` names the place in them."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The tool's definition is not usable; an operator must correct it: {reason}")
        self.reason = reason


def _validator(schema: Mapping[str, Any]) -> _Compiled:
    try:
        content = orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise UnusableSchema(f"parameters: {error}") from error
    key = hashlib.sha256(content).digest()
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(dict(schema), len(content))
    return compiled


def _compile(schema: dict[str, Any], size: int) -> _Compiled:
    try:
        validator = jsonschema_rs.Draft202012Validator(schema, offline=True, pattern_options=_LINEAR)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise UnusableSchema(_reason(error)) from error
    costly = sum(pattern != _FREE_PATTERN for pattern in patterns(schema))
    return _Compiled(validator, size, parts(schema), costly)


def _reason(error: Exception) -> str:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return f"parameters: {short(str(error))}"
    where = ".".join(("parameters", *(short(str(part)) for part in error.instance_path)))
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Format):
        return f"{where}: is no regular expression that is read: too large, or with look-around or back-references"
    return f"{where}: {short(error.message)}"


def visible_schema(schema: Mapping[str, Any], hidden: frozenset[str]) -> Mapping[str, Any]:
    """The schema without the names that the model never sees (`fixed` and `envs`)."""
    properties, required = schema.get("properties"), schema.get("required")
    if not hidden or not (isinstance(properties, dict) or isinstance(required, list)):
        return schema
    visible = dict(schema)
    if isinstance(properties, dict):
        visible["properties"] = {name: rule for name, rule in properties.items() if name not in hidden}
    if isinstance(required, list):
        visible["required"] = [name for name in required if not (isinstance(name, str) and name in hidden)]
    return visible
