"""Executor of `dev`: its settings, and its status page, which shows results from the cards (`serve` shows none)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cachetools import FIFOCache

from openapi_tool.bootstrap import build_bootstrap, tool_secrets
from openapi_tool.cli.embedded import executor_settings
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.local.caller import ERRORS
from openapi_tool.local.dev import KEY_NAMES
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.settings import PREFIX, given_values, load_settings
from openapi_tool.settings.sources import kernel_remarks
from openapi_tool.settings.variables import ignored_variables
from openapi_tool.telemetry.health_server import health_server
from openapi_tool.tools.secret_variables import FILE_SUFFIX

_CA = "SSL_CERT_FILE"
_DURABLE_SETTINGS = ("nats.ack_wait_s", "nats.max_ack_pending")
"""Settings of section `nats` that do not concern the connection."""

_OF_KERNEL = ("protocol", "quotas")
"""Sections of the stack: the executor must use nothing but the simulated kernel."""

_STACK_SETTINGS = ("postgres.dsn", "telemetry.log_level", "telemetry.log_format")
_UPSTREAM_CONNECTION = ("egress.ca_file", "egress.proxy", "egress.public_addresses_only")
"""No effect with the double, which is on loopback and has a certificate of its own."""


@dataclass(frozen=True, slots=True)
class DevSettings:
    """Variables of the executor, names of the keys that the double accepts, and lines for the user."""

    environment: Mapping[str, str]
    key_names: tuple[str, ...]
    remarks: tuple[str, ...]


def dev_settings(
    upstream: UpstreamChoice, environment: Mapping[str, str], protocol: ProtocolVersion = DEFAULT_VERSION
) -> DevSettings:
    """Return the user's settings, except for what the stack decides. Raises SettingsError; exits without a key."""
    stack_settings = executor_settings(upstream) | {f"{PREFIX}PROTOCOL__VERSION": protocol.value}
    settings = load_settings(NO_DATABASE)
    allowed = tool_secrets(settings, {}).allowed
    passed = _passed(environment, allowed) if upstream is UpstreamChoice.REAL else {}
    build_bootstrap(settings, passed)
    configured = given_values()
    names = sorted(f"{section}.{key}" for section, values in configured.items() for key in values)
    unused = [name for name in names if not _takes_effect(name, upstream)]
    if environment.get(_CA) and _CA not in passed:
        unused.append(_CA)
    if upstream is UpstreamChoice.DOUBLE:
        stack_settings["OPENAPI_TOOL__URL_POLICY__ALLOW"] = ",".join((RECORDED_HOSTS, *settings.url_policy.allow))
        stack_settings["OPENAPI_TOOL__SECRETS__ALLOWED_ENV"] = ",".join(
            sorted({*KEY_NAMES, *settings.secrets.allowed_env})
        )
    remarks = [*kernel_remarks(), *ignored_variables(environment)]
    if unused:
        remarks.append(f"Not used by this stack, which has its own: {', '.join(unused)}")
    sections = {}
    for section, values in configured.items():
        used = {key: value for key, value in values.items() if f"{section}.{key}" not in unused}
        sections[f"{PREFIX}{section}".upper()] = json.dumps(used)
    return DevSettings(
        environment={**sections, **passed, **stack_settings},
        key_names=tuple(sorted({*KEY_NAMES, *allowed})),
        remarks=tuple(remarks),
    )


def _passed(environment: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    # What the real upstream needs beside settings.
    names = [_CA, *(name + suffix for name in allowed for suffix in ("", FILE_SUFFIX))]
    return {name: environment[name] for name in names if environment.get(name)}


def _takes_effect(name: str, upstream: UpstreamChoice) -> bool:
    section = name.partition(".")[0]
    if section == "nats":
        return name in _DURABLE_SETTINGS
    if name in _UPSTREAM_CONNECTION:
        return upstream is UpstreamChoice.REAL
    return section not in _OF_KERNEL and name not in _STACK_SETTINGS


_UPDATE_S = 1.0
_SILENT_S = 5.0  # without an answer, after which the page calls the statistics silent
_MAX_RESULTS = 20
_MAX_RESULT_CHARS = 4_000

Ask = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Function that returns the statistics of all replicas; the page shows those of the first."""


@dataclass(slots=True)
class DevStatistics:
    """Statistics of the stack's first executor, and the last results."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    _answered_at: float = field(default_factory=time.monotonic)
    _results: FIFOCache[str, str] = field(default_factory=lambda: FIFOCache(_MAX_RESULTS))

    def record_result(self, tool_call_id: str, text: str) -> None:
        """Keep what the model read, truncated to 4,000 characters, for the last 20 calls."""
        if len(text) > _MAX_RESULT_CHARS:
            text = f"{text[:_MAX_RESULT_CHARS]} … ({len(text):,} characters)"
        self._results[tool_call_id] = text

    def now(self) -> Mapping[str, Any]:
        """Return the statistics, `silent` if they are an earlier answer; empty before an executor answers."""
        if not self.stats:
            return {}
        last = [{**call, "read": self._results.get(call["tool_call_id"])} for call in self.stats.get("last", ())]
        silent = {"silent": True} if time.monotonic() - self._answered_at > _SILENT_S else {}
        return {**self.stats, "last": last, **silent}

    async def follow(self, ask: Ask) -> None:
        """Ask the executors once a second."""
        while True:
            with suppress(*ERRORS):
                if answers := await ask():
                    self.stats = answers[0]
                    self._answered_at = time.monotonic()
            await asyncio.sleep(_UPDATE_S)


@asynccontextmanager
async def dev_page(ask: Ask, port: int, statistics: DevStatistics) -> AsyncIterator[str]:
    """Serve the page on loopback; yield its URL. Raises OSError."""
    following = asyncio.create_task(statistics.follow(ask), name="page")
    try:
        async with health_server("127.0.0.1", port, None, statistics) as bound_port:
            yield f"http://127.0.0.1:{bound_port}/"
    finally:
        following.cancel()
        await asyncio.wait([following])
