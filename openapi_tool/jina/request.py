"""The upstream request of a call: its parameters, mapped from the arguments, and how it is built (jina-api 0-2).

POST with a JSON body can carry every parameter. A definition that asks for GET gets POST nevertheless if a parameter
does not fit: secrets never go into a URL, and some texts fit into no header.

Later sources of a parameter override earlier ones: the definition's `headers`, its `params`, defaults, the model's
arguments, fixed values. So a fixed value wins, whichever alias of the parameter the model uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr

from openapi_tool import __version__
from openapi_tool.jina.endpoints import Endpoint, endpoint_of
from openapi_tool.jina.parameters import REFUSED, Parameter, secret_problem
from openapi_tool.jina.response import Expected
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.errors import BadRequest, TargetRefused
from openapi_tool.protocol.jsontext import dumps
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
_TIMEOUT = "timeout"
_CURSOR = re.compile(r"[A-Za-z0-9_-]{40,60}=?")
_NEEDS_WHOLE_PAGE = frozenset({"removeSelector", "withIframe", "withShadowDom"})
"""Parameters that do nothing in the default format: the server keeps what it extracted before (jina-api section 9)."""


@dataclass(frozen=True, slots=True)
class ResolvedParameters:
    """Upstream parameters by body name, secret body members, and the call's own time limit in seconds.

    `names` maps parameters to the names by which the model gave them. `main_parameter_option` is the path of the
    definition's option that sets the query or address; None if the model gave it. `left_out` are the definition's
    options that the upstream does not take. `denied` are the hosts that are not shown.
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
        if problem := secret_problem(name):
            resolver.operator_problems.append(Problem(("options", "envs", name), problem))
    return resolver.finish(arguments.secrets)


def without_unknown(definition: ToolDefinition, arguments: Arguments) -> Arguments:
    """Drop the model's arguments that neither the tool nor the upstream knows, if `parameters` allow them.

    The kernel's own executor sends them upstream (protocol section 10). A call without a query or page keeps them: one
    of them is probably meant as such, and the error names them.
    """
    if not definition.takes_other_arguments:
        return arguments
    endpoint = endpoint_of(definition)
    built_in = definition.built_in

    def is_known(name: str) -> bool:
        return (
            name in built_in.arguments.model_fields
            or fold(name) == _TIMEOUT
            or fold(name) in endpoint.own
            or fold(name) in REFUSED
            or endpoint.find(name) is not None
        )

    main = {built_in.list_argument, CURSOR}
    if not any(name in main or names_main_parameter(definition, name) for name in arguments.values):
        return arguments
    unknown = frozenset(name for name in arguments.by_model if not is_known(name))
    if not unknown:
        return arguments
    values = {name: value for name, value in arguments.values.items() if name not in unknown}
    repaired = tuple(sorted({*arguments.repaired, *map(short, unknown)}))
    return replace(arguments, values=values, by_model=arguments.by_model - unknown, repaired=repaired)


def examine_parameters(definition: ToolDefinition, arguments: Arguments, *, suggest: bool = True) -> ParameterResolver:
    """Resolve a call's parameters without raising mistakes; with `suggest` these name similar arguments."""
    resolver = ParameterResolver(definition, suggest=suggest)
    for name, header in definition.headers.items():
        resolver.take_header(name, header)
    for name, option in definition.upstream_params.items():
        resolver.take_option(name, option, ("options", "jina", "params", name))
    for name, value in arguments.values.items():
        resolver.take_argument(name, value, by_model=name in arguments.by_model)
    return resolver


def under_url_policy(resolved: ResolvedParameters, definition: ToolDefinition, rules: UrlPolicy) -> ResolvedParameters:
    """Return the parameters with a checked and repaired page address, and the hosts that are not shown.

    Raises BadRequest or TargetRefused, or ToolMisconfigured if the definition sets the address: the model cannot
    correct it then, and must not see it.
    """
    endpoint = endpoint_of(definition)
    if rules.deny:
        resolved = replace(resolved, denied=rules.deny)
    if endpoint.check_url is None:
        return resolved
    name = endpoint.operation.main_parameter
    parameters = resolved.parameters
    try:
        return replace(resolved, parameters={**parameters, name: endpoint.check_url(parameters[name], rules)})
    except (BadRequest, TargetRefused) as refusal:
        if resolved.main_parameter_option is None:
            given = definition.built_in.list_argument or resolved.names.get(name, name)
            refusal.message = refusal.message.replace("url:", f"{given}:", 1)
            if takes_cursor(definition) and _CURSOR.fullmatch(parameters[name]):
                refusal.message = f"{given}: is no address. If it is a cursor, give it as {CURSOR}, without {given}."
            raise
        problem = Problem(resolved.main_parameter_option, f"is no address that may be read ({refusal.code})")
    # Outside of the `except` block, so that the refusal, which quotes the address, is not its context.
    raise unusable(definition.tool_name, [str(problem)])


