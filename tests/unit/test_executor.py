"""Tool calls without the kernel: the runner's interface for any front end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from openapi_tool.concurrency import at_once
from openapi_tool.executor.commit import MAX_BYTES, CallResult, ParkedResults
from openapi_tool.executor.runner import ToolCallRequest
from openapi_tool.protocol.attempts import Attempt
from openapi_tool.protocol.cards import StoredText, ToolCall, artifact_card
from openapi_tool.protocol.errors import ToolMisconfigured, Unavailable
from openapi_tool.protocol.records import Artifact
from openapi_tool.tools.arguments import CallOwner
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.policy import Authorizer, Policy
from openapi_tool.tools.result import Item, ResultFields, ToolOutput, Usage
from openapi_tool.tools.truncation import stored_text
from tests.frames import framed_items
from tests.races.fakes import FakeResultStore, runner
from tests.requirements import requirement
from tests.support import call_card, definition, identity

OWNER = CallOwner("proj", "agent", {})
READ = {"tool": "jina.read"}
PARAMETERS = {"type": "object", "properties": {"url": {"type": "string"}}}


class SpentContext:
    """Context of a call that has cost something already."""

    spent = Usage(tokens=7, requests=1)
    attempts: tuple[Attempt, ...] = ()
    budget = None


class Tools:
    """Backend that returns or raises `end`, and records the calls that reached it."""

    def __init__(self, end: ToolOutput | BaseException) -> None:
        self.end = end
        self.calls: list[dict[str, Any]] = []

    def call_context(self, project_id: str) -> SpentContext:
        del project_id
        return SpentContext()

    async def run(self, definition: Any, arguments: Any, deadline: Any, context: Any) -> ToolOutput:
        del definition, deadline, context
        self.calls.append(dict(arguments.values))
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


class Texts:
    """The stored text of one owner."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        assert (project_id, agent_id) == ("proj", "agent")
        text = "x" * 60_000
        return Artifact(card_id, len(text), "sha", text[start : start + chars])


def request(left_s: float = 60, **arguments: Any) -> ToolCallRequest:
    given = arguments or {"url": "https://site.example/"}
    return ToolCallRequest(OWNER, definition(READ, parameters=PARAMETERS), ToolCall(given), Deadline.after(left_s))


async def run(tools: Tools, call: ToolCallRequest, **options: Any) -> tuple[ResultFields, StoredText | None]:
    one = runner(Texts(), tools, **options)
    return await one.run(call, one.call_context("proj"))


@requirement("runner.alone")
async def test_a_call_needs_no_turn_no_card_and_no_inbox() -> None:
    tools = Tools(ToolOutput((Item("the page"),), {"url": "x"}, Usage(3, 1)))
    fields, stored = await run(tools, request())
    assert (fields.status, framed_items(fields.result), stored) == ("success", ["the page"], None)
    assert tools.calls == [{"url": "https://site.example/"}]


@requirement("runner.alone")
async def test_truncated_result_returns_the_whole_text_and_continues_for_its_owner() -> None:
    tools = Tools(ToolOutput((Item("x" * 60_000),)))
    fields, stored = await run(tools, request())
    assert stored is not None
    assert fields.tool_output is not None
    about = fields.tool_output
    assert about["artifact_ref"] is not None
    assert about["artifact_ref"]["card_id"] == stored.card_id
    again, _ = await run(tools, request(cursor=about["next_cursor"]))
    assert again.status == "success"
    assert len(tools.calls) == 1


@requirement("runner.alone")
async def test_a_hook_of_a_call_without_turn_sees_empty_ids() -> None:
    seen = []

    async def hook(call: Any) -> None:
        seen.append((call.project_id, call.agent_id, call.channel_id, call.agent_turn_id, call.tool_call_id))

    await run(Tools(ToolOutput((Item("x"),))), request(), authorizer=Authorizer(hooks={"seen": hook}))
    assert seen == [("proj", "agent", "", "", "")]


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        ({"url": {"a": 1}}, {}, "bad_request"),
        ({}, {"authorizer": Authorizer(Policy(deny=("*",)))}, "tool_not_available"),
        ({"left_s": 0}, {}, "tool_timeout"),
        ({"left_s": 0, "url": {"a": 1}}, {}, "bad_request"),
        ({"cursor": "unknown"}, {}, "not_found"),
    ],
    ids=["arguments", "policy", "deadline", "arguments before deadline", "cursor"],
)
@requirement("runner.alone")
async def test_refused_call_reaches_no_tool(arguments: dict[str, Any], options: dict[str, Any], code: str) -> None:
    tools = Tools(ToolOutput((Item("x"),)))
    fields, _ = await run(tools, request(**arguments), **options)
    assert (fields.error_code, tools.calls) == (code, [])


