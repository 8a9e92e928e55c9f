"""NATS client that survives any published message and any server error, and sends no login in plain text.

nats-py ends its read loop on bytes that it cannot decode, closes permanently on most server errors, and logs in
over whatever transport the server offers. The hooks below replace these parts of nats-py.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport, WebSocketTransport
from nats.js.errors import APIError, NoStreamResponseError
from nats.protocol.command import hpub_cmd, pub_cmd
from nats.protocol.parser import PERMISSIONS_ERR

from openapi_tool.bus.connection_errors import SERVERS_SETTING, LogBackoff, LoginRefusal, describe_connection_error
from openapi_tool.bus.wire import Handlers, Headers, Parser, header_block, parse_headers
from openapi_tool.concurrency import interruptible
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

INBOX = "_INBOX.openapi_tool"
"""Prefix of reply subjects. With nats-py's `_INBOX` the NATS user would need permission to read everybody's replies."""

_TOKEN_BYTES = 16
_FLUSH_TIMEOUT_S = 10  # nats-py's default
_ACK_DELAY_S = 0.01
"""Seconds for which an acknowledgement waits for a publication to share its socket write: each write costs CPU."""

LISTED_BY = "openapi-tool nats permissions"
"""Command that prints the permissions that `serve` needs."""

_DOMAIN_PREFIXES = ("$JS.API.", "$KV.")  # of subjects that depend on the JetStream domain

_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_MAX_RETRY_WAIT_S = 5.0  # between attempts of the first connection


class Denied(nats.errors.Error):
    """The server denies permission for `subject`; only an operator can grant it."""

    def __init__(self, subject: str, listed_by: str = LISTED_BY) -> None:
        super().__init__(f"permission for {subject} is denied; grant what `{listed_by}` lists to the NATS user")


class TlsNotOffered(nats.errors.Error):
    """TLS is required, but the server at `address` does not offer it, or a man in the middle removed the offer."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} does not offer TLS, which the settings require (nats.tls, nats.ca_file, or a tls:// or wss:// "
            "server); no login was sent to it"
        )


class _Tokens:
    """Random tokens for reply subjects, in place of nats-py's NUID, whose values can be predicted from one of them.

    Every doorbell shows one token in its reply subject. From it a client that may publish to our inboxes could compute
    the inbox of the open pull request, and forge the server's status messages there, such as "consumer deleted".
    """

    def next(self) -> bytearray:
        """Return an unguessable token."""
        return bytearray(secrets.token_urlsafe(_TOKEN_BYTES).encode())