def changed_arguments(definition: ToolDefinition, given: ResolvedParameters, sent: ResolvedParameters) -> set[str]:
    """Return the model's argument of the query or address if it is not sent as it was given."""
    name = endpoint_of(definition).operation.main_parameter
    if given.main_parameter_option is not None or given.parameters.get(name) == sent.parameters.get(name):
        return set()
    return {definition.built_in.list_argument or given.names.get(name, name)}


def with_max_tokens(resolved: ResolvedParameters, max_tokens: int) -> ResolvedParameters:
    """Add a limit of tokens per page if neither definition nor model set one; 0 is no limit.

    For a search without pages remove the limit that they set.
    """
    parameters = resolved.parameters
    has_limit = "maxTokens" in resolved.parameters
    if parameters.get("respondWith") == "no-content":  # no pages
        if has_limit:
            parameters = {name: value for name, value in parameters.items() if name != "maxTokens"}
    elif max_tokens and not has_limit:
        parameters = {**parameters, "maxTokens": max_tokens}
    return resolved if parameters is resolved.parameters else replace(resolved, parameters=parameters)


class ParameterResolver:
    """Parameters of one call, the mistakes of model and operator in them, and options that are left out.

    Options are left out that the upstream does not know (`unknown`), and `invalid` ones that earlier versions sent.
    """

    def __init__(self, definition: ToolDefinition, *, suggest: bool = True) -> None:
        self.model_problems: list[Problem] = []
        self.operator_problems: list[Problem] = []
        self.unknown: list[Path] = []
        self.invalid: list[Problem] = []
        self.parameters: dict[str, Any] = {}
        self._definition = definition
        self._suggest = suggest
        self._endpoint = endpoint_of(definition)
        self._argument_by_parameter: dict[str, str] = {}  # the model's first one: two must not set the same parameter
        self._names: dict[str, str] = {}  # as in ResolvedParameters: only where the model's value is the one sent
        self._main_parameter_option: Path | None = None
        self._timeout_s: float | None = None

    def take_header(self, name: str, value: str) -> None:
        """Take a header of the definition."""
        path = ("options", "jina", "headers", name)
        if fold(name) in IGNORED_HEADERS:
            return
        if reason := REFUSED.get(fold(name)):
            self.operator_problems.append(Problem(path, f"is not a header that may be sent: {reason}"))
        elif self._endpoint.find(name) is None:
            self.operator_problems.append(Problem(path, "is not a header that may be sent"))
        else:
            self.take_option(name, value, path)

    def take_option(self, name: str, value: Any, path: Path) -> None:
        """Take a value set by the operator; record an unknown name, to be logged and not sent."""
        if reason := REFUSED.get(fold(name)):
            self.operator_problems.append(Problem(path, f"may not be sent to the upstream: {reason}"))
        elif parameter := self._endpoint.find(name):
            self._set(parameter, value, path, by_model=False)
        else:
            self.unknown.append(path)

    def take_argument(self, name: str, value: Any, *, by_model: bool) -> None:
        """Take an argument of the call."""
        path = (name,) if by_model else self._option_of(name)
        if fold(name) == _TIMEOUT:
            self._set_timeout(value, path, by_model=by_model)
        elif name == MAX_RESULT_TOKENS:
            return  # used by the executor (engine/pagination.py), not sent
        elif own := self._endpoint.own.get(fold(name)):
            self._set(own, value, path, by_model=by_model)
        elif by_model:
            self._take_model_argument(name, value)
        else:
            self.take_option(name, value, path)

    def finish(self, secrets: Mapping[str, SecretStr]) -> ResolvedParameters:
        """Add defaults. Raises the mistakes."""
        if self.operator_problems:
            raise unusable(self._definition.tool_name, listed(list(map(str, self.operator_problems))))
        if self._endpoint.operation.main_parameter not in self.parameters and not self.model_problems:
            self.model_problems.append(_missing_main_argument(self._definition.built_in))
        if self.model_problems:
            problems = listed(list(map(str, self.model_problems)))
            raise BadRequest(
                "Correct these arguments and call again: " + "; ".join(problems), detail={"problems": problems}
            )
        values = self.parameters
        for name, value in self._endpoint.defaults.items():
            values.setdefault(name, value)
        if "respondWith" not in values and not _NEEDS_WHOLE_PAGE.isdisjoint(values):
            values["respondWith"] = "markdown"
        implied = self._endpoint.implied  # what the upstream does also without the parameter
        parameters = {
            name: value for name, value in values.items() if name not in secrets and implied.get(name) != value
        }
        return ResolvedParameters(
            parameters=parameters,
            secrets=secrets,
            timeout_s=self._timeout_s,
            main_parameter_option=self._main_parameter_option,
            names=self._names,
            left_out=self._left_out(),
        )

    def _left_out(self) -> tuple[str, ...]:
        unknown = [f"{shown_path(path)}: is unknown" for path in self.unknown]
        return tuple(listed(sorted((*unknown, *map(str, self.invalid)))))

    def _take_model_argument(self, name: str, value: Any) -> None:
        if value in (None, "") and name in self._definition.built_in.arguments.model_fields:
            return  # as if it were not given
        path = (name,)
        problems = self.model_problems
        parameter = self._endpoint.find(name)
        if parameter is None or not self._may_be_set_by_model(parameter):
            is_listed = len(problems) < MAX_PROBLEMS  # else skip the search for similar names: 0.1 ms for each
            known = sorted(self._definition.model_arguments - {name}) if is_listed else ()
            problems.append(Problem(path, not_taken(name, known, suggest=self._suggest)))
        elif parameter.name == "respondWith" and value is not None and value not in self._endpoint.formats:
            problems.append(Problem(path, f"must be one of {', '.join(self._endpoint.formats)}"))
        elif (first := self._argument_by_parameter.setdefault(parameter.name, name)) != name:
            # else the order of the arguments would decide which value is sent
            problems.append(Problem(path, f"sets the same parameter as {short(first)}; give only one of them"))
        else:
            self._set(parameter, value, path, by_model=True)

    def _may_be_set_by_model(self, parameter: Parameter) -> bool:
        return parameter.model and (not parameter.declared or _declares(self._definition, parameter.name))

    def _option_of(self, name: str) -> Path:
        """Return the path of an argument's option; for an item of a batch, that of the list."""
        groups = {"fixed": self._definition.fixed, "defaults": self._definition.defaults}
        for own in (name, self._definition.built_in.list_argument):
            for group, values in groups.items():
                if own is not None and own in values:
                    return ("options", "args", group, own)
        return ("options", "args", name)

    def _set_timeout(self, value: Any, path: Path, *, by_model: bool) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            problems = self.model_problems if by_model else self.operator_problems
            problems.append(Problem(path, "must be a number of seconds above 0"))
        else:
            self._timeout_s = float(value)

    def _set(self, parameter: Parameter, value: Any, path: Path, *, by_model: bool) -> None:
        if value is None:
            return
        is_main = parameter.name == self._endpoint.operation.main_parameter
        try:
            converted = parameter.convert(value)
        except ValueError as mistake:
            problem = Problem(path, f"{mistake}{one_of_several(value) if is_main else ''}")
            if by_model:
                self.model_problems.append(problem)
            elif parameter.lenient:
                self.invalid.append(problem)
            else:
                self.operator_problems.append(problem)
            return
        if parameter.merge and by_model and parameter.name in self._names:  # set by another argument of the model
            converted = parameter.merge(self.parameters[parameter.name], converted)
        if converted is None:  # not sent, such as a flag that is set to False
            self.parameters.pop(parameter.name, None)
        else:
            self.parameters[parameter.name] = converted
        if by_model:
            self._names[parameter.name] = short(str(path[0]))
        else:  # the operator's value is sent, so an error must not name an argument of the model
            self._names.pop(parameter.name, None)
        if is_main:
            self._main_parameter_option = None if by_model else path


