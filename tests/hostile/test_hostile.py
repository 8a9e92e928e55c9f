"""One project attacks while another one lives: the other one notices nothing."""

from __future__ import annotations

import pytest

from tests.hostile.awaited import AWAITED
from tests.hostile.cases import CASES
from tests.hostile.play import complaints, play
from tests.hostile.stage import Stage
from tests.hostile.victim import Pace
from tests.promises import requirement

PACE = Pace(every_s=0.05, calls=5)


@pytest.mark.parametrize("name", CASES)
@requirement("hostile.neighbour")
async def test_a_hostile_project_stops_nobody(stage: Stage, name: str) -> None:
    if name in AWAITED:
        stage.spoilt = False
        pytest.skip("its mend has not landed")
    played = await play(CASES[name], stage, PACE)
    assert complaints(CASES[name], played) == []
    stage.spoilt = False
