"""Plain HTTP over real sockets: tools, problems, tokens, usage and budgets of a caller."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from openapi_tool.gateway.file_state import FileRows
from openapi_tool.gateway.token_stores import StoredTokens
from openapi_tool.http.problems import STATUS_OF_CODE
from openapi_tool.http.senders import FAILED_TRIES
from openapi_tool.local.stack import UpstreamDouble
from openapi_tool.protocol import errors
from openapi_tool.tools.switches import ALL, Switch, Switches
from tests.gateway.conftest import PAGE, Serve, Served
from tests.gateway.test_mcp import CUSTOM, page_of
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

READ = "/v1/tools/jina_read"


@asynccontextmanager
async def raw(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def sent(served: Served, request: bytes) -> bytes:
    """Return everything that the server answers to a request until it closes the connection."""
    async with asyncio.timeout(WAIT_S), raw(served) as (reader, writer):
        writer.write(request)
        with suppress(ConnectionError):
            await writer.drain()
        return await reader.read()


@requirement("gateway.http")
async def test_a_tool_is_called_with_its_arguments_as_json(serve: Serve, double: UpstreamDouble) -> None:
    async with serve() as served, served.client() as client:
        answer = await client.post(READ, json={"url": PAGE})
        assert answer.status_code == 200
        result = answer.json()
        assert result["content"].startswith("[Untrusted web content between marks")
        assert "A Fixture Article" in result["content"]
        assert result["usage"]["requests"] == 1
        assert result["tool_call_id"].startswith("tc_")
        listed = (await client.get("/v1/tools")).json()["tools"]
        assert [tool["name"] for tool in listed] == ["jina_search", "jina_search_many", "jina_read", "jina_read_many"]
        assert "properties" in listed[0]["parameters"]
    assert len(double.requests()) == 1


@requirement("gateway.http")
@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        (READ, {"link": PAGE}, 400, "bad_request", "Correct these and call again: link"),
        (READ, {"url": "http://127.0.0.1/"}, 422, "target_refused", "127.0.0.1"),
        ("/v1/tools/nothing", {}, 404, "not_found", "There is no tool named 'nothing'"),
        (READ, {"cursor": "AAAA"}, 404, "not_found", "cursor: is unknown here"),
        (READ, [], 400, "bad_request", "must be a JSON object"),
        ("/v1/nothing", {}, 404, "not_found", "/openapi.json"),
        ("/mcp/", {}, 404, "not_found", "/openapi.json"),
        ("/v1/tools", {}, 405, "bad_request", "Method Not Allowed"),
    ],
)
async def test_a_failure_is_a_problem_with_the_code_of_the_engine(
    serve: Serve, path: str, body: Any, status: int, code: str, words: str
) -> None:
    async with serve() as served, served.client() as client:
        answer = await client.post(path, json=body)
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in problem["detail"]
    assert problem["type"] == f"urn:openapi-tool:problem:{code}"


@requirement("gateway.http")
async def test_a_problem_has_a_text_as_detail_and_numbers_beside_it(serve: Serve, double: UpstreamDouble) -> None:
    async with serve(budgets={"project_day_requests": 1}, cache={"ttl_s": 0}) as served, served.client() as client:
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["Problem"]
        await client.post(READ, json={"url": PAGE})
        spent = await client.post(READ, json={"url": PAGE})
    problem = spent.json()
    assert (spent.status_code, problem["code"], problem["title"]) == (402, "budget_exceeded", "Budget exceeded")
    assert "budget of this project for today" in problem["detail"]
    assert problem["details"]["limit"] == problem["details"]["used"] == 1
    jsonschema_rs.validator_for(schema).validate(problem)

    double.rules({"match": "article", "statuses": [429] * 9, "retry_after": "60"})
    async with serve() as served, served.client() as client:
        limited = await client.post(READ, json={"url": PAGE})
    problem = limited.json()
    assert (limited.status_code, problem["code"]) == (429, "rate_limited")
    assert "call again" in problem["detail"]
    assert limited.headers["retry-after"] == str(problem["details"]["retry_after_s"])
    jsonschema_rs.validator_for(schema).validate(problem)


@requirement("gateway.http", "budgets.calls")
async def test_a_result_without_a_request_has_the_budget_that_is_known(
    serve: Serve, double: UpstreamDouble, tmp_path: Path
) -> None:
    double.rules({"match": "article", "body": page_of("A sentence about lighthouses. " * 10_000)})
    budgets = {"project_day_requests": 2, "session_tokens": 1_000_000}
    state = tmp_path / "state.sqlite3"
    async with serve(state, budgets=budgets) as served, served.client() as client:
        first = (await client.post(READ, json={"url": PAGE})).json()
        cursor = first["next_cursor"]
        assert first["budget"]["project_day"]["requests_left"] == 1
        second = (await client.post(READ, json={"cursor": cursor})).json()
        assert second["budget"] == first["budget"]
        found = (await client.post(READ, json={"cursor": cursor, "find": "lighthouses"})).json()
        assert found["budget"] == first["budget"]
        last = (await client.post(READ, json={"url": f"{PAGE}?other"})).json()
        assert "for today is used up: 0 of 2 requests are left" in last["content"]
        third = (await client.post(READ, json={"cursor": cursor})).json()
        assert third["budget"]["project_day"]["requests_left"] == 0
    async with serve(state, budgets=budgets) as served, served.client() as client:
        assert "budget" not in (await client.post(READ, json={"cursor": cursor})).json()  # it has read no account
        assert len(double.requests()) == 2
    async with serve(state) as served, served.client() as client:
        assert "budget" not in (await client.post(READ, json={"cursor": cursor})).json()


@requirement("gateway.http")
def test_each_code_of_an_error_has_a_status() -> None:
    codes = {
        each.code for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ToolError)
    }
    assert codes == set(STATUS_OF_CODE)


@requirement("gateway.http")
@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"url": 1e999}', "application/json", 400),
        ('{"url": "x"}'.encode("utf-16"), "application/json", 400),
        ('{"url": "x"}'.encode("utf-16-le"), "application/json; charset=utf-16", 400),
        (b"[" * 1_000_000, "application/json", 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "application/json", 400),
        (b'{"url": "' + b"\\u0000" * 1_000 + b'"}', "application/json", 400),
        (b'{"url": [' + b"0," * 500_000 + b"0]}", "application/json", 400),
        (b'{"url": ' + b"9" * 900_000 + b"}", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"a=1", "application/x-www-form-urlencoded", 415),
    ],
)
async def test_a_body_that_is_no_usable_object_is_refused(
    serve: Serve, double: UpstreamDouble, body: bytes, content_type: str, status: int
) -> None:
    async with serve() as served, served.client() as client:
        answer = await client.post(READ, content=body, headers={"Content-Type": content_type})
        assert (answer.status_code, answer.json()["code"]) == (status, "bad_request")
        assert (await client.get("/v1/tools")).status_code == 200
    assert double.requests() == []


@requirement("gateway.http", "arguments.checked")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1e999", "timeout: contains a number that is not finite"),
        ("[-1e999]", "timeout: contains a number that is not finite"),
        ("9" * 400, "timeout: contains a number beyond 64 bits"),
        ('"\\ud800"', "timeout: contains half of a surrogate pair"),
        ('{"\\ud800": 1}', "timeout: contains half of a surrogate pair"),
    ],
)
async def test_a_value_that_json_cannot_hold_exactly_is_named(serve: Serve, value: str, words: str) -> None:
    body = f'{{"url": "{PAGE}", "timeout": {value}}}'.encode()
    async with serve() as served, served.client() as client:
        answer = await client.post(READ, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert words in answer.json()["detail"]
    assert "required" not in answer.json()["detail"]


@requirement("gateway.http")
@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding", "Idempotency-Key"])
async def test_a_header_that_is_given_twice_is_refused(serve: Serve, name: str) -> None:
    values = {"Content-Type": "application/json", "Content-Encoding": "identity", "Idempotency-Key": "a"}
    headers = [(key, value) for key, value in values.items() for _ in range(2 if key == name else 1)]
    async with serve() as served, served.client() as client:
        answer = await client.post(READ, json={"url": PAGE}, headers=headers)
    assert answer.status_code == 400
    assert name in answer.json()["detail"]


@requirement("gateway.http")
async def test_the_document_describes_each_tool_as_one_operation(serve: Serve) -> None:
    validator = pytest.importorskip("openapi_spec_validator", reason="openapi-spec-validator is not installed")
    async with serve() as served, served.client() as client:
        document = (await client.get("/openapi.json")).json()
    validator.validate(document)
    assert document["servers"] == [{"url": served.url}]
    assert document["security"] == [{}]
    assert "unavailable" in document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]


@requirement("gateway.tokens")
async def test_the_document_asks_for_a_token_where_one_is_required(serve: Serve) -> None:
    async with serve() as served:
        token = await served.token("local", "local")
        async with served.client(token) as client:
            assert (await client.get("/openapi.json")).json()["security"] == [{"token": []}]


@requirement("gateway.http")
async def test_the_document_names_operations_and_their_schemas(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        document = (await client.get("/openapi.json")).json()
        tools = {tool["name"]: tool for tool in (await client.get("/v1/tools")).json()["tools"]}
    assert document["openapi"] == "3.1.0"
    operations = {path: item["post"] for path, item in document["paths"].items()}
    assert {operation["operationId"]: path for path, operation in operations.items()} == {
        name: f"/v1/tools/{name}" for name in tools
    }
    for operation in operations.values():
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        shown = tools[operation["operationId"]]["parameters"]
        assert list(schema["properties"]) == list(shown["properties"])
        assert schema.get("required") == shown.get("required")
        assert {"400", "401", "402", "404", "413", "422", "429", "502", "503", "504"} < operation["responses"].keys()


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("jina_read", {"url": "https://example.com"}),
    ("jina_read", {"url": "http://sub.example-site.co.uk:8080/a_(b)?q=a%20b&c=[1]#part", "timeout": 20}),
    ("jina_read", {"url": "https://bücher.example/straße"}),
    ("jina_read", {"url": "https://例え.example/"}),
    ("jina_read", {"url": "https://8.8.8.8/"}),
    ("jina_read_many", {"urls": ["https://example.com/a", "https://example.com/b"]}),
    ("jina_search", {"query": "x", "site": ["example.com"], "after": "2024-02-29", "language": "zh-cn"}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("jina_read", {}),
    ("jina_read", {"url": "ftp://example.com"}),
    ("jina_read", {"url": "https://a b.example/"}),
    ("jina_read", {"url": "https://user@example.com/"}),
    ("jina_read", {"url": "https://1.2.3.256/"}),
    ("jina_read", {"url": "https://example.com", "cursor": "c"}),
    ("jina_read", {"url": "https://example.com", "find": "x"}),
    ("jina_read", {"url": "https://example.com", "question": "what"}),
    ("jina_read", {"cursor": "c", "find": "x", "question": "what"}),
    ("jina_search", {"query": "x", "after": "2023-02-29"}),
    ("jina_search", {"query": "x", "site": ["a b"]}),
    ("jina_search", {"query": "x", "exclude_sites": ["a,b"]}),
    ("jina_search", {"query": "x", "title_words": [" "]}),
    ("jina_search", {"query": "x", "language": "   "}),
]


@requirement("gateway.http")
async def test_the_document_says_what_the_checks_refuse(serve: Serve, double: UpstreamDouble) -> None:
    async with serve() as served, served.client() as client:
        document = (await client.get("/openapi.json")).json()
        for name, arguments in [*ACCEPTED, *REFUSED]:
            operation = document["paths"][f"/v1/tools/{name}"]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            valid = jsonschema_rs.Draft202012Validator(schema, validate_formats=True).is_valid(arguments)
            answer = await client.post(f"/v1/tools/{name}", json=arguments)
            assert (valid, answer.status_code) == ((True, 200) if (name, arguments) in ACCEPTED else (False, 400)), (
                arguments,
                answer.text,
            )


@requirement("gateway.http")
async def test_the_document_leaves_rules_of_a_definition_as_they_are(serve: Serve, tmp_path: Path) -> None:
    rule = "{type: string, pattern: '^https://docs[.]', default: 'https://docs.example.com/'}"
    definition = (
        CUSTOM.replace("{type: string}", "{type: string, enum: [a, b]}")
        + "---"
        + CUSTOM.replace("docs.search", "docs.read")
        .replace("jina.search", "jina.read")
        .replace("mode: search", "mode: reader")
        .replace("[query]", "[url]")
        .replace("query: {type: string}", f"url: {rule}")
        .replace("  args:\n    defaults: {count: 3}\n    fixed: {site: example.org}\n", "")
    )
    (tmp_path / "docs.yaml").write_text(definition)
    async with serve(tools=tmp_path) as served, served.client() as client:
        document = (await client.get("/openapi.json")).json()
        shown = {tool["name"]: tool["parameters"] for tool in (await client.get("/v1/tools")).json()["tools"]}
    assert len(shown) == 2
    for name, parameters in shown.items():
        operation = document["paths"][f"/v1/tools/{name}"]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == parameters


@requirement("gateway.tokens")
async def test_with_a_token_nobody_is_served_without_one(serve: Serve) -> None:
    async with serve() as served:
        token = await served.token("p", "a", "jina_read")
        for wrong in (None, "x", token[:-1], token.upper(), "oat_000000000000_0"):
            async with served.client(wrong) as client:
                refused = await client.get("/v1/tools")
                assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
                assert refused.headers["www-authenticate"] == "Bearer"
                assert (await client.post("/mcp", json={})).status_code == 401
        async with served.client(token) as client:
            tools = (await client.get("/v1/tools")).json()["tools"]
            assert [tool["name"] for tool in tools] == ["jina_read"]
            assert list((await client.get("/openapi.json")).json()["paths"]) == ["/v1/tools/jina_read"]
            hidden = await client.post("/v1/tools/jina_search", json={"query": "x"})
            assert (hidden.status_code, hidden.json()["code"]) == (404, "not_found")


@requirement("gateway.tokens")
async def test_a_token_names_agents_only_if_it_may(serve: Serve) -> None:
    async with serve() as served:
        fixed, free = await served.token("p", "a"), await served.token("p", "a", any_agent=True)
        async with served.client() as client:

            async def usage(token: str, **headers: str) -> httpx.Response:
                given = {"Authorization": f"Bearer {token}", **headers}
                return await client.get("/v1/usage", headers=given)

            assert (await usage(fixed)).json()["agent"] == "a"
            assert (await usage(fixed, **{"X-Agent-Id": "a"})).json()["agent"] == "a"
            assert (await usage(fixed, **{"X-Agent-Id": "b"})).json()["code"] == "forbidden"
            assert (await usage(free, **{"X-Agent-Id": "b"})).json()["agent"] == "b"
            for wrong in ("", "b c", "b.c", "*", "x" * 129):
                assert (await usage(free, **{"X-Agent-Id": wrong})).status_code == 400


@requirement("gateway.tokens")
async def test_failed_tries_are_limited_and_a_right_token_is_still_taken(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        token = await served.token()
        async with served.client() as client:
            statuses = []
            for number in range(FAILED_TRIES + 5):
                guess = {"Authorization": f"Bearer oat_{number:012x}_{'f' * 64}"}
                statuses.append((await client.get("/v1/tools", headers=guess)).status_code)
            assert statuses == [401] * FAILED_TRIES + [429] * 5
        async with served.client(token) as client:
            assert (await client.get("/v1/tools")).status_code == 200
            await client.post(READ, json={"url": PAGE})
    secret = token.rpartition("_")[2]
    assert secret not in caplog.text
    assert "f" * 64 not in caplog.text
    assert caplog.text.count("refused a wrong token") == FAILED_TRIES


@requirement("gateway.tokens")
async def test_the_log_names_a_revoked_token_but_only_if_its_secret_is_right(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        token = await served.token("p", "a")
        token_id = token.split("_")[1]
        await StoredTokens(served.state.tokens).revoke(token_id)
        await served.tokens.load()
        for tried in (token, f"oat_{token_id}_{'f' * 64}"):
            async with served.client(tried) as client:
                refused = await client.get("/v1/tools")
                assert refused.status_code == 401
                assert "revoked" not in refused.json()["detail"].replace("neither expired nor revoked", "")
    refusals = [line for line in caplog.records if vars(line).get("action") == "token.refused"]
    assert [line.getMessage() for line in refusals] == [
        f"refused the token {token_id}, which is revoked",
        "refused a wrong token",
    ]
    assert vars(refusals[0])["project_id"] == "p"
    assert not hasattr(refusals[1], "project_id")


@requirement("gateway.http")
async def test_a_caller_sees_its_own_usage_and_budget(serve: Serve) -> None:
    budgets = {"project_day_tokens": 1_000_000, "agent_day_tokens": 200_000}
    async with serve(budgets=budgets) as served:
        mine, other = await served.token("p", "a"), await served.token("p", "b")
        async with served.client(mine) as client, served.client(other) as another:
            result = (await client.post(READ, json={"url": PAGE})).json()
            schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["Result"]
            assert result.keys() <= schema["properties"].keys()
            assert result["budget"]["agent_day"]["tokens_left"] == 200_000 - result["usage"]["tokens"]
            used = result["usage"]["tokens"]
            usage = (await client.get("/v1/usage?days=7")).json()
            [row] = usage["by_tool"]
            assert (row["tool"], row["calls"], row["tokens"]) == ("jina_read", 1, used)
            assert (await another.get("/v1/usage")).json()["by_tool"] == []
            left = {each["budget"]: each for each in (await client.get("/v1/budget")).json()["budgets"]}
            assert left["agent_day"]["tokens_left"] == 200_000 - used
            assert left["project_day"]["tokens_left"] == 1_000_000 - used
            left = {each["budget"]: each for each in (await another.get("/v1/budget")).json()["budgets"]}
            assert left["agent_day"]["tokens_left"] == 200_000
            assert left["project_day"]["tokens_left"] == 1_000_000 - used
            for days in ("0", "91", "x", "-1", "٣"):
                assert (await client.get("/v1/usage", params={"days": days})).status_code == 400


@requirement("gateway.http")
async def test_a_request_that_is_repeated_with_its_key_is_charged_once(serve: Serve, double: UpstreamDouble) -> None:
    async with serve(cache={"ttl_s": 0}) as served:
        mine, other = await served.token("p", "a"), await served.token("p", "b")
        key = {"Idempotency-Key": "4b0f"}
        async with served.client(mine) as client, served.client(other) as another:
            first = await client.post(READ, json={"url": PAGE}, headers=key)
            again = await client.post(READ, json={"url": PAGE}, headers=key)
            assert again.content == first.content
            assert again.headers["idempotent-replayed"] == "true"
            assert len(double.requests()) == 1
            changed = await client.post(READ, json={"url": PAGE, "format": "text"}, headers=key)
            assert (changed.status_code, changed.json()["code"]) == (422, "bad_request")
            assert (await another.post(READ, json={"url": PAGE}, headers=key)).headers.get(
                "idempotent-replayed"
            ) is None
            assert len(double.requests()) == 2
            for wrong in ("", "x" * 256):
                refused = await client.post(READ, json={"url": PAGE}, headers={"Idempotency-Key": wrong})
                assert refused.status_code == 400


@requirement("gateway.http")
async def test_requests_with_the_same_key_at_the_same_time_run_once(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "delay_s": 1.0})
    async with serve() as served, served.client(**{"Idempotency-Key": "k"}) as client:
        answers = await asyncio.gather(*(client.post(READ, json={"url": PAGE}) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert len(double.requests()) == 1


@requirement("gateway.access")
async def test_costly_requests_for_usage_of_one_project_leave_the_state_to_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    by_tool = FileRows.by_tool

    async def slow(self: FileRows, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        began.append(project)
        await asyncio.sleep(0.1)
        return await by_tool(self, project, agent, since)

    monkeypatch.setattr(FileRows, "by_tool", slow)
    async with serve() as served:
        flood, other = await served.token("p", "a"), await served.token("q", "b")
        async with served.client(flood) as client, served.client(other) as quiet:
            asking = [asyncio.create_task(client.get("/v1/usage")) for _ in range(5)]
            await until(lambda: began == ["p"])
            assert (await quiet.get("/v1/usage")).status_code == 200
            await asyncio.sleep(0.4)
            assert began == ["p", "q"], "the next one waits for nine times as long as the first took"
            assert (await asyncio.wait(asking, timeout=10, return_when=asyncio.FIRST_COMPLETED))[0]
            for each in asking:
                each.cancel()


@requirement("gateway.tokens")
async def test_a_stored_result_is_only_for_a_caller_who_may_call_its_tool(serve: Serve, double: UpstreamDouble) -> None:
    async with serve() as served:
        key = {"Idempotency-Key": "k"}
        async with served.client(await served.token("p", "a"), **key) as client:
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
        async with served.client(await served.token("p", "a", "jina_search"), **key) as client:
            for page in (PAGE, f"{PAGE}?other"):
                assert (await client.post(READ, json={"url": page})).status_code == 404
        async with served.client(await served.token("p", "a"), **key) as client:
            assert (await client.post(READ, json={"url": PAGE})).headers["Idempotent-Replayed"] == "true"
            served.gateway.use_switches(Switches([Switch(ALL, "jina_read", "Broken.", "me", "2026-01-01T00:00:00Z")]))
            assert (await client.post(READ, json={"url": PAGE})).status_code == 403
    assert len(double.requests()) == 1


@requirement("switches", "gateway.http")
@pytest.mark.parametrize(
    ("body", "code"),
    [({"query": "x"}, "tool_misconfigured"), ({}, "bad_request"), ({"query": [0] * 2_000}, "bad_request")],
    ids=["no key", "invalid arguments", "too many arguments"],
)
async def test_a_disabled_tool_is_refused_for_that_before_its_arguments_and_key_are_looked_at(
    serve: Serve, tmp_path: Path, body: Any, code: str
) -> None:
    (tmp_path / "docs.yaml").write_text(CUSTOM.replace("auth_env: JINA_API_KEY", "auth_env: UNSET"))
    path = "/v1/tools/docs__search"
    async with serve(tools=tmp_path, secrets={"allowed_env": ["UNSET"]}) as served, served.client() as client:
        assert (await client.post(path, json=body)).json()["code"] == code
        served.gateway.use_switches(Switches([Switch(ALL, ALL, "Broken.", "me", "2026-01-01T00:00:00Z")]))
        refused = await client.post(path, json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "tool_not_available")
    assert "An operator disabled this tool: Broken." in refused.json()["detail"]


@requirement("gateway.tokens")
async def test_running_requests_of_a_revoked_token_end(
    serve: Serve, double: UpstreamDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams would otherwise keep their places among the connections."""
    monkeypatch.setattr("openapi_tool.http.access._TOKEN_CHECK_S", 0.05)
    double.rules({"match": "article", "hang": True})
    async with serve() as served:
        token, other = await served.token("p", "a"), await served.token("p", "b")
        async with served.client(token) as client, served.client(other) as unaffected:
            running = asyncio.create_task(client.post(READ, json={"url": PAGE}))
            staying = asyncio.create_task(unaffected.post(READ, json={"url": f"{PAGE}?b"}))
            await until(lambda: len(double.requests()) == 2)
            await StoredTokens(served.state.tokens).revoke(token.split("_")[1])
            await served.tokens.load()
            with pytest.raises(httpx.TransportError):
                await running
            await until(lambda: served.gateway.running == 1)
            staying.cancel()


@requirement("mcp.cancellation", "gateway.http")
async def test_a_client_that_is_gone_stops_its_upstream_request_and_its_cost_is_settled(
    serve: Serve, double: UpstreamDouble
) -> None:
    double.rules({"match": "article", "hang": True})
    async with serve(budgets={"project_day_tokens": 1_000_000}) as served:
        body = json.dumps({"url": PAGE}).encode()
        async with raw(served) as (_, writer):
            head = f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: len(double.requests()) == 1)
        began = time.monotonic()
        await until(lambda: not served.gateway.running)
        assert time.monotonic() - began < 30, "a call may take 60 s"
        async with served.client() as client:
            [row] = (await client.get("/v1/usage")).json()["by_tool"]
            assert (row["calls"], row["errors"], row["requests"]) == (1, 1, 1)
            [budget] = (await client.get("/v1/budget")).json()["budgets"]
            assert budget["tokens_left"] < 1_000_000
