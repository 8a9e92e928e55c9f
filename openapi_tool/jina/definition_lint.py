"""The lint of a definition, whole: what `tools.lint` finds, and what only the parameter table knows.

It stands here because `tools` may not import this room, and both the table and the rules are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from openapi_tool.jina.parameters import (
    MODEL_FORMATS,
    READER,
    REFUSED,
    SEARCH,
    Parameter,
    find_parameter,
    may_never_take_a_secret,
)
from openapi_tool.tools.arguments import API_KEY, fold, is_identity
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.exports import complete
from openapi_tool.tools.lint import (
    LintLimits,
    general_problems,
    has_placeholder,
    part,
    readable,
    upstream_section,
)
from openapi_tool.tools.problems import Path, Problem, did_you_mean

_IGNORED_HEADERS = frozenset(fold(name) for name in ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"))
_OWN_ARGUMENTS = {"search": ("with_content", "timeout"), "reader": ("timeout",)}
_CURSOR = "cursor"
_SUBJECT = {"search": "q", "reader": "url"}
_SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "integer": (1, 500),
    "number": (1, 500),
    "boolean": (True,),
    "array": (["a"],),
    "object": ({"a": 1},),
    "null": (),
}
_STAGES, _STAGES_MARGIN_S = 2, 3


def definition_problems(document: Any, limits: LintLimits = LintLimits()) -> list[Problem]:  # noqa: B008 - frozen
    """Every problem of a definition, errors first, one for each path and message."""
    found = list(general_problems(document, limits))
    definition = readable(document) if isinstance(document, dict) else None
    if definition is not None:
        found += _Checks(document, definition, limits).problems()
    unique = {(problem.path, problem.message): problem for problem in found}
    return sorted(unique.values(), key=lambda problem: problem.warning)


class _Checks:
    """One definition that can be read, against the upstream's parameters."""

    def __init__(self, document: Mapping[str, Any], definition: ToolDefinition, limits: LintLimits) -> None:
        self.document = document
        self.mode = definition.mode
        self.tool: BuiltInTool = definition.tool
        self.limits = limits
        takes_cursor = _CURSOR in self.tool.arguments.model_fields
        self.own = (*_OWN_ARGUMENTS[self.mode], *((_CURSOR,) if takes_cursor else ()))
        self.section, self.jina = upstream_section(document)
        self.properties = part(document, "parameters", "properties")
        self.required = part(document, "parameters").get("required")
        self.args = {group: part(document, "options", "args", group) for group in ("defaults", "fixed")}

    def problems(self) -> Iterator[Problem]:
        yield from self._headers()
        yield from self._params()
        for group, values in self.args.items():
            for name, value in values.items():
                yield from self._set_argument(name, value, ("options", "args", group, name))
        yield from self._envs()
        for name, rule in self.properties.items():
            yield from self._shown_argument(name, rule if isinstance(rule, dict) else {})
        yield from self._shown_and_fixed()
        if self.document.get("parameters"):
            yield from self._subject()

    def _envs(self) -> Iterator[Problem]:
        for name in part(self.document, "options", "envs"):
            path: Path = ("options", "envs", name)
            if name == API_KEY or fold(name) in self.limits.env_parameters:
                continue
            if may_never_take_a_secret(name):
                yield Problem(path, "may never take a secret: pages, addresses or third parties would see it")
            else:
                yield Problem(path, "may not take a secret: only api_key and what secrets.env_parameters lists may")

    def _known(self) -> list[str]:
        table = SEARCH if self.mode == "search" else READER
        names = [name for entry in table for name in (*entry.aliases, entry.name)]
        return [*names, *self.own, *([self.tool.items] if self.tool.items else [])]

    def _headers(self) -> Iterator[Problem]:
        for name, value in part(self.jina, "headers").items():
            path: Path = (*self.section, "headers", name)
            parameter = find_parameter(self.mode, name)
            if fold(name) in _IGNORED_HEADERS:
                yield Problem(path, "is passed over: the executor writes this header itself", warning=True)
            elif fold(name) in REFUSED or parameter is None:
                known = [entry.header for entry in (*SEARCH, *READER) if entry.header]
                yield Problem(path, f"is not a header that may be sent{did_you_mean(name, known)}")
            else:
                yield from _value(parameter, value, path)

    def _params(self) -> Iterator[Problem]:
        for group in ("params", "defaults"):
            for name, value in part(self.jina, group).items():
                path: Path = (*self.section, group, name)
                yield from self._option(name, value, path)
                if find_parameter(self.mode, name) is find_parameter(self.mode, "timeout"):
                    yield from self._stage_time(value, path)

    def _stage_time(self, value: Any, path: Path) -> Iterator[Problem]:
        """The upstream's own `timeout` counts for each of its two stages (jina-api 6.2)."""
        suspend = part(self.document, "options").get("suspend_timeout_seconds")
        waits = max(self.limits.worker_default_s, suspend if isinstance(suspend, int | float) else 0)
        left = min(waits - self.limits.margin_s, self.limits.maximum_s)
        if isinstance(value, int | float) and value >= left:
            yield Problem(path, f"cannot fit: a call has {left:g} s; raise options.suspend_timeout_seconds")
        elif isinstance(value, int | float) and _STAGES * value + _STAGES_MARGIN_S > left:
            yield Problem(path, f"two stages of it may take longer than the {left:g} s of a call", warning=True)

    def _option(self, name: str, value: Any, path: Path) -> Iterator[Problem]:
        parameter = find_parameter(self.mode, name)
        if fold(name) in REFUSED:
            yield Problem(path, "may not be sent to the upstream")
        elif parameter is None:
            other = find_parameter("reader" if self.mode == "search" else "search", name)
            hint = f"; it is one of a {'reader' if self.mode == 'search' else 'search'} tool" if other else ""
            yield Problem(path, f"is no parameter of a {self.mode} tool{did_you_mean(name, self._known()) or hint}")
        elif not has_placeholder(value):
            yield from _value(parameter, value, path)

    def _set_argument(self, name: str, value: Any, path: Path) -> Iterator[Problem]:
        if is_identity(name):
            return
        if name in ("queries", "urls"):
            yield from self._items(name, path)
        elif fold(name) == "timeout":
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                yield Problem(path, "must be a number of seconds above 0")
        elif fold(name) == "withcontent" and self.mode == "search":
            if not isinstance(value, bool):
                yield Problem(path, "must be true or false")
        else:
            yield from self._option(name, value, path)

    def _items(self, name: str, path: Path) -> Iterator[Problem]:
        if self.tool.items != name:
            batch = next(tool.name for tool in CATALOGUE.values() if tool.items == name)
            yield Problem(path, f"is only for options.jina.tool: {batch}; this is {self.tool.name}")

    def _shown_argument(self, name: str, rule: Mapping[str, Any]) -> Iterator[Problem]:
        path: Path = ("parameters", "properties", name)
        if is_identity(name):
            return
        if name in ("queries", "urls"):
            yield from self._items(name, path)
            yield from self._item_rules(name, rule, path)
            return
        if fold(name) in {fold(own) for own in self.own}:
            return
        parameter = find_parameter(self.mode, name)
        if fold(name) in REFUSED:
            yield Problem(path, "may not be sent to the upstream")
        elif parameter is None:
            yield Problem(path, f"is no argument of a {self.mode} tool{did_you_mean(name, self._known())}")
        elif not parameter.model:
            yield Problem(path, "may be set only by an operator, in options.jina.params")
        elif self.tool.items and parameter.name == _SUBJECT[self.mode]:
            yield Problem(path, f"{self.tool.name} takes {self.tool.items} in its place")
        else:
            yield from _rule(parameter, rule, path)

    def _item_rules(self, name: str, rule: Mapping[str, Any], path: Path) -> Iterator[Problem]:
        if self.tool.items != name:
            return
        items, most = rule.get("items"), rule.get("maxItems")
        if rule.get("type") not in (None, "array"):
            yield Problem((*path, "type"), "must be 'array'")
        if isinstance(items, dict) and items.get("type") not in (None, "string"):
            yield Problem((*path, "items", "type"), "must be 'string'")
        if isinstance(most, int) and most > self.limits.max_batch_items:
            yield Problem((*path, "maxItems"), f"is over tools.max_batch_items ({self.limits.max_batch_items})")

    def _shown_and_fixed(self) -> Iterator[Problem]:
        """A fixed value whose parameter a model is shown under another name."""
        shown = part(complete(self.document, self.tool), "parameters", "properties")
        for name in self.args["fixed"]:
            parameter = find_parameter(self.mode, name)
            for other in shown:
                if parameter and other != name and find_parameter(self.mode, other) is parameter and name not in shown:
                    yield Problem(
                        ("options", "args", "fixed", name), f"a model is shown the same parameter as {other!r}"
                    )

    def _subject(self) -> Iterator[Problem]:
        """Without a query or an address no call can work."""
        subject = self.tool.items or _SUBJECT[self.mode]
        shown = [name for name in self.properties if self._means(name, subject)]
        elsewhere = [*self.args["defaults"], *self.args["fixed"], *part(self.jina, "params")]
        if any(self._means(name, subject) for name in elsewhere):
            return
        wanted = self.tool.items or {"q": "query"}.get(subject, subject)
        if not shown:
            yield Problem(("parameters", "properties"), f"lacks {wanted!r}, without which no call can work")
        elif _CURSOR in self.own and _CURSOR in self.properties and shown[0] in (self.required or []):
            message = f"names {shown[0]!r}, so a call with only a cursor, which goes on with a cut result, never fits"
            yield Problem(("parameters", "required"), message, warning=True)
        elif _CURSOR not in self.properties and shown[0] not in (self.required or []):
            yield Problem(
                ("parameters", "required"), f"should name {shown[0]!r}: no call works without it", warning=True
            )

    def _means(self, name: str, subject: str) -> bool:
        if self.tool.items:
            return name == subject
        parameter = find_parameter(self.mode, name)
        return parameter is not None and parameter.name == subject


def _value(parameter: Parameter, value: Any, path: Path) -> Iterator[Problem]:
    try:
        parameter.convert(value)
    except ValueError as problem:
        yield Problem(path, str(problem))


def _rule(parameter: Parameter, rule: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Values that the schema lets through and the upstream's parameter does not."""
    samples = _SAMPLES.get(str(rule.get("type")), ())
    if samples and all(list(_value(parameter, sample, path)) for sample in samples):
        yield from (Problem((*path, "type"), problem.message) for problem in _value(parameter, samples[0], path))
        return
    for word in ("minimum", "maximum", "default", "const"):
        if word in rule and not isinstance(rule[word], bool | None):
            yield from _value(parameter, rule[word], (*path, word))
    choices = rule.get("enum")
    for place, choice in enumerate(choices if isinstance(choices, list) else []):
        here: Path = (*path, "enum", place)
        if parameter.name == "respondWith" and choice not in (*MODEL_FORMATS, "no-content"):
            yield Problem(here, f"a model may not ask for it; it may for {', '.join(MODEL_FORMATS)}")
        else:
            yield from _value(parameter, choice, here)
