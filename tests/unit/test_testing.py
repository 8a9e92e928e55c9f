"""`openapi_tool.testing`, which tests custom tools: the runner over a respx router, without servers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from openapi_tool.local.recordings import load_recordings
from openapi_tool.settings import SettingsError
from openapi_tool.testing import (
    InProcessExecutor,
    InvalidDefinition,
    ToolResult,
    UnansweredRequest,
    error_names,
    recorded,
    recordings,
)
from tests.requirements import requirement
from tests.support import framed_items

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "config" / "tools"
SEARCH, READ = TOOLS / "jina_search.yaml", TOOLS / "jina_read.yaml"
EXAMPLE = ROOT / "examples" / "own-tools"
PAGE = "https://a.example/"

Run = Callable[..., ToolResult]


def defined(mode: str = "reader", **options: Any) -> dict[str, Any]:
    """Return a custom definition, as in a file."""
    jina = {"mode": mode, **options.pop("jina", {})}
    return {
        "tool_name": "own",
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.own",
        "after_execution": "suspend",
        "options": {"jina": jina, **options},
    }


def page(content: str) -> dict[str, Any]:
    return {"code": 200, "data": {"title": "t", "url": PAGE, "content": content, "usage": {"tokens": 12}}}


@requirement("testing.runner")
def test_a_call_is_answered_from_a_route_and_shows_the_request_that_left(jina: respx.Router, run_tool: Run) -> None:
    route = jina.post("https://r.jina.ai/").respond(json=page("Hello."))
    result = run_tool(defined(args={"fixed": {"with_links": True}}), {"url": PAGE})
    assert (result.status, result.error, result.error_code) == ("success", None, None)
    assert framed_items(result.text) == ["Title: t\nURL: https://a.example/\n\nHello."]
    assert (result.usage["tokens"], result.usage["requests"]) == (12, 1)
    [request] = result.requests
    assert route.calls.last.request is request
    assert request.headers["authorization"] == "Bearer key-of-the-test"
    sent = json.loads(request.content)
    assert sent.pop("timeout") > 0
    assert sent == {"url": PAGE, "withLinksSummary": True, "maxTokens": 20_000}


@requirement("testing.runner")
def test_a_request_without_a_route_is_answered_by_its_recording(run_tool: Run) -> None:
    result = run_tool(SEARCH, {"query": "hello world", "count": 3})
    assert result.status == "success"
    assert "hello" in result.text.lower()


@requirement("testing.runner")
@pytest.mark.parametrize("name", ["o-compound-json", "InsufficientBalanceError"])
def test_recorded_responses_are_found_by_name(name: str, jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").mock(recorded(name))
    result = run_tool(READ, {"url": PAGE})
    if name in load_recordings():
        assert result.status == "success"
    else:
        assert result.error is not None
        assert (result.error_code, result.error["http_status"]) == ("budget_exceeded", 402)
        assert json.loads(result.text) == {"error": result.error}


@requirement("testing.runner")
def test_every_recording_and_error_class_is_an_answer_and_another_name_is_refused() -> None:
    for name in (*recordings(), *error_names()):
        assert recorded(name).status_code >= 200
    with pytest.raises(LookupError, match="no recorded answer is named 's-post-jsom'; did you mean 's-post-json"):
        recorded("s-post-jsom")


@requirement("testing.runner")
def test_a_request_that_nothing_answers_fails_the_test_and_says_what_to_add(run_tool: Run) -> None:
    with pytest.raises(UnansweredRequest, match=r'jina\.post\("https://r\.jina\.ai/"\)') as refused:
        run_tool(READ, {"url": PAGE})
    assert PAGE in str(refused.value)


@requirement("testing.runner")
def test_a_batch_with_an_unanswered_item_fails_the_test(jina: respx.Router, run_tool: Run) -> None:
    jina.post(json__url=PAGE).respond(json=page("x"))
    with pytest.raises(UnansweredRequest, match=r"other\.example"):
        run_tool(TOOLS / "jina_read_many.yaml", {"urls": [PAGE, "https://other.example/"]})


@requirement("testing.runner")
def test_long_result_continues_for_its_agent_only_without_a_request(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("word " * 20_000))
    first = run_tool(READ, {"url": PAGE})
    assert first.cursor is not None
    assert first.cursor in first.text
    second = run_tool(READ, {"cursor": first.cursor})
    assert (second.status, second.requests) == ("success", ())
    assert "word" in second.text
    for other in ({"project": "proj_other"}, {"agent": "agent_other"}):
        assert run_tool(READ, {"cursor": first.cursor}, **other).error_code == "not_found"


@requirement("testing.runner")
def test_the_second_of_two_equal_calls_comes_from_the_cache_of_its_owner(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("x"))
    sent = [len(run_tool(READ, {"url": PAGE}, agent=agent).requests) for agent in ("one", "one", "two")]
    assert sent == [1, 0, 1]


@requirement("testing.runner")
def test_placeholders_take_the_ids_of_the_call(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://s.jina.ai/").mock(recorded("s-post-json"))
    tool = defined("search", args={"fixed": {"query": "{project_id} {agent_id} {agent_turn_id} {channel_id}"}})
    result = run_tool(tool, {}, project="p", agent="a", ids={"channel_id": "private"})
    assert json.loads(result.requests[0].content)["q"] == "p a turn_test private"


@requirement("testing.runner")
def test_waits_between_attempts_are_skipped_and_recorded(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").mock(
        side_effect=[
            recorded("RateLimitTriggeredError"),
            httpx.ConnectError("refused"),
            httpx.Response(200, json=page("x")),
        ]
    )
    result = run_tool(READ, {"url": PAGE})
    assert (result.status, len(result.requests), len(result.waits_s)) == ("success", 3, 2)
    assert result.waits_s[0] >= 17, "what Retry-After of the recorded answer says"


@requirement("testing.runner")
def test_a_mistake_of_the_model_costs_no_request_and_reads_as_the_model_reads_it(run_tool: Run) -> None:
    result = run_tool(SEARCH, {"quary": "x"})
    assert (result.status, result.error_code, result.requests) == ("failed", "bad_request", ())
    assert "quary" in json.loads(result.text)["error"]["message"]


@requirement("testing.runner")
def test_a_definition_that_may_not_be_applied_is_refused_with_its_place(tmp_path: Path, run_tool: Run) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(SEARCH.read_text(encoding="utf-8").replace("mode: search", "mode: serach"), encoding="utf-8")
    with pytest.raises(InvalidDefinition, match=r"own\.yaml:\d+:\d+: error: options\.jina\.mode"):
        run_tool(file, {"query": "x"})
    with pytest.raises(InvalidDefinition, match=r"definition:1:1: error: options\.jina\.mode"):
        run_tool(defined("serach"), {"query": "x"})


@pytest.fixture
def openapi_tool_settings() -> Mapping[str, Any]:
    """Settings of the tests below."""
    return {
        "secrets": {"allowed_env": ["DOCS_KEY"], "env_parameters": ["tenant_token"]},
        "policy": {"projects": {"proj_quiet": {"deny": ["*"]}}},
    }


@pytest.fixture
def openapi_tool_environment() -> Mapping[str, str]:
    return {"DOCS_KEY": "key-of-the-docs"}


@requirement("testing.runner")
def test_missing_definition_is_named_with_the_folder_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_tool: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/tools/nope.yaml; a relative path starts at")):
        run_tool("tools/nope.yaml", {})


@requirement("testing.runner")
def test_settings_and_environment_are_those_of_the_fixtures(
    jina: respx.Router, run_tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__TOOLS__MAX_RESULT_CHARS", "1000")
    jina.post("https://r.jina.ai/").respond(json=page("x" * 2_000))
    result = run_tool(defined(envs={"api_key": "DOCS_KEY"}), {"url": PAGE})
    assert result.requests[0].headers["authorization"] == "Bearer key-of-the-docs"
    assert result.cursor is None, "settings of the shell do not count"
    assert run_tool(READ, {"url": PAGE}, project="proj_quiet").error_code == "tool_not_available"


@requirement("testing.runner")
async def test_in_an_asynchronous_test_the_executor_is_awaited(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("x"))
    executor = InProcessExecutor(jina)
    urls = [f"{PAGE}{number}" for number in range(3)]
    results = await asyncio.gather(*(executor.run_tool(READ, {"url": url}) for url in urls))
    assert [json.loads(request.content)["url"] for result in results for request in result.requests] == urls
    with pytest.raises(RuntimeError, match=r"await InProcessExecutor\(jina\)\.run_tool"):
        run_tool(READ, {"url": PAGE})


@requirement("testing.runner")
def test_settings_that_serve_would_refuse_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"policy\.hooks"):
        InProcessExecutor(respx.Router(), settings={"policy": {"hooks": ["no-such-hook"]}})


@requirement("testing.runner")
def test_request_refused_by_the_egress_checks_is_not_sent(
    jina: respx.Router, run_tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jina.route().respond(json=page("x"))
    monkeypatch.setattr("openapi_tool.jina.client.ALLOWED_HOSTS", frozenset({"elsewhere.example"}))
    assert run_tool(READ, {"url": PAGE}).error_code == "internal_error"
    assert not jina.calls


@requirement("testing.example")
def test_the_example_project_passes_and_notices_a_broken_definition(tmp_path: Path) -> None:
    project = tmp_path / "own-tools"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))

    def tested() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603 - pytest

    passed = tested()
    assert passed.returncode == 0, passed.stdout
    tool = project / "tools" / "product_docs.yaml"
    tool.write_text(tool.read_text(encoding="utf-8").replace("docs.example.org", "blog.example.org"), encoding="utf-8")
    failed = tested()
    assert failed.returncode == 1, failed.stdout
    assert "blog.example.org" in failed.stdout
