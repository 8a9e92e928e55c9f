"""The Jina double: HTTPS on loopback for s.jina.ai and r.jina.ai, answering from recordings.

It checks each request (host, SNI, key, Accept, body). One that no recording, rule or fallback answers gets an error. A
second port without TLS accepts rules and fallbacks, and returns the received requests, with names in place of keys.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aiohttp import web

from openapi_tool.local.double_responses import json_response, padded, partial_response, text_on_site, with_echo
from openapi_tool.local.recordings import Recording, error_bodies, load_recordings, recording_of
from openapi_tool.local.request_content import (
    READER_HOST,
    SEARCH_HOST,
    RequestContent,
    UnknownRequest,
    parse_request,
)

KEYS_VARIABLE = "OPENAPI_TOOL_DOUBLE_KEYS"
"""Variable with the accepted keys by name, as JSON. They are no argument, because process lists show arguments."""

UNKNOWN_STATUS = 422
"""Status for a request that the double refuses: of a 5xx the executor would not show the reason."""

_MAX_LOGGED_REQUESTS = 100_000
_MINUTE_S = 60.0
_MAX_REQUEST_BYTES = 1_000_000


@dataclass(slots=True)
class ResponseRule:
    """Rule for requests whose query or url contains `match`; with `key` only for that key.

    - `answer` names the recording for requests without one of their own.
    - `delay_s` delays the response; with `hang` none comes.
    - Each request takes the next of `statuses`; when they are used up, responses are normal.
    - Above `rate_per_minute` requests in any 60 s the status is 429. `recent` are the times of these requests.
    - Error responses have the header `Retry-After: retry_after`.
    - `body` replaces the text of the response, `body_bytes` sets the length of its content, `echo_headers` adds the
      request's headers.
    - `drop` aborts the connection `before` the response or after `half` of its body; with `stall` the second half never
      comes.
    """

    match: str = ""
    key: str | None = None
    answer: str | None = None
    delay_s: float = 0.0
    statuses: list[int] = field(default_factory=list)
    retry_after: str | None = None
    body: str | None = None
    body_bytes: int = 0
    echo_headers: bool = False
    hang: bool = False
    drop: str | None = None
    rate_per_minute: int | None = None
    recent: deque[float] = field(default_factory=deque)

    def matches(self, subject: str, key: str | None) -> bool:
        """Return whether the rule applies to this query or url."""
        return self.match in subject and self.key in (None, key)

    def next_status(self) -> int:
        """Count a request, and return the status of its response; that of a recording may replace 200."""
        if self._exceeds_rate():
            return web.HTTPTooManyRequests.status_code
        if self.statuses:
            return self.statuses.pop(0)
        return web.HTTPOk.status_code

    def _exceeds_rate(self) -> bool:
        if self.rate_per_minute is None:
            return False
        now = time.monotonic()
        while self.recent and now - self.recent[0] > _MINUTE_S:
            self.recent.popleft()
        self.recent.append(now)
        return len(self.recent) > self.rate_per_minute


class Double:
    """Handlers of both ports. `keys` are the accepted keys by name.

    The admin port sets rules and fallbacks. A *fallback* is a rule of which only `match` and `answer` count: it answers
    requests without a recording.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._key_names = {value: name for name, value in keys.items()}
        self._rules_by_kind: dict[str, list[ResponseRule]] = {"rules": [], "fallbacks": []}
        self._received: deque[dict[str, Any]] = deque(maxlen=_MAX_LOGGED_REQUESTS)
        self._log_changed = asyncio.Condition()
        self._contexts: dict[str, ssl.SSLContext] = {}

    def tls(self, certificate: Path) -> ssl.SSLContext:
        """Return a TLS context that switches to that of the host which the client names (SNI).

        So `_check_connection` can compare this host with the one in the request.
        """
        self._contexts = {host: _server_context(certificate) for host in (SEARCH_HOST, READER_HOST)}
        first = _server_context(certificate)
        first.sni_callback = self._choose_context
        return first

    def _choose_context(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        if name not in self._contexts:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = self._contexts[name]
        return None

    async def upstream(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to Jina."""
        entry = await self._record(request)
        try:
            self._check_connection(request)
            response = await self._answer(request, entry)
        except UnknownRequest as unknown:  # in Jina's format, so that the executor's result shows it
            text = f"the Jina double refuses: {unknown}"
            error = {"code": UNKNOWN_STATUS, "name": "DoubleError", "message": text, "readableMessage": text}
            response = json_response(UNKNOWN_STATUS, json.dumps({"data": None, **error}))
        finally:
            entry["ended_at"] = time.time()  # also if the client has disconnected
        entry["status"] = response.status
        # False if the client disconnected or a rule aborted the connection.
        entry["whole"] = request.transport is not None and not request.transport.is_closing()
        entry["answered_at"] = time.time()
        return response

    async def _record(self, request: web.Request) -> dict[str, Any]:
        """Add a request to the log, with the name of its key in place of the key; return the entry."""
        body = await request.read()
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        entry = {
            "at": time.time(),
            "host": request.host,
            "method": request.method,
            "target": request.raw_path,
            "headers": {name: value for name, value in request.headers.items() if name.lower() != "authorization"},
            "key": self._key_names.get(value) if scheme == "Bearer" else None,
            "body": body.decode("utf-8", "replace"),
        }
        self._received.append(entry)
        async with self._log_changed:
            self._log_changed.notify_all()
        return entry

    def _check_connection(self, request: web.Request) -> None:
        """Raise UnknownRequest for a host that the client has not named to TLS, or for a wrong Accept."""
        connection = request.transport.get_extra_info("ssl_object") if request.transport else None
        if connection is None or connection.context is not self._contexts.get(request.host):
            raise UnknownRequest(f"host {request.host!r} is not what TLS was asked for")
        if request.headers.getall("Accept", []) != ["application/json"]:
            raise UnknownRequest("Accept is not exactly application/json")

    async def _answer(self, request: web.Request, entry: dict[str, Any]) -> web.StreamResponse:
        """Answer as the first rule for the request says; without one with the recording of the request."""
        if entry["key"] is None:
            return json_response(401, json.dumps(error_bodies()[401]))
        body = entry["body"].encode()
        content = parse_request(request.host, request.method, request.raw_path, dict(request.headers), body)
        rule = self._rule_for(content, entry["key"])
        entry["hung"] = rule.hang
        await asyncio.sleep(rule.delay_s)
        if rule.hang:
            await asyncio.Event().wait()
        if rule.drop == "before" and request.transport is not None:
            request.transport.abort()  # what follows reaches nobody
        status = rule.next_status()
        failed = status != web.HTTPOk.status_code
        headers = {}
        if failed:
            text = json.dumps(error_bodies().get(status, {"code": status}))
            if rule.retry_after is not None:
                headers["Retry-After"] = rule.retry_after
        else:
            recording = self._recording(content, rule)
            status = recording.status
            text = padded(text_on_site(recording, content), rule.body_bytes)
        if rule.body is not None:
            text = rule.body
        if rule.echo_headers:
            text = with_echo(text, request)
            headers["X-Echo"] = request.headers.get("Authorization", "")
        if rule.drop in ("half", "stall") and not failed:
            return await partial_response(request, text.encode(), stall=rule.drop == "stall")
        return json_response(status, text, headers)

    def _rule_for(self, content: RequestContent, key: str | None) -> ResponseRule:
        """Return the first rule that applies to the request; without one a rule that changes nothing."""
        for rule in self._rules_by_kind["rules"]:
            if rule.matches(content.subject, key):
                return rule
        return ResponseRule()

    def _recording(self, content: RequestContent, rule: ResponseRule) -> Recording:
        """Return the recording of the same request, else the rule's `answer`, else that of a fallback."""
        recording = recording_of(content)
        if recording is not None:
            return recording
        for each in (rule, *self._rules_by_kind["fallbacks"]):
            if each.answer and each.match in content.subject:
                return load_recordings()[each.answer]
        raise UnknownRequest(f"no recording answers {content.text()}")

    async def set_rules(self, request: web.Request) -> web.Response:
        """Replace all rules or all fallbacks, whose `answer` serves requests that nothing else answers."""
        kind = request.match_info["kind"]
        self._rules_by_kind[kind] = await _rules_in(request)
        return web.json_response({kind: len(self._rules_by_kind[kind])})

    async def requests(self, request: web.Request) -> web.Response:
        """Return received requests, oldest first, once there are `at_least` as many."""
        at_least = int(request.query.get("at_least", 0))
        async with self._log_changed:
            await self._log_changed.wait_for(lambda: len(self._received) >= at_least)
        return web.json_response(list(self._received))

    async def clear_requests(self, _: web.Request) -> web.Response:
        """Clear the log of requests."""
        self._received.clear()
        return web.json_response({})


def _server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def _rules_in(request: web.Request) -> list[ResponseRule]:
    try:
        rules = [ResponseRule(**rule) for rule in await request.json()]
    except (TypeError, ValueError) as error:
        known = ", ".join(field.name for field in fields(ResponseRule) if field.name != "recent")
        text = f"must be a JSON list of objects with these fields: {known} ({error})\n"
        raise web.HTTPBadRequest(text=text) from None
    unknown = [rule.answer for rule in rules if rule.answer is not None and rule.answer not in load_recordings()]
    if unknown:
        raise web.HTTPBadRequest(text=f"no recording is named {unknown[0]!r}; one is 's-post-json'\n")
    return rules


async def serve(double: Double, certificate: Path, port: int, admin_port: int) -> None:
    """Serve until cancelled; print the ports as one JSON line."""
    upstream = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    upstream.router.add_route("*", "/{tail:.*}", double.upstream)
    admin = web.Application()
    admin.router.add_put("/{kind:rules|fallbacks}", double.set_rules)
    admin.router.add_get("/requests", double.requests)
    admin.router.add_delete("/requests", double.clear_requests)
    ports = {
        "port": await _listen(upstream, port, double.tls(certificate)),
        "admin_port": await _listen(admin, admin_port, None),
    }
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _listen(app: web.Application, port: int, tls: ssl.SSLContext | None) -> int:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls, backlog=1024)
    await site.start()
    return int(runner.addresses[0][1])


def main() -> None:
    """Run the double: the arguments are a PEM file with key and chain, and both ports; 0 is a free one."""
    _, certificate, port, admin_port = sys.argv
    double = Double(json.loads(os.environ[KEYS_VARIABLE]))
    asyncio.run(serve(double, Path(certificate), int(port), int(admin_port)))


if __name__ == "__main__":
    main()
