"""Protocol v1r3 without servers: commands, acceptance, reports, doorbells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.bus.held import ids_of
from openapi_tool.protocol.command import INLINE_DATA, Delivery
from openapi_tool.protocol.dialect import Dialect, claimed_identity
from openapi_tool.protocol.errors import ReportRefused, Unanswerable
from openapi_tool.protocol.identity import SpanContext, identify
from openapi_tool.protocol.records import CardRecord, RequestEdgeRecord
from openapi_tool.protocol.report import Report, trace_link
from openapi_tool.protocol.v1r3 import V1r3
from openapi_tool.protocol.v1r4 import CONTROL_FIELDS
from openapi_tool.tools.template import placeholder_values
from tests.requirements import requirement
from tests.support import BODY, TRACE_ID, TRACEPARENT, call_card, delivery, records

ACTOR = "tool.openapi.jina"
V1R3 = V1r3(ACTOR)
SUBJECT = "cg.v1r3.proj.public.cmd.tool.jina.search"
HEADERS = {"traceparent": TRACEPARENT, "CG-Recursion-Depth": "2"}
IDENTITY = {"tool_call_id": "call", "agent_turn_id": "turn", "turn_epoch": 3, "agent_id": "agent"}
SPAN = SpanContext(TRACE_ID, "1111111111111111", "01")
CONTENT = {"status": "success", "after_execution": "suspend"}
EXAMPLE = json.loads((Path(__file__).parent.parent / "data" / "example-call-v1r3.json").read_text(encoding="utf-8"))


def command_message(headers: Any = None, data: Any = None, **changes: Any) -> Delivery:
    body = {name: value for name, value in {**BODY, **IDENTITY, **changes}.items() if value is not ...}
    return delivery(HEADERS if headers is None else headers, body, subject=SUBJECT, data=data)


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
def test_each_required_field_is_named_when_it_is_wrong(field: str, value: object) -> None:
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
    claimed = V1R3.decode(command_message(HEADERS | {"CG-Agent-Id": "other", "CG-Tool-Call-Id": "other"})).identity
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
    command = V1R3.decode(delivery(HEADERS, body, subject=SUBJECT))
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
    headers = {name: value for name, value in {**HEADERS, "CG-Recursion-Depth": header}.items() if value is not None}
    assert report_of(command_message(headers), request_edge=edge).depth == depth


@pytest.mark.parametrize(("edge", "header"), [(None, "20"), (RequestEdgeRecord("e", 20), "0"), (None, str(2**60))])
@requirement("v1r3.report")
def test_a_report_at_the_limit_of_depth_is_refused(edge: RequestEdgeRecord | None, header: str) -> None:
    with pytest.raises(ReportRefused) as refused:
        report_of(command_message(HEADERS | {"CG-Recursion-Depth": header}), request_edge=edge)
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
    identity = identify(V1R3.decode(command_message(HEADERS | {"tracestate": "a=b"})).identity, found.card)
    link = trace_link(identity, V1R3.accept(identity, found).waiting_turn)
    assert (link.parent, link.tracestate, link.linked) == (identity.trace, "a=b", None)


@requirement("v1r3.doorbell")
def test_the_doorbell_names_the_agent_and_carries_the_inbound_headers_only() -> None:
    message = command_message(HEADERS | {"Nats-Msg-Id": "x", "tracestate": "a=b"})
    identity = identify(V1R3.decode(message).identity, call_card())
    report = V1R3.report(V1R3.accept(identity, records(card=call_card())), SPAN, "a=b", "result", CONTENT)
    assert report.wakeup is not None
    assert report.wakeup.subject == "cg.v1r3.proj.public.cmd.agent.worker_generic.wakeup"
    assert orjson.loads(report.wakeup.body) == {"agent_id": "agent"}
    assert report.wakeup.headers == {
        "CG-Recursion-Depth": "2",
        "traceparent": SPAN.traceparent(),
        "tracestate": "a=b",
    }


@pytest.mark.parametrize("worker_target", [None, "a.b", "", "*"])
@requirement("v1r3.doorbell")
def test_no_doorbell_without_a_worker_that_can_be_addressed(worker_target: str | None) -> None:
    assert report_of(command_message(), worker_target=worker_target).wakeup is None


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
    assert report.wakeup is not None
    (doorbell,) = example["doorbells"]
    assert report.wakeup.subject == doorbell["subject"]
    assert report.wakeup.headers == doorbell["headers"]
    assert report.wakeup.body.decode() == doorbell["data"]
