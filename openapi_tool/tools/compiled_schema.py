"""Compiled JSON Schemas: the validators of jsonschema-rs, cached within a limit of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import jsonschema_rs
import orjson
from cachetools import LRUCache

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonObject, JsonValue
from openapi_tool.tools.bounds import count_values, patterns
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.wording import short

MAX_CACHE_BYTES = 32_000_000
"""Memory of all compiled validators, by the estimate of `CompiledSchema.memory`."""

# The linear-time engine, without look-around. A larger compiled pattern would take too long per character.
_LINEAR_PATTERNS = jsonschema_rs.RegexOptions(size_limit=16_000, dfa_size_limit=200_000)
_CHEAP_PATTERN = r"\S"  # of the built-in tools; found at the first character that is not white space

# Memory of a compiled validator in bytes: the minimum, and for each value, byte and costly pattern of its schema.
# The numbers fit measured resident sizes.
_MIN_MEMORY_BYTES = 5_000
_MEMORY_PER_VALUE = 1_000
_MEMORY_PER_BYTE = 2
_MEMORY_PER_PATTERN = 250_000


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """Compiled validator, and the number of bytes (`size`), values and costly patterns of its schema."""

    validator: jsonschema_rs.Draft202012Validator
    size: int
    values: int
    patterns: int

    @property
    def memory(self) -> int:
        """Estimate its memory in bytes."""
        return (
            _MIN_MEMORY_BYTES
            + self.size * _MEMORY_PER_BYTE
            + self.values * _MEMORY_PER_VALUE
            + self.patterns * _MEMORY_PER_PATTERN
        )


class UnusableSchema(ToolMisconfigured):
    """The `parameters` of a definition are not a supported JSON Schema."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"The tool's definition is not usable; an operator must correct it: {problem}")
        self.problem = problem


_cache: LRUCache[bytes, CompiledSchema] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda compiled: compiled.memory)


def compiled_schema(schema: Mapping[str, JsonValue]) -> CompiledSchema:
    """Return the validator of a schema, from the cache if it is there. Raises UnusableSchema."""
    try:
        content = orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise UnusableSchema(Problem(("parameters",), str(error))) from error
    key = hashlib.sha256(content).digest()
    compiled = _cache.get(key)
    if compiled is None:
        compiled = _cache[key] = _compile(dict(schema), len(content))
    return compiled


def schema_defect(schema: Mapping[str, JsonValue]) -> Problem | None:
    """Return why a schema cannot be compiled; None if it can."""
    try:
        compiled_schema(schema)
    except UnusableSchema as unusable:
        return unusable.problem
    return None


def _compile(schema: JsonObject, size: int) -> CompiledSchema:
    try:
        # Offline: references are never fetched.
        validator = jsonschema_rs.Draft202012Validator(schema, offline=True, pattern_options=_LINEAR_PATTERNS)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise UnusableSchema(_defect(error)) from error
    costly_patterns = sum(pattern != _CHEAP_PATTERN for pattern in patterns(schema))
    return CompiledSchema(validator, size, count_values(schema), costly_patterns)


def _defect(error: Exception) -> Problem:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return Problem(("parameters",), short(str(error)))
    path = ("parameters", *error.instance_path)
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Format):  # in a schema only `regex` is checked
        return Problem(path, "is no supported regular expression: too large, or with look-around or back-references")
    return Problem(path, short(error.message))
