"""Generate the chart's values.schema.json and README.md from its commented values.yaml and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openapi_tool.settings import Settings

CHART = Path(__file__).parent.parent / "helm" / "openapi-tool"
VALUES = CHART / "values.yaml"
HEAD = Path(__file__).parent / "chart_readme.md"
_MARK = "@schema "
_TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_MAX = 2**31 - 1
"""Maximum of Kubernetes' 32-bit integers."""

_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_LABEL = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
_VOLUME_TYPES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)


def _closed(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*required], "additionalProperties": False, "properties": properties}


_STRING, _BOOLEAN, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_VARIABLE = {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_.-]*$"}
_NAMED: Mapping[str, dict[str, Any]] = {
    "labels": {
        "additionalProperties": {"type": "string", "maxLength": 63, "pattern": _LABEL},
        "propertyNames": {"pattern": _LABEL_KEY},
    },
    "annotations": {"additionalProperties": _STRING, "propertyNames": {"pattern": _LABEL_KEY}},
    "name": {"maxLength": 253, "pattern": _NAME},
    "key": {"maxLength": 253, "pattern": r"^[-._A-Za-z0-9]*$"},
    "quantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": r"^([0-9]+([.][0-9]+)?(m|k|[MGTP]|[KMGTP]i)?)?$",
    },
    "affinity": {
        "additionalProperties": False,
        "properties": dict.fromkeys(("nodeAffinity", "podAffinity", "podAntiAffinity"), _OBJECT),
    },
    "tolerations": {
        "items": _closed(
            (), key=_STRING, operator=_STRING, value=_STRING, effect=_STRING, tolerationSeconds={"type": "integer"}
        )
    },
    "spread": {"items": {"type": "object", "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"]}},
    "peers": {
        "items": {**_closed((), podSelector=_OBJECT, namespaceSelector=_OBJECT, ipBlock=_OBJECT), "minProperties": 1}
    },
    "egress": {"items": _closed((), ports={"type": "array"}, to={"type": "array"})},
    "count": {"type": ["integer", "string"], "minimum": 0, "pattern": r"^[0-9]{1,3}%$"},
    "variables": {"items": _closed(("name",), name=_VARIABLE, value=_STRING, valueFrom=_OBJECT)},
    "variable-sources": {"items": _closed((), prefix=_STRING, configMapRef=_OBJECT, secretRef=_OBJECT)},
    "volumes": {
        "items": _closed(
            ("name",),
            name={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"},
            **dict.fromkeys(_VOLUME_TYPES, _OBJECT),
        )
    },
    "mounts": {
        "items": _closed(
            ("name", "mountPath"),
            name=_STRING,
            mountPath={"type": "string", "pattern": r"^/[^:]+$"},
            subPath=_STRING,
            readOnly=_BOOLEAN,
        )
    },
}
"""Constraints by the name that `@schema` lines of values.yaml give."""

_COPIED_KEYWORDS = ("type", "enum", "const", "items", "pattern", "anyOf", "additionalProperties", "minItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml; `constraints` are those of its `@schema` lines, `children` its keys.

    An object with constraints of its own is one value, without children.
    """

    path: str
    default: Any
    description: str
    constraints: dict[str, Any]
    children: tuple[Value, ...]

    @property
    def key(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]


def values() -> tuple[Value, ...]:
    """Return the keys of values.yaml in their order."""
    text = VALUES.read_text(encoding="utf-8")
    return tuple(_values(yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text), text.splitlines(), ""))


def _values(node: Any, defaults: Mapping[str, Any], lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        default, path = defaults[key.value], f"{prefix}{key.value}"
        words, marks = _comment(lines, key.start_mark.line)
        constraints: dict[str, Any] = {}
        for mark in map(yaml.safe_load, marks):
            constraints.update(_named(mark) if isinstance(mark, str) else mark)
        nested = isinstance(default, dict) and default and not constraints
        inner = tuple(_values(child, default, lines, f"{path}.")) if nested else ()
        yield Value(path, default, " ".join(words), constraints, inner)


def _comment(lines: list[str], at: int) -> tuple[list[str], list[str]]:
    """Return the words and the `@schema` lines of the comment that ends above line `at`."""
    comment: list[str] = []
    while at > 0 and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        comment.insert(0, lines[at].strip().removeprefix("#").strip())
    marks = [line.removeprefix(_MARK) for line in comment if line.startswith(_MARK)]
    return [line for line in comment if not line.startswith(_MARK)], marks


def values_schema() -> str:
    """Return values.schema.json."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_object(values())}
    schema["properties"] = {"global": {"type": "object"}, **schema["properties"]}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object(children: tuple[Value, ...]) -> dict[str, Any]:
    """Return the schema of an object. Helm removes keys that are set to null: only empty ones may be missing."""
    properties = {value.key: _property(value) for value in children}
    required = [value.key for value in children if value.default not in ("", [], {}, None)]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _property(value: Value) -> dict[str, Any]:
    described = {"description": value.description}
    if isinstance(value.default, dict):
        return {**described, **(_object(value.children) if value.children else {"type": "object"}), **value.constraints}
    kind: dict[str, Any] = {} if "enum" in value.constraints else {"type": _TYPES.get(type(value.default), "string")}
    if kind == {"type": "integer"}:
        kind["maximum"] = _MAX
    return {**described, **kind, **value.constraints}


def _named(name: str) -> dict[str, Any]:
    """Return the constraints that an `@schema` line names."""
    return settings_schema() if name == "settings" else _NAMED[name]


def settings_schema() -> dict[str, Any]:
    """Return the schema of `config`: that of the settings, without `required` and references."""
    root = Settings.model_json_schema()
    schema: dict[str, Any] = _inlined(root, root["$defs"])
    return schema


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    inlined = {name: schema[name] for name in (*_COPIED_KEYWORDS, *_BOUNDS) if name in schema}
    if "properties" in schema:
        inlined["properties"] = {name: _inlined(inner, definitions) for name, inner in schema["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(inlined.get(name), dict):
            inlined[name] = _inlined(inlined[name], definitions)
    if "anyOf" in inlined:  # an optional setting: TOML has no null
        (inlined,) = (_inlined(inner, definitions) for inner in inlined["anyOf"] if inner != {"type": "null"})
    return inlined


def chart_readme() -> str:
    """Return the chart's README.md."""
    return HEAD.read_text(encoding="utf-8") + "".join(f"{line}\n" for value in values() for line in _rows(value))


def _rows(value: Value) -> Iterator[str]:
    if value.children:
        yield f"| **`{value.path}`** | | {value.description} |"
        for child in value.children:
            yield from _rows(child)
    else:
        shown = json.dumps(value.default, ensure_ascii=False)
        choices = value.constraints.get("enum", ())
        among = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        yield f"| `{value.path}` | `{shown}` | {value.description}{among} |"
