"""Attacks of one project do not affect another one."""

from __future__ import annotations

import asyncio

import pytest

from openapi_tool.local.placed_call import VERSION
from tests.hostile.play import CASES, attacking, broken_limits, play
from tests.hostile.rows import FORGED, TEXTS, assert_plain
from tests.hostile.scene import ANSWER_S, Scene, Stage, hpub
from tests.hostile.victim import Pace
from tests.requirements import requirement

PACE = Pace(every_s=0.05, calls=5)
ALONE = {
    "pages_of_ten_megabytes_at_once",
    "pages_of_many_values_at_once",
    "pages_in_small_chunks_at_once",
    "pages_without_a_length_at_once",
    "response_headers_that_fill_the_memory",
    "slow_calls_in_every_slot",
}
"""Attacks that need a whole core: beside another test they would exceed limits because of it."""

_NAMES = [name for name, case in CASES.items() if VERSION in case.versions]
_FIRST = {CASES[name].item: name for name in reversed(_NAMES) if name not in ALONE}
"""The first attack of each kind: the short form of `make test`."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in ALONE:
        return [pytest.mark.alone]
    return [] if name in _FIRST.values() else [pytest.mark.long]


_PARAMETERS = [pytest.param(name, marks=_marks(name)) for name in _NAMES]


@pytest.mark.parametrize("name", _PARAMETERS)
@requirement("hostile.neighbour")
async def test_attack_does_not_affect_another_project(stage: Stage, name: str) -> None:
    result = await play(CASES[name], stage, PACE)
    assert broken_limits(CASES[name], result) == []
    stage.has_failed = False


SHORT_OF_V1R3 = (
    "invalid_ids_in_the_body",
    "identity_in_headers_contradicts_the_body",
    "subjects_without_utf8_in_each_token",
    "bodies_hard_to_parse_without_identity",
    "ids_of_sixty_kilobytes",
    "workers_with_invalid_names",
    "card_with_large_metadata",
    "dead_letters_with_terminal_sequences",
)
"""Attacks on code that only v1r3 uses; `make hostile HOSTILE="--protocol v1r3"` runs all attacks."""


@requirement("hostile.neighbour")
async def test_attack_in_v1r3_does_not_affect_another_project(older_stage: Stage, subtests: pytest.Subtests) -> None:
    for name in SHORT_OF_V1R3:
        with subtests.test(name):
            assert broken_limits(CASES[name], await play(CASES[name], older_stage, PACE)) == []


# The console log: no text of a project can forge a line.


CONSOLE = {"OPENAPI_TOOL__TELEMETRY__LOG_FORMAT": "console", "OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}


@requirement("terminal.text")
async def test_texts_of_a_project_cannot_forge_a_line_of_the_console_log(stage: Stage) -> None:
    await asyncio.to_thread(stage.restart, CONSOLE)
    async with attacking(stage) as scene:
        await _send_texts(scene)
        await scene.settled()
    log = scene.log()
    assert "forged" in log, "nothing was tried"
    assert not [line for line in log.splitlines() if line.startswith(FORGED)]
    assert_plain(log)


async def _send_texts(scene: Scene) -> None:
    """Send each text as the name of a tool, as an id, as a parameter, and in a subject."""
    for number, text in enumerate((f"x\n{FORGED}", *TEXTS)):
        tool = await scene.define({"jina": {"mode": "search", "params": {text: 1}}}, name=f"{number} {text}")
        call = await scene.place(tool, {"query": text}, publish=False)
        await scene.caller.publish(call)
        await scene.caller.result(call, ANSWER_S)
    await scene.publish_raw(hpub(scene.subject.encode() + b".\x1b[2J" + FORGED.encode().replace(b" ", b"_"), None))