@requirement("runner.alone")
async def test_defect_becomes_a_failure_with_its_cost_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields, _ = await run(Tools(ValueError("of the page")), request())
    assert fields.error_code == "internal_error"
    assert "of the page" not in str(fields)
    assert fields.tool_output is not None
    assert fields.tool_output["usage"] == {"tokens": 7, "requests": 1}
    assert [(record.levelno, record.exc_info is None) for record in caplog.records] == [(logging.ERROR, False)]


@requirement("runner.alone")
async def test_outage_and_cancellation_are_raised() -> None:
    with pytest.raises(Unavailable):
        await run(Tools(Unavailable("connection refused")), request())
    with pytest.raises(asyncio.CancelledError):
        await run(Tools(asyncio.CancelledError()), request())


@requirement("runner.alone")
async def test_error_in_a_front_end_becomes_a_result_too(caplog: pytest.LogCaptureFixture) -> None:
    tools = Tools(ToolOutput((Item("x"),)))
    one = runner(None, tools, redact=lambda value: "masked" if isinstance(value, str) else value)
    for _ in range(2):
        fields = one.failure_result(OWNER, "a_tool", ToolMisconfigured("no host"), one.call_context("proj"), 0.0)
        assert fields.error_code == "tool_misconfigured"
    assert [vars(record)["action"] for record in caplog.records] == ["tool.misconfigured"]


# Parked results: who may find them, what is stored, and an unavailable store.


KEY = b"k" * 32
FIELDS = ResultFields("success", "what the model reads: ü", None, {"usage": {"tokens": 7, "requests": 1}})


class UnavailableResultStore(FakeResultStore):
    """Result store whose server does not answer."""

    async def put(self, name: str, record: bytes) -> None:
        del name, record
        raise Unavailable("NATS: connection refused")

    async def get(self, name: str) -> bytes | None:
        del name
        raise Unavailable("NATS: connection refused")

    async def delete(self, name: str) -> None:
        del name
        raise Unavailable("NATS: connection refused")


@requirement("answer.parked")
async def test_parked_result_is_found_complete_and_then_deleted() -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    artifact = artifact_card(
        "tool.openapi", identity(), call_card(), at_once(stored_text([Item("the whole text")], [])), 60
    )
    await parked.park(identity(), CallResult(FIELDS, artifact))
    found = await ParkedResults(store, KEY).find(identity())
    assert found is not None
    assert (found.fields, found.parked) == (FIELDS, True)
    assert found.artifact == artifact
    await parked.delete(identity())
    assert await parked.find(identity()) is None
    assert store.records == {}


@pytest.mark.parametrize(
    "other",
    [{"project_id": "another"}, {"agent_id": "another"}, {"agent_turn_id": "another"}, {"tool_call_id": "another"}],
    ids=lambda other: next(iter(other)),
)
@requirement("answer.parked", "tenant.scoped")
async def test_parked_result_is_not_found_by_another_project_agent_or_turn(other: dict[str, str]) -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    await parked.park(identity(), CallResult(FIELDS))
    assert await parked.find(identity(**other)) is None
    mine, foreign = parked._name(identity()), parked._name(identity(**other))  # noqa: SLF001 - as who writes there could
    store.records[foreign] = store.records[mine]
    assert await parked.find(identity(**other)) is None


@requirement("answer.parked")
async def test_parked_record_with_a_wrong_seal_is_ignored() -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    await parked.park(identity(), CallResult(FIELDS))
    name, record = store.records.popitem()
    assert "what the model reads" not in name
    for forged in (record.replace(b"model", b"forger"), record[:40], b"", bytes(32) + record[32:]):
        store.records[name] = forged
        assert await parked.find(identity()) is None
    store.records[name] = record
    assert await ParkedResults(store, b"another key").find(identity()) is None


@requirement("answer.parked")
async def test_too_large_result_is_not_parked_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeResultStore()
    await ParkedResults(store, KEY).park(identity(), CallResult(ResultFields("success", "x" * MAX_BYTES, None, None)))
    assert store.records == {}
    assert "too large to be parked" in caplog.text


@requirement("answer.parked")
async def test_unavailable_result_store_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    parked = ParkedResults(UnavailableResultStore(), KEY)
    await parked.park(identity(), CallResult(FIELDS))
    assert await parked.find(identity()) is None
    await parked.delete(identity())
    assert "cannot park" in caplog.text
