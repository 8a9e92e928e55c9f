"""Texts with an effect on terminals, tables or logs."""

from __future__ import annotations

import asyncio
import os
import sys
import unicodedata
import uuid
from itertools import count

import orjson

from tests.hostile.case import Cases
from tests.hostile.scene import PROJECT, Scene, hpub

CASES = Cases()
FORGED = "12:00:00.000 ERROR   all keys have expired  action=forged"
TEXTS = (
    *("[/bold]", "[link=https://evil.example/]https://good.example/[/link]", "[red]x", "[[", "[/]", "]\\[", ":skull:"),
    *("\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;https://evil.example/\x07x\x1b]8;;\x07", "\x9b2J", "\x08\x08\x7f"),
    *("a\u202eb\u2066c", "\u200f\u061c", f"x\r{FORGED}", f"x\u2028{FORGED}", f"x\x85{FORGED}", f"x\x0b{FORGED}"),
)
"""Texts to try. They are also sent as header values, so they contain no line feed."""

_NUMBERS = count()
_ALLOWED = "\n\u200c\u200d"
_TIMEOUT_S = 30.0


async def command(scene: Scene, *arguments: str, columns: int = 400) -> tuple[int, str]:
    """Run the command line with the right to register tools; return exit code and output of both streams."""
    stage = scene.stage
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openapi_tool", *arguments),
        env={**_machine(columns), **stage.environment, "PG_DSN": stage.stack.postgres.dsn(stage.database)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(_TIMEOUT_S):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="surrogateescape")


def _machine(columns: int) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "COLUMNS": str(columns)}


def assert_plain(text: str) -> None:
    """Assert that a text has no effect on a terminal."""
    odd = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs")} - set(_ALLOWED)
    assert not odd, f"{sorted(map(ascii, odd))} in {text[:2_000]!a}"


async def _cause_dead_letters(scene: Scene) -> None:
    """Cause a dead letter for each text, in every field that is shown."""
    frames = []
    for text in TEXTS:
        data = text.encode()
        value = data.replace(b"\r", b" ")
        lines = [b"%b: %b" % (name, value) for name in (b"CG-Tool-Call-Id", b"CG-Turn-Id", b"X-Note")]
        block = b"\r\n".join([b"NATS/1.0", *lines, b"", b""])
        frames.append(hpub(scene.subject.encode(), block, data))
    frames += [
        hpub(scene.subject.encode() + b".[/bold]\x1b[2J\xe2\x80\xae", None),
        hpub(scene.subject.encode() + b".\xff[", None),
    ]
    await scene.publish_raw(*frames)
    await scene.letters(len(frames))


@CASES.case("15")
async def dead_letters_with_terminal_sequences(scene: Scene) -> None:
    await _cause_dead_letters(scene)
    (code, table), (list_code, _), (show_code, shown) = await asyncio.gather(
        command(scene, "deadletters", "list"),
        command(scene, "deadletters", "list", "--json", columns=80),
        command(scene, "deadletters", "show", str(await scene.last_letter())),
    )
    assert (code, list_code, show_code) == (0, 0, 0), table[-2_000:] + shown[-2_000:]
    assert "[/bold]" in table, "the text is not there as it is"
    assert_plain(table)
    assert_plain(shown)


@CASES.case("15")
async def definitions_with_terminal_sequences(scene: Scene) -> None:
    for number, text in enumerate(TEXTS):
        await scene.define({"jina": {"mode": "search", "base_url": text}}, name=f"{number} {text}")
    code, shown = await command(scene, "tools", "list", "--db", "--project", PROJECT)
    await scene.caller.database.execute("delete from resource.tools where project_id = $1", PROJECT)
    assert code == 0, shown[-2_000:]
    assert_plain(shown)


@CASES.case("14")
async def dead_letters_that_break_a_replay(scene: Scene) -> None:
    """Dead letters with headers that the NATS server would obey, then one without."""
    headers = "Nats-Expected-Last-Subject-Sequence: 0", f"Nats-Msg-Id: {uuid.uuid4()}"  # the server drops repeated ids
    blocks = [f"NATS/1.0\r\n{header}\r\n\r\n".encode() for header in headers]
    subject = scene.subject.encode() + b".%d" % next(_NUMBERS)
    await scene.publish_raw(*(hpub(subject + b".%d" % number, block) for number, block in enumerate((*blocks, None))))
    await scene.letters(3)
    code, listed = await command(scene, "deadletters", "list", "--json")
    assert code == 0, listed[-2_000:]
    ids = [orjson.loads(line)["id"] for line in listed.splitlines() if line.startswith("{")]
    code, output = await command(scene, "deadletters", "replay", *ids, "--yes")
    assert (code, output.count("sent ")) == (0, len(ids)), output[-2_000:]
    await scene.settled()