def _declares(definition: ToolDefinition, name: str) -> bool:
    properties = definition.schema.get("properties")
    return isinstance(properties, dict) and name in properties


def _missing_main_argument(tool: BuiltInTool) -> Problem:
    main_argument = tool.list_argument or tool.operation.argument
    if "cursor" in tool.arguments.model_fields:
        return Problem((f"{main_argument} or cursor",), "one of them is required")
    return Problem((main_argument,), "is required")


USER_AGENT = f"openapi-tool/{__version__}"
_DNT = "DNT"  # the upstream expects a number in this header: `true` has no effect (jina-api section 9)
MAX_GET_URL_CHARS = 8_000

_Parts = tuple[str, dict[str, str], bytes | None]  # target, headers, body


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """Request without its API key; `target` is the percent-encoded path and query.

    `expected` is what the reading of its response depends on. `secrets` are the secrets in the body.
    """

    method: str
    host: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None
    expected: Expected = field(repr=False)
    secrets: tuple[SecretStr, ...] = field(default=(), repr=False)


def build_request(
    definition: ToolDefinition, resolved: ResolvedParameters, offered: frozenset[str] = frozenset()
) -> UpstreamRequest:
    """Return the request of a call: GET if the definition asks for it and every parameter fits, else POST.

    `offered` are the arguments that a remedy may name.
    """
    endpoint = endpoint_of(definition)
    parameters = resolved.parameters  # as the response is read by them; some are sent as part of the query or address
    if not endpoint.separators.keys().isdisjoint(parameters):
        resolved = replace(resolved, parameters=_with_appended(endpoint, parameters))
    get = _get(endpoint, definition.path, resolved) if definition.method == "GET" else None
    target, headers, body = get or _post(endpoint, definition.path, resolved)
    # `identity`, as a small compressed body could unpack to any size
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **headers}
    method = "GET" if get else "POST"
    host = endpoint.operation.host
    secrets = tuple(resolved.secrets.values())
    expected = Expected(endpoint.operation.name, parameters, resolved.names, offered, resolved.denied)
    return UpstreamRequest(method, host, target, headers, body, expected, secrets)


