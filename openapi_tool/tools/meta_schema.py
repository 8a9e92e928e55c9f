"""JSON meta-schema of tool definitions, for the linter and for stored rows.

`errorMessage` is the message for a violation of the keywords beside it, as in ajv-errors; `warning` makes it a warning.
The `$defs`:

- `definition`: a definition's file (protocol sections 4 and 5), stricter than the parser of stored rows.
- `schema`: the subset of JSON Schema that `parameters` may use (tool-design section 2).
- `stored`, `section`: what the parser needs of a stored row, and of its `options.jina`.
- `row`: limits of keywords in stored `parameters`. Validation takes linear time: the value of a refused keyword is not
  validated, and its error contains only that value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

import jsonschema_rs

from openapi_tool.protocol.jsontext import JsonObject, JsonValue
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.wording import any_of, did_you_mean

BUDGETS = tuple(
    f"{scope}_{unit}"
    for scope in ("session", "agent_day", "project_day", "project_month")
    for unit in ("requests", "tokens")
)
"""Names of all budgets, narrowest first. Not of `options/`: worker processes import this module, not pydantic."""

MAX_SUSPEND_S = 3_600
MIN_RESULT_TOKENS = 500
"""Lowest limit of the tokens that a model is shown at once."""

MAX_PROPERTIES = 200
"""Names in one `properties`; model providers accept at most 128."""

MAX_ENUM_VALUES = 500
"""Values of one `enum`; the validator compares each item of a list with all of them."""

TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
_FORMATS: list[JsonValue] = ["date", "date-time", "email", "hostname", "ipv4", "ipv6", "regex", "time", "uri", "uuid"]


def _refused(message: str, *words: str) -> JsonObject:
    return {word: {"not": {}, "errorMessage": message} for word in words}


def _ignored(why: str) -> JsonObject:
    return {"not": {}, "errorMessage": f"is ignored{why}; take it out", "warning": True}


REFUSED_KEYWORDS = {
    **_refused("references are not read; write the schema out", "$ref", "$dynamicRef", "$recursiveRef"),
    **_refused(
        "is not read: what it costs grows with the product of branches and values",
        "unevaluatedProperties",
        "unevaluatedItems",
        "propertyNames",
    ),
}
"""Keywords that no stored row may use, with the schema that refuses each."""

_BELOW: JsonObject = {"$ref": "#/$defs/below"}


def _row(refused: JsonObject) -> JsonObject:
    names = f"has more than {MAX_PROPERTIES} names; take some out"
    values = f"has more than {MAX_ENUM_VALUES} values; take some out, or use a pattern"
    return {
        "properties": {
            **refused,
            "properties": {**_BELOW, "maxProperties": MAX_PROPERTIES, "errorMessage": names},
            "enum": {**_BELOW, "maxItems": MAX_ENUM_VALUES, "errorMessage": values},
        },
        "additionalProperties": _BELOW,
        "items": _BELOW,
    }


_NOT_IN_SUBSET: JsonObject = {
    **REFUSED_KEYWORDS,
    **_refused("references are not read; write the schema out", "$defs", "definitions"),
    **_refused("alternatives are not allowed; an optional field is left out of `required`", "anyOf"),
    **_refused("alternatives are not allowed; say in the descriptions which fields exclude each other", "oneOf"),
    **_refused("combinations are not allowed; write one schema", "allOf"),
    **_refused("negations are not allowed; say in the description what does not fit", "not"),
    **_refused(
        "conditionals are not allowed; say them in the descriptions",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
    ),
    **_refused("name every property in `properties`", "patternProperties"),
}
_SIZE: JsonObject = {"type": "integer", "minimum": 0, "errorMessage": "must be a whole number from 0"}
_PROSE: JsonObject = {"type": "string", "pattern": r"\S", "errorMessage": "must be a text that is not empty"}
_ARGUMENT: JsonObject = {"$ref": "#/$defs/argument"}
_COMMON_KEYWORDS: JsonObject = {
    "type": {
        "if": {"type": "array"},
        "then": {
            "not": {},
            "errorMessage": "must be one type; an optional field is left out of `required`, never null",
        },
        "else": {"enum": [*TYPES]},
    },
    **dict.fromkeys(("title", "description"), _PROSE),
    **{word: {} for word in ("default", "const", "examples", "deprecated")},
    "enum": {
        "type": "array",
        "minItems": 1,
        "uniqueItems": True,
        "errorMessage": "must be a list of at least one value, each once",
    },
}
_NUMBER_KEYWORDS: JsonObject = {
    word: {"type": "number", "errorMessage": "must be a number"}
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
}
_PROPERTIES: JsonObject = {
    "type": "object",
    "additionalProperties": _ARGUMENT,
    "patternProperties": {
        "^(?![A-Za-z0-9_.-]{1,64}$)": {
            **_ARGUMENT,
            "not": {},
            "errorMessage": "must be 1 to 64 letters, digits, '_', '-' or '.'",
        }
    },
}
_KEYWORDS_OF_TYPE: Mapping[str, JsonObject] = {
    "object": {
        "properties": _PROPERTIES,
        "required": {"type": "array"},
        "additionalProperties": {"const": False, "errorMessage": "may only be false"},
    },
    "string": {"minLength": _SIZE, "maxLength": _SIZE, "pattern": {"type": "string"}, "format": {"enum": _FORMATS}},
    **dict.fromkeys(("number", "integer"), _NUMBER_KEYWORDS),
    **dict.fromkeys(("boolean", "null"), JsonObject()),
    "array": {"items": {"$ref": "#/$defs/schema"}, "minItems": _SIZE, "maxItems": _SIZE},
}
_TYPE_KEYWORDS: JsonObject = {word: rule for words in _KEYWORDS_OF_TYPE.values() for word, rule in words.items()}


def _has_type(kind: str) -> JsonObject:
    return {"properties": {"type": {"const": kind}}, "required": ["type"]}


def _rules_of_type(kind: str) -> JsonObject:
    foreign = _refused(
        f"says nothing about type {kind!r}; take it out",
        *sorted(_TYPE_KEYWORDS.keys() - _KEYWORDS_OF_TYPE[kind].keys()),
    )
    values: JsonObject = {"items": {"type": kind, "errorMessage": f"is not of type {kind!r}"}}
    return {"if": _has_type(kind), "then": {"properties": {**foreign, "enum": values}}}


_SCHEMA: JsonObject = {
    "type": "object",
    "errorMessage": "must be a schema, which is an object with a `type`",
    "$ref": "#/$defs/keywords",
    "allOf": [
        {
            # With `enum` or `const` it needs no `type`; a refused keyword already has its own problem.
            "if": {"not": {"anyOf": [{"required": [word]} for word in ("enum", "const", *_NOT_IN_SUBSET)]}},
            "then": {"required": ["type"], "errorMessage": f"is missing; it is one of {any_of(TYPES)}"},
        },
        {
            "if": _has_type("array"),
            "then": {"required": ["items"], "errorMessage": "is missing; the kernel refuses an array without it"},
        },
        *map(_rules_of_type, TYPES),
    ],
}
_PARAMETERS: JsonObject = {
    "type": ["object", "null"],
    "minProperties": 1,
    "errorMessage": "must be an object with the schema of each argument; leave it out to take the built-in tool's own",
    "if": {"type": "object", "minProperties": 1, "properties": {"type": {"const": "object"}}},
    "then": {"$ref": "#/$defs/schema"},
    "else": {"properties": _refused("must be 'object': arguments are named", "type")},
}
_TEXT: JsonObject = {"type": "string", "minLength": 1, "errorMessage": "must be a text that is not empty"}
_TEXT_OR_NULL: JsonObject = {**_TEXT, "type": ["string", "null"]}
_ANY_TEXT: JsonObject = {"type": ["string", "null"], "errorMessage": "must be a text"}
_SECONDS: JsonObject = {
    "type": ["number", "null"],
    "exclusiveMinimum": 0,
    "maximum": MAX_SUSPEND_S,
    "errorMessage": f"must be a number of seconds above 0, at most {MAX_SUSPEND_S}",
}


def _object_of(**properties: JsonValue) -> JsonObject:
    partial = _refused(
        "is not an option: a model would see only the error of a partial result. Here a call succeeds if at least one "
        "item does; take it out",
        "(?i)partial",
    )
    return {"properties": properties, "patternProperties": partial, "additionalProperties": False}


# Only what a new definition needs more than a stored one is checked here; the linter runs the parser, too.
_OBJECT: JsonObject = {"type": "object", "errorMessage": "must be an object"}
_NO_NULLS: JsonObject = {
    **_OBJECT,
    "additionalProperties": {"not": {"type": "null"}, "errorMessage": "is empty; give it a value or take it out"},
}
_JINA: JsonObject = {
    **dict.fromkeys(("mode", "tool", "base_url", "method", "endpoint_template", "auth_env"), _TEXT_OR_NULL),
    "path": _ANY_TEXT,
    "accept": {**_ANY_TEXT, "allOf": [_ignored(": JSON is always asked for")]},
    **dict.fromkeys(("params", "defaults"), _NO_NULLS),
    **dict.fromkeys(("timeout_s", "timeout"), _SECONDS),
    "headers": _OBJECT,
}
_ARGS: JsonObject = {"defaults": _NO_NULLS, "fixed": _NO_NULLS}
_BUDGET: JsonObject = {
    name: {"type": "integer", "minimum": 0, "errorMessage": "must be an integer of at least 0"} for name in BUDGETS
}


def _section(**more: JsonValue) -> JsonObject:
    beside = {"timeout_s": "timeout", "endpoint_template": "path", "auth": "auth_env"}
    return _object_of(**_JINA, **more) | {
        "dependentSchemas": {
            winner: {"properties": {name: _ignored(f" beside {winner}")}} for winner, name in beside.items()
        }
    }


# Known options by section: also for the hint in which section a misplaced option belongs.
_SECTIONS: Mapping[str, JsonObject] = {
    "options.args": _ARGS,
    "options.jina": _JINA,
    "options.budget": _BUDGET,
    "options": {
        "args": {**_object_of(**_ARGS), **_OBJECT},
        "envs": _OBJECT,
        "jina": _section(),
        # Legacy name of `jina`; it may also name the variable of the key as `auth.env`.
        "openapi": _section(auth={**_object_of(env=_TEXT), "type": ["object", "null"], "required": ["env"]}),
        **dict.fromkeys(("suspend_timeout_seconds", "timeout_s", "timeout"), _SECONDS),
        "result_format": _TEXT_OR_NULL,
        "max_result_tokens": {},
        "budget": {**_object_of(**_BUDGET), **_OBJECT},
        "ui_allowed": {"type": ["boolean", "null"], "errorMessage": "must be true or false"},
    },
}
# What the parser of stored rows checks; `tools.definition` adds integers and what depends on several options.
_IF_GIVEN: JsonObject = {**_OBJECT, "type": ["object", "null"]}
_NAMES: JsonObject = {**_IF_GIVEN, "additionalProperties": _TEXT}
_UNSET_VALUES: list[JsonValue] = [None, False, 0, "", [], {}]  # stand for the default in old rows
_UNSET: JsonObject = {"enum": _UNSET_VALUES}
_STORED_SECTION: JsonObject = {
    "properties": {
        "method": {
            "anyOf": [_UNSET, {"type": "string", "pattern": "^(?i:get|post)$"}],
            "errorMessage": "must be GET or POST",
        },
        "auth_env": {
            "anyOf": [_UNSET, {"type": "string"}],
            "errorMessage": "must be the name of an environment variable",
        },
        **dict.fromkeys(("params", "defaults"), _IF_GIVEN),
        "headers": _NAMES,
    }
}
_STORED_OPTIONS: JsonObject = {
    **dict.fromkeys(("jina", "openapi", "budget"), _IF_GIVEN),
    "args": {**_IF_GIVEN, "properties": dict.fromkeys(("defaults", "fixed"), _IF_GIVEN)},
    "envs": _NAMES,
    "result_format": {"enum": ["text", "object", *_UNSET_VALUES], "errorMessage": "must be 'text' or 'object'"},
}
_DEFINITION: JsonObject = _object_of(
    **dict.fromkeys(("tool_name", "name", "target_subject"), _TEXT),
    after_execution={"enum": ["suspend", "terminate"]},
    description=_TEXT_OR_NULL,
    parameters=_PARAMETERS,
    options={
        **_object_of(**_SECTIONS["options"]),
        "type": "object",
        "dependentSchemas": {"jina": {"properties": {"openapi": _ignored(" beside options.jina")}}},
    },
) | {
    "required": ["target_subject", "after_execution", "options"],
    "if": {"required": ["name"]},
    "then": {
        "dependentSchemas": {"tool_name": {"properties": _refused("says the same as tool_name; give only one", "name")}}
    },
    "else": {"required": ["tool_name"]},
}
META_SCHEMA: JsonObject = {
    "$defs": {
        "definition": _DEFINITION,
        "stored": {"properties": {"parameters": _IF_GIVEN, "options": {**_IF_GIVEN, "properties": _STORED_OPTIONS}}},
        "section": _STORED_SECTION,
        "schema": _SCHEMA,
        "keywords": {
            "properties": {**_COMMON_KEYWORDS, **_TYPE_KEYWORDS, **_NOT_IN_SUBSET},
            "additionalProperties": False,
        },
        "argument": {
            "$ref": "#/$defs/schema",
            "anyOf": [{"required": ["description"]}, {"not": {"type": "object"}}],
            "errorMessage": "has no description for the model to read; add one",
            "warning": True,
        },
        "row": _row(REFUSED_KEYWORDS),
        # Below the root, these could select another draft of JSON Schema, with other keywords and formats.
        "below": _row(
            REFUSED_KEYWORDS | _refused("is read only at the root of parameters; take it out", "$schema", "$id")
        ),
    }
}


_MISSING_HINTS = {
    "tool_name": "; give the name by which a model calls it",
    "target_subject": "; give cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search, or .read",
    "after_execution": "; give suspend or terminate",
    "options": "; give options.jina with mode: search or mode: reader",
}
_KINDS = {"object": "an object", "array": "a list", "string": "a text"}


def violations(part: str, value: object, path: Path) -> Iterator[Problem]:
    """Yield the violations of one of the `$defs` by the value at a path of the definition."""
    try:
        errors = _validator(part).iter_errors(value)
    except ValueError:  # lone surrogates, keys that are not texts, more than 255 levels
        yield Problem(path, "is nested too deeply, or not JSON")
        return
    for error in errors:
        *places, keyword = error.schema_path
        rule = object_at(META_SCHEMA, *places)
        for where, given in _places(error):
            message = rule.get("errorMessage") or _message(rule, keyword, given)
            yield Problem((*path, *error.instance_path, *where), str(message), warning="warning" in rule)


def object_at(value: object, *path: str | int) -> Mapping[str, JsonValue]:
    """Return the object at a path, empty if there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return {}
    return value if isinstance(value, dict) else {}


