"""Both protocol versions: decoding of commands, identity, reports, doorbells."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.kernel.jetstream.claimed_ids import ids_of
from openapi_tool.protocol.cards import read_tool_call, result_card
from openapi_tool.protocol.command import INLINE_DATA, Delivery
from openapi_tool.protocol.dialect import Dialect, claimed_identity
from openapi_tool.protocol.errors import BadRequest, NotFound, ReportRefused, ToolError, Unanswerable
from openapi_tool.protocol.identity import CONTROL_FIELDS, identify
from openapi_tool.protocol.jsontext import dumps, loads, storable
from openapi_tool.protocol.records import CardRecord, RequestEdgeRecord, ResultContent, WaitingTurnRecord
from openapi_tool.protocol.report import Report, trace_link
from openapi_tool.protocol.subjects import doorbell_subject, parse_command_subject
from openapi_tool.protocol.tracing import SpanContext, new_span_id, parse_traceparent
from openapi_tool.protocol.v1r3 import V1r3
from openapi_tool.tools.placeholders import placeholder_values
from tests.requirements import requirement
from tests.support import (
    BODY,
    HEADERS,
    TRACE_ID,
    TRACEPARENT,
    V1R4,
    call_card,
    delivery,
    identity,
    records,
    waiting_turn,
)

EDGE = RequestEdgeRecord("edge_1", 0)


def _at_depth(depth: str) -> WaitingTurnRecord:
    return waiting_turn(HEADERS | {"CG-Recursion-Depth": depth})


@requirement("subject.durable")
def test_a_suffix_keeps_its_dots() -> None:
    subject = parse_command_subject("cg.v1r4.p.c.cmd.tool.jina.search.deep.er")
    assert (subject.project_id, subject.channel_id, subject.target, subject.suffix) == (
        "p",
        "c",
        "jina",
        "search.deep.er",
    )


@pytest.mark.parametrize(
    "subject", ["", "cg.v1r4.p.c.cmd.tool.jina", "cg.v1r4.p.c.cmd.agent.w.wakeup", "xx.v1r4.p.c.cmd.tool.jina.search"]
)
@requirement("subject.durable")
def test_a_subject_that_is_no_tool_command_is_unanswerable(subject: str) -> None:
    with pytest.raises(Unanswerable) as refused:
        parse_command_subject(subject)
    assert refused.value.reason == "bad_subject"


@pytest.mark.parametrize("token", ["", "a.b", "a b", "*", ">", "a\n"])
def test_a_doorbell_subject_takes_no_wildcards_or_separators(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        doorbell_subject("v1r4", "p", "c", token)


@requirement("command.body")
def test_a_good_command_has_no_violation_and_ignores_unknown_fields() -> None:
    command = V1R4.decode(delivery(body={**BODY, "comment": "hello"}))
    assert command.violation is None
    assert (command.card_id, command.tool_name, command.after_execution) == ("card", "jina_search", "suspend")


@pytest.mark.parametrize("field", ["tool_call_card_id", "tool_name", "after_execution"])
@pytest.mark.parametrize("value", [None, "", 7, ["x"], "?"])
@requirement("command.body")
def test_each_required_field_is_named_when_it_is_wrong(field: str, value: object) -> None:
    if value == "?" and field != "after_execution":
        value = {}
    command = V1R4.decode(delivery(body={**BODY, field: value}))
    assert command.violation is not None
    assert field in command.violation.message


@pytest.mark.parametrize("field", sorted(INLINE_DATA | CONTROL_FIELDS))
@requirement("command.body")
def test_each_forbidden_field_is_named(field: str) -> None:
    command = V1R4.decode(delivery(body={**BODY, field: None}))
    assert command.violation is not None
    assert field in command.violation.message


@pytest.mark.parametrize("data", [b"", b"[1,2]", b"{", b'"x"', b"\xff\xfe", b"null", b"[" * 100_000])
@requirement("command.body")
def test_a_body_that_is_no_object_is_a_violation_with_the_suffix_as_name(data: bytes) -> None:
    command = V1R4.decode(delivery(data=data))
    assert command.violation is not None
    assert command.function_name == "search"
    assert command.identity.agent_id == "agent"


@requirement("identity.headers")
def test_headers_are_read_in_any_case_but_the_exact_spelling_wins() -> None:
    headers = {name.upper(): value for name, value in HEADERS.items()} | {
        "cg-agent-id": "other",
        "CG-Agent-Id": "agent",
    }
    identity_read = V1R4.decode(delivery(headers)).identity
    assert identity_read.agent_id == "agent"
    assert identity_read.trace == SpanContext(TRACE_ID, "b7ad6b7169203331", "01")
    assert identity_read.problems == ()


@pytest.mark.parametrize("zeros", [0, 1, 30, 5_000])
@requirement("identity.headers")
def test_leading_zeros_of_a_number_do_not_count(zeros: int) -> None:
    command = V1R4.decode(delivery({**HEADERS, "CG-Turn-Epoch": "0" * zeros + "7", "CG-Recursion-Depth": "0" * 9}))
    assert (command.identity.turn_epoch, command.identity.recursion_depth) == (7, 0)
    assert command.violation is None


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("CG-Turn-Epoch", "-1"),
        ("CG-Turn-Epoch", "one"),
        ("CG-Turn-Epoch", "9" * 30),
        ("CG-Turn-Epoch", "0" + "8" * 30),
        ("CG-Turn-Epoch", "\u0663"),
        ("CG-Recursion-Depth", "1.5"),
        ("CG-Project-Id", "elsewhere"),
        ("CG-Channel-Id", "elsewhere"),
        ("CG-Agent-Id", ""),
        ("CG-Tool-Call-Id", "  "),
        ("CG-Tool-Call-Id", "a\x00b"),
        ("CG-Agent-Id", "a" * 513),
        ("CG-Turn-Id", "\u00e9" * 257),
        ("CG-Step-Id", "a" * 513),
        ("CG-Parent-Step-Id", "a" * 513),
        ("traceparent", "00-zz"),
        ("traceparent", f"ff-{TRACE_ID}-b7ad6b7169203331-01"),
        ("traceparent", f"00-{'0' * 32}-b7ad6b7169203331-01"),
        ("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01"),
        ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01-more"),
    ],
)
@requirement("identity.headers")
def test_each_malformed_header_is_named(header: str, value: str) -> None:
    command = V1R4.decode(delivery({**HEADERS, header: value}))
    assert command.violation is not None
    assert header in command.violation.message


@requirement("identity.headers")
def test_an_id_of_the_most_bytes_is_taken_and_a_tool_call_id_of_any() -> None:
    names = ("CG-Agent-Id", "CG-Turn-Id", "CG-Step-Id", "CG-Parent-Step-Id")
    headers = {**HEADERS, **dict.fromkeys(names, "\u00e9" * 256), "CG-Tool-Call-Id": "c" * 60_000}
    command = V1R4.decode(delivery(headers))
    assert command.violation is None
    assert command.identity.step_id == "\u00e9" * 256


@requirement("identity.headers")
def test_the_body_never_becomes_identity() -> None:
    body = {**BODY, "agent_id": "evil", "tool_call_id": "evil", "agent_turn_id": "evil", "project_id": "evil"}
    claimed = V1R4.decode(delivery({}, body)).identity
    assert (claimed.project_id, claimed.agent_id, claimed.agent_turn_id, claimed.tool_call_id) == (
        "proj",
        None,
        None,
        None,
    )


@requirement("identity.headers")
def test_missing_identity_is_recovered_from_the_call_card() -> None:
    found = identify(V1R4.decode(delivery({})).identity, call_card())
    assert (found.agent_id, found.agent_turn_id, found.tool_call_id, found.step_id) == ("agent", "turn", "call", "step")


@pytest.mark.parametrize(
    "card",
    [None, call_card(metadata={"type": "note", "author_id": "agent", "agent_turn_id": "turn"}), call_card(metadata={})],
)
@requirement("identity.unanswerable")
def test_identity_that_no_kernel_fact_gives_is_unanswerable(card: Any) -> None:
    with pytest.raises(Unanswerable) as refused:
        identify(V1R4.decode(delivery({})).identity, card)
    assert refused.value.terminate


@pytest.mark.parametrize("name", ["author_id", "agent_turn_id"])
@requirement("identity.headers")
def test_an_id_of_the_card_that_no_index_takes_is_none(name: str) -> None:
    card = call_card()
    with pytest.raises(Unanswerable) as refused:
        identify(V1R4.decode(delivery({})).identity, replace(card, metadata={**card.metadata, name: "a" * 513}))
    assert refused.value.reason == "no_identity"


@pytest.mark.parametrize("value", ["a" * 513, "\u00e9" * 257, ["a"], 10**30])
@pytest.mark.parametrize("name", ["step_id", "trace_id", "parent_step_id"])
@requirement("identity.headers")
def test_lineage_that_no_index_takes_is_refused_and_not_copied(name: str, value: Any) -> None:
    card = call_card()
    card = replace(card, metadata={**card.metadata, name: value})
    with pytest.raises(BadRequest, match=name):
        read_tool_call(card, "call")
    assert _card(call_card=card).metadata.get(name) != value


@requirement("identity.headers")
def test_the_card_of_another_call_gives_no_identity() -> None:
    headers = {"CG-Tool-Call-Id": "mine"}
    with pytest.raises(Unanswerable):
        identify(V1R4.decode(delivery(headers)).identity, call_card(tool_call_id="other"))


@requirement("answer.errors")
def test_the_text_of_an_error_is_its_message_also_after_that_was_replaced() -> None:
    error = BadRequest("url: is a private address", detail={"a": 1})
    error.message = "page: is a private address"
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own
        assert str(one) == one.message == one.as_error()["message"] == "page: is a private address"
        assert repr(one) == "BadRequest('page: is a private address')"
        assert one.detail == {"a": 1}


@pytest.mark.parametrize(
    ("card", "error"),
    [
        (None, NotFound),
        (call_card(metadata={"type": "tool.result"}), BadRequest),
        (call_card(content={"__type__": "TextContent", "text": "x"}), BadRequest),
        (call_card(content="x"), BadRequest),
        (call_card(tool_call_id="other"), BadRequest),
        (call_card(content={"__type__": "ToolCallContent", "arguments": [1]}), BadRequest),
    ],
)
@requirement("card.read")
def test_an_unreadable_call_card_is_a_typed_failure(card: Any, error: type[ToolError]) -> None:
    with pytest.raises(error):
        read_tool_call(card, "call")


@requirement("card.read")
def test_raw_arguments_are_refused_and_say_why() -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        read_tool_call(call_card({"_raw": "{broken"}), "call")


def test_what_the_worker_applied_is_read_from_the_card() -> None:
    metadata = {
        "type": "tool.call",
        "tool_args_defaults_applied": ["a", 1],
        "tool_args_fixed_applied": ["b"],
    }
    call = read_tool_call(call_card({"a": 1, "b": 2}, metadata=metadata), "call")
    assert (call.defaults_applied, call.fixed_applied) == (frozenset({"a"}), frozenset({"b"}))


def _card(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "actor_id": "tool.openapi",
        "function_name": "jina_search",
        "identity": identity(),
        "call_card": call_card(),
        "status": "success",
        "after_execution": "suspend",
        "result": "text",
        "error": None,
        "tool_output": None,
    }
    return result_card(**(values | changes))


@requirement("card.result")
def test_a_result_card_has_exactly_the_fields_that_readers_accept() -> None:
    card = _card()
    assert card.content.keys() == {"__type__", "status", "after_execution", "result", "error"}
    assert card.metadata.keys() == {
        *("type", "role", "project_id", "author_id", "function_name", "agent_turn_id", "tool_call_id"),
        *("created_at", "step_id"),
    }
    assert re.fullmatch(r"[0-9a-f]{12}7[0-9a-f]{19}", card.card_id)
    assert card.metadata["created_at"].endswith("+00:00")


@requirement("card.result")
def test_lineage_is_copied_verbatim_and_never_made_up() -> None:
    metadata = {"type": "tool.call", "step_id": "s1", "trace_id": "not-even-hex", "parent_step_id": "p1"}
    copied = _card(call_card=call_card(metadata=metadata)).metadata
    assert (copied["step_id"], copied["trace_id"], copied["parent_step_id"]) == ("s1", "not-even-hex", "p1")
    absent = _card(call_card=call_card(metadata={"type": "tool.call", "step_id": "s1"})).metadata
    assert "trace_id" not in absent
    assert "parent_step_id" not in absent


@requirement("card.result")
def test_only_a_missing_step_is_filled_from_the_header() -> None:
    assert _card(call_card=call_card(metadata={"type": "tool.call"})).metadata["step_id"] == "step"
    assert _card(call_card=None).metadata["step_id"] == "step"
    other = call_card(tool_call_id="other", metadata={"type": "tool.call", "step_id": "foreign", "trace_id": "t"})
    assert _card(call_card=other).metadata["step_id"] == "step"


@requirement("answer.precheck")
def test_a_call_that_a_turn_waits_for_is_accepted() -> None:
    accepted = V1R4.accept(identity(), records(waiting_turn=waiting_turn(), request_edge=EDGE))
    assert accepted.depth == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"waiting_turn": None, "request_edge": EDGE}, "stale_turn"),
        ({"waiting_turn": waiting_turn(), "request_edge": None}, "no_request_edge"),
        ({"waiting_turn": waiting_turn(), "request_edge": RequestEdgeRecord("e", 1)}, "depth_mismatch"),
        ({"waiting_turn": _at_depth("20"), "request_edge": RequestEdgeRecord("e", 20)}, "recursion_depth"),
        ({"waiting_turn": _at_depth("x"), "request_edge": EDGE}, "recursion_depth"),
        ({"waiting_turn": _at_depth("-1"), "request_edge": EDGE}, "recursion_depth"),
    ],
)
@requirement("answer.precheck")
def test_each_rule_of_the_report_refuses_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReportRefused) as refused:
        V1R4.accept(identity(), records(**changes))
    assert refused.value.reason == reason
    assert not refused.value.terminate


def test_depth_nineteen_is_the_last_that_is_accepted() -> None:
    waiting = _at_depth("19")
    assert V1R4.accept(identity(), records(waiting_turn=waiting, request_edge=RequestEdgeRecord("e", 19))).depth == 19


@requirement("answer.trace")
def test_the_inbound_span_is_the_parent_in_the_turns_own_trace() -> None:
    link = trace_link(identity(tracestate="v=1"), waiting_turn())
    assert (link.parent.span_id, link.linked, link.tracestate) == ("b7ad6b7169203331", None, "v=1")


@requirement("answer.trace")
def test_a_foreign_trace_becomes_a_link_and_the_rows_trace_counts() -> None:
    foreign = SpanContext("a" * 32, "b" * 16)
    link = trace_link(identity(trace=foreign), waiting_turn(HEADERS | {"tracestate": "row=1"}))
    assert (link.parent.trace_id, link.linked, link.tracestate) == (TRACE_ID, foreign, "row=1")


@requirement("answer.trace")
def test_without_an_inbound_trace_the_row_gives_it() -> None:
    link = trace_link(identity(trace=None), waiting_turn())
    assert (link.parent.traceparent(), link.linked) == (TRACEPARENT, None)


def test_without_any_trace_a_new_one_begins() -> None:
    link = trace_link(identity(trace=None), waiting_turn({}))
    assert parse_traceparent(link.parent.traceparent()) == link.parent


@pytest.mark.parametrize("trace_id", ["0" * 32, "A" * 32, "a" * 31, "a" * 33, "", "x\n"])
@requirement("answer.trace")
def test_without_a_traceparent_the_report_has_the_trace_of_the_card(trace_id: str) -> None:
    known = trace_link(identity(trace=None, trace_id=TRACE_ID), waiting_turn({}))
    assert known.parent.trace_id == TRACE_ID
    other = trace_link(identity(trace=None, trace_id=trace_id), waiting_turn({}))
    assert other.parent.trace_id != trace_id
    assert parse_traceparent(other.parent.traceparent()) == other.parent


def _report(waiting: Any = None, tracestate: str | None = None) -> Report:
    acceptance = V1R4.accept(identity(), records(waiting_turn=waiting or waiting_turn(), request_edge=EDGE))
    content = ResultContent(status="success", after_execution="terminate")
    return V1R4.report(acceptance, SpanContext(TRACE_ID, "c" * 16, "01"), tracestate, "result", content)


@requirement("identity.headers")
def test_the_report_carries_the_targets_topology_and_the_new_span() -> None:
    report = _report(tracestate="v=1")
    assert report.context_headers == HEADERS | {"traceparent": f"00-{TRACE_ID}-{'c' * 16}-01", "tracestate": "v=1"}
    assert report.payload == {"after_execution": "terminate", "status": "success", "tool_result_card_id": "result"}


def test_a_turn_row_gets_the_tool_call_id_and_keeps_the_parents() -> None:
    headers = {name: value for name, value in HEADERS.items() if name != "CG-Tool-Call-Id"}
    waiting = waiting_turn(headers | {"CG-Parent-Step-Id": "p", "CG-Parent-Agent-Id": "boss"}, message_type="turn")
    report = _report(waiting)
    assert report.context_headers["CG-Tool-Call-Id"] == "call"
    assert report.parent_step_id == "p"
    context = report.edge_metadata["cg_ctx"]
    assert isinstance(context, dict)
    assert context["parent_agent_id"] == "boss"


@requirement("answer.doorbell")
def test_the_doorbell_names_no_step_call_depth_or_parent() -> None:
    doorbell = V1R4.doorbell("proj", "worker", HEADERS | {"CG-Parent-Step-Id": "p", "tracestate": "v=1"})
    assert doorbell is not None
    wanted = {
        "CG-Project-Id",
        "CG-Channel-Id",
        "CG-Agent-Id",
        "CG-Turn-Id",
        "CG-Turn-Epoch",
        "traceparent",
        "tracestate",
        "CG-Timestamp",
        "CG-Version",
        "CG-Msg-Type",
        "CG-Sender",
    }
    assert doorbell.headers.keys() == wanted
    assert (doorbell.subject, doorbell.body) == ("cg.v1r4.proj.public.cmd.agent.worker.wakeup", b"{}")


def test_span_ids_are_never_zero_and_always_sixteen_digits() -> None:
    assert all(re.fullmatch(r"[0-9a-f]{16}", new_span_id()) for _ in range(100))


@requirement("card.result")
def test_what_jsonb_refuses_is_replaced() -> None:
    replaced = "\N{REPLACEMENT CHARACTER}"
    dirty = {"a\x00": ["\ud800", "ok", 1.5, float("nan"), None, 2**70]}
    assert storable(dirty) == {f"a{replaced}": [replaced, "ok", 1.5, None, None, str(2**70)]}
    assert loads(b'"\\ud83d\\ude00 \\ud800"') == "\U0001f600 \ud800"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@requirement("arguments.checked")
@pytest.mark.parametrize("depth", [1_025, 1_500, 20_000])
def test_json_that_is_nested_too_deeply_is_refused_by_either_parser(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for text in (nested, f'["\\ud800", {nested}]', f"[1{'0' * 400}, {nested}]"):
        with pytest.raises(ValueError, match=r"deeply|depth limit"):
            loads(text)
    assert loads('["\\ud800", ' + "[" * 900 + "]" * 900 + "]")


@given(json_values)
@requirement("card.result")
def test_any_value_can_be_stored_once_it_is_storable(value: object) -> None:
    clean = storable(value)
    text = dumps(clean)
    assert b"\\u0000" not in text
    assert orjson.loads(text) == clean


ACTOR = "tool.openapi.jina"
V1R3 = V1r3(ACTOR)
SUBJECT = "cg.v1r3.proj.public.cmd.tool.jina.search"
V1R3_HEADERS = {"traceparent": TRACEPARENT, "CG-Recursion-Depth": "2"}
IDENTITY = {"tool_call_id": "call", "agent_turn_id": "turn", "turn_epoch": 3, "agent_id": "agent"}
SPAN = SpanContext(TRACE_ID, "1111111111111111", "01")
CONTENT = ResultContent(status="success", after_execution="suspend")
EXAMPLE = json.loads((Path(__file__).parent.parent / "data" / "example-call-v1r3.json").read_text(encoding="utf-8"))


def command_message(headers: Any = None, data: Any = None, **changes: Any) -> Delivery:
    body = {name: value for name, value in {**BODY, **IDENTITY, **changes}.items() if value is not ...}
    return delivery(V1R3_HEADERS if headers is None else headers, body, subject=SUBJECT, data=data)


def report_of(message: Delivery, card: CardRecord | None = None, **loaded: Any) -> Report:
    found = records(card=card or call_card(), **loaded)
    identity = identify(V1R3.decode(message).identity, found.card)
    return V1R3.report(V1R3.accept(identity, found), SPAN, None, "result", CONTENT)


@requirement("v1r3.command")
def test_the_identity_is_in_the_body() -> None:
    dialect: Dialect = V1R3
    command = dialect.decode(command_message(comment="unknown fields are ignored", channel="other", project_id="other"))
    claimed = command.identity
    assert command.violation is None
    assert (claimed.project_id, claimed.channel_id) == ("proj", "public")
    assert (claimed.agent_id, claimed.agent_turn_id, claimed.turn_epoch, claimed.tool_call_id) == (
        "agent",
        "turn",
        3,
        "call",
    )
    assert claimed.recursion_depth == 2
    assert claimed.trace is not None
    assert claimed.trace.trace_id == TRACE_ID


@requirement("v1r3.command", "logs.call")
def test_log_lines_of_a_command_name_the_ids_in_its_body_and_of_a_large_one_its_project() -> None:
    found = ids_of(command_message())
    ids = {"project_id": "proj", "agent_id": "agent", "agent_turn_id": "turn", "tool_call_id": "call"}
    assert found == {**ids, "protocol": "v1r3", "trace_id": TRACE_ID, "stream_sequence": 1}
    large = ids_of(command_message(comment="x" * 20_000))
    assert (large["project_id"], large["tool_call_id"]) == ("proj", "")
    assert ids_of(command_message(data=b"[" * 10_000))["tool_call_id"] == ""


@pytest.mark.parametrize("field", sorted({*BODY, *IDENTITY}))
@pytest.mark.parametrize("value", [..., None, "", [], {}, -1, True])
@requirement("v1r3.command")
def test_each_required_field_of_v1r3_is_named_when_it_is_wrong(field: str, value: object) -> None:
    violation = V1R3.decode(command_message(**{field: value})).violation
    assert violation is not None
    assert field in violation.message


@pytest.mark.parametrize("field", sorted(INLINE_DATA))
@requirement("v1r3.command")
def test_inline_data_is_forbidden(field: str) -> None:
    violation = V1R3.decode(command_message(**{field: {}})).violation
    assert violation is not None
    assert f"({field})" in violation.message


@pytest.mark.parametrize("field", sorted(CONTROL_FIELDS - IDENTITY.keys()))
@requirement("v1r3.command")
def test_control_fields_are_allowed_and_ignored(field: str) -> None:
    command = V1R3.decode(command_message(**{field: "other"}))
    assert command == V1R3.decode(command_message())


@requirement("v1r3.command")
def test_identity_headers_of_v1r4_are_ignored() -> None:
    claimed = V1R3.decode(command_message(V1R3_HEADERS | {"CG-Agent-Id": "other", "CG-Tool-Call-Id": "other"})).identity
    assert (claimed.agent_id, claimed.tool_call_id) == ("agent", "call")


@pytest.mark.parametrize("name", ["agent_id", "agent_turn_id", "tool_call_id"])
@pytest.mark.parametrize("value", ["\\u0000x", "\\ud800"])
@requirement("v1r3.command")
def test_an_id_that_cannot_be_stored_is_refused_instead_of_changed(name: str, value: str) -> None:
    text = orjson.dumps({**BODY, **IDENTITY, name: "MARK"}).replace(b"MARK", value.encode())
    command = V1R3.decode(command_message(data=text))
    assert getattr(command.identity, name) is None
    assert command.violation is not None


@requirement("v1r3.command", "dialects.commands")
def test_what_a_command_claims_is_read_by_its_version() -> None:
    body = json.dumps(IDENTITY).encode()
    header = {"CG-Agent-Id": "other", "CG-Tool-Call-Id": "other"}
    for subject, data, ids in (
        (SUBJECT, body, ("proj", "agent", "call")),
        (SUBJECT.replace("v1r3", "v1r4"), body, ("proj", "other", "other")),
        (SUBJECT, body[:-1], ("proj", None, None)),
        (SUBJECT, b"[1]", ("proj", None, None)),
        ("cg.v1r3", b"\xff", ("", None, None)),
        ("", b"", ("", "other", "other")),
    ):
        claimed = claimed_identity(subject, header, data)
        assert (claimed.project_id, claimed.agent_id, claimed.tool_call_id) == ids


@requirement("v1r3.command")
def test_missing_ids_are_taken_from_the_call_card() -> None:
    command = V1R3.decode(command_message(agent_id=..., agent_turn_id=..., tool_call_id=...))
    identity = identify(command.identity, call_card())
    assert (identity.agent_id, identity.agent_turn_id, identity.tool_call_id) == ("agent", "turn", "call")


@pytest.mark.parametrize("data", [b"", b"[1,2]", b"{", b"null", b"\xff"])
@requirement("v1r3.command")
def test_a_body_without_identity_is_unanswerable(data: bytes) -> None:
    command = V1R3.decode(command_message(data=data))
    with pytest.raises(Unanswerable):
        identify(command.identity, None)


VALUES = st.none() | st.text() | st.integers(-(2**63), 2**63)


@given(st.dictionaries(st.sampled_from(sorted({*BODY, *IDENTITY, "args"})), VALUES))
@requirement("command.any")
def test_any_body_is_decoded_or_a_violation(body: dict[str, Any]) -> None:
    command = V1R3.decode(delivery(V1R3_HEADERS, body, subject=SUBJECT))
    for value in (command.identity.agent_id, command.identity.tool_call_id, command.tool_name):
        assert value is None or value.encode()


@requirement("v1r3.command")
def test_the_context_box_of_the_body_fills_its_placeholder() -> None:
    command = V1R3.decode(command_message(context_box_id="box"))
    assert placeholder_values(identify(command.identity, call_card()))["context_box_id"] == "box"


@requirement("v1r3.report")
def test_the_step_is_that_of_the_call_card_and_never_the_body() -> None:
    report = report_of(command_message(step_id="other"))
    assert report.payload["step_id"] == report.parent_step_id == "step"
    without = report_of(command_message(step_id="other"), call_card(metadata={"type": "tool.call"}))
    assert "step_id" not in without.payload
    assert without.parent_step_id is None


@pytest.mark.parametrize(
    ("edge", "header", "depth"),
    [(None, "2", 2), (None, None, 0), (RequestEdgeRecord("e", 5), "2", 5), (RequestEdgeRecord("e", None), "2", 2)],
)
@requirement("v1r3.report")
def test_the_depth_is_the_request_edges_else_the_headers_else_0(
    edge: RequestEdgeRecord | None, header: str | None, depth: int
) -> None:
    sent = {**V1R3_HEADERS, "CG-Recursion-Depth": header}
    headers = {name: value for name, value in sent.items() if value is not None}
    assert report_of(command_message(headers), request_edge=edge).acceptance.depth == depth


@pytest.mark.parametrize(("edge", "header"), [(None, "20"), (RequestEdgeRecord("e", 20), "0"), (None, str(2**60))])
@requirement("v1r3.report")
def test_a_report_at_the_limit_of_depth_is_refused(edge: RequestEdgeRecord | None, header: str) -> None:
    with pytest.raises(ReportRefused) as refused:
        report_of(command_message(V1R3_HEADERS | {"CG-Recursion-Depth": header}), request_edge=edge)
    assert refused.value.reason == "recursion_depth"


@requirement("v1r3.report")
def test_a_report_whose_card_is_gone_is_refused() -> None:
    found = replace(records(card=call_card()), reported_inbox_id="inbox")
    identity = identify(V1R3.decode(command_message()).identity, found.card)
    with pytest.raises(ReportRefused) as refused:
        V1R3.accept(identity, found)
    assert refused.value.reason == "already_reported"


@requirement("v1r3.report")
def test_the_report_continues_the_inbound_trace() -> None:
    found = records(card=call_card())
    identity = identify(V1R3.decode(command_message(V1R3_HEADERS | {"tracestate": "a=b"})).identity, found.card)
    link = trace_link(identity, V1R3.accept(identity, found).waiting_turn)
    assert (link.parent, link.tracestate, link.linked) == (identity.trace, "a=b", None)


@requirement("v1r3.doorbell")
def test_the_doorbell_names_the_agent_and_carries_the_inbound_headers_only() -> None:
    message = command_message(V1R3_HEADERS | {"Nats-Msg-Id": "x", "tracestate": "a=b"})
    identity = identify(V1R3.decode(message).identity, call_card())
    report = V1R3.report(V1R3.accept(identity, records(card=call_card())), SPAN, "a=b", "result", CONTENT)
    assert report.doorbell is not None
    assert report.doorbell.subject == "cg.v1r3.proj.public.cmd.agent.worker_generic.wakeup"
    assert orjson.loads(report.doorbell.body) == {"agent_id": "agent"}
    assert report.doorbell.headers == {
        "CG-Recursion-Depth": "2",
        "traceparent": SPAN.traceparent(),
        "tracestate": "a=b",
    }


@pytest.mark.parametrize("worker_target", [None, "a.b", "", "*"])
@requirement("v1r3.doorbell")
def test_no_doorbell_without_a_worker_that_can_be_addressed(worker_target: str | None) -> None:
    assert report_of(command_message(), worker_target=worker_target).doorbell is None


@pytest.mark.parametrize("name", sorted(EXAMPLE))
@requirement("v1r3.report", "answer.example")
def test_the_example_gives_its_payload_edge_and_doorbell(name: str) -> None:
    example = EXAMPLE[name]
    command, card, row = example["command"], example["call_card"], example["inbox_row"]
    message = delivery(command["headers"], command["body"], subject=command["subject"])
    found = CardRecord(card["card_id"], card["tool_call_id"], card["content"], card["metadata"])
    identity = identify(V1R3.decode(message).identity, found)
    loaded = records(card=found, request_edge=RequestEdgeRecord("edge", 0))
    span = SpanContext(*row["traceparent"].split("-")[1:])
    card_id = row["payload"]["tool_result_card_id"]
    report = V1R3.report(V1R3.accept(identity, loaded), span, None, card_id, CONTENT)
    edge = next(edge for edge in example["edges"] if edge["edge_phase"] == "response")
    assert report.payload == row["payload"]
    assert {**report.edge_metadata, "inbox_id": row["inbox_id"]} == edge["metadata"]
    assert report.doorbell is not None
    (doorbell,) = example["doorbells"]
    assert report.doorbell.subject == doorbell["subject"]
    assert report.doorbell.headers == doorbell["headers"]
    assert report.doorbell.body.decode() == doorbell["data"]
