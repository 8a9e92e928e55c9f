"""Attacks by rows of the database, and on terminals."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import unicodedata
import uuid
from itertools import count

import orjson

from openapi_tool.local.placed_call import PlacedCall
from tests.hostile.answers import MAX_BYTES, assert_bounded, fill, page
from tests.hostile.case import Cases
from tests.hostile.scene import AGENT, PROJECT, Scene, assert_failed, assert_succeeded, hpub
from tests.hostile.upstream import response

CASES = Cases()
LARGE_CHARS = 30_000_000
COMMANDS = 24
ABOVE_SLOTS = 66  # more calls than slots (64)
_HELLO = {"query": "hello world"}

WORKERS = ("*", ">", "a.b", "a b", "", "\u202e", "x" * 5_000, "worker\r\nPUB x 1", "w\u0000"[:1] * 300)
ODD_CONTEXTS = (
    {"CG-Channel-Id": "public\r\nCG-Agent-Id: somebody"},
    {"traceparent": {"a": 1}, "tracestate": ["x"], "CG-Turn-Epoch": {}},
    {"tracestate": "x" * 300_000},
    {"tracestate": "a=b\r\n\r\nPUB x 1"},
    {"CG-Recursion-Depth": "9" * 5_000},
    {f"CG-{number}": number for number in range(20_000)},
)


async def _unpublished_call(scene: Scene) -> PlacedCall:
    return await scene.place(await scene.define(), _HELLO, publish=False)


async def _publish_many(scene: Scene, call: PlacedCall) -> None:
    """Publish the same command many times, and wait until all are settled."""
    await asyncio.gather(*(scene.caller.publish(call) for _ in range(COMMANDS)))
    await scene.settled()


@CASES.case("own")
async def card_with_large_metadata(scene: Scene) -> None:
    call = await _unpublished_call(scene)
    await scene.caller.database.execute(
        "update cards set metadata = metadata || jsonb_build_object('parent_step_id', repeat('s', $2::int), 'note', "
        "repeat('n', $2::int)) where card_id = $1",
        call.card_id,
        LARGE_CHARS,
    )
    await _publish_many(scene, call)


@CASES.case("own", versions=["v1r4"])
async def turn_with_large_headers(scene: Scene) -> None:
    call = await _unpublished_call(scene)
    await scene.caller.database.execute(
        "update state.agent_inbox set context_headers = context_headers || "
        "jsonb_build_object('X', repeat('x', $2::int)) where correlation_id = $1",
        call.tool_call_id,
        LARGE_CHARS,
    )
    await _publish_many(scene, call)


@CASES.case("own")
async def large_result_of_another_author(scene: Scene) -> None:
    """A command for a call that already has a large result by another author."""
    call = await _unpublished_call(scene)
    await scene.caller.database.execute(
        "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) values ($1, $2, "
        "jsonb_build_object('result', repeat('r', $3::int)), $4, jsonb_build_object('type', 'tool.result', "
        "'author_id', 'tool.other', 'note', repeat('n', $3::int)))",
        f"result_{call.card_id}",
        PROJECT,
        LARGE_CHARS,
        call.tool_call_id,
    )
    await _publish_many(scene, call)


@CASES.case("own", latency_s=5.0, versions=["v1r4"])
async def missing_turns_among_many_rows(scene: Scene) -> None:
    """Many rows of one of the attacker's agents, and commands for a turn that is not among them."""
    agent = f"{AGENT}_of_many_rows"
    await scene.caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, agent_turn_id, turn_epoch, "
        "status) select 'row_' || n, $1, $2, 'turn', 'other_' || n, 1, 'consumed' from generate_series(1, $3) as n "
        "on conflict do nothing",
        PROJECT,
        agent,
        scene.scaled(100_000),
    )
    call = await _unpublished_call(scene)
    headers = dict(call.headers) | {"CG-Agent-Id": agent, "CG-Turn-Id": "turn_that_is_none"}
    await asyncio.gather(*(scene.caller.publish(call, headers=headers) for _ in range(200)))
    await scene.settled()


@CASES.case("own")
async def metadata_with_many_applied_arguments(scene: Scene) -> None:
    call = await _unpublished_call(scene)
    await scene.caller.database.execute(
        "update cards set metadata = metadata || jsonb_build_object('tool_args_defaults_applied', "
        "(select jsonb_agg('name' || n) from generate_series(1, 300000) n)) where card_id = $1",
        call.card_id,
    )
    await _publish_many(scene, call)


@CASES.case("own")
async def workers_with_invalid_names(scene: Scene) -> None:
    for number, worker in enumerate(WORKERS):
        agent = f"{AGENT}_{number}"
        await scene.caller.database.execute(
            "insert into resource.project_agents (project_id, agent_id, profile_box_id, worker_target) "
            "values ($1, $2, gen_random_uuid(), $3) on conflict do nothing",
            PROJECT,
            agent,
            worker,
        )
        await scene.caller.place(PROJECT, agent, await scene.define(), _HELLO)
    await scene.settled()


@CASES.case("own", versions=["v1r4"])
async def turns_with_odd_headers(scene: Scene) -> None:
    for context in ODD_CONTEXTS:
        call = await _unpublished_call(scene)
        await scene.caller.database.execute(
            "update state.agent_inbox set context_headers = context_headers || $2 where correlation_id = $1",
            call.tool_call_id,
            context,
        )
        await scene.caller.publish(call)
    await scene.settled()