@cache
def _validator(part: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(META_SCHEMA | {"$ref": f"#/$defs/{part}"}, offline=True)


def _places(error: jsonschema_rs.ValidationError) -> list[tuple[Path, object]]:
    """Return path and value of each mistake in an error, one per missing or unexpected name."""
    match error.kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name):
            return [((name,), name)]
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            return [((name,), name) for name in names]
    return [((), error.instance)]


def _message(rule: Mapping[str, JsonValue], keyword: str | int, given: object) -> str:
    match keyword:
        case "required":
            return f"is missing{_MISSING_HINTS.get(str(given), '')}"
        case "enum":
            choices = list(map(str, cast("list[JsonValue]", rule["enum"])))
            return f"must be {any_of(choices)}{did_you_mean(str(given), choices)}"
        case "additionalProperties":
            names = object_at(rule, "properties")
            known = [name for name in names if "not" not in object_at(names, name)]
            home = next((place for place, others in _SECTIONS.items() if given in others and others is not names), None)
            hint = f"; {given!r} belongs in {home}" if home else did_you_mean(str(given), known)
            return f"is not known here{hint or '; known are ' + any_of(sorted(known))}"
    types = rule["type"]
    return f"must be {_KINDS[str(types[0] if isinstance(types, list) else types)]}"
