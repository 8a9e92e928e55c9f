"""What a call asks of the upstream: names resolved, values converted, mistakes named by who made them.

Weight grows from the definition's `headers` and `params` over defaults and the model's arguments to
fixed ones, so a fixed value wins over any alias that a model may find for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from openapi_tool.jina.parameters import (
    MODEL_FORMATS,
    REFUSED,
    Parameter,
    find_parameter,
    may_never_take_a_secret,
)
from openapi_tool.protocol.errors import BadRequest, ToolMisconfigured
from openapi_tool.telemetry.once import Once
from openapi_tool.tools.arguments import Arguments, fold
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import listed, short

log = logging.getLogger(__name__)
_logged = Once()

_IGNORED_HEADERS = frozenset(fold(name) for name in ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"))
_WITH_CONTENT = fold("with_content")
_TIMEOUT = "timeout"
_SUBJECT = {"search": "q", "reader": "url"}
_REQUIRED = {
    "jina.search": "query: is required",
    "jina.search_many": "queries: is required",
    "jina.read": "url or cursor: one of them is required",
    "jina.read_many": "urls: is required",
}
_FORMATS = {"search": (*MODEL_FORMATS, "no-content"), "reader": MODEL_FORMATS}


@dataclass(frozen=True, slots=True)
class Plan:
    """Upstream parameters by body name, secret body members, and the call's own limit in seconds."""

    parameters: Mapping[str, Any]
    secrets: Mapping[str, SecretStr]
    timeout_s: float | None


def plan_call(definition: ToolDefinition, arguments: Arguments) -> Plan:
    """Resolve a call. Raises BadRequest or ToolMisconfigured naming every offending name."""
    planner = _Planner(definition)
    for name, value in definition.headers.items():
        planner.header(name, value)
    for name, value in definition.params.items():
        planner.option(name, value, f"options.jina.params.{short(name)}")
    for name, value in arguments.values.items():
        planner.argument(name, value, by_model=name in arguments.by_model)
    secrets = {planner.secret_name(name): value for name, value in arguments.secrets.items()}
    return planner.finish(secrets)


class _Planner:
    def __init__(self, definition: ToolDefinition) -> None:
        self._definition = definition
        self._mode = definition.mode
        self._values: dict[str, Any] = {}
        self._given_as: dict[str, str] = {}
        self._model_problems: list[str] = []
        self._operator_problems: list[str] = []
        self._ignored: list[str] = []
        self._timeout_s: float | None = None

    def header(self, name: str, value: str) -> None:
        if fold(name) in _IGNORED_HEADERS:
            return
        if fold(name) in REFUSED or find_parameter(self._mode, name) is None:
            self._operator_problems.append(f"options.jina.headers.{short(name)} is not a header that may be sent")
        else:
            self.option(name, value, f"options.jina.headers.{short(name)}")

    def option(self, name: str, value: Any, where: str) -> None:
        """Take what the operator set; leave out and log what the upstream does not know."""
        parameter = find_parameter(self._mode, name)
        if fold(name) in REFUSED:
            self._operator_problems.append(f"{where} may not be sent to the upstream")
        elif parameter is not None:
            self._set(parameter, value, where, self._operator_problems)
        else:
            self._ignored.append(where)

    def argument(self, name: str, value: Any, *, by_model: bool) -> None:
        problems = self._model_problems if by_model else self._operator_problems
        if fold(name) == _TIMEOUT:
            self._limit(name, value, problems)
        elif fold(name) == _WITH_CONTENT and self._mode == "search":
            self._set_with_content(name, value, problems)
        elif by_model:
            self._model_argument(name, value)
        else:
            self.option(name, value, f"options.args.{short(name)}")

    def secret_name(self, name: str) -> str:
        """The body name of an `envs` argument: the parameter's own, else the name as it is."""
        if may_never_take_a_secret(name):
            self._operator_problems.append(f"options.envs.{short(name)} may never take a secret")
        parameter = find_parameter(self._mode, name)
        return parameter.name if parameter else name

    def finish(self, secrets: Mapping[str, SecretStr]) -> Plan:
        if self._ignored:
            self._log_ignored()
        if self._operator_problems:
            problems = listed(self._operator_problems)
            raise ToolMisconfigured(
                f"The definition of {short(self._definition.tool_name)!r} is not usable; an operator must correct it: "
                + "; ".join(problems),
                detail={"problems": problems},
            )
        subject = _SUBJECT[self._mode]
        if subject not in self._values and not self._model_problems:
            self._model_problems.append(_REQUIRED[self._definition.tool.name])
        if self._model_problems:
            problems = listed(self._model_problems)
            raise BadRequest(
                "Correct these arguments and call again: " + "; ".join(problems), detail={"problems": problems}
            )
        if self._mode == "search" and self._values.setdefault("respondWith", "no-content") == "content":
            del self._values["respondWith"]  # what a search does when it is not said
        parameters = {name: value for name, value in self._values.items() if name not in secrets}
        return Plan(parameters, secrets, self._timeout_s)

    def _log_ignored(self) -> None:
        """Log once for each definition: two calls of one with 20,000 such names wrote 53 MB of log."""
        names = tuple(listed(sorted(self._ignored)))
        if _logged.first(self._definition.tool_name, names):
            log.warning(
                "the upstream does not know parameters of a definition; they are left out: %s",
                ", ".join(names),
                extra={"action": "parameter.ignored", "tool_name": short(self._definition.tool_name)},
            )

    def _model_argument(self, name: str, value: Any) -> None:
        if value is None and name in self._definition.tool.arguments.model_fields:
            return
        parameter = find_parameter(self._mode, name)
        if parameter is None or not self._model_may(parameter):
            self._model_problems.append(f"{short(name)}: is not an argument that this tool takes")
        elif parameter.name == "respondWith" and value is not None and value not in _FORMATS[self._mode]:
            self._model_problems.append(f"{short(name)}: must be one of {', '.join(_FORMATS[self._mode])}")
        elif self._only_name_of(parameter.name, name):
            self._set(parameter, value, short(name), self._model_problems)

    def _model_may(self, parameter: Parameter) -> bool:
        declared = self._definition.parameters.get("properties")
        return parameter.model and (
            not parameter.declared or (isinstance(declared, dict) and parameter.name in declared)
        )

    def _only_name_of(self, parameter_name: str, name: str) -> bool:
        """Two names for one parameter in one call would make the answer a matter of luck."""
        other = self._given_as.setdefault(parameter_name, name)
        if other != name:
            self._model_problems.append(f"{short(name)}: says the same as {short(other)}; give only one of them")
        return other == name

    def _limit(self, name: str, value: Any, problems: list[str]) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            problems.append(f"{short(name)}: must be a number of seconds above 0")
        else:
            self._timeout_s = float(value)

    def _set_with_content(self, name: str, value: Any, problems: list[str]) -> None:
        if isinstance(value, bool):
            self._values["respondWith"] = "content" if value else "no-content"
        elif value is not None:
            problems.append(f"{short(name)}: must be true or false")

    def _set(self, parameter: Parameter, value: Any, where: str, problems: list[str]) -> None:
        if value is None:
            return
        try:
            converted = parameter.convert(value)
        except ValueError as problem:
            problems.append(f"{where}: {problem}")
            return
        if converted is None:
            self._values.pop(parameter.name, None)
        else:
            self._values[parameter.name] = converted
