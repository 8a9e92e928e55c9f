"""`openapi-tool check`: whether `serve` could use its settings, PostgreSQL, NATS, keys and definitions.

Each check is a function that returns details for the user, or raises an exception whose message is the problem.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.dev_choice import named_dev, names_of_dev, servers_of
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.output import USAGE, print_json, print_line, print_status
from openapi_tool.cli.stored_definitions import NOT_OURS, UNUSABLE, judge, secrets_of_dev, stored_check
from openapi_tool.jina.client import JinaClient
from openapi_tool.kernel.jetstream.durable import DurableMissing, observe
from openapi_tool.kernel.jetstream.storage_check import unusable, unusable_quotas
from openapi_tool.kernel.jetstream.streams import UNLIMITED, Durable, command_stream_of
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected, outage_as_unavailable
from openapi_tool.nats_client.options import BusOptions, DurableOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.service.process_parts import upstream_transport
from openapi_tool.settings import SettingsError, load_settings
from openapi_tool.settings.sources import settings_file
from openapi_tool.settings.variables import ignored_variables
from openapi_tool.telemetry.health import QUOTAS
from openapi_tool.tools.operations import OPERATIONS
from openapi_tool.tools.registry import RegistryError
from openapi_tool.tools.secret_variables import FILE_SUFFIX
from openapi_tool.tools.wording import counted

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

_TIMEOUT_S = 10.0
_FAILED = 1


@dataclass(slots=True)
class CheckResult:
    """Result of one check; `problem` is why `serve` could not use the dependency."""

    problem: str = ""
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.problem or "; ".join(["ok", *self.details])


def check(
    config: Path | None,
    *,
    as_json: bool,
    project: list[str] | None,
    upstream: bool,
) -> None:
    """Print what `serve` could not use; change nothing but an empty record in NATS, which expires after an hour."""
    for name in project or ():
        check_given("--project", name, "project id")
    with settings_file(config):
        _check(as_json=as_json, project=project, upstream=upstream)


def _check(*, as_json: bool, project: list[str] | None, upstream: bool) -> None:
    try:
        dev = named_dev()
        bootstrap = build_bootstrap(load_settings(servers_of(dev)), os.environ)
    except SettingsError as error:
        if as_json:
            _print_json({"settings": CheckResult("\n".join(error.problems))}, [])
            raise typer.Exit(USAGE) from None
        stacks = names_of_dev()
        if stacks and any(problem.startswith("postgres: is missing") for problem in error.problems):
            error.problems.append(f"to check a running dev stack ({stacks}): openapi-tool --dev NAME check")
        raise
    served_project = bootstrap.settings.protocol.project
    projects = project or ([] if served_project == "*" else [served_project])
    results = {"settings": CheckResult(), **asyncio.run(_results(bootstrap, projects, dev, upstream=upstream))}
    weak = [f"{name} is too short or too common a word to be masked; set another one" for name in bootstrap.unmasked]
    remarks = [*bootstrap.settings.remarks, *ignored_variables(os.environ), *weak]
    if as_json:
        _print_json(results, remarks)
    else:
        for remark in remarks:
            print_status(f"openapi-tool: {remark}")
        for name, result in results.items():
            print_line(f"{name}: {result}")
    if any(result.problem for result in results.values()):
        raise typer.Exit(_FAILED)


def _print_json(results: Mapping[str, CheckResult], remarks: Sequence[str]) -> None:
    checks = {name: result.problem for name, result in results.items()}
    details = {name: result.details for name, result in results.items()}
    print_json({"ok": not any(checks.values()), "checks": checks, "details": details, "remarks": list(remarks)})


async def _results(
    bootstrap: Bootstrap, projects: Sequence[str], dev: StackAddress | None, *, upstream: bool
) -> dict[str, CheckResult]:
    checks: dict[str, Awaitable[list[str]]] = {"postgres": _postgres(bootstrap), "nats": _nats(bootstrap)}
    if bootstrap.quotas:  # the NATS of `quotas.nats_servers`, if it is another one than the kernel's
        checks[QUOTAS] = _quotas(bootstrap.quotas)
    if upstream:
        checks["upstream"] = _upstream(bootstrap)
    for project in projects:
        checks[f"definitions of {project}"] = _definitions(bootstrap, project, dev)
    results = await asyncio.gather(*(_result(check, bootstrap) for check in checks.values()))
    keys = _keys(bootstrap) if dev is None else _keys_of_dev(bootstrap, dev)
    return {**dict(zip(checks, results, strict=True)), **keys}


def _keys(bootstrap: Bootstrap) -> dict[str, CheckResult]:
    keys = {variable: CheckResult() for variable in sorted(bootstrap.secrets.allowed)}
    for variable in bootstrap.secrets.missing():
        keys[variable] = CheckResult(_why_key_is_missing(bootstrap, variable))
    return keys


def _keys_of_dev(bootstrap: Bootstrap, dev: StackAddress) -> dict[str, CheckResult]:
    """Return which keys the executors of a `dev` have: they got them at their start, whatever is set here."""
    secrets = secrets_of_dev(bootstrap.settings, dev)
    keys = {variable: CheckResult(details=["a key of the dev stack"]) for variable in sorted(secrets.allowed)}
    for variable in secrets.missing():
        keys[variable] = CheckResult(f"the dev stack {dev.name!r} has no such key; set it and start that `dev` again")
    return keys


def _why_key_is_missing(bootstrap: Bootstrap, variable: str) -> str:
    pool = bootstrap.settings.limits.pool_name(variable)
    needed_by = f" (a key of limits.pools.{pool})" if pool else ""
    return f"is not set{needed_by}; set it or {variable}{FILE_SUFFIX}"


async def _result(check: Awaitable[list[str]], bootstrap: Bootstrap) -> CheckResult:
    mask = bootstrap.redactor.text
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            details = await check
            return CheckResult("", [mask(detail) for detail in details])
    except TimeoutError:
        return CheckResult(f"no answer within {_TIMEOUT_S:.0f} s")
    except (Unavailable, RegistryError, _CheckFailed) as error:
        # `located` adds the address of the server to an error of PostgreSQL, and changes no other.
        return CheckResult(mask(located(str(error), bootstrap.pool)))


class _CheckFailed(Exception):
    """A dependency cannot be used; the message says why."""


async def _postgres(bootstrap: Bootstrap) -> list[str]:
    async with aclosing(await KernelStore.open(bootstrap.pool)) as store:
        return [_transport(encrypted=await store.encrypted())]


async def _nats(bootstrap: Bootstrap) -> list[str]:
    options = bootstrap.durable
    with outage_as_unavailable(bootstrap.bus.where):
        async with connected(replace(bootstrap.bus, once=True)) as client:
            encryption = _transport(encrypted=client.encrypted)
            stream = await command_stream_of(client, options)
            problems = await unusable(client, stream or "", quotas=bootstrap.quotas is None)
            if problems:
                raise _CheckFailed("; ".join(problems))
            if stream is None:
                return [encryption, "the command stream is created at the start"]
            state_of_durable = await _durable(client, Durable(stream, options.name), options)
            return [encryption, f"stream {stream}", state_of_durable]


async def _quotas(bus: BusOptions) -> list[str]:
    with outage_as_unavailable(bus.where):
        async with connected(replace(bus, once=True)) as client:
            problems = await unusable_quotas(client)
            if problems:
                raise _CheckFailed("; ".join(problems))
            return [_transport(encrypted=client.encrypted)]


async def _durable(client: BusClient, durable: Durable, options: DurableOptions) -> str:
    try:
        state = await observe(client, durable, ServerClock())
    except DurableMissing:
        return f"durable {durable.name} is created at the start"
    if state.paused_until:
        raise _CheckFailed(
            f"durable {durable.name} is paused until {state.paused_until}; resume it: no call runs before"
        )
    found = f"durable {durable.name}, {state.pending} pending"
    if state.filters == (options.filter_subject,) and state.max_deliver == UNLIMITED:
        return found
    return f"{found}; its settings are changed at the start"


async def _upstream(bootstrap: Bootstrap) -> list[str]:
    hosts = sorted({operation.host for operation in OPERATIONS})
    transport = upstream_transport(bootstrap, None)
    # 0 bytes of a response, because `reach` reads no body.
    async with aclosing(JinaClient(transport, 0)) as client:
        await asyncio.gather(*(_reach(client, host) for host in hosts))
    return hosts


async def _reach(client: JinaClient, host: str) -> None:
    try:
        await client.reach(host)
    except ToolError as error:
        detail = error.detail if isinstance(error.detail, dict) else {}
        kind = detail.get("cause") or detail.get("kind") or error.code
        remedy = "egress.ca_file (SSL_CERT_FILE)" if kind == "certificate" else "DNS, egress.proxy and network policies"
        raise _CheckFailed(f"{host} cannot be reached ({kind}); check {remedy}") from error


async def _definitions(bootstrap: Bootstrap, project: str, dev: StackAddress | None) -> list[str]:
    stored = stored_check(bootstrap.settings, dev)
    async with ToolRows.open(bootstrap.pool) as rows:
        definitions = await rows.definitions(project)
    unusable_tools = []
    remarks = []  # also on tools of others: what of them this program would not use
    tools_of_others = []
    for row in definitions:
        name = row["tool_name"]
        verdict = judge(row, stored, bootstrap.version)
        if verdict.kind == UNUSABLE:
            unusable_tools.append(f"{name}: {'; '.join(verdict.problems)}")
        elif verdict.kind == NOT_OURS:
            tools_of_others.append(name)
        remarks += [f"{name}: {problem}" for problem in verdict.problems]
    if unusable_tools:
        raise _CheckFailed("; ".join(unusable_tools))
    details = [counted(len(definitions) - len(tools_of_others), "definition")]
    if tools_of_others:
        details.append(f"of other executors: {', '.join(tools_of_others)}")
    return details + remarks


def _transport(*, encrypted: bool) -> str:
    return "TLS" if encrypted else "without TLS"