@CASES.case("own")
async def ids_that_the_database_rejects(scene: Scene) -> None:
    tool = await scene.define()
    for name in ("CG-Agent-Id", "CG-Turn-Id", "CG-Step-Id", "CG-Tool-Call-Id", "tracestate", "CG-Turn-Epoch"):
        call = await scene.place(tool, _HELLO, publish=False)
        for value in (b"\xff\xfe", b"\x00", b"a\x00b", b"\xed\xa0\x80"):
            lines = [f"{other}: {text}".encode() for other, text in call.headers.items() if other != name]
            block = b"\r\n".join([b"NATS/1.0", *lines, name.encode() + b": " + value, b"", b""])
            await scene.publish_raw(hpub(call.subject.encode(), block, json.dumps(dict(call.body)).encode()))
    for token in (b"\x00", b"a\x00b", b"\xff\x00"):
        await scene.publish_raw(hpub(scene.subject.encode().replace(PROJECT.encode(), token), None, b"{}"))
    await scene.settled()


@CASES.case("own", versions=["v1r4"])
async def ids_too_long_for_an_index(scene: Scene) -> None:
    """Otherwise the database would reject each result after the upstream was paid for it."""
    tool = await scene.define()
    for number in range(ABOVE_SLOTS):
        call = await scene.place(tool, {"query": "never billed"}, publish=False)
        await scene.caller.database.execute(
            "update cards set metadata = metadata - 'step_id' where card_id = $1", call.card_id
        )
        name = ("CG-Step-Id", "CG-Turn-Id", "CG-Agent-Id")[number % 3]
        await scene.caller.publish(call, headers=dict(call.headers) | {name: secrets.token_urlsafe(6_000)})
    await scene.settled()
    assert b"never billed" not in scene.sent()


@CASES.case("own", log_bytes=150_000)
async def ids_and_names_that_fill_the_log(scene: Scene) -> None:
    """50 kB of control characters, or of characters with long escapes, many times; 2.5 MB of commands."""
    call = await _unpublished_call(scene)
    odd = "t" + "\x01" * 50_000
    lines = [f"{name}: {odd if name == 'CG-Turn-Id' else value}".encode() for name, value in call.headers.items()]
    block = b"\r\n".join([b"NATS/1.0", *lines, b"", b""])
    frame = hpub(call.subject.encode(), block, json.dumps(dict(call.body)).encode())
    await scene.publish_raw(*[frame] * COMMANDS)
    for _ in range(COMMANDS):
        call = await _unpublished_call(scene)
        body = dict(call.body) | {"tool_name": "n" + "\u0080" * 20_000}
        await scene.caller.publish(call, data=json.dumps(body, ensure_ascii=False).encode())
    await scene.settled()


@CASES.case("own", lambda: {"in_batches": page(content=fill("words of a page \u00e9 "))})
async def batches_of_large_pages(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader", "tool": "jina.read_many"}})
    urls = [f"https://example.com/attack-in_batches/{number}" for number in range(10)]
    for answer in await asyncio.gather(*(scene.call(tool, {"urls": urls}) for _ in range(2))):
        assert_bounded(answer)


@CASES.case("own", lambda: {"continued": page(content=fill("words of a page \u00e9 "))})
async def cursors_into_a_large_page(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader"}})
    first = await scene.call(tool, {"url": "https://example.com/attack-continued"})
    cursor = first.card["metadata"]["tool_output"]["next_cursor"]
    queries = [{"find": "no such text"}, {"question": "which words of the page are no filling?"}, *[{}] * 6]
    calls = range(8 if scene.stage.short else 16)
    for answer in await asyncio.gather(*(scene.call(tool, {"cursor": cursor, **queries[n % 8]}) for n in calls)):
        assert_succeeded(answer)
        assert_bounded(answer)


@CASES.case(
    "own",
    lambda: {"drips": response(b"").replace(b"Length: 0", b"Length: %d" % MAX_BYTES) + b'{"data":{"content":"'},
    latency_s=4.0,  # half of what the attacker's calls take
)
async def responses_that_never_end(scene: Scene) -> None:
    """Each declares a large size, sends little, and holds the memory reserved for it."""
    tool = await scene.define({"jina": {"mode": "reader"}, "suspend_timeout_seconds": 40})
    calls = [
        scene.call(tool, {"url": f"https://example.com/attack-drips/{number}", "timeout": 8}) for number in range(48)
    ]
    for answer in await asyncio.gather(*calls):
        assert_failed(answer, "tool_timeout", "upstream_unavailable")


@CASES.case("own")
async def header_values_with_line_breaks(scene: Scene) -> None:
    for name, value in (
        ("X-Locale", "de\r\nX-Leak: 1"),
        ("X-User-Agent", "a\nHost: evil.example"),
    ):
        for method in ("GET", "POST"):
            tool = await scene.define({"jina": {"mode": "reader", "method": method, "headers": {name: value}}})
            await scene.call(tool, {"url": "https://example.com/two"})
    assert b"\nX-Leak" not in scene.sent()
    assert b"\nHost: evil" not in scene.sent()


@CASES.case("own")
async def invalid_time_limits(scene: Scene) -> None:
    for seconds in ("1e308", "-1", "0", "1e-300", '"9"', "[]", "99999999999999999999"):
        options = f'{{"jina":{{"mode":"search","timeout_s":{seconds}}},"suspend_timeout_seconds":{seconds}}}'
        await scene.call(await scene.define_text(options), {"query": f"time {seconds}"})
        await scene.call_text(await scene.define(), f'{{"query":"time","timeout":{seconds}}}')


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
