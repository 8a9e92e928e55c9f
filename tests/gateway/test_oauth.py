"""Access tokens of an external issuer: what is accepted, its keys, and what clients are told."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import jwt
import pytest
import respx
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from openapi_tool.gateway.issuer_keys import FRESH_S, RETRY_S, IssuerKeys, usable_keys
from openapi_tool.gateway.jwt_errors import ClaimUnusable, JwtRefused
from openapi_tool.gateway.jwts import Jwts
from openapi_tool.jina.document import MAX_BYTES, DocumentTransport, read_document
from openapi_tool.jina.egress import EgressRefused
from openapi_tool.options.oauth import OauthOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from tests.gateway.conftest import Serve
from tests.gateway.test_mcp_http import modern_message
from tests.requirements import requirement
from tests.waiting import WAIT_S

ISSUER, JWKS, RESOURCE = "https://issuer.test", "https://issuer.test/keys", "https://tools.test/mcp"
OPTIONS = OauthOptions(issuer=ISSUER, jwks_url=JWKS, resource=RESOURCE)
RSA_KEY, OTHER_KEY = (rsa.generate_private_key(public_exponent=65_537, key_size=2_048) for _ in range(2))
EC_KEY = ec.generate_private_key(ec.SECP256R1())
SHORT_KEY = rsa.generate_private_key(public_exponent=65_537, key_size=1_024)  # noqa: S505 - to be refused


def jwk(key_id: str, key: Any, **more: str) -> dict[str, Any]:
    algorithm = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    return {"kid": key_id, "use": "sig", **algorithm.to_jwk(key.public_key(), as_dict=True), **more}


DOCUMENT = json.dumps({"keys": [jwk("rsa", RSA_KEY), jwk("ec", EC_KEY)]}).encode()


def signed(key: Any = RSA_KEY, key_id: str | None = "rsa", algorithm: str = "RS256", **changes: Any) -> str:
    claims = {"iss": ISSUER, "aud": RESOURCE, "exp": time.time() + 60, "project": "p", "sub": "a"} | changes
    given = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(given, key, algorithm, headers={"kid": key_id} if key_id else {})


class Issuer:
    """Where the keys are read from; counts the attempts."""

    def __init__(self) -> None:
        self.document: bytes | None = DOCUMENT
        self.reads = 0
        self.now = 1_000.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.keys = IssuerKeys(self.read, 300, lambda: self.now)
        self.jwts = Jwts(OPTIONS, self.keys)

    async def read(self) -> bytes:
        self.reads += 1
        await self.answers.wait()
        if self.document is None:
            raise Unavailable("no answer")
        return self.document


@requirement("gateway.oauth")
async def test_a_jwt_gives_project_and_agent() -> None:
    issuer = Issuer()
    for text in (signed(), signed(EC_KEY, "ec", "ES256"), signed(aud=["x", RESOURCE])):
        caller, _ = await issuer.jwts.caller(text)
        assert (caller.project_id, caller.agent_id) == ("p", "a")
    assert issuer.reads == 1


def with_header(text: str, header: dict[str, Any]) -> str:
    encoded = base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip("=")
    return f"{encoded}.{text.partition('.')[2]}"


WRONG: dict[str, Callable[[], str]] = {
    "another key": lambda: signed(OTHER_KEY),
    "an unknown key": lambda: signed(key_id="new"),
    "no key": lambda: signed(key_id=None),
    "another issuer": lambda: signed(iss="https://other.test"),
    "another audience": lambda: signed(aud="https://other.test"),
    "no audience": lambda: signed(aud=None),
    "no issuer": lambda: signed(iss=None),
    "expired": lambda: signed(exp=time.time() - 60),
    "no expiry": lambda: signed(exp=None),
    "an expiry beyond all numbers": lambda: signed(exp=10**400),
    "not yet valid": lambda: signed(nbf=time.time() + 300),
    "unsigned": lambda: with_header(signed(), {"alg": "none", "kid": "rsa"}),
    "an HMAC with the public key": lambda: with_header(
        jwt.encode({"iss": ISSUER, "aud": RESOURCE, "exp": time.time() + 60}, "x" * 32, "HS256"),
        {"alg": "HS256", "kid": "rsa"},
    ),
    "a stronger algorithm": lambda: signed(algorithm="RS512"),
    "the algorithm of another key": lambda: with_header(signed(), {"alg": "RS256", "kid": "ec"}),
    "a key id of another type": lambda: with_header(signed(), {"alg": "RS256", "kid": ["rsa"]}),
    "huge": lambda: signed(more="x" * 10_000),
    "garbage": lambda: "..",
    "garbage of bytes": lambda: "ö.\ud800.x",
}


@requirement("gateway.oauth")
@pytest.mark.parametrize("wrong", WRONG)
async def test_another_jwt_is_refused(wrong: str) -> None:
    with pytest.raises(JwtRefused):
        await Issuer().jwts.caller(WRONG[wrong]())


@requirement("gateway.oauth")
@pytest.mark.parametrize("claims", [{"project": None}, {"project": "a b"}, {"sub": "a.b"}, {"sub": "x" * 200}])
async def test_a_claim_that_names_nobody_is_named(claims: dict[str, Any]) -> None:
    [name] = claims
    with pytest.raises(ClaimUnusable, match=f"The claim '{name}' must be"):
        await Issuer().jwts.caller(signed(**claims))


@requirement("gateway.oauth")
async def test_keys_are_read_again_for_a_new_one_but_not_for_each_unknown_one() -> None:
    issuer = Issuer()
    await issuer.jwts.caller(signed())
    for number in range(50):
        issuer.now += RETRY_S / 60
        with pytest.raises(JwtRefused):
            await issuer.jwts.caller(signed(key_id=f"unknown{number}"))
    assert issuer.reads == 1
    issuer.document = json.dumps({"keys": [jwk("new", OTHER_KEY)]}).encode()
    issuer.now += RETRY_S
    results = await asyncio.gather(*(issuer.jwts.caller(signed(OTHER_KEY, "new")) for _ in range(20)))
    assert (len(results), issuer.reads) == (20, 2)
    with pytest.raises(JwtRefused):  # the old one was withdrawn
        await issuer.jwts.caller(signed())


@requirement("gateway.oauth")
async def test_without_the_issuer_its_last_known_keys_count_for_a_bounded_time() -> None:
    issuer = Issuer()
    issuer.document = None
    with pytest.raises(Unavailable):
        await issuer.jwts.caller(signed())
    issuer.document, issuer.now = DOCUMENT, issuer.now + RETRY_S
    await issuer.jwts.caller(signed())
    issuer.document, issuer.now = None, issuer.now + FRESH_S + 1
    await issuer.jwts.caller(signed())
    issuer.now += 300
    with pytest.raises(Unavailable):
        await issuer.jwts.caller(signed())


@requirement("gateway.oauth")
async def test_only_an_unknown_key_waits_for_an_issuer_that_does_not_answer() -> None:
    issuer = Issuer()
    await issuer.jwts.caller(signed())
    issuer.now += FRESH_S + 1
    issuer.answers.clear()
    async with asyncio.timeout(WAIT_S):
        await issuer.jwts.caller(signed())
    unknown = asyncio.create_task(issuer.jwts.caller(signed(OTHER_KEY, "new")))
    assert not (await asyncio.wait([unknown], timeout=0.1))[0]
    issuer.document = json.dumps({"keys": [jwk("new", OTHER_KEY)]}).encode()
    issuer.answers.set()
    await unknown
    assert issuer.reads == 2


@requirement("gateway.oauth")
@pytest.mark.parametrize(
    "document", [b"", b"[]", b"{}", b'{"keys": 5}', b'{"keys": "abc"}', b'{"keys": {"a": {}}}', b"<html>"]
)
def test_a_document_without_keys_is_refused(document: bytes) -> None:
    with pytest.raises(Unavailable, match="no JWKS"):
        usable_keys(document)


@requirement("gateway.oauth")
def test_keys_for_something_else_are_passed_over() -> None:
    others = [
        jwk("enc", RSA_KEY, use="enc"),
        jwk("short", SHORT_KEY),
        jwk("512", RSA_KEY, alg="RS512"),
        jwk("curve", ec.generate_private_key(ec.SECP384R1())),
        {"kid": "oct", "kty": "oct", "k": "AAAA"},
        {"kid": "broken", "kty": "RSA", "n": "?", "e": "AQAB"},
        {"kid": "empty", "kty": "EC", "crv": "P-256"},
        {"kty": "RSA"},
        5,
    ]
    assert list(usable_keys(json.dumps({"keys": [*others, jwk("rsa", RSA_KEY)]}).encode())) == ["rsa"]


@requirement("gateway.oauth")
async def test_of_a_thousand_keys_each_counts_and_the_broken_ones_are_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    issuer = Issuer()
    others = [{**jwk("ec", EC_KEY), "kid": f"ec{number}"} for number in range(1_000)]
    broken = [{"kid": f"broken{number}", "kty": "EC", "crv": "P-256"} for number in range(500)]
    issuer.document = json.dumps({"keys": [*broken, *others, jwk("rsa", RSA_KEY)]}).encode()
    assert len(issuer.document) < MAX_BYTES
    await issuer.jwts.caller(signed())
    await issuer.jwts.caller(signed(EC_KEY, "ec999", "ES256"))
    assert caplog.messages == ["500 keys of the issuer cannot be used"]


@requirement("gateway.oauth")
async def test_a_flood_of_unknown_keys_shares_one_request_to_an_issuer_that_hangs() -> None:
    issuer = Issuer()
    await issuer.jwts.caller(signed())
    issuer.now += RETRY_S
    issuer.answers.clear()
    flood = [asyncio.create_task(issuer.jwts.caller(signed(key_id=f"unknown{number}"))) for number in range(200)]
    async with asyncio.timeout(WAIT_S):
        for _ in range(10):
            await issuer.jwts.caller(signed())  # the others go on
    issuer.document = None
    issuer.answers.set()
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(result) for result in results} == {JwtRefused}
    await issuer.jwts.caller(signed())
    assert issuer.reads == 2


@requirement("gateway.oauth", "egress.hosts")
@respx.mock
async def test_only_the_document_is_requested_and_its_size_is_bounded(respx_mock: respx.MockRouter) -> None:
    tls = ssl.create_default_context()
    route = respx_mock.get(JWKS).mock(return_value=httpx.Response(200, content=DOCUMENT))
    assert await read_document(JWKS, tls) == DOCUMENT
    for answer in (
        httpx.Response(302, headers={"Location": "https://evil.test/"}),
        httpx.Response(500),
        httpx.Response(200, content=b"x" * (MAX_BYTES + 1)),
    ):
        route.mock(return_value=answer)
        with pytest.raises(Unavailable):
            await read_document(JWKS, tls)
    route.mock(side_effect=httpx.ConnectError("x"))
    with pytest.raises(Unavailable, match="ConnectError"):
        await read_document(JWKS, tls)
    transport = DocumentTransport(JWKS, httpx.AsyncHTTPTransport())
    for method, url in (("GET", "https://evil.test/keys"), ("POST", JWKS), ("GET", f"{JWKS}/x")):
        with pytest.raises(EgressRefused):
            await transport.handle_async_request(httpx.Request(method, url))


@requirement("gateway.oauth")
@pytest.mark.parametrize(
    "wrong",
    [{"jwks_url": "http://issuer.test/keys"}, {"issuer": "issuer"}, {"resource": "https://u:p@tools.test/"}],
)
def test_only_https_is_accepted(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="https"):
        OauthOptions(**{"issuer": ISSUER, "jwks_url": JWKS, "resource": RESOURCE} | wrong)


@requirement("gateway.oauth", "gateway.access")
async def test_the_gateway_tells_where_tokens_come_from_and_serves_who_has_one(serve: Serve) -> None:
    issuer = Issuer()
    async with serve(jwts=issuer.jwts) as served, served.client() as client:
        refused = await client.post("/mcp", json={})
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        named = "https://tools.test/.well-known/oauth-protected-resource/mcp"
        assert refused.headers["WWW-Authenticate"] == f'Bearer resource_metadata="{named}"'
        for path in ("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource/mcp"):
            metadata = (await client.get(path)).json()
            assert (metadata["resource"], metadata["authorization_servers"]) == (RESOURCE, [ISSUER])
        for wrong in range(25):  # none is counted
            again = await client.get(
                "/v1/tools", headers={"Authorization": f"Bearer {signed(OTHER_KEY, sub=str(wrong))}"}
            )
            assert (again.status_code, 'error="invalid_token"' in again.headers["WWW-Authenticate"]) == (401, True)
        headers = {"Authorization": f"Bearer {signed()}"}
        assert (await client.get("/v1/tools", headers=headers)).status_code == 200
        foreign = await client.get("/v1/tools", headers=headers | {"X-Agent-Id": "other"})
        assert foreign.status_code == 403
        nobody = await client.get("/v1/tools", headers={"Authorization": f"Bearer {signed(project=None)}"})
        assert (nobody.status_code, "The claim 'project'" in nobody.json()["detail"]) == (403, True)
        token = await served.token()
        assert (await client.get("/v1/tools", headers={"Authorization": f"Bearer {token}"})).status_code == 200
        issuer.document, issuer.now = None, issuer.now + FRESH_S + 400
        outage = await client.get("/v1/tools", headers=headers)
        assert (outage.status_code, outage.json()["code"]) == (503, "unavailable")


@requirement("gateway.oauth")
async def test_a_stream_ends_after_its_jwt(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise keep its place among the connections."""
    monkeypatch.setattr("openapi_tool.http.access._TOKEN_CHECK_S", 0.05)
    async with serve(jwts=Issuer().jwts) as served:
        body, headers = modern_message("subscriptions/listen", {"notifications": {"toolsListChanged": True}})

        async def listen(client: httpx.AsyncClient, began: asyncio.Event) -> None:
            async with client.stream("POST", "/mcp", content=body, headers=headers) as answer:
                assert answer.status_code == 200
                began.set()
                await answer.aread()

        async with served.client(signed()) as brief, served.client(signed(exp=time.time() + 3_600)) as unaffected:
            listeners = []
            for client in (brief, unaffected):
                began = asyncio.Event()
                listeners.append(asyncio.create_task(listen(client, began)))
                async with asyncio.timeout(WAIT_S):
                    await began.wait()
            await asyncio.sleep(0.2)
            ending, staying = listeners
            assert not ending.done()
            later = SimpleNamespace(time=lambda: time.time() + 1_800)
            monkeypatch.setattr("openapi_tool.http.senders.time", later)
            with pytest.raises(httpx.TransportError):
                async with asyncio.timeout(WAIT_S):
                    await ending
            assert not staying.done()
            staying.cancel()


@requirement("gateway.oauth")
async def test_without_the_setting_a_jwt_is_a_wrong_token(serve: Serve) -> None:
    async with serve() as served, served.client(signed()) as client:
        await served.token()
        refused = await client.get("/v1/tools")
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await client.get("/.well-known/oauth-protected-resource")).status_code == 401


@requirement("gateway.oauth")
def test_the_settings_name_the_issuer() -> None:
    given = {"issuer": ISSUER, "jwks_url": JWKS, "resource": RESOURCE}
    settings = Settings(gateway={"oauth": given}, postgres={"dsn": "postgresql://unused"})
    assert settings.gateway.oauth is not None
    assert settings.gateway.oauth.agent_claim == "sub"
