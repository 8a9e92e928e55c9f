"""The upstream parameters of a call, resolved from its definition and its arguments (jina-api sections 0 to 2).

A parameter may be set in several places. Of these a later one overrides an earlier one: the definition's `headers`, its
`params`, its default arguments, the model's arguments, its fixed arguments. One parameter may have several names
(`query` and `q`), and the rule holds for the parameter: a fixed value wins, whichever name the model uses.

Whoever wrote the definition is called the *operator* here. The model cannot correct a mistake of the operator. It can
correct its own arguments, so it reads the error about them, and calls again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import SecretStr

from openapi_tool.jina.endpoints import endpoint_of
from openapi_tool.jina.parameters import REFUSED, Parameter, secret_problem
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.errors import BadRequest, TargetRefused
from openapi_tool.tools.argument_hints import one_of_several
from openapi_tool.tools.argument_names import fold, not_taken
from openapi_tool.tools.arguments import (
    CURSOR,
    MAX_RESULT_TOKENS,
    Arguments,
    names_main_parameter,
    takes_cursor,
)
from openapi_tool.tools.catalogue import BuiltInTool
from openapi_tool.tools.definition import ToolDefinition, unusable
from openapi_tool.tools.problems import MAX_PROBLEMS, Path, Problem, listed, shown_path
from openapi_tool.tools.wording import short

IGNORED_HEADERS = frozenset(fold(name) for name in ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"))
"""Headers of a definition that are not sent, since `request.py` writes them itself."""

_TIMEOUT = "timeout"

_CURSOR = re.compile(r"[A-Za-z0-9_-]{40,60}=?")
"""What a cursor looks like; no address does."""

_NEEDS_WHOLE_PAGE = frozenset({"removeSelector", "withIframe", "withShadowDom"})
"""Parameters without effect in the default format, which is only the main content of a page (jina-api section 9)."""


@dataclass(frozen=True, slots=True)
class ResolvedParameters:
    """The upstream parameters of a call, and what errors and rendering need to know of them.

    - `parameters`: values by the parameter's name in a JSON body.
    - `secrets`: members of the body that hold a secret.
    - `timeout_s`: the call's own time limit in seconds.
    - `main_parameter_option`: path of the definition's option that sets the query or address; None if the model set it.
    - `names`: of each parameter that the model set, the name that it used: `{"q": "query"}`, where `q` is Jina's name.
    - `left_out`: options of the definition that are not sent, each with the reason.
    - `denied`: hosts that are neither read nor shown (`UrlPolicy.deny`).
    """

    parameters: Mapping[str, Any]
    secrets: Mapping[str, SecretStr]
    timeout_s: float | None
    main_parameter_option: Path | None
    names: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()


def resolve_parameters(definition: ToolDefinition, arguments: Arguments) -> ResolvedParameters:
    """Resolve a call's parameters. Raises BadRequest or ToolMisconfigured, whose message lists every mistake."""
    resolver = examine_parameters(definition, arguments)
    for name in arguments.secrets:
        problem = secret_problem(name)
        if problem:
            resolver.operator_problems.append(Problem(("options", "envs", name), problem))
    return resolver.finish(arguments.secrets)


def examine_parameters(definition: ToolDefinition, arguments: Arguments, *, suggest: bool = True) -> ParameterResolver:
    """Resolve a call's parameters, and collect mistakes without raising them.

    With `suggest` the mistake of an unknown argument names similar arguments.
    """
    resolver = ParameterResolver(definition, suggest=suggest)
    for name, header in definition.headers.items():
        resolver.take_header(name, header)
    for name, option in definition.upstream_params.items():
        resolver.take_option(name, option, ("options", "jina", "params", name))
    for name, value in arguments.values.items():  # each has its final value
        resolver.take_argument(name, value, by_model=name in arguments.by_model)
    return resolver


def without_unknown(definition: ToolDefinition, arguments: Arguments) -> Arguments:
    """Drop the model's arguments that neither the tool nor the upstream knows.

    There are such arguments only if the definition's schema allows any. The kernel's own program sends them upstream
    (protocol section 10); this one does not, and names them in the result. A call without a query or address keeps
    them: one of them is probably meant as such, and the error will name them.
    """
    if not definition.takes_other_arguments or not _has_main_argument(definition, arguments):
        return arguments
    unknown = frozenset(name for name in arguments.by_model if not _is_known(definition, name))
    if not unknown:
        return arguments
    values = {name: value for name, value in arguments.values.items() if name not in unknown}
    repaired = tuple(sorted({*arguments.repaired, *map(short, unknown)}))
    return replace(arguments, values=values, by_model=arguments.by_model - unknown, repaired=repaired)


