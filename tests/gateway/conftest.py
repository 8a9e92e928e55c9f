"""The Jina double alone, and gateways in this process that send to it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import httpx
import pytest
from mcp import Client

from openapi_tool.bootstrap import build_bootstrap, lint_limits
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.gateway.assembly import open_gateway
from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.file_state import FileState
from openapi_tool.gateway.opening import open_state
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.token_record import new_token
from openapi_tool.gateway.token_stores import StoredTokens
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.gateway.tools import ToolFolder, built_in_tools
from openapi_tool.http.server import HttpDoor, serve_http
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import UpstreamDouble, make_certificates
from openapi_tool.mcp.server import McpServer
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.reloading import Reloader
from openapi_tool.settings import Settings
from openapi_tool.state.sqlite import MEMORY, StateFile
from tests.support import ONE_WORKER
from tests.waiting import WAIT_S

KEY = "JINA_API_KEY"
ME = Caller("proj_me", "agent_me")
PAGE = "http://site.fixture.test:8099/article"


@pytest.fixture(autouse=True)
def _workers_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start worker processes of services within this process at the first task; each takes 0.1 s of CPU time."""
    monkeypatch.setattr(WorkerPool, "start", lambda _: None)


@pytest.fixture(scope="session")
def double_process() -> Iterator[tuple[UpstreamDouble, Mapping[str, str]]]:
    with TemporaryDirectory() as folder:
        guard, certificates = Guard(()), make_certificates(Path(folder))
        double = UpstreamDouble(Path(folder), certificates, guard, (KEY,))
        double.start()
        try:
            yield (
                double,
                {
                    KEY: double.keys[KEY],
                    "SSL_CERT_FILE": str(certificates.ca),
                    "OPENAPI_TOOL__URL_POLICY__ALLOW": RECORDED_HOSTS,
                    "OPENAPI_TOOL__ISOLATION__WORKERS": str(ONE_WORKER["workers"]),
                },
            )
        finally:
            double.stop()
            guard.close()


@pytest.fixture
def double(double_process: tuple[UpstreamDouble, Mapping[str, str]]) -> UpstreamDouble:
    double, _ = double_process
    double.rules()
    double.fallbacks(*FALLBACKS)
    double.clear_requests()
    return double


@pytest.fixture
def environment(double: UpstreamDouble, double_process: tuple[UpstreamDouble, Mapping[str, str]]) -> dict[str, str]:
    """Variables of a process that sends to the double."""
    del double
    return dict(double_process[1])


class OpenGateway(Protocol):
    def __call__(
        self, state: Path = MEMORY, tools: Path | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[Gateway]: ...


@pytest.fixture
def opened(double: UpstreamDouble, environment: dict[str, str]) -> OpenGateway:
    """Return a function that opens a gateway in this process."""

    @asynccontextmanager
    async def open_one(state: Path = MEMORY, tools: Path | None = None, **settings: Any) -> AsyncIterator[Gateway]:
        defaults: dict[str, Any] = {"url_policy": {"allow": (RECORDED_HOSTS,)}, "isolation": ONE_WORKER}
        values = defaults | settings | NO_DATABASE

        def read() -> Settings:
            return Settings(**values)

        bootstrap = build_bootstrap(read(), environment)
        folder = tools and ToolFolder(tools, lint_limits(bootstrap.settings), bootstrap.settings.url_policy)
        async with (
            open_state(bootstrap, state) as opened_state,
            open_gateway(
                Reloader(bootstrap, read, environment),
                opened_state,
                folder.load() if folder else built_in_tools(),
                LoopbackResolver(double.port),
            ) as gateway,
        ):
            yield gateway

    return open_one


def file_of(gateway: Gateway) -> StateFile:
    """Return the open state file of a gateway; a second one would wait for its lock."""
    state = gateway._parts.state  # noqa: SLF001 - it has no other use for it
    assert isinstance(state, FileState)
    return state.file


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that serves HTTP on loopback in this process."""

    gateway: Gateway
    state: GatewayState
    tokens: Tokens
    door: HttpDoor
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def token(self, project: str = "p", agent: str = "a", *tools: str, any_agent: bool = False) -> str:
        """Create a token, which is in use at once."""
        text, token_id, token = new_token(project, agent, tools or ("*",), any_agent=any_agent, expires=None)
        await StoredTokens(self.state.tokens).add(token_id, token)
        await self.tokens.load()
        return text

    def client(self, token: str | None = None, **headers: str) -> httpx.AsyncClient:
        given = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.url, headers=given | headers, timeout=WAIT_S, trust_env=False)


class Serve(Protocol):
    def __call__(
        self, state: Path = MEMORY, tools: Path | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[Served]: ...


@pytest.fixture
def serve(opened: OpenGateway) -> Serve:
    """Return a function that serves a gateway over HTTP; `gateway` are options of that section."""

    @asynccontextmanager
    async def serve_one(state: Path = MEMORY, tools: Path | None = None, **settings: Any) -> AsyncIterator[Served]:
        options, jwts = GatewayOptions(**settings.pop("gateway", {})), settings.pop("jwts", None)
        async with opened(state, tools, **settings) as gateway:
            opened_state = gateway._parts.state  # noqa: SLF001 - one state for both
            tokens = Tokens([StoredTokens(opened_state.tokens)], grace_s=options.token_grace_s)
            await tokens.load()
            listening = socket.create_server(("127.0.0.1", 0))
            door = serve_http(
                gateway,
                opened_state,
                tokens,
                options,
                listening,
                open_to_all=jwts is None,
                structured=False,
                drain_s=5,
                jwts=jwts,
            )
            async with door as running:
                yield Served(gateway, opened_state, tokens, running, listening.getsockname()[1])

    return serve_one


Connect = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def connect() -> Connect:
    """Return a function that connects a client to a gateway, without a transport."""

    @asynccontextmanager
    async def connected(
        gateway: Gateway, mode: Any = "auto", caller: Caller = ME, **options: Any
    ) -> AsyncIterator[Client]:
        server = McpServer(gateway, lambda _: caller, **options).server(gateway.tools_of(caller))
        async with Client(server, mode=mode) as client:
            yield client

    return connected