def _with_appended(endpoint: Endpoint, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Append what the upstream takes only as part of the query or page address."""
    name = endpoint.operation.main_parameter
    text = parameters[name]
    for other, separator in endpoint.separators.items():
        if other in parameters:
            start = text.partition("#")[0] if separator == "#" else text  # an address has one fragment
            text = f"{start}{separator}{parameters[other]}"
    rest = {other: value for other, value in parameters.items() if other not in endpoint.separators}
    return {**rest, name: text}


def _post(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> _Parts:
    body: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    for name, value in resolved.parameters.items():
        parameter = endpoint.find(name)
        if parameter is not None and parameter.header_only and parameter.header:
            headers[parameter.header] = _header_text(value)
        else:
            _nest(body, name, value)
    for name, secret in resolved.secrets.items():
        _nest(body, name, secret.get_secret_value())
    path = "/" if path == endpoint.operation.template else path  # the page address is in the body
    return path, headers, dumps(body)


def _nest(body: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[leaf] = value


def _get(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> _Parts | None:
    if resolved.secrets:
        return None
    headers: dict[str, str] = {}
    query: list[str] = []
    operation = endpoint.operation
    for name, value in resolved.parameters.items():
        parameter = endpoint.find(name)
        if parameter and (header := parameter.header):
            if _would_be_split(name, value):
                return None
            headers[header] = "1" if header == _DNT else _header_text(value)
        elif name == operation.main_parameter and operation.template:
            path = "/" + quote(value, safe="")
        elif isinstance(value, dict):
            return None
        else:
            for item in value if isinstance(value, list) else [value]:
                text = str(item).lower() if isinstance(item, bool) else str(item)
                query.append(f"{name}={quote(text, safe='')}")
    target = path + ("?" + "&".join(query) if query else "")
    if len(target) > MAX_GET_URL_CHARS or not all(text.isascii() and text.isprintable() for text in headers.values()):
        return None
    return target, headers, None


def _would_be_split(name: str, value: Any) -> bool:
    """The server splits a selector in a header at each `, `, also within `:is(h1, h2)`."""
    texts = value if isinstance(value, list) else [value]
    return name.endswith("Selector") and any(", " in text for text in texts)


def _header_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true"  # never False, which is not sent (`_flag` in jina/parameters.py)
    return ", ".join(value) if isinstance(value, list) else str(value)
