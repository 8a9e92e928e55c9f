"""Which calls a set of disabled tools refuses, and its stored form."""

from __future__ import annotations

import pytest

from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.tools.policy import ALL, Switch, Switches, SwitchRecordInvalid
from tests.requirements import requirement


def switch(project: str = "p", tool: str = "t", reason: str = "Too dear.") -> Switch:
    return Switch(project, tool, reason, "an operator", "2030-01-01T00:00:00+00:00")


@requirement("switches")
@pytest.mark.parametrize(
    ("project", "tool", "refused"),
    [
        ("p", "t", {("p", "t")}),
        ("p", ALL, {("p", "t"), ("p", "u")}),
        (ALL, "t", {("p", "t"), ("q", "t")}),
        (ALL, ALL, {("p", "t"), ("p", "u"), ("q", "t"), ("q", "u")}),
    ],
)
def test_a_switch_disables_just_its_scope(project: str, tool: str, refused: set[tuple[str, str]]) -> None:
    switches = Switches([switch(project, tool)])
    found = set()
    for scope in (("p", "t"), ("p", "u"), ("q", "t"), ("q", "u")):
        try:
            switches.check(*scope)
        except ToolNotAvailable as refusal:
            assert "Too dear." in refusal.message
            found.add(scope)
    assert found == refused


@requirement("switches")
def test_a_set_is_stored_and_read_back() -> None:
    switches = Switches([switch(), switch(ALL, "u")]).disabled(switch(reason="Another.")).enabled(switch(ALL, "u"))
    again = Switches.decode(switches.encode())
    assert again.all == switches.all == [switch(reason="Another.")]
    assert again.enablings == (switch(ALL, "u"),)
    assert switches.enabled(switch("q")) is switches


@requirement("switches")
@pytest.mark.parametrize(
    "record", [b"", b"null", b"[]", b"{}", b'{"disabled": [3], "enabled": []}', b"\xff", b"[" * 9_000]
)
def test_invalid_record_of_switches_is_refused(record: bytes) -> None:
    with pytest.raises(SwitchRecordInvalid, match="it is not a record of disabled tools"):
        Switches.decode(record)


@requirement("switches")
def test_only_the_last_enablings_are_stored() -> None:
    switches = Switches()
    for number in range(50):
        switches = switches.disabled(switch(str(number))).enabled(switch(str(number)))
    assert [each.project_id for each in switches.enablings] == [str(number) for number in range(30, 50)]
