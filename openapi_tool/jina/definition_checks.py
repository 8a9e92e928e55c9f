"""Lint of a definition in a file: the problems that its calls would have, and what its model should not be shown.

`tools/lint.py` has the general checks. Here sample calls (`sample_calls.py`) show what the executor would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from openapi_tool.jina.batches import item_arguments, item_problems
from openapi_tool.jina.endpoints import endpoint_of
from openapi_tool.jina.parameter_hints import with_hint
from openapi_tool.jina.parameters import secret_problem
from openapi_tool.jina.resolved_parameters import (
    IGNORED_HEADERS,
    examine_parameters,
)
from openapi_tool.jina.sample_calls import is_template_of_tokens, sample_call, usable_part
from openapi_tool.jina.sample_values import SIZE_KEYWORDS, samples
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.errors import BadRequest, TargetRefused
from openapi_tool.protocol.jsontext import as_object, object_at
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import (
    API_KEY,
    CURSOR,
    FIND,
    QUESTION,
    is_identity,
    takes_cursor,
)
from openapi_tool.tools.definition import ToolDefinition, upstream_path
from openapi_tool.tools.lint import ARGS_PATH, PROPERTIES_PATH, LintLimits, lint_general, value_fits
from openapi_tool.tools.placeholders import is_template, texts_in
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.result_request import request_problems, requested_cursor, tokens_problems
from openapi_tool.tools.schema import visible_schema
from openapi_tool.tools.wording import short
from openapi_tool.tools.yaml_source import Source


def definition_problems(
    document: Any,
    limits: LintLimits = LintLimits(),  # noqa: B008 - frozen
    rules: UrlPolicy = UrlPolicy(),  # noqa: B008 - frozen
) -> list[Problem]:
    """Return every problem, errors first, one for each path and message."""
    if not isinstance(document, dict):
        return [Problem((), "must be an object with tool_name, target_subject, after_execution and options")]
    definition, found = lint_general(document, limits)
    found += _env_problems(document, limits)
    if definition is not None:
        found += _SampleCalls(document, definition, limits, rules).problems()
    unique = {(problem.path, problem.message): problem for problem in found}
    return sorted(unique.values(), key=lambda problem: problem.warning)


def source_problems(source: Source, limits: LintLimits, rules: UrlPolicy) -> list[Problem]:
    """Return every problem of the YAML, and of the parts of the definition that could be read."""
    broken = {problem.path for problem in source.problems if not problem.warning}
    if source.document is None and broken:
        return source.problems
    found = definition_problems(source.document, limits, rules)
    return [*source.problems, *(problem for problem in found if problem.path not in broken)]


def _env_problems(document: Mapping[str, Any], limits: LintLimits) -> Iterator[Problem]:
    """Yield the arguments of `options.envs` that may not take a secret."""
    for name in object_at(document, "options", "envs"):
        if name != API_KEY and fold(name) not in limits.env_parameters:
            problem = "may not take a secret: only api_key and what secrets.env_parameters lists may"
            yield Problem(("options", "envs", name), secret_problem(name) or problem)


class _SampleCalls:
    """Sample calls of one definition in a file.

    - `document`: the file; `definition`: what was read of it.
    - `limits`, `url_policy`: those of the settings.
    - `built_in`, `endpoint`: the built-in tool and the endpoint that its calls use.
    - `upstream_path`: path of the upstream's section in the file, which may have a legacy name. `upstream` is that
      section.
    - `shown`: schemas of the arguments that the model is shown, by name.
    - `bare_call`: a call with only the values that the definition sets.
    - `paginates`: whether the tool takes a cursor.
    """

    def __init__(
        self, document: Mapping[str, Any], definition: ToolDefinition, limits: LintLimits, url_policy: UrlPolicy
    ) -> None:
        self.document = document
        self.definition = definition
        self.limits = limits
        self.url_policy = url_policy
        self.built_in = definition.built_in
        self.endpoint = endpoint_of(definition)
        self.upstream_path = upstream_path(object_at(document, "options"))
        self.upstream = object_at(document, *self.upstream_path)
        self.shown = object_at(document, *PROPERTIES_PATH)
        self.bare_call = sample_call(usable_part(definition)[0], {})
        self.paginates = takes_cursor(definition)

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of what the operator set, then those of the arguments that the model is shown."""
        yield from self._operator_problems()
        yield from self._set_text_problems()
        for name, rule in self.shown.items():
            if not is_identity(name):
                yield from self._argument_problems(name, as_object(rule), (*PROPERTIES_PATH, name))
        yield from self._same_parameter_problems()
        if object_at(self.document, "parameters"):
            yield from self._open_schema_problems()
            yield from self._main_argument_problems()

    def _set_text_problems(self) -> Iterator[Problem]:
        """Yield the problems of addresses and other texts that the definition sets."""
        for group in ("defaults", "fixed"):
            for name, value in getattr(self.definition, group).items():
                yield from self._address_problems(name, (*ARGS_PATH, group, name), self.bare_call.values.get(name))
                yield from self._doubtful_texts(name, (*ARGS_PATH, group, name), value)
        for name, value in self.definition.headers.items():
            yield from self._doubtful_texts(name, (*self.upstream_path, "headers", name), value)
        for name, value in self.definition.upstream_params.items():
            path = self._path_in_file(("options", "jina", "params", name))
            yield from self._address_problems(name, path, value)
            yield from self._doubtful_texts(name, path, value)

    def _operator_problems(self) -> Iterator[Problem]:
        """Yield the problems of headers, parameters and values that the operator set."""
        for name in object_at(self.upstream, "headers"):
            if fold(name) in IGNORED_HEADERS:
                message = "is ignored: the executor writes this header itself; take it out"
                yield Problem((*self.upstream_path, "headers", name), message, warning=True)
        values = {name: value for name, value in self.bare_call.values.items() if name != self.built_in.list_argument}
        found = examine_parameters(self.definition, replace(self.bare_call, values=values))
        unknown = [
            Problem(path, f"is no parameter of a {self.definition.operation.name} tool") for path in found.unknown
        ]
        for problem in (*found.operator_problems, *found.invalid, *unknown):
            in_file = replace(problem, path=self._path_in_file(problem.path))
            yield with_hint(in_file, self.built_in, self.endpoint)
        yield from self._upstream_time(found.parameters)
        yield from self._own_argument_problems()

    def _own_argument_problems(self) -> Iterator[Problem]:
        """Check the values of `args` that the upstream does not get: items of a batch, and `max_result_tokens`."""
        name = self.built_in.list_argument
        wrong = item_problems(self.definition, self.bare_call, self.limits.tools.max_batch_items) if name else []
        if not is_template_of_tokens(self.definition):
            wrong += tokens_problems(self.bare_call)
        for problem in wrong:
            for group in ("fixed", "defaults"):
                if problem.path[0] in getattr(self.definition, group):
                    yield replace(problem, path=(*ARGS_PATH, group, *problem.path))
                    break

    def _address_problems(self, name: str, path: Path, value: Any) -> Iterator[Problem]:
        """Yield why a page address, or one in a list, may not be read; nothing for a value of another argument."""
        main = (self.definition.operation.argument, self.built_in.list_argument)
        if self.endpoint.check_url is None or not any(self._is_parameter(name, wanted) for wanted in main):
            return
        if isinstance(value, list):
            for place, item in enumerate(value):
                yield from self._address_problems(name, (*path, place), item)
        elif isinstance(value, str) and value.strip():
            try:
                self.endpoint.check_url(value, self.url_policy)
            except (BadRequest, TargetRefused) as refusal:
                yield Problem(path, refusal.message.removeprefix("url: "))

    def _doubtful_texts(self, name: str, path: Path, value: Any) -> Iterator[Problem]:
        """Yield a problem for each text that the upstream would not understand; templates are not known yet."""
        parameter = self.endpoint.find(name)
        if parameter is None or parameter.doubt is None:
            return
        try:
            parameter.convert(value)
        except ValueError:  # which the executor reports
            return
        for where, text in texts_in(value, path):
            doubt = "" if is_template(text) else parameter.doubt(text)
            if doubt:
                yield Problem(where, doubt)

    def _path_in_file(self, path: Path) -> Path:
        """Return an option's path in the file, which may use the legacy names `openapi` and `defaults`."""
        if path[:2] != ("options", "jina"):
            return path
        _, _, group, name = path
        in_defaults = group == "params" and name not in object_at(self.upstream, "params")
        return (*self.upstream_path, "defaults" if in_defaults else group, name)

    def _upstream_time(self, parameters: Mapping[str, Any]) -> Iterator[Problem]:
        """Check the upstream's `timeout`, which applies to each of its stages."""
        call_s = min(self.limits.max_call_s(self.document), self.limits.tools.max_timeout_s)
        longest_s = self.endpoint.timeouts.longest_s(parameters)
        if longest_s is None or longest_s <= call_s:
            return
        one_stage_fits = parameters["timeout"] < call_s
        for name in self.definition.upstream_params:
            if self._is_parameter(name, "timeout"):
                message = (
                    f"lets the upstream take {longest_s:g} s, and a call has {call_s:g} s; raise both or shorten it"
                )
                path = self._path_in_file(("options", "jina", "params", name))
                yield Problem(path, message, warning=one_stage_fits)

    def _argument_problems(self, name: str, rule: dict[str, Any], path: Path) -> Iterator[Problem]:
        """Yield problems of values that the schema of an argument allows and the executor refuses."""
        of_list = name == self.built_in.list_argument
        # None is as if the argument were not given, so it is refused only if the tool has no such argument.
        unknown = self._refusals(name, ["a"] if of_list else None)
        if unknown:
            for problem in unknown:
                yield with_hint(replace(problem, path=path), self.built_in, self.endpoint)
            return
        for where, values in samples(rule, of_list=of_list):
            tried = values
            if where[0] in SIZE_KEYWORDS:  # a value proves nothing about a size if the smallest such value is refused
                tried = [value for value in values if not self._refusals(name, _smallest(value), unfit=True)]
            found = [self._refusals(name, value) for value in tried]
            if found and all(found):
                yield from (replace(problem, path=(*path, *where)) for problem in found[0])
                if where[-1] == "type":
                    return
            if where[0] in ("default", "const", "enum"):
                yield from self._address_problems(name, (*path, *where), values[0])
                yield from self._doubtful_texts(name, (*path, *where), values[0])
        if rule.get("type") == "string" and self._takes_numbers_only(name):
            message = "lets a model give words, and only a number fits; write `integer`"
            yield Problem((*path, "type"), message, warning=True)

    def _takes_numbers_only(self, name: str) -> bool:
        """Return whether a parameter of the upstream takes a number, also as a text, and no other text."""
        rule = object_at(self.shown, name)
        if self.endpoint.find(name) is None or not {"enum", "const", "pattern"}.isdisjoint(rule):
            return False
        takes_a_number = any(not self._refusals(name, number, unfit=True) for number in ("1", "500"))
        return takes_a_number and all(self._refusals(name, word, unfit=True) for word in ("a", "true"))

    def _refusals(self, name: str, value: Any, *, unfit: bool = False) -> list[Problem]:
        """Return the executor's problems with a value of an argument.

        A value that the argument's own schema refuses has none, unless `unfit`.
        """
        items = self.built_in.list_argument  # each sample call needs some, and a cursor if it searches a stored text
        given: dict[str, Any] = {items: ["a"]} if items else {}
        if self.paginates and name in (FIND, QUESTION):
            given[CURSOR] = "a"
        call = sample_call(replace(self.definition, defaults={}, fixed={}), given | {name: value})
        problems = request_problems(self.definition, call)
        if problems:
            if not unfit and not value_fits(dict(object_at(self.shown, name)), value):
                return []
            return [replace(problem, path=(name,)) for problem in problems]
        if requested_cursor(self.definition, call) is not None:
            return []
        if items:
            found = item_problems(self.definition, call, self.limits.tools.max_batch_items)
            if found or name == items:
                return found
            call = item_arguments(self.definition, call, "a")
        return examine_parameters(self.definition, call, suggest=False).model_problems

    def _same_parameter_problems(self) -> Iterator[Problem]:
        """Check fixed values whose parameter a model is shown under another name."""
        derived = object_at(visible_schema(self.built_in.schema(), self.definition.hidden), "properties")
        shown = self.shown if object_at(self.document, "parameters") else derived
        for name in self.definition.fixed.keys() - shown.keys():
            parameter = self.endpoint.find(name)
            for other in shown:
                if parameter and self.endpoint.find(other) is parameter:
                    message = f"a model is shown the same parameter as {short(other)!r}; take one out"
                    yield Problem((*ARGS_PATH, "fixed", name), message)

    def _open_schema_problems(self) -> Iterator[Problem]:
        """Check that the schema refuses arguments that it does not declare, and declares `cursor` if it does."""
        schema = object_at(self.document, "parameters")
        if schema.get("type") != "object":
            return
        lacks_cursor = self.paginates and CURSOR not in self.shown
        if schema.get("additionalProperties") is False and lacks_cursor:
            message = f"lacks `{CURSOR}`, so a model sees only the beginning of a long page; declare it, as a text"
            yield Problem(PROPERTIES_PATH, message, warning=True)
        if "additionalProperties" in schema:
            return
        message = "lacks `additionalProperties: false`, so a model may give what is not declared; add it"
        if lacks_cursor:
            message += f", and declare `{CURSOR}`: a closed schema without it shows only the beginning of a long page"
        yield Problem(("parameters",), message, warning=True)

    def _main_argument_problems(self) -> Iterator[Problem]:
        """Check that each call has a query or address: set by the definition, or required of the model."""
        wanted = self.built_in.list_argument or self.definition.operation.argument
        set_by_definition = (*self.bare_call.values, *self.definition.upstream_params)
        is_set = any(self._is_parameter(name, wanted) for name in set_by_definition)
        required = object_at(self.document, "parameters").get("required") or []
        if is_set or not isinstance(required, list):
            return
        shown = [name for name in self.shown if self._is_parameter(name, wanted)]
        path = ("parameters", "required")
        if not shown:
            yield Problem(
                PROPERTIES_PATH,
                f"lacks {wanted!r}, without which no call can work; declare it, or set it in options.args",
            )
        elif self.paginates and CURSOR in self.shown and shown[0] in required:
            message = f"names {short(shown[0])!r}, which is ignored beside a cursor; take it out of `required`"
            yield Problem(path, message, warning=True)
        elif CURSOR not in self.shown and shown[0] not in required:
            yield Problem(path, f"should name {short(shown[0])!r}: no call works without it; add it", warning=True)

    def _is_parameter(self, name: str, wanted: str | None) -> bool:
        """Return whether `name` sets the same as `wanted`, a parameter or the list of a batch."""
        if wanted is None or wanted == self.built_in.list_argument:
            return name == wanted
        return self.endpoint.find(name) is self.endpoint.find(wanted)


def _smallest(value: Any) -> Any:
    """Return the first character of a text, or the first item of a list as a list."""
    return value[:1] if isinstance(value, str | list) else value