class BusClient(Client):
    """Client that always reconnects, and fails a request at once if the server denies its subject.

    With `tls_required` it logs in over TLS only, also to servers that the cluster announces; `connect` raises
    Unavailable if no server offers TLS. JetStream requests go to `domain`, by default the server's own; replies arrive
    at `inbox`. A `quiet` client logs denials only. Further options: BusOptions.
    """

    def __init__(
        self,
        *,
        tls_required: bool = False,
        domain: str | None = None,
        inbox: str = INBOX,
        listed_by: str = LISTED_BY,
        quiet: bool = False,
        where: str = "",
        setting: str = SERVERS_SETTING,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._nuid = _Tokens()  # type: ignore[assignment] # nats-py calls only `next`
        self._listed_by = listed_by
        self._quiet = quiet
        self.where = where
        self._setting = setting
        self._on_trouble = on_trouble
        self._error_log_backoff = LogBackoff()
        self._denial_log_backoff = LogBackoff()
        self.reported_error: Exception | None = None
        self._login_refusal = LoginRefusal()
        self._domain = domain
        self._inbox = inbox
        self._tls_required = tls_required
        self._addresses_without_tls: set[str] = set()
        self._was_connected = False
        self._configured_wait_s: float | None = None  # set while `_back_off` has replaced it
        handlers = Handlers(
            message=self._process_msg,
            ping=self._process_ping,
            pong=self._process_pong,
            error=self._process_err,
            info=self._process_info,
        )
        self._ps = Parser(handlers)  # type: ignore[assignment] # the same interface
        self._awaiting_reply: dict[asyncio.Future[Msg], str] = {}  # subject of each pending request
        self._inbox_denied_at: int | None = None  # number of the connection (reconnects until then)
        self._ack_timer: asyncio.TimerHandle | None = None

    async def request(self, subject: str, *request: Any, **options: Any) -> Msg:
        """Send a request and return the reply. Raises nats.errors.Error, Denied without permission."""
        subject = routed(subject, self._domain)
        if self._inbox_denied_at == self.stats["reconnects"]:
            raise Denied(f"{self._inbox}.>", self._listed_by)
        return await super().request(subject, *request, **options)

    async def flush(self, timeout: int = _FLUSH_TIMEOUT_S) -> None:  # noqa: ASYNC109 - nats-py's signature
        """Wait for a round trip. Raises nats.errors.Error.

        nats-py waits with asyncio.wait_for, which in Python 3.11 swallows a cancellation that arrives together with the
        reply. A cancelled pull then continued, and the drain waited for it forever.
        """
        await interruptible(super().flush(timeout))

    async def publish(self, subject: str, *message: Any, **options: Any) -> None:
        """Publish; subjects of the JetStream API are mapped to the domain. Raises nats.errors.Error."""
        await super().publish(routed(subject, self._domain), *message, **options)

    async def publish_to_stream(self, subject: str, payload: bytes, headers: dict[str, str], timeout_s: float) -> None:
        """Publish, and wait until a stream has stored the message. Raises nats.errors.Error."""
        try:
            reply = await self.request(subject, payload, timeout=timeout_s, headers=headers)
        except nats.errors.NoRespondersError:
            raise NoStreamResponseError from None
        confirmation = orjson.loads(reply.data)
        if "error" in confirmation:
            raise APIError.from_error(confirmation["error"])
        if "stream" not in confirmation:
            raise NoStreamResponseError

    def acknowledge(self, message: Msg) -> None:
        """Acknowledge a message without an `await`, which a cancellation could interrupt. Raises nats.errors.Error."""
        message._check_reply()  # noqa: SLF001 - as `Msg.ack` does
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if not self.is_connected and self._pending_data_size > self._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        command = pub_cmd(message.reply, "", b"")
        self._pending.append(command)
        self._pending_data_size += len(command)
        self.stats["out_msgs"] += 1
        message._ackd = True  # noqa: SLF001
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY_S, self._send_acks)

    def _send_acks(self) -> None:
        self._ack_timer = None
        if self._pending and self.is_connected and self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())  # wakes nats-py's flusher

    @property
    def unconfigured_domain(self) -> str:
        """JetStream domain of the server if the settings name none; empty if the server has no domain."""
        return "" if self._domain else str(self._server_info.get("domain") or "")

    @property
    def encrypted(self) -> bool:
        """Return whether the connection uses TLS."""
        return self._is_encrypted()

    async def on_error(self, error: Exception) -> None:
        """Log an error of the client; fail the pending requests that a denial concerns (callback of nats-py)."""
        denied = _DENIAL.search(str(error).lower())
        if denied is None:
            self.reported_error = self._login_refusal.reason_of(error)
            cause = describe_connection_error(self.reported_error, self.where, self._setting)
            if self._on_trouble is not None and not self._was_connected:
                self._back_off()
                self._on_trouble(cause)  # the callback logs the cause
            elif not self._quiet and self._error_log_backoff.should_log(cause, time.monotonic()):
                log.warning("%s", cause, extra={"action": "nats.error", "error": type(error).__name__})
            return
        kind, subject = denied.groups()
        subject = self._fail_requests(subject) if kind == "publish" else self._fail_all_requests(subject)
        refusal = Denied(subject, self._listed_by)
        if self._denial_log_backoff.should_log(subject, time.monotonic()):
            log.error("NATS: %s", refusal, extra={"action": "nats.denied", "subject": subject})

    def _back_off(self) -> None:
        """Double the wait before the next attempt to connect for the first time."""
        wait_s = self.options["reconnect_time_wait"]
        self._configured_wait_s = self._configured_wait_s or wait_s
        self.options["reconnect_time_wait"] = min(2 * wait_s, _MAX_RETRY_WAIT_S)

    async def start_over(self) -> None:
        """Reconnect and abort the old socket: a graceful close of a half-open connection would never end."""
        await self.force_reconnect()
        self.abort()

    def abort(self) -> None:
        """Close the socket at once, if there is one."""
        match self._transport:
            case TcpTransport(_io_writer=stream) if stream is not None:
                stream.transport.abort()

    def drop(self, subscription: Subscription) -> None:
        """Remove a subscription, even without a connection.

        nats-py keeps a subscription whose drain failed, and would subscribe again after the next reconnect.
        """
        self._remove_sub(subscription._id)  # noqa: SLF001 - nats-py has no public method for it

    def _fail_requests(self, lowered: str) -> str:
        """Fail pending requests to a subject, given in lower case as nats-py reports it; return it in its real case."""
        denied = {subject for subject in self._awaiting_reply.values() if subject.lower() == lowered}
        for reply, subject in self._awaiting_reply.items():
            if subject in denied and not reply.done():
                reply.set_exception(Denied(subject, self._listed_by))
        return next(iter(denied), lowered)

    def _fail_all_requests(self, lowered: str) -> str:
        """Fail all pending requests if the denied subscription is the inbox: no reply arrives on this connection."""
        if not lowered.startswith(self._inbox.lower()):
            return lowered
        self._inbox_denied_at = self.stats["reconnects"]
        for reply in self._awaiting_reply:
            if not reply.done():
                reply.set_exception(Denied(f"{self._inbox}.>", self._listed_by))
        return f"{self._inbox}.>"

    # Hooks of nats-py.

    async def _request_new_style(
        self,
        subject: str,
        payload: bytes,
        timeout: float = 1,  # noqa: ASYNC109
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and await the reply in the caller's task. Raises nats.errors.Error, Denied.

        nats-py waits with asyncio.wait_for, which may swallow a cancellation (`flush`).
        """
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        token = self._nuid.next().decode()
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._resp_map[token], self._awaiting_reply[reply] = reply, subject
        try:
            inbox = (self._resp_sub_prefix or b"").decode()
            await self.publish(subject, payload, reply=f"{inbox}{token}", headers=headers)
            expiry = asyncio.get_running_loop().call_later(timeout, _expire, reply)
            try:
                return await reply
            finally:
                expiry.cancel()
        finally:
            del self._awaiting_reply[reply]
            self._resp_map.pop(token, None)

    async def _read_loop(self) -> None:
        """Read until the connection ends, then reconnect at once instead of after failed pings."""
        await super()._read_loop()
        if self.is_connected:
            self._err = nats.errors.Error("nats: the connection's read loop ended")
            await self._error_cb(self._err)
            await self._process_op_err(self._err)

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002
        """Close. If not connected, discard pending writes: nats-py would write them to a closed transport."""
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    async def _process_connect_init(self) -> None:
        """Log in. On failure close the transport, which nats-py leaves open, and raise an error that it retries."""
        try:
            await super()._process_connect_init()
        except BaseException as error:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
            if isinstance(error, TlsNotOffered) and not self._was_connected and self._no_server_offers_tls():
                await self._close(Client.DISCONNECTED, do_cbs=False)
                raise Unavailable(f"NATS: {error}") from error  # which ends `connect`, unlike nats-py's own errors
            if not isinstance(error, Exception) or isinstance(error, nats.errors.Error | OSError | TimeoutError):
                raise
            raise nats.errors.Error(f"nats: the server's greeting cannot be read: {type(error).__name__}") from error
        self._was_connected = True
        self._login_refusal.clear()
        if self._configured_wait_s is not None:
            self.options["reconnect_time_wait"] = self._configured_wait_s

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        """If TLS is required here, use it also if the server only offers it. Raises TlsNotOffered."""
        if initial_connection and self._tls_required and not self._is_encrypted():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise self._tls_not_offered()
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        """Return the login. Raises TlsNotOffered if TLS is required and the transport is not encrypted."""
        if self._tls_required and not self._is_encrypted():
            raise self._tls_not_offered()
        return super()._connect_command()

    def _tls_not_offered(self) -> TlsNotOffered:
        address = self._current_server.uri.netloc.rpartition("@")[2] if self._current_server else ""
        self._addresses_without_tls.add(address)
        return TlsNotOffered(address)

    def _no_server_offers_tls(self) -> bool:
        return {server.uri.netloc.rpartition("@")[2] for server in self._server_pool} <= self._addresses_without_tls

    def _is_encrypted(self) -> bool:
        match self._transport:
            case TcpTransport(_io_writer=stream) if stream is not None:
                return stream.get_extra_info("ssl_object") is not None
            case WebSocketTransport(_ws=stream) if stream is not None:
                return stream.get_extra_info("ssl_object") is not None
            case _:
                return False

    async def _process_err(self, err_msg: str) -> None:
        """Treat every error but a denial as a lost connection; nats-py would close the client permanently."""
        self._err = nats.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        await self._error_cb(self._err)
        if PERMISSIONS_ERR not in err_msg:
            await self._process_op_err(self._err)

    async def _process_headers(self, headers: bytes | None) -> Headers | None:
        return parse_headers(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """Create a message; lone surrogates represent bytes that are not UTF-8 (PEP 383)."""
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
        """Publish. Raises MaxPayloadError if headers and payload together are too large.

        nats-py checks the payload only, and the server would then disconnect. Headers are encoded here because
        nats-py's encoder takes a tenth of the CPU that NATS costs per call.
        """
        if not headers:
            await super()._send_publish(subject, reply, payload, payload_size, None)
            return
        block = header_block(headers)
        if payload_size + len(block) > self._max_payload:
            raise nats.errors.MaxPayloadError
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(hpub_cmd(subject, reply, block, payload))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()


def routed(subject: str, domain: str | None) -> str:
    """Return a subject of the JetStream API or of KV with the prefix of its domain, any other subject unchanged.

    A leaf node does not forward `$JS.API` and `$KV` to another domain (NATS ADR-15).
    """
    if domain is None or not subject.startswith(_DOMAIN_PREFIXES):
        return subject
    return f"$JS.{domain}.API.{subject.removeprefix('$JS.API.')}"


def _expire(reply: asyncio.Future[Msg]) -> None:
    if not reply.done():
        reply.set_exception(nats.errors.TimeoutError())
