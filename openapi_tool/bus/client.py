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
from nats.protocol.parser import PERMISSIONS_ERR

from openapi_tool.bus.wire import Handlers, Headers, Parser, parse_headers

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


class BusClient(Client):
    """Client that reconnects whatever ends its connection, and fails a request at once where the server denies it."""

    def __init__(self) -> None:
        super().__init__()
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
            if not isinstance(error, Exception) or isinstance(error, nats.errors.Error | OSError | TimeoutError):
                raise
            raise nats.errors.Error(f"nats: the server's greeting cannot be read: {type(error).__name__}") from error

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
