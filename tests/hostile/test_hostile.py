"""Attacks of one project do not affect another one."""

from __future__ import annotations

import asyncio

import pytest

from openapi_tool.local.caller import VERSION
from tests.hostile.play import CASES, attacking, complaints, play
from tests.hostile.scene import ANSWER_S, Scene, Stage, hpub
from tests.hostile.terminal import FORGED, TEXTS, assert_plain
from tests.hostile.victim import Pace
from tests.requirements import requirement

PACE = Pace(every_s=0.05, calls=5)
ALONE = {
    "pages_of_ten_megabytes_at_once",
    "pages_of_many_values_at_once",
    "pages_without_a_length_at_once",
    "heads_of_answers_that_fill_the_memory",
    "calls_that_take_long_in_every_slot",
}
"""Attacks that need a whole core: beside another test their limits would measure that test."""

_PARAMETERS = [
    pytest.param(name, marks=pytest.mark.alone if name in ALONE else ())
    for name, case in CASES.items()
    if VERSION in case.versions
]


@pytest.mark.parametrize("name", _PARAMETERS)
@requirement("hostile.neighbour")
async def test_a_hostile_project_stops_nobody(stage: Stage, name: str) -> None:
    played = await play(CASES[name], stage, PACE)
    assert complaints(CASES[name], played) == []
    stage.spoilt = False


SHORT_OF_V1R3 = (
    "ids_in_the_body_that_are_none",
    "an_identity_in_headers_that_the_body_contradicts",
    "subjects_that_are_no_utf8_in_any_token",
    "bodies_that_are_hard_to_parse_and_name_nobody",
    "ids_of_sixty_kilobytes",
    "workers_that_are_no_token",
    "card_whose_metadata_are_large",
    "dead_letters_that_speak_to_the_terminal",
)
"""Attacks on code that only v1r3 uses; `make hostile HOSTILE="--protocol v1r3"` runs all attacks."""


@requirement("hostile.neighbour")
async def test_a_hostile_project_of_v1r3_stops_nobody(older_stage: Stage, subtests: pytest.Subtests) -> None:
    for name in SHORT_OF_V1R3:
        with subtests.test(name):
            assert complaints(CASES[name], await play(CASES[name], older_stage, PACE)) == []


# The console log: no text of a project can forge a line.


CONSOLE = {"OPENAPI_TOOL__TELEMETRY__LOG_FORMAT": "console", "OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}


@requirement("terminal.text")
async def test_nothing_that_a_project_sends_forges_a_line_of_the_console_log(stage: Stage) -> None:
    await asyncio.to_thread(stage.restart, CONSOLE)
    async with attacking(stage) as scene:
        await _speak(scene)
        await scene.settled()
    log = scene.log()
    assert "forged" in log, "nothing was tried"
    assert not [line for line in log.splitlines() if line.startswith(FORGED)]
    assert_plain(log)


async def _speak(scene: Scene) -> None:
    """Send each text as the name of a tool, as an id, as a parameter, and in a subject."""
    for number, text in enumerate((f"x\n{FORGED}", *TEXTS)):
        tool = await scene.define({"jina": {"mode": "search", "params": {text: 1}}}, name=f"{number} {text}")
        call = await scene.place(tool, {"query": text}, publish=False)
        await scene.caller.publish(call)
        await scene.caller.answer(call, ANSWER_S)
    await scene.publish_raw(hpub(scene.subject.encode() + b".\x1b[2J" + FORGED.encode().replace(b" ", b"_"), None))
