"""NATS client that survives any published message and any server error, and sends no login in plain text.

`connection.connected` opens it. It is nats-py's client, whose behaviour does not fit a service:

- it ends its read loop on bytes that it cannot decode, and closes permanently on most errors of a server;
- it logs in over whatever transport the server offers, and reads certificates and keys only once;
- it cannot end a subscription whose drain failed.

nats-py has no public way to change that. So this module, and no other, overrides its private methods and uses its
private attributes; `__main__.py` refuses another minor version of nats-py.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import ssl
import time
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import ParseResult

import nats.errors
import orjson
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport, Transport, WebSocketTransport
from nats.js.api import Header
from nats.js.errors import APIError, NoStreamResponseError
from nats.protocol.parser import PERMISSIONS_ERR

from openapi_tool.concurrency.cancellation import cancel_until_ended, interruptible
from openapi_tool.nats_client.connection_errors import (
    ClientCertificateMissing,
    ClosedAfterHandshake,
    Denied,
    cause_of,
    describe_connection_error,
    is_closure,
)
from openapi_tool.nats_client.headers import MessageHeaders, header_bytes, parse_headers
from openapi_tool.nats_client.log_backoff import LogBackoff
from openapi_tool.nats_client.login import login
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_client.parser import Events, Parser
from openapi_tool.nats_client.tls import tls_context
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

# An error of the server, in lower case: `permissions violation for publish to "openapi_tool.stats"`.
_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_LOGIN_FIELDS = ("user", "pass", "auth_token")  # that nats-py takes from a server's URL
RECONNECT_WAIT_S = 0.5  # between two attempts to reconnect
_ALERT_TIMEOUT_S = 1.0  # for the reason why a server closed a TLS connection to arrive
_MAX_RETRY_WAIT_S = 5.0  # between attempts of the first connection


class TlsNotOffered(nats.errors.Error):
    """The server at `address` does not offer the required TLS, or a man in the middle removed the offer."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} does not offer TLS, which the settings require (nats.tls, nats.ca_file, or a tls:// or wss:// "
            "server); no login was sent to it"
        )


class PendingRequest(NamedTuple):
    """Request that awaits its reply; `subject` is the one on which it was published (`routed`)."""

    subject: str
    reply: asyncio.Future[Msg]


