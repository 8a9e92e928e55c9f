"""TLS to PostgreSQL according to the connection string.

The embedded server is built without TLS, so a proxy in front of it terminates TLS: it answers PostgreSQL's
SSLRequest with one byte and forwards the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.kernel.store import KernelStore
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings, SettingsError
from tests.requirements import requirement
from tests.support import dsn_of

SSL_REQUEST_BYTES = 8


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    client = authority.issue_cert("executor")
    client.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    client.private_key_pem.write_to_path(str(tmp_path / "client_key.pem"))
    (tmp_path / "client_key.pem").chmod(0o600)
    return authority


@asynccontextmanager
async def tls_proxy(stack: EmbeddedStack, authority: trustme.CA, *, ask_client: bool = False) -> AsyncIterator[int]:
    """Yield the port of a proxy that accepts TLS only, with a certificate for `localhost`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED if ask_client else ssl.CERT_NONE

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(SSL_REQUEST_BYTES)
        writer.write(b"S")
        try:
            await writer.start_tls(context)
            await _forward(reader, writer, stack.postgres.port)
        except (OSError, ssl.SSLError):
            pass  # one side refused the certificate of the other
        finally:
            writer.close()

    server = await asyncio.start_server(enter, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()


async def connects(stack: EmbeddedStack, database: str, port: int, query: str, host: str = "localhost") -> bool:
    """Return whether the store connects through the proxy with these TLS parameters."""
    inner = dsn_of(stack, database)
    dsn = inner.replace(f"127.0.0.1:{stack.postgres.port}", f"{host}:{port}") + "?" + query
    try:
        store = await KernelStore.open(build_bootstrap(Settings(postgres={"dsn": dsn}), {}).pool)
    except Unavailable:
        return False
    await store.aclose()
    return True


@requirement("postgres.connection")
async def test_the_servers_certificate_and_name_are_verified(
    stack: EmbeddedStack, database: str, authority: trustme.CA, tmp_path: Path
) -> None:
    trusted = f"sslmode=verify-full&sslrootcert={tmp_path / 'ca.pem'}"
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other_ca.pem"))
    async with tls_proxy(stack, authority) as port:
        assert await connects(stack, database, port, trusted)
        assert not await connects(stack, database, port, trusted, host="127.0.0.1")
        assert not await connects(stack, database, port, f"sslmode=verify-full&sslrootcert={tmp_path / 'other_ca.pem'}")


@requirement("postgres.connection")
async def test_the_client_certificate_is_sent(
    stack: EmbeddedStack, database: str, authority: trustme.CA, tmp_path: Path
) -> None:
    trusted = f"sslmode=verify-full&sslrootcert={tmp_path / 'ca.pem'}"
    mine = f"&sslcert={tmp_path / 'client.pem'}&sslkey={tmp_path / 'client_key.pem'}"
    async with tls_proxy(stack, authority, ask_client=True) as port:
        assert await connects(stack, database, port, trusted + mine)
        assert not await connects(stack, database, port, trusted)


@pytest.mark.parametrize(
    ("query", "names"),
    [("sslmode=sure", "sslmode"), ("sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "sslrootcert")],
)
@requirement("postgres.connection")
def test_invalid_tls_parameters_are_reported_before_any_connection(query: str, names: str) -> None:
    sections: dict[str, Any] = {"postgres": {"dsn": f"postgresql://u:p@127.0.0.1/x?{query}"}}
    with pytest.raises(SettingsError, match=rf"postgres\.dsn: {names}"):
        build_bootstrap(Settings(**sections), {})