def under_url_policy(resolved: ResolvedParameters, definition: ToolDefinition, rules: UrlPolicy) -> ResolvedParameters:
    """Return the parameters with a checked and repaired page address, and with the hosts that are not shown.

    Raises BadRequest or TargetRefused; but ToolMisconfigured if the definition sets the address, since the model cannot
    correct such an address, and must not see it.
    """
    endpoint = endpoint_of(definition)
    if rules.deny:
        resolved = replace(resolved, denied=rules.deny)
    if endpoint.check_url is None:  # this operation has no address
        return resolved
    name = endpoint.operation.main_parameter
    parameters = resolved.parameters
    try:
        return replace(resolved, parameters={**parameters, name: endpoint.check_url(parameters[name], rules)})
    except (BadRequest, TargetRefused) as refusal:
        if resolved.main_parameter_option is None:
            given = definition.built_in.list_argument or resolved.names.get(name, name)
            # `check_url` begins its messages with "url:"; the model may have used another name.
            refusal.message = refusal.message.replace("url:", f"{given}:", 1)
            if takes_cursor(definition) and _CURSOR.fullmatch(parameters[name]):
                refusal.message = f"{given}: is no address. If it is a cursor, give it as {CURSOR}, without {given}."
            raise
        problem = Problem(resolved.main_parameter_option, f"is no address that may be read ({refusal.code})")
    # Raised outside of the `except` block: within it, the refusal, which quotes the address, would be its context.
    raise unusable(definition.tool_name, [str(problem)])


def changed_main_argument(definition: ToolDefinition, given: ResolvedParameters, sent: ResolvedParameters) -> set[str]:
    """Return the model's argument that has the query or address, if that is not sent as it was given; else nothing."""
    name = endpoint_of(definition).operation.main_parameter
    is_of_operator = given.main_parameter_option is not None
    is_unchanged = given.parameters.get(name) == sent.parameters.get(name)
    if is_of_operator or is_unchanged:
        return set()
    return {definition.built_in.list_argument or given.names.get(name, name)}


def with_token_limit(resolved: ResolvedParameters, default: int) -> ResolvedParameters:
    """Return the parameters with `maxTokens`, the limit for each page: as given, else `default`; 0 is no limit.

    A search without page texts has no pages, so it is sent without the limit.
    """
    parameters = resolved.parameters
    has_limit = "maxTokens" in parameters
    if parameters.get("respondWith") == "no-content":
        if not has_limit:
            return resolved
        without_limit = {name: value for name, value in parameters.items() if name != "maxTokens"}
        return replace(resolved, parameters=without_limit)
    if has_limit or not default:
        return resolved
    return replace(resolved, parameters={**parameters, "maxTokens": default})