class BusClient(Client):
    """Client that always reconnects, and fails a request at once if the server denies its subject.

    TLS, if the settings require it, is also required of servers that the cluster announces later. `connect` raises
    Unavailable if no server offers it. `reported_error` is the last error of the connection since it was made.
    """

    def __init__(self, bus: BusOptions | None = None) -> None:
        super().__init__()
        logging.getLogger("asyncio").addFilter(_is_meaningful)
        self.bus = bus or BusOptions()
        self._error_log_backoff = LogBackoff()
        self._denial_log_backoff = LogBackoff()
        self.reported_error: Exception | None = None
        self._addresses_without_tls: set[str] = set()
        self._was_greeted = False  # whether any server has sent its INFO
        self._login_sent = False  # in this attempt to connect
        self._was_connected = False
        events = Events(
            ping=self._process_ping,
            pong=self._process_pong,
            error=self._process_err,
            info=self._process_info,
            message=self._process_msg,
        )
        self._ps = Parser(events)  # type: ignore[assignment] # the same interface
        # A request's reply subject is `_replies_to`, which all requests share, and a random token.
        self._replies_to = ""
        self._requests: dict[str, PendingRequest] = {}  # by token
        # Number of reconnects when the server denied the subscription to replies: on that connection none can arrive.
        self._inbox_denied_at: int | None = None

    async def connect(self, *servers: Any, **options: Any) -> None:
        """Connect, and subscribe to the replies to requests.

        nats-py would subscribe at the first request, and the task that handles replies would keep the context of the
        call that makes it. Raises nats.errors.Error, OSError, Unavailable if TLS is required and no server offers it.

        If this is cancelled, no attempt goes on: nats-py may swallow a cancellation, and would try to connect for ever.
        """
        attempts = asyncio.ensure_future(super().connect(*servers, **options))
        try:
            await asyncio.wait([attempts])
        finally:
            await cancel_until_ended(attempts)
        attempts.result()
        self._replies_to = f"{self.new_inbox()}."
        await self.subscribe(f"{self._replies_to}*", cb=self._on_reply)

    def new_inbox(self) -> str:
        """Return a random subject for replies.

        Those of nats-py can be predicted by whoever has seen one. A client that may publish to our inboxes could then
        forge the server's messages to an open pull request, such as "consumer deleted".
        """
        return f"{self.bus.nats.inbox_prefix}.{secrets.token_urlsafe(16)}"

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py's signature
        old_style: bool = False,  # noqa: FBT001, FBT002
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Return the reply to a request. Raises nats.errors.Error, Denied without permission.

        Unlike nats-py's own, it does not use `asyncio.wait_for`, which may swallow a cancellation.
        """
        del old_style
        if self._inbox_denied_at == self.stats["reconnects"]:  # no reply would arrive
            raise self._denied(f"{self.bus.nats.inbox_prefix}.>")
        token = secrets.token_urlsafe(16)
        published_subject = routed(subject, self.bus.nats.jetstream_domain)
        request = PendingRequest(published_subject, asyncio.get_running_loop().create_future())
        self._requests[token] = request
        try:
            await self.publish(subject, payload, reply=f"{self._replies_to}{token}", headers=headers)
            async with asyncio.timeout(timeout):
                reply = await request.reply
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            del self._requests[token]
        if reply.headers and reply.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise nats.errors.NoRespondersError
        return reply

    async def _on_reply(self, message: Msg) -> None:
        request = self._requests.get(message.subject.removeprefix(self._replies_to))
        if request is not None and not request.reply.done():
            request.reply.set_result(message)

    async def flush(self, timeout: int = 10) -> None:  # noqa: ASYNC109 - nats-py's signature
        """Wait for a round trip. Raises nats.errors.Error.

        nats-py may swallow a cancellation (see `interruptible`). Then the drain at the end of the process would wait
        forever for a pull that it has cancelled.
        """
        await interruptible(super().flush(timeout))

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, Any] | None = None
    ) -> None:
        """Publish. Raises nats.errors.Error; MaxPayloadError also if headers and payload together are too large.

        nats-py does not count the headers, and the server would close the connection.
        """
        if headers and len(payload) + header_bytes(headers) > self.max_payload:
            raise nats.errors.MaxPayloadError
        await super().publish(routed(subject, self.bus.nats.jetstream_domain), payload, reply, headers or None)

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

    @property
    def unconfigured_domain(self) -> str:
        """JetStream domain of the server if the settings name none; empty if the server has no domain."""
        return "" if self.bus.nats.jetstream_domain else str(self._server_info.get("domain") or "")

    @property
    def encrypted(self) -> bool:
        """Return whether the connection uses TLS."""
        match self._transport:
            case TcpTransport(_io_writer=stream) | WebSocketTransport(_ws=stream) if stream is not None:
                return stream.get_extra_info("ssl_object") is not None
            case _:
                return False

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """Return a context of the present files (called by nats-py for each attempt). Raises FileUnusable."""
        if "tls" in self.options:  # a context that was given to `connect`
            return super().ssl_context
        return tls_context(self.bus.nats, self.bus.section)

    @property
    def outage(self) -> str:
        """Return why the client is not connected, as far as it is known."""
        if self.reported_error is None:
            return ""
        return describe_connection_error(self.reported_error, self.bus, was_greeted=self._was_greeted)

    async def on_error(self, error: Exception) -> None:
        """Log an error or denial (callback of nats-py)."""
        denial = _DENIAL.search(str(error).lower())
        if denial is None:
            self._on_connection_error(error)
        else:
            self._on_denial(kind=denial[1], subject=denial[2])

    def _on_connection_error(self, error: Exception) -> None:
        self.reported_error = cause_of(error, self.reported_error)
        cause = self.outage
        if self.bus.on_trouble is not None and not self._was_connected:
            # Back-off until the first connection: nats-py calls only this method between attempts.
            self.options["reconnect_time_wait"] = min(2 * self.options["reconnect_time_wait"], _MAX_RETRY_WAIT_S)
            self.bus.on_trouble(cause)  # the callback logs the cause
        elif not self.bus.once and self._error_log_backoff.should_log(cause, time.monotonic()):
            log.warning("%s", cause, extra={"action": "nats.error", "error": type(error).__name__})

    def _on_denial(self, kind: str, subject: str) -> None:
        """Fail the requests that a denial concerns, and log it.

        `kind` is `publish` or `subscription`. The server's message has the subject, which nats-py puts in lower case.
        """
        is_raised = False  # whether a request raises it
        if kind == "publish":
            denied = [request for request in self._requests.values() if request.subject.lower() == subject]
            if denied:
                subject = denied[0].subject
                is_raised = True
            self._fail(denied, subject)
        elif subject.startswith(self.bus.nats.inbox_prefix.lower()):  # no reply arrives on this connection
            subject = f"{self.bus.nats.inbox_prefix}.>"
            is_raised = True  # at the latest by the next request
            self._inbox_denied_at = self.stats["reconnects"]
            self._fail(list(self._requests.values()), subject)
        is_printed = self.bus.once and is_raised  # a command prints what its requests raise
        if not is_printed and self._denial_log_backoff.should_log(subject, time.monotonic()):
            log.error("NATS: %s", self._denied(subject), extra={"action": "nats.denied", "subject": subject})

    def _fail(self, requests: Iterable[PendingRequest], denied_subject: str) -> None:
        for request in requests:
            if not request.reply.done():
                request.reply.set_exception(self._denied(denied_subject))

    def _denied(self, subject: str) -> Denied:
        return Denied(subject, self.bus.denial_remedy)

    async def start_over(self) -> None:
        """Reconnect without a graceful close, which would never end on a half-open connection."""
        await self.force_reconnect()
        self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        match self._transport:
            case TcpTransport(_io_writer=stream) if stream is not None:
                stream.transport.abort()

    def drop(self, subscription: Subscription) -> None:
        """End a subscription at once, and cancel its task.

        nats-py keeps a subscription whose drain failed, and subscribes again after a reconnect. A task that only the
        garbage collector ends is logged by asyncio, with the ids of whatever call runs then.
        """
        subscription._stop_processing()  # noqa: SLF001
        self._remove_sub(subscription._id)  # noqa: SLF001

    # Overridden methods of nats-py.

    async def _read_loop(self) -> None:
        """Reconnect as soon as the read loop ends, instead of after failed pings."""
        await super()._read_loop()
        if self.is_connected:
            await self._process_err("the connection's read loop ended")

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002
        """If not connected, discard pending writes: nats-py would write them to a closed transport."""
        if not self.is_connected:
            self._pending = []
            self._pending_data_size = 0
        await super()._close(status, do_cbs)

    async def _process_connect_init(self) -> None:
        """Log in. On failure close the transport, which nats-py leaves open, and raise an error that it retries."""
        self._login_sent = False
        try:
            await super()._process_connect_init()
        except BaseException as error:  # also if the connection attempt is cancelled
            transport = self._close_transport()
            # Before the login, `_server_info` may be anything that a server has sent.
            if transport and is_closure(error) and self._login_sent and self._server_info.get("tls_verify"):
                raise ClosedAfterHandshake from await _alert(transport)
            if isinstance(error, TlsNotOffered) and self._no_server_offers_tls and not self._was_connected:
                await self._close(Client.DISCONNECTED, do_cbs=False)
                raise Unavailable(f"NATS: {error}") from error  # which ends `connect`, unlike nats-py's own errors
            if not isinstance(error, Exception) or isinstance(error, nats.errors.Error | OSError):
                raise
            raise nats.errors.Error(f"nats: the server's greeting cannot be read: {type(error).__name__}") from error
        self._was_connected = True
        self.reported_error = None
        if self.bus.on_trouble is not None:
            self.options["reconnect_time_wait"] = RECONNECT_WAIT_S

    def _close_transport(self) -> Transport | None:
        """Close the transport of a failed attempt, and return it."""
        transport = self._transport
        if transport is not None:
            transport.close()  # type: ignore[no-untyped-call]
        if isinstance(transport, TcpTransport):
            self._transport = None  # after a failed handshake nats-py would wait forever for its end
        return transport

    @property
    def _no_server_offers_tls(self) -> bool:
        """Return whether all servers were tried, and none has offered it."""
        return self._addresses_without_tls.issuperset(map(_address, self.servers))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        """Read a server's INFO. If TLS is required here, use it also if the server only offers it.

        Raises TlsNotOffered, ClientCertificateMissing.
        """
        if initial_connection:
            self._was_greeted = True
        if initial_connection and not self.encrypted:
            if self._requires_tls:
                if not (info.get("tls_required") or info.get("tls_available")):
                    raise self._tls_not_offered()
                info["tls_required"] = True  # by which nats-py decides
            if info.get("tls_required") and info.get("tls_verify") and self._has_no_certificate:
                raise ClientCertificateMissing
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        """Return the message CONNECT with the login of the settings. Raises TlsNotOffered, FileUnusable."""
        if self._requires_tls and not self.encrypted:
            raise self._tls_not_offered()
        command, _, options = super()._connect_command().partition(b" ")
        configured = login(self.bus.nats, self._server_info.get("nonce"), self.bus.section)
        if self.bus.on_login is not None:
            self.bus.on_login(configured.secrets)
        self._login_sent = True
        fields: dict[str, Any] = orjson.loads(options)
        if configured.fields:  # which replace a login in the server's URL
            fields = {name: value for name, value in fields.items() if name not in _LOGIN_FIELDS}
            fields |= configured.fields
        return b"%b %b\r\n" % (command, orjson.dumps(fields))

    @property
    def _requires_tls(self) -> bool:
        return self.bus.nats.requires_tls or "tls" in self.options

    @property
    def _has_no_certificate(self) -> bool:
        return self.bus.nats.cert_file is None and "tls" not in self.options

    def _tls_not_offered(self) -> TlsNotOffered:
        """Return the error for the current server, and remember its address."""
        address = _address(self._current_server.uri) if self._current_server else ""
        self._addresses_without_tls.add(address)
        return TlsNotOffered(address)

    async def _process_err(self, err_msg: str) -> None:
        """Treat every error but a denial as a lost connection; nats-py would close the client permanently."""
        unquoted = err_msg.strip("'")
        error = nats.errors.Error(f"nats: {unquoted}")
        await self.on_error(error)
        if PERMISSIONS_ERR not in err_msg:
            await self._process_op_err(error)

    async def _process_headers(self, headers: bytes | None) -> MessageHeaders | None:
        return parse_headers(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """Represent bytes that are not UTF-8 by lone surrogates (PEP 383)."""
        return Msg(
            _client=self,
            _sid=sid,
            subject=subject.decode("utf-8", "surrogateescape"),
            reply=reply.decode("utf-8", "surrogateescape"),
            data=data,
            headers=headers,
        )


def _is_meaningful(record: logging.LogRecord) -> bool:
    """Return False for a warning that asyncio logs whenever a server closes a connection that nats-py made with TLS."""
    return not str(record.msg).startswith("returning true from eof_received()")


async def _alert(transport: Transport) -> OSError | None:
    """Return the TLS alert with which a server closed a connection, which says why; None if none arrives."""
    try:
        async with asyncio.timeout(_ALERT_TIMEOUT_S):
            await transport.wait_closed()  # type: ignore[no-untyped-call]
    except OSError as alert:
        return alert
    return None


def _address(server: ParseResult) -> str:
    """Return host and port, without a login."""
    return server.netloc.rpartition("@")[2]


def routed(subject: str, domain: str | None) -> str:
    """Return a JetStream subject with the prefix of its domain: a leaf node forwards no others (NATS ADR-15).

    `$JS.API.INFO` becomes `$JS.hub.API.INFO`, and `$KV.bucket.key` becomes `$JS.hub.API.$KV.bucket.key`.
    """
    if domain is None or not subject.startswith(("$JS.API.", "$KV.")):
        return subject
    return f"$JS.{domain}.API.{subject.removeprefix('$JS.API.')}"
