"""The log for people: whatever a project sends, a line of it is a line of ours."""

from __future__ import annotations

import asyncio

import pytest

from tests.hostile.awaited import AWAITED
from tests.hostile.play import attacking
from tests.hostile.scene import ANSWER_S, SUBJECT, Scene, hpub
from tests.hostile.stage import Stage
from tests.hostile.terminal import FORGED, TEXTS, assert_plain
from tests.promises import requirement

CONSOLE = {"OPENAPI_TOOL__TELEMETRY__LOG_FORMAT": "console", "OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}


@requirement("hostile.terminal")
async def test_nothing_that_a_project_sends_forges_a_line_of_the_console_log(stage: Stage) -> None:
    if "console" in AWAITED:
        stage.spoilt = False
        pytest.skip("its mend has not landed")
    await asyncio.to_thread(stage.restart, CONSOLE)
    async with attacking(stage) as scene:
        await _speak(scene)
        await scene.settled()
    log = scene.log()
    assert "forged" in log, "nothing was tried"
    assert not [line for line in log.splitlines() if line.startswith(FORGED)]
    assert_plain(log)


async def _speak(scene: Scene) -> None:
    """Each text as the name of a tool, as an id, as a parameter, and in a subject."""
    for number, text in enumerate((f"x\n{FORGED}", *TEXTS)):
        tool = await scene.define({"jina": {"mode": "search", "params": {text: 1}}}, name=f"{number} {text}")
        call = await scene.place(tool, {"query": text}, publish=False)
        await scene.caller.publish(call)
        await scene.caller.answer(call, ANSWER_S)
    await scene.publish_raw(hpub(SUBJECT.encode() + b".\x1b[2J" + FORGED.encode().replace(b" ", b"_"), None))