class ParameterResolver:
    """Resolves the parameters of one call, one source after the other, and collects what is wrong.

    The caller *takes* each header, option and argument, in the order in which a later one overrides an earlier one, and
    then calls `finish`.

    - `parameters`: the values so far.
    - `model_problems`, `operator_problems`: mistakes for which the call is refused.
    - `unknown`: paths of the operator's options that the upstream does not know. They are left out.
    - `invalid`: the operator's options with values that the upstream does not take, but which earlier versions sent.
      They are left out, too, so that a stored definition keeps working.
    """

    def __init__(self, definition: ToolDefinition, *, suggest: bool = True) -> None:
        self.parameters: dict[str, Any] = {}
        self.model_problems: list[Problem] = []
        self.operator_problems: list[Problem] = []
        self.unknown: list[Path] = []
        self.invalid: list[Problem] = []
        self._definition = definition
        self._endpoint = endpoint_of(definition)
        self._suggest = suggest
        self._first_arguments: dict[str, str] = {}  # the model's first argument for each parameter, to find a second
        self._names: dict[str, str] = {}  # the model's argument that set each parameter (`ResolvedParameters.names`)
        self._main_parameter_option: Path | None = None
        self._timeout_s: float | None = None

    def take_header(self, name: str, value: str) -> None:
        """Take a header of the definition."""
        path = ("options", "jina", "headers", name)
        if fold(name) in IGNORED_HEADERS:
            return
        reason = REFUSED.get(fold(name))
        if reason:
            self.operator_problems.append(Problem(path, f"is not a header that may be sent: {reason}"))
        elif self._endpoint.find(name) is None:
            self.operator_problems.append(Problem(path, "is not a header that may be sent"))
        else:
            self.take_option(name, value, path)

    def take_option(self, name: str, value: Any, path: Path) -> None:
        """Take a value that the operator set at `path`; record a name that the upstream does not know."""
        reason = REFUSED.get(fold(name))
        parameter = self._endpoint.find(name)
        if reason:
            self.operator_problems.append(Problem(path, f"may not be sent to the upstream: {reason}"))
        elif parameter:
            self._set(parameter, value, path, by_model=False)
        else:
            self.unknown.append(path)

    def take_argument(self, name: str, value: Any, *, by_model: bool) -> None:
        """Take an argument of the call; without `by_model` it is a default or fixed value of the operator."""
        path = (name,) if by_model else self._option_of(name)
        folded_name = fold(name)
        own = self._endpoint.own.get(folded_name)  # arguments that Jina has no parameter for: `recency`, `with_content`
        if folded_name == _TIMEOUT:
            self._set_timeout(value, path, by_model=by_model)
        elif name == MAX_RESULT_TOKENS:
            return  # not sent: it limits what the model is shown (`engine/pagination.py`)
        elif own:
            self._set(own, value, path, by_model=by_model)
        elif by_model:
            self._take_model_argument(name, value)
        else:
            self.take_option(name, value, path)

    def finish(self, secrets: Mapping[str, SecretStr]) -> ResolvedParameters:
        """Return the parameters with defaults of the endpoint. Raises the mistakes, the operator's first."""
        if self.operator_problems:
            raise unusable(self._definition.tool_name, listed(list(map(str, self.operator_problems))))
        if self._endpoint.operation.main_parameter not in self.parameters and not self.model_problems:
            self.model_problems.append(_missing_main_argument(self._definition.built_in))
        if self.model_problems:
            problems = listed(list(map(str, self.model_problems)))
            raise BadRequest(
                "Correct these arguments and call again: " + "; ".join(problems), detail={"problems": problems}
            )
        return ResolvedParameters(
            parameters=self._with_defaults(secrets),
            secrets=secrets,
            timeout_s=self._timeout_s,
            main_parameter_option=self._main_parameter_option,
            names=self._names,
            left_out=self._left_out(),
        )

    def _with_defaults(self, secrets: Mapping[str, SecretStr]) -> dict[str, Any]:
        """Return the values to send: with defaults, without secrets and without what the upstream assumes anyway."""
        values = dict(self.parameters)
        for name, value in self._endpoint.defaults.items():
            values.setdefault(name, value)
        if "respondWith" not in values and not _NEEDS_WHOLE_PAGE.isdisjoint(values):
            values["respondWith"] = "markdown"
        implied = self._endpoint.implied
        return {name: value for name, value in values.items() if name not in secrets and implied.get(name) != value}

    def _left_out(self) -> tuple[str, ...]:
        unknown = [f"{shown_path(path)}: is unknown" for path in self.unknown]
        invalid = list(map(str, self.invalid))
        return tuple(listed(sorted([*unknown, *invalid])))

    def _take_model_argument(self, name: str, value: Any) -> None:
        """Take an argument of the model, or record why it may not be given."""
        if value in (None, "") and name in self._definition.built_in.arguments.model_fields:
            return  # as if it were not given
        parameter = self._endpoint.find(name)
        if parameter is None or not self._may_be_set_by_model(parameter):
            self._refuse_argument(name)
            return
        formats = self._endpoint.formats
        if parameter.name == "respondWith" and value is not None and value not in formats:
            self.model_problems.append(Problem((name,), f"must be one of {', '.join(formats)}"))
            return
        first = self._first_arguments.setdefault(parameter.name, name)
        if first != name:  # the order of the two would decide which value is sent
            message = f"sets the same parameter as {short(first)}; give only one of them"
            self.model_problems.append(Problem((name,), message))
            return
        self._set(parameter, value, (name,), by_model=True)

    def _refuse_argument(self, name: str) -> None:
        """Record that the tool does not take an argument of the model."""
        # Beyond MAX_PROBLEMS a problem is only counted, so skip the search for similar names, which takes 0.1 ms.
        is_listed = len(self.model_problems) < MAX_PROBLEMS
        known = sorted(self._definition.model_arguments - {name}) if is_listed else ()
        self.model_problems.append(Problem((name,), not_taken(name, known, suggest=self._suggest)))

    def _may_be_set_by_model(self, parameter: Parameter) -> bool:
        """Return whether the model may set a parameter: some never, some only if the definition's schema has them."""
        if parameter.declared and not _declares(self._definition, parameter.name):
            return False
        return parameter.model

    def _option_of(self, name: str) -> Path:
        """Return the path of the definition's option that set an argument; for an item of a batch, that of the list."""
        groups = {"fixed": self._definition.fixed, "defaults": self._definition.defaults}
        for own in (name, self._definition.built_in.list_argument):
            for group, values in groups.items():
                if own is not None and own in values:
                    return ("options", "args", group, own)
        return ("options", "args", name)

    def _set_timeout(self, value: Any, path: Path, *, by_model: bool) -> None:
        """Set the call's own time limit, which is no parameter of the upstream."""
        if value is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value > 0:
            self._timeout_s = float(value)
        else:
            problems = self.model_problems if by_model else self.operator_problems
            problems.append(Problem(path, "must be a number of seconds above 0"))

    def _set(self, parameter: Parameter, value: Any, path: Path, *, by_model: bool) -> None:
        """Set a parameter to a value converted to the upstream's form, and record whose value it is now.

        A value that cannot be converted is recorded as a mistake. None sets nothing.
        """
        if value is None:
            return
        try:
            converted = parameter.convert(value)
        except ValueError as mistake:
            self._record_mistake(parameter, value, Problem(path, str(mistake)), by_model=by_model)
            return
        was_set_by_model = parameter.name in self._names
        if parameter.merge and by_model and was_set_by_model:  # `after` and `recency` are both dates: the later counts
            converted = parameter.merge(self.parameters[parameter.name], converted)
        if converted is None:  # not sent, such as a flag that is set to False
            self.parameters.pop(parameter.name, None)
        else:
            self.parameters[parameter.name] = converted
        self._record_origin(parameter, path, by_model=by_model)

    def _record_mistake(self, parameter: Parameter, value: Any, problem: Problem, *, by_model: bool) -> None:
        if self._is_main(parameter):
            problem = replace(problem, message=f"{problem.message}{one_of_several(value)}")
        if by_model:
            self.model_problems.append(problem)
        elif parameter.lenient:
            self.invalid.append(problem)
        else:
            self.operator_problems.append(problem)

    def _record_origin(self, parameter: Parameter, path: Path, *, by_model: bool) -> None:
        """Record whether the value that will be sent is the model's: an error may name only what the model gave."""
        if by_model:
            self._names[parameter.name] = short(str(path[0]))
        else:
            self._names.pop(parameter.name, None)
        if self._is_main(parameter):
            self._main_parameter_option = None if by_model else path

    def _is_main(self, parameter: Parameter) -> bool:
        """Return whether a parameter is the query or address."""
        return parameter.name == self._endpoint.operation.main_parameter


def _has_main_argument(definition: ToolDefinition, arguments: Arguments) -> bool:
    """Return whether a call has a query, an address, a list of them, or a cursor."""
    main = {definition.built_in.list_argument, CURSOR}
    return any(name in main or names_main_parameter(definition, name) for name in arguments.values)


def _is_known(definition: ToolDefinition, name: str) -> bool:
    """Return whether tool or upstream knows an argument, also one that is refused."""
    endpoint = endpoint_of(definition)
    if name in definition.built_in.arguments.model_fields or fold(name) == _TIMEOUT:
        return True
    return fold(name) in endpoint.own or fold(name) in REFUSED or endpoint.find(name) is not None


def _declares(definition: ToolDefinition, name: str) -> bool:
    """Return whether the definition's schema has an argument of this name."""
    properties = definition.schema.get("properties")
    return isinstance(properties, dict) and name in properties


def _missing_main_argument(tool: BuiltInTool) -> Problem:
    main_argument = tool.list_argument or tool.operation.argument
    if "cursor" in tool.arguments.model_fields:
        return Problem((f"{main_argument} or cursor",), "one of them is required")
    return Problem((main_argument,), "is required")
