"""NATS client that no published message and no answer of the server leaves deaf, closed or in plain text.

nats-py ends its read loop on bytes that it cannot decode, closes for good on most errors of the server, and logs in
over whatever transport the server offers. The hooks below replace that; everything else is nats-py's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport, WebSocketTransport
from nats.protocol.parser import PERMISSIONS_ERR

from openapi_tool.bus.wire import Handlers, Headers, Parser, parse_headers
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

INBOX = "_INBOX.openapi_tool"
"""Prefix of the subjects on which we receive replies: our own, so that we need no right to receive other clients'."""

_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_HEADER_LINE_BYTES = len(": \r\n")
_HEADER_FRAME_BYTES = len("NATS/1.0\r\n\r\n")


class Denied(nats.errors.Error):
    """The server does not let us use `subject`, which only an operator can mend."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject} is denied. Only an operator can mend this: `openapi-tool nats permissions` lists what is needed"
        )


class TlsNotOffered(nats.errors.Error):
    """TLS was asked for and the server at `address` does not offer it, or somebody on the way hides the offer."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} does not offer TLS, which the settings ask for (nats.tls, nats.ca_file, or a tls:// or wss:// "
            "server); no login was sent to it"
        )


class BusClient(Client):
    """Client that reconnects whatever ends its connection, and fails a request at once where the server denies it.

    With `tls_required` it logs in over TLS alone, whatever server it is led to; `connect` raises Unavailable where none
    of them offers that.
    """

    def __init__(self, *, tls_required: bool = False) -> None:
        super().__init__()
        self._tls_required = tls_required
        self._without_tls: set[str] = set()
        self._was_connected = False
        handlers = Handlers(
            message=self._process_msg,
            ping=self._process_ping,
            pong=self._process_pong,
            error=self._process_err,
            info=self._process_info,
        )
        self._ps = Parser(handlers)  # type: ignore[assignment] # the same interface
        self._asking: dict[asyncio.Future[str], str] = {}
        self._deaf_since: int | None = None

    async def request(self, subject: str, *request: Any, **options: Any) -> Msg:
        """Send a request and return the reply. Raises nats.errors.Error, Denied where the server refuses."""
        if self._deaf_since == self.stats["reconnects"]:
            raise Denied(f"{INBOX}.>")
        denied: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(super().request(subject, *request, **options))
        self._asking[denied] = subject
        try:
            await asyncio.wait((asking, denied), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Denied(denied.result())
            return asking.result()
        finally:
            del self._asking[denied]
            asking.cancel()

    async def hear_error(self, error: Exception) -> None:
        """Log whatever the client reports; a denial ends the requests that it is about."""
        denied = _DENIAL.search(str(error).lower())
        if denied is None:
            log.warning("NATS: %s", error, extra={"action": "nats.error", "error": type(error).__name__})
            return
        kind, subject = denied.groups()
        subject = self._end(subject) if kind == "publish" else self._end_all(subject)
        log.error("NATS: %s", Denied(subject), extra={"action": "nats.denied", "subject": subject})

    def _end(self, lowered: str) -> str:
        """End requests on a subject, which the client reports in lower case; returns it as it is spelled, if known."""
        asked = {subject for subject in self._asking.values() if subject.lower() == lowered}
        for denied, subject in self._asking.items():
            if subject in asked and not denied.done():
                denied.set_result(subject)
        return next(iter(asked), lowered)

    def _end_all(self, lowered: str) -> str:
        """Without an inbox no request can be answered, for as long as this connection lasts."""
        if not lowered.startswith(INBOX.lower()):
            return lowered
        self._deaf_since = self.stats["reconnects"]
        for denied in self._asking:
            if not denied.done():
                denied.set_result(f"{INBOX}.>")
        return f"{INBOX}.>"

    # Hooks of nats-py.

    async def _read_loop(self) -> None:
        """Read until the connection ends; whatever ended it, reconnect at once instead of when pings fail."""
        await super()._read_loop()
        if self.is_connected:
            self._err = nats.errors.Error("nats: the connection's read loop ended")
            await self._error_cb(self._err)
            await self._process_op_err(self._err)

    async def _process_connect_init(self) -> None:
        """Log in. Whatever fails closes the transport, which nats-py leaves open, and is an error that it retries."""
        try:
            await super()._process_connect_init()
        except BaseException as error:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
            if isinstance(error, TlsNotOffered) and not self._was_connected and self._nobody_offers_tls():
                await self._close(Client.DISCONNECTED, do_cbs=False)
                raise Unavailable(f"NATS: {error}") from error  # which ends `connect`, unlike nats-py's own errors
            if not isinstance(error, Exception) or isinstance(error, nats.errors.Error | OSError | TimeoutError):
                raise
            raise nats.errors.Error(f"nats: the server's greeting cannot be read: {type(error).__name__}") from error
        self._was_connected = True

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        """Use TLS where it is offered, even if the server does not require it. Raises TlsNotOffered."""
        if initial_connection and self._tls_required and not self._is_encrypted():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise self._tls_not_offered()
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        """Return the login. Raises TlsNotOffered where the transport is in plain text, whatever led to that."""
        if self._tls_required and not self._is_encrypted():
            raise self._tls_not_offered()
        return super()._connect_command()

    def _tls_not_offered(self) -> TlsNotOffered:
        address = self._current_server.uri.netloc.rpartition("@")[2] if self._current_server else ""
        self._without_tls.add(address)
        return TlsNotOffered(address)

    def _nobody_offers_tls(self) -> bool:
        return {server.uri.netloc.rpartition("@")[2] for server in self._server_pool} <= self._without_tls

    def _is_encrypted(self) -> bool:
        """Whether the bytes go over TLS, by the transport's own account. nats-py offers no way to ask."""
        match self._transport:
            case TcpTransport(_io_writer=stream) if stream is not None:
                return stream.get_extra_info("ssl_object") is not None
            case WebSocketTransport(_ws=stream) if stream is not None:
                return stream.get_extra_info("ssl_object") is not None
            case _:
                return False

    async def _process_err(self, err_msg: str) -> None:
        """Treat every error but a denial as a lost connection; nats-py would close the client for good."""
        self._err = nats.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        await self._error_cb(self._err)
        if PERMISSIONS_ERR not in err_msg:
            await self._process_op_err(self._err)

    async def _process_headers(self, headers: bytes | None) -> Headers | None:
        """Decode a header block; None where there is none."""
        return parse_headers(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """Make a message; in subject and reply, lone surrogates stand for bytes that are not UTF-8 (PEP 383)."""
        return Msg(
            _client=self,
            _sid=sid,
            subject=subject.decode("utf-8", "surrogateescape"),
            reply=reply.decode("utf-8", "surrogateescape"),
            data=data,
            headers=headers,
        )

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        """Publish. Raises MaxPayloadError for headers, too, which nats-py does not count; the server would hang up."""
        if headers and payload_size + _header_bytes(headers) > self._max_payload:
            raise nats.errors.MaxPayloadError
        await super()._send_publish(subject, reply, payload, payload_size, headers)


def _header_bytes(headers: Mapping[str, str]) -> int:
    lines = (len(name.encode()) + len(value.encode()) + _HEADER_LINE_BYTES for name, value in headers.items())
    return _HEADER_FRAME_BYTES + sum(lines)
