"""Executor with one part removed, to measure the effect of the part: `make bench BENCH="--without NAME"`."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpcore
import httpx
from aiohttp.abc import AbstractResolver

if TYPE_CHECKING:
    from openapi_tool.jina.options import EgressOptions

PART_VARIABLE = "BENCH_WITHOUT"


def no_prepared_statements() -> None:
    """Disable prepared statements, as behind PgBouncer."""
    os.environ["OPENAPI_TOOL__POSTGRES__PREPARED_STATEMENTS"] = "false"


def no_cache() -> None:
    """Disable the response cache."""
    os.environ["OPENAPI_TOOL__CACHE__TTL_S"] = "0"


def no_uvloop() -> None:
    """Use asyncio's event loop; call before the executor is imported."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]


def no_orjson() -> None:
    """Replace orjson by the standard library's json; call before the executor is imported."""
    plain = ModuleType("orjson")
    vars(plain).update(JSONDecodeError=json.JSONDecodeError, OPT_SORT_KEYS=1, loads=_loads, dumps=_dumps)
    sys.modules["orjson"] = plain


def _loads(text: bytes | bytearray | str) -> Any:
    return json.loads(text)


def _dumps(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=default, sort_keys=bool(option))
    return text.encode()


def no_gc_settings() -> None:
    """Keep Python's default settings of the garbage collector."""
    from openapi_tool.service import process  # noqa: PLC0415 - another part may have to be removed before the import

    process.collect_garbage_rarely = lambda: None  # type: ignore[attr-defined]  # no setting disables it


def no_aiohttp() -> None:
    """Use httpx's connection pool."""
    from openapi_tool.service import process_parts  # noqa: PLC0415 - as above

    vars(process_parts)["AiohttpTransport"] = _pool_of_httpx


class _Resolved(httpcore.AsyncNetworkBackend):
    """Connects to the address that a resolver returns, as aiohttp does."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's name
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        [address] = await self._resolver.resolve(host, port)
        return await self._backend.connect_tcp(address["host"], address["port"], timeout, local_address, socket_options)


def _pool_of_httpx(tls: ssl.SSLContext, options: EgressOptions, resolver: AbstractResolver) -> httpx.AsyncHTTPTransport:
    limits = httpx.Limits(max_connections=options.max_connections, max_keepalive_connections=options.max_connections)
    transport = httpx.AsyncHTTPTransport(verify=tls, limits=limits)
    transport._pool._network_backend = _Resolved(resolver)  # noqa: SLF001 - httpx takes none
    return transport


PARTS: Mapping[str, Callable[[], None]] = {
    "aiohttp": no_aiohttp,
    "cache": no_cache,
    "gc-settings": no_gc_settings,
    "orjson": no_orjson,
    "prepared-statements": no_prepared_statements,
    "uvloop": no_uvloop,
}


def main() -> None:
    """Serve like the embedded stack's executor, without the part that the environment names."""
    PARTS[os.environ[PART_VARIABLE]]()
    from openapi_tool.local.executor import main as serve  # noqa: PLC0415 - the part must be removed before the import

    serve()


if __name__ == "__main__":
    main()
