"""Violations of the protocol: result card, inbox row, doorbell and settlement of each."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import replace
from typing import Any

import pytest

from openapi_tool.kernel.pipeline import pipeline
from openapi_tool.local.caller import STREAM
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.protocol.command import BODY_SIZE_HEADER
from openapi_tool.telemetry.logs import JsonFormatter
from openapi_tool.telemetry.redact import Redactor
from tests.conftest import AGENT, PROJECT, reader_tool, search_tool
from tests.requirements import requirement
from tests.waiting import until
from tests.wire.conftest import DURABLE, RECORDED_ARGUMENTS, Outcome, World

BODY_LIMIT = 65_536
CONTROL_FIELDS = (  # protocol section 2, name by name
    *("project_id", "channel_id", "channel", "agent_id", "agent_turn_id", "turn_epoch", "step_id", "tool_call_id"),
    *("trace_id", "traceparent", "tracestate", "parent_agent_id", "parent_agent_turn_id", "parent_step_id"),
    *("parent_traceparent", "recursion_depth"),
)


def assert_answered(outcome: Outcome, code: str, *names: str, name: str = "jina_search") -> None:
    """Assert a failed result with this code, its report, one doorbell, one acknowledgement and no upstream request."""
    content, row = outcome.content, outcome.rows.inbox_row
    assert (content["status"], content["error"]["code"]) == ("failed", code)
    assert all(word in content["error"]["message"] for word in names), content["error"]["message"]
    assert content["result"]["error_message"] == content["error"]["message"]
    assert outcome.rows.card["metadata"]["function_name"] == name
    assert row["payload"] == {
        "status": "failed",
        "after_execution": "suspend",
        "tool_result_card_id": outcome.rows.card["card_id"],
    }
    assert row["status"] == "pending"
    assert outcome.rows.edge["primitive"] == "report"
    assert [bell.subject for bell in outcome.doorbells] == [f"cg.v1r4.{PROJECT}.public.cmd.agent.worker_generic.wakeup"]
    assert_settled_once(outcome)
    assert (outcome.term_acks, outcome.dead_letters) == (0, [])
    assert outcome.upstream_requests == []


def assert_dead_lettered(outcome: Outcome, reason: str, *, terminated: bool) -> None:
    """Assert one dead letter after one delivery, without card, row, doorbell or upstream request."""
    assert [letter["reason"] for letter in outcome.dead_letters] == [reason]
    assert (outcome.rows.card, outcome.rows.inbox_row, outcome.rows.edge) == ({}, {}, {})
    assert outcome.doorbells == []
    assert_settled_once(outcome)
    assert outcome.term_acks == int(terminated)
    assert outcome.upstream_requests == []


def assert_settled_once(outcome: Outcome) -> None:
    assert (outcome.deliveries, outcome.handed_back) == (1, 0)


async def _send_without(world: World, field: str) -> Outcome:
    call = await world.place()
    body = {name: value for name, value in call.body.items() if name != field}
    return await world.send(call, data=json.dumps(body).encode())


# The body (protocol section 2).


@pytest.mark.parametrize("data", [b"{broken", b"", b"\xff\xfe", b'{"tool_name": NaN}'])
@requirement("command.body")
async def test_a_body_that_is_not_json_is_refused(world: World, data: bytes) -> None:
    assert_answered(await world.send(await world.place(), data=data), "bad_request", "not JSON", name="search")


@pytest.mark.parametrize("data", [b"[1, 2]", b"null", b'"text"', b"7"])
@requirement("command.body")
async def test_a_body_that_is_not_an_object_is_refused(world: World, data: bytes) -> None:
    assert_answered(await world.send(await world.place(), data=data), "bad_request", "not a JSON object", name="search")


@requirement("command.body")
async def test_a_body_over_the_limit_is_refused(world: World) -> None:
    call = await world.place()
    data = json.dumps({**call.body, "comment": "x" * BODY_LIMIT}).encode()
    assert_answered(await world.send(call, data=data), "bad_request", "larger than", name="search")


@pytest.mark.parametrize("field", ["tool_call_card_id", "after_execution"])
@requirement("command.body")
async def test_a_missing_required_field_is_refused(world: World, field: str) -> None:
    assert_answered(await _send_without(world, field), "bad_request", field)


@requirement("command.body")
async def test_a_missing_tool_name_is_answered_under_the_suffix(world: World) -> None:
    assert_answered(await _send_without(world, "tool_name"), "bad_request", "tool_name", name="search")


@pytest.mark.parametrize("value", ["later", "", 1, None])
@requirement("command.body")
async def test_an_invalid_after_execution_is_refused(world: World, value: object) -> None:
    assert_answered(
        await world.send(await world.place(), body={"after_execution": value}), "bad_request", "after_execution"
    )


@pytest.mark.parametrize("field", ["tool_call_card_id", "tool_name"])
@requirement("command.body")
async def test_an_overlong_tool_name_is_refused(world: World, field: str) -> None:
    outcome = await world.send(await world.place(), body={field: "n" + "\u0080" * 20_000})
    name = "search" if field == "tool_name" else "jina_search"
    assert_answered(outcome, "bad_request", field, "512 bytes", name=name)
    assert len(json.dumps(dict(outcome.content))) < 2_000


@requirement("command.body")
async def test_an_unknown_field_is_ignored(world: World) -> None:
    outcome = await world.send(await world.place(), body={"comment": "hello", "priority": 7})
    assert outcome.content["status"] == "success"


@pytest.mark.parametrize("field", ["args", "arguments", "result"])
@requirement("command.body")
async def test_inline_data_in_the_body_is_refused(world: World, field: str) -> None:
    assert_answered(await world.send(await world.place(), body={field: {}}), "bad_request", field)


@pytest.mark.parametrize("field", CONTROL_FIELDS)
@requirement("command.body")
async def test_a_control_field_in_the_body_is_refused(world: World, field: str) -> None:
    assert_answered(await world.send(await world.place(), body={field: "x"}), "bad_request", field)


@pytest.mark.parametrize("name", ["skills.task_watch", "skills.job_watch"])
@requirement("card.result")
async def test_a_tool_name_that_workers_treat_as_heartbeat_is_refused(world: World, name: str) -> None:
    outcome = await world.send(await world.place(), body={"tool_name": name})
    assert_answered(outcome, "bad_request", "heartbeats", name=f"tool.{name}")


# The headers (protocol section 2).


@requirement("identity.headers")
async def test_a_missing_agent_is_a_violation_answered_to_the_cards_author(world: World) -> None:
    assert_answered(await world.send(await world.place(), headers={"CG-Agent-Id": None}), "bad_request", "CG-Agent-Id")


@requirement("identity.headers")
async def test_a_missing_call_id_is_a_violation_answered_under_the_cards(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Tool-Call-Id": None})
    assert_answered(outcome, "bad_request", "CG-Tool-Call-Id")


@requirement("identity.headers")
async def test_a_missing_turn_is_taken_from_the_card(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Turn-Id": None})
    assert outcome.content["status"] == "success"


@pytest.mark.parametrize("value", ["-1", "one", "1.0", "9" * 25])
@requirement("identity.headers")
async def test_a_malformed_epoch_is_refused(world: World, value: str) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Turn-Epoch": value})
    assert_answered(outcome, "bad_request", "CG-Turn-Epoch")


@requirement("identity.headers")
async def test_a_missing_epoch_is_taken_from_the_inbox_row(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Turn-Epoch": None})
    assert outcome.content["status"] == "success"
    assert outcome.rows.inbox_row["turn_epoch"] == 1


@requirement("identity.headers")
async def test_a_step_id_too_long_for_its_index_is_refused_before_anything_is_billed(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update cards set metadata = metadata - 'step_id'")
    outcome = await world.send(call, headers={"CG-Step-Id": secrets.token_urlsafe(6_000)})
    assert_answered(outcome, "bad_request", "CG-Step-Id", "512 bytes")


@requirement("identity.headers")
async def test_a_turn_id_too_long_for_its_index_is_dead_lettered(world: World) -> None:
    call, turn = await world.place(), secrets.token_urlsafe(6_000)
    await world.caller.database.execute("update state.agent_inbox set agent_turn_id = $1", turn)
    await world.caller.database.execute("update cards set metadata = metadata - 'agent_turn_id'")
    assert_dead_lettered(await world.send(call, headers={"CG-Turn-Id": turn}), "no_identity", terminated=True)


@requirement("identity.headers")
async def test_a_project_too_long_for_its_index_is_dead_lettered(world: World) -> None:
    project = secrets.token_hex(300)
    call = await world.place()
    call = replace(call, subject=call.subject.replace(PROJECT, project), tool_call_id="none")
    assert_dead_lettered(await world.send(call), "bad_subject", terminated=True)


@requirement("terminal.text")
async def test_long_ids_are_cut_in_log_lines(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(JsonFormatter(Redactor([])))  # adds the ids of the running call
    call, long = await world.place(), "t" + "\x01" * 50_000
    for column in (
        "cards set tool_call_id",
        "state.agent_inbox set correlation_id",
        "state.execution_edges set correlation_id",
    ):
        await world.caller.database.execute(f"update {column} = $1", long)
    caplog.set_level("INFO", "openapi_tool")
    outcome = await world.send(replace(call, tool_call_id=long), headers={"CG-Tool-Call-Id": long})
    assert outcome.content["status"] == "success"
    assert "t\\u0001" in caplog.text
    assert len(caplog.text) < 12_000


@requirement("identity.headers")
async def test_a_malformed_depth_is_refused(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Recursion-Depth": "deep"})
    assert_answered(outcome, "bad_request", "CG-Recursion-Depth")


@requirement("identity.headers")
async def test_the_depth_of_the_inbox_row_takes_precedence(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Recursion-Depth": "7"})
    assert outcome.rows.edge["recursion_depth"] == 0
    assert outcome.rows.inbox_row["context_headers"]["CG-Recursion-Depth"] == "0"


@pytest.mark.parametrize("header", ["CG-Project-Id", "CG-Channel-Id"])
@requirement("identity.headers")
async def test_tenant_headers_that_differ_from_the_subject_are_refused(world: World, header: str) -> None:
    assert_answered(await world.send(await world.place(), headers={header: "elsewhere"}), "bad_request", header)


@requirement("identity.headers")
async def test_tenant_headers_may_be_missing(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Project-Id": None, "CG-Channel-Id": None})
    assert outcome.content["status"] == "success"


@requirement("identity.headers")
async def test_header_names_are_case_insensitive(world: World) -> None:
    call = await world.place()
    lower = dict.fromkeys(call.headers) | {name.lower(): value for name, value in call.headers.items()}
    outcome = await world.send(call, headers=lower)
    assert outcome.content["status"] == "success"
    assert outcome.rows.inbox_row["context_headers"]["CG-Agent-Id"] == AGENT


@pytest.mark.parametrize("value", ["nonsense", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01"])
@requirement("identity.headers")
async def test_a_malformed_traceparent_is_refused(world: World, value: str) -> None:
    call = await world.place()
    outcome = await world.send(call, headers={"traceparent": value})
    assert_answered(outcome, "bad_request", "traceparent")
    assert outcome.rows.inbox_row["context_headers"]["traceparent"].split("-")[1] == call.trace_id


@pytest.mark.parametrize("value", [None, f"00-{'a' * 32}-{'b' * 16}-01"])
@requirement("answer.trace")
async def test_a_foreign_or_missing_trace_keeps_the_trace_of_the_turn(world: World, value: str | None) -> None:
    call = await world.place()
    outcome = await world.send(call, headers={"traceparent": value, "tracestate": "vendor=1"})
    headers = outcome.rows.inbox_row["context_headers"]
    assert outcome.content["status"] == "success"
    assert headers["traceparent"].split("-")[1] == call.trace_id
    assert outcome.rows.edge["trace_id"] == call.trace_id
    assert "tracestate" not in headers
    assert (outcome.doorbells[0].headers or {})["traceparent"] == headers["traceparent"]


@requirement("answer.trace")
async def test_the_tracestate_is_passed_on(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"tracestate": "vendor=1"})
    assert outcome.rows.inbox_row["context_headers"]["tracestate"] == "vendor=1"
    assert (outcome.doorbells[0].headers or {})["tracestate"] == "vendor=1"


@requirement("identity.unanswerable")
async def test_a_command_whose_result_cannot_reach_a_turn_is_dead_lettered(world: World) -> None:
    call = replace(await world.place(), tool_call_id="unknown")
    outcome = await world.send(call, headers=dict.fromkeys(call.headers), data=b"[]")
    assert_dead_lettered(outcome, "no_identity", terminated=True)


# The report (protocol section 6).


@requirement("answer.precheck")
async def test_a_turn_without_an_inbox_row_is_dead_lettered(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Turn-Id": "an-old-turn"})
    assert_dead_lettered(outcome, "stale_turn", terminated=False)


@requirement("answer.precheck")
async def test_an_epoch_other_than_the_turns_is_dead_lettered(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Turn-Epoch": "2"})
    assert_dead_lettered(outcome, "stale_turn", terminated=False)


@requirement("answer.precheck")
async def test_an_agent_that_did_not_call_is_dead_lettered(world: World) -> None:
    outcome = await world.send(await world.place(), headers={"CG-Agent-Id": "somebody-else"})
    assert_dead_lettered(outcome, "stale_turn", terminated=False)


@requirement("answer.precheck")
async def test_a_call_without_request_edge_is_dead_lettered(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("delete from state.execution_edges")
    assert_dead_lettered(await world.send(call), "no_request_edge", terminated=False)


@requirement("answer.precheck")
async def test_a_depth_other_than_the_edges_is_dead_lettered(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update state.execution_edges set recursion_depth = 3")
    assert_dead_lettered(await world.send(call), "depth_mismatch", terminated=False)


@requirement("answer.precheck")
async def test_a_turn_with_headers_larger_than_a_message_is_dead_lettered(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute(
        "update state.agent_inbox set context_headers = context_headers || jsonb_build_object('X', repeat('x', 70000))"
    )
    assert_dead_lettered(await world.send(call), "turn_headers", terminated=False)


COLLIDING_ID = "TEXTCOLLBYfGiJUETHQ4hAcKSMd5zYpgqf1YRDhkmxHkhPWptrkoyz28wnI9V0aHeAuaKnak"
"""With `4hE` in place of `4hA` it has the same MD5."""


@requirement("tenant.scoped")
async def test_an_id_with_the_md5_of_an_answered_one_is_refused_before_anything_is_billed(world: World) -> None:
    first = await _place_with_id(world, COLLIDING_ID)
    assert (await world.send(first, headers={"CG-Tool-Call-Id": COLLIDING_ID})).content["status"] == "success"
    await world.caller.database.execute("delete from state.execution_edges")
    await world.caller.database.execute("delete from state.agent_inbox")
    other = COLLIDING_ID.replace("4hA", "4hE")
    second = await _place_with_id(world, other)
    outcome = await world.send(second, headers={"CG-Tool-Call-Id": other})
    assert [letter["reason"] for letter in outcome.dead_letters] == ["id_collision"]
    assert (outcome.rows.card, outcome.deliveries) == ({}, 2)
    assert len(outcome.upstream_requests) == 1


async def _place_with_id(world: World, tool_call_id: str) -> PlacedCall:
    """Place a call with this id."""
    call = await world.place()
    for column in (
        "cards set tool_call_id",
        "state.agent_inbox set correlation_id",
        "state.execution_edges set correlation_id",
    ):
        name = column.rpartition(" ")[2]
        await world.caller.database.execute(f"update {column} = $1 where {name} = $2", tool_call_id, call.tool_call_id)
    return replace(call, tool_call_id=tool_call_id)


@requirement("answer.precheck")
async def test_a_depth_at_the_limit_is_dead_lettered(world: World) -> None:
    call = await world.place()
    await _set_depth(world, 20)
    assert_dead_lettered(await world.send(call), "recursion_depth", terminated=False)


@requirement("answer.precheck")
async def test_a_depth_just_below_the_limit_is_answered(world: World) -> None:
    call = await world.place()
    await _set_depth(world, 19)
    outcome = await world.send(call)
    assert outcome.rows.edge["recursion_depth"] == 19
    assert outcome.rows.edge["metadata"]["cg_ctx"]["recursion_depth"] == 19


async def _set_depth(world: World, depth: int) -> None:
    await world.caller.database.execute("update state.execution_edges set recursion_depth = $1", depth)
    await world.caller.database.execute(
        "update state.agent_inbox set context_headers = context_headers || $1", {"CG-Recursion-Depth": str(depth)}
    )


@requirement("answer.doorbell")
async def test_an_agent_missing_in_the_roster_gets_a_result_without_doorbell(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = await world.send(await world.place(agent="unlisted"))
    assert outcome.content["status"] == "failed"
    assert "resource.project_agents" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []
    assert outcome.rows.inbox_row["agent_id"] == "unlisted"
    assert outcome.doorbells == []
    assert_settled_once(outcome)
    assert "doorbell.impossible" in [getattr(record, "action", "") for record in caplog.records]


@requirement("answer.doorbell")
@pytest.mark.parametrize("reader", ["message_type = 'ui_action'", "turn_epoch = 0"])
async def test_a_caller_that_reads_the_inbox_itself_needs_no_roster(world: World, reader: str) -> None:
    call = await world.place(agent="unlisted")
    await world.caller.database.execute(f"update state.agent_inbox set {reader}")  # noqa: S608 - constants only
    outcome = await world.send(call, headers={"CG-Turn-Epoch": "0"})
    assert outcome.content["status"] == "success"
    assert outcome.doorbells == []


@requirement("answer.doorbell")
async def test_an_invalid_worker_target_only_prevents_the_doorbell(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.caller.add_agent(PROJECT, "odd", "a b.*")
    outcome = await world.send(await world.place(agent="odd"))
    assert outcome.rows.inbox_row["payload"]["status"] == "success"
    assert outcome.doorbells == []
    assert_settled_once(outcome)
    assert "doorbell.impossible" in [getattr(record, "action", "") for record in caplog.records]


# The card (protocol section 3).


@requirement("card.read")
async def test_a_call_card_that_does_not_exist_is_not_found(world: World) -> None:
    outcome = await world.send(await world.place(), body={"tool_call_card_id": "nowhere"})
    assert_answered(outcome, "not_found", "card")


@requirement("card.read")
async def test_a_deleted_call_card_is_not_found(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update cards set deleted_at = now()")
    assert_answered(await world.send(call), "not_found", "card")


@requirement("card.read")
async def test_a_call_card_of_another_project_is_not_found(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update cards set tenant_id = 'another'")
    assert_answered(await world.send(call), "not_found", "card")


@requirement("card.read")
async def test_a_card_of_another_type_is_refused(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update cards set metadata = metadata || $1", {"type": "note"})
    assert_answered(await world.send(call), "bad_request", "tool.call")


@requirement("card.read")
async def test_a_card_of_another_content_class_is_refused(world: World) -> None:
    call = await world.place()
    await world.caller.database.execute("update cards set content = $1", {"__type__": "TextContent", "text": "x"})
    assert_answered(await world.send(call), "bad_request", "ToolCallContent")


@requirement("card.read")
async def test_a_card_of_another_call_is_refused(world: World) -> None:
    other, call = await world.place(), await world.place()
    outcome = await world.send(call, body={"tool_call_card_id": other.card_id})
    assert_answered(outcome, "bad_request", "another tool call")
    assert outcome.rows.card["metadata"]["step_id"] == call.step_id


@requirement("card.read")
async def test_arguments_that_were_not_an_object_are_refused(world: World) -> None:
    assert_answered(await world.send(await world.place({"_raw": "{broken"})), "bad_request", "JSON object")


@pytest.mark.parametrize("arguments", [[1], "text", 7])
@requirement("card.read")
async def test_arguments_of_a_wrong_json_type_are_refused(world: World, arguments: Any) -> None:
    assert_answered(await world.send(await world.place(arguments)), "bad_request", "JSON object")


@requirement("arguments.checked")
async def test_too_many_arguments_are_refused(world: World) -> None:
    arguments = {**RECORDED_ARGUMENTS, "site": [f"{number}.org" for number in range(1001)]}
    assert_answered(await world.send(await world.place(arguments)), "bad_request", "1,000")


@requirement("arguments.checked")
async def test_too_deeply_nested_arguments_are_refused(world: World) -> None:
    nested: Any = "x"
    for _ in range(25):
        nested = {"a": nested}
    assert_answered(
        await world.send(await world.place({**RECORDED_ARGUMENTS, "deep": nested})), "bad_request", "nested"
    )


@requirement("arguments.checked")
async def test_unparsable_arguments_are_refused(world: World) -> None:
    call = await world.place()
    deep = "[" * 2000 + "]" * 2000
    await world.caller.database.execute(
        f"""update cards set content = '{{"__type__": "ToolCallContent", "arguments": {{"a": {deep}}}}}'"""  # noqa: S608
    )
    assert_answered(await world.send(call), "bad_request", "ToolCallContent")


@pytest.mark.parametrize("text", ["x" * 300_000, "".join(chr(33 + number * 7919 % 90) for number in range(300_000))])
@requirement("arguments.checked")
async def test_too_large_arguments_are_refused(world: World, text: str) -> None:
    assert_answered(await world.send(await world.place({"query": text})), "bad_request", "262,144 bytes")


# The tool (protocol sections 4 and 5).


@requirement("tool.definition")
async def test_a_tool_that_the_project_does_not_have_is_not_found(world: World) -> None:
    outcome = await world.send(await world.place(tool="jina_nothing"))
    assert_answered(outcome, "not_found", "jina_nothing", name="jina_nothing")


@requirement("tool.definition")
async def test_a_tool_of_another_project_is_not_found(world: World) -> None:
    await world.caller.database.execute("update resource.tools set project_id = 'another'")
    assert_answered(await world.send(await world.place()), "not_found", "jina_search")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "options.jina"),
        ({"jina": []}, "options.jina"),
        ({"jina": {"mode": "search", "base_url": "https://r.jina.ai"}}, "mode"),
        ({"jina": {"base_url": "http://s.jina.ai"}}, "base_url"),
        ({"jina": {"base_url": "https://u:p@s.jina.ai"}}, "base_url"),
        ({"jina": {"base_url": "https://s.jina.ai:8443"}}, "base_url"),
        ({"jina": {"mode": "search"}, "args": {"fixed": {"x": "{nonsense}"}}}, "nonsense"),
        ({"jina": {"mode": "search"}, "args": {"fixed": {"x": "{context_box_id}"}}}, "context_box_id"),
        ({"jina": {"mode": "search", "auth_env": "HOME"}}, "secrets.allowed_env"),
        ({"jina": {"mode": "search", "auth_env": "UNSET"}}, "UNSET"),
        ({"jina": {"mode": "search"}, "envs": {"api_key": "PG_DSN"}}, "the executor's own settings"),
        ({"jina": {"mode": "search", "auth_env": "nats_password_file"}}, "the executor's own settings"),
    ],
)
@requirement("tool.definition")
async def test_an_unusable_definition_is_tool_misconfigured(world: World, options: Any, names: str) -> None:
    await world.caller.add_tool(PROJECT, {**search_tool(), "options": options})
    assert_answered(await world.send(await world.place()), "tool_misconfigured", names)


@requirement("arguments.checked")
async def test_arguments_that_do_not_fit_the_schema_are_refused(world: World) -> None:
    schema = {"type": "object", "required": ["query"], "properties": {"count": {"type": "integer"}}}
    await world.caller.add_tool(PROJECT, {**search_tool(), "parameters": schema})
    assert_answered(await world.send(await world.place({"count": "many"})), "bad_request", "query", "count")


@requirement("url.checked")
async def test_an_invalid_page_address_is_refused(world: World) -> None:
    await world.caller.add_tool(PROJECT, reader_tool())
    call = await world.place({"url": "ftp://a.example/x"}, "jina_reader", suffix="read")
    assert_answered(await world.send(call), "bad_request", "url", name="jina_reader")


# Page addresses: repaired, refused before anything is billed, or allowed by an operator.


ANY_PAGE = {"answer": "r-post-json"}


async def _read(world: World, url: str) -> Outcome:
    world.stack.upstream.rules(ANY_PAGE)
    await world.caller.add_tool(PROJECT, reader_tool())
    return await world.send(await world.place({"url": url}, "jina_reader", suffix="read"))


@pytest.mark.parametrize(
    "url",
    ["http://localhost/", "http://0x7f.1/", "http://[::ffff:10.0.0.1]/", "http://db.svc", "http://169.254.169.254/"],
)
@requirement("url.checked")
async def test_an_internal_target_is_refused_before_it_is_billed(world: World, url: str) -> None:
    outcome = await _read(world, url)
    assert outcome.content["error"]["code"] == "target_refused"
    assert outcome.upstream_requests == []


@pytest.mark.parametrize("url", ["<https://example.com/a>", "[a page](https://example.com/a)", "example.com/a"])
@requirement("url.checked")
async def test_an_address_with_a_plain_intent_is_repaired(world: World, url: str) -> None:
    [sent] = (await _read(world, url)).upstream_requests
    assert json.loads(sent["body"])["url"] == "https://example.com/a"


@pytest.mark.parametrize("group", ["fixed", "defaults"])
@requirement("url.checked", "tool.definition")
async def test_an_invalid_address_in_the_definition_is_tool_misconfigured(world: World, group: str) -> None:
    """The model must not see the address, nor be asked to correct it."""
    for jina, name, value in (
        ({"mode": "reader"}, "url", "http://169.254.169.254/"),
        ({"mode": "reader"}, "target_url", "not an address"),
        ({"mode": "reader", "tool": "jina.read_many"}, "urls", ["http://169.254.169.254/"]),
        ({"mode": "reader", "tool": "jina.read_many"}, "urls", "http://169.254.169.254/"),
    ):
        tool = {"tool_name": "a_tool", "parameters": {}}
        await world.caller.add_tool(PROJECT, reader_tool(jina=jina, args={group: {name: value}}) | tool)
        outcome = await world.send(await world.place({}, "a_tool", suffix="read"))
        error = outcome.content["error"]
        assert (error["code"], outcome.upstream_requests) == ("tool_misconfigured", [])
        assert f"options.args.{group}.{name}" in error["message"]
        assert "169.254" not in error["message"]


@requirement("url.checked")
async def test_an_operator_may_allow_an_internal_host(world_without_executor: World) -> None:
    async with world_without_executor.executor(url_policy={"allow": ("wiki.corp",)}):
        allowed, refused = (
            await _read(world_without_executor, "http://wiki.corp/x"),
            await _read(world_without_executor, "http://db.corp/x"),
        )
    assert allowed.content["status"] == "success"
    assert refused.content["error"]["code"] == "target_refused"


# Commands whose body the server leaves out.


@requirement("nats.watched")
async def test_a_command_that_arrives_without_its_body_is_answered_once_the_durable_delivers_bodies(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Another client has set `headers_only`; replicas restore it within a second."""
    caplog.set_level(logging.INFO)
    jetstream = world.caller.client.jetstream()
    await until(lambda: world.components is not None and world.components.consumer.durable)
    config = (await jetstream.consumer_info(STREAM, DURABLE)).config
    await jetstream.add_consumer(STREAM, config.evolve(headers_only=True))
    call = await world.place()
    await world.caller.publish(call)
    await until(lambda: "command.requeued" in [getattr(record, "action", "") for record in caplog.records])
    await jetstream.add_consumer(STREAM, config.evolve(headers_only=None))
    outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"


@requirement("command.body")
async def test_a_command_without_a_body_whose_header_claims_one_is_refused_after_some_deliveries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MAX_WITHOUT_BODY", 3)
    outcome = await world.send(await world.place(), headers={BODY_SIZE_HEADER: "5"}, data=b"")
    assert outcome.content["error"]["code"] == "bad_request"
    assert outcome.deliveries == 3
