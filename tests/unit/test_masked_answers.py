"""What an answer shows of secrets: nothing of what was sent with its call, nothing about all the others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from openapi_tool.protocol.errors import ToolError
from openapi_tool.telemetry.redact import MASK
from tests.answering import KEY, Answering, serving
from tests.promises import requirement

SENT, OTHER = "value-sent-in-the-body", "password-of-the-database"
SECRETS = (KEY, SENT, OTHER)
CUT = {"title": 2_000, "url": 16_000, "publishedTime": 2_000, "description": 10_000, "source": 2_000}


def answering(data: Any, status: int = 200, **more: Any) -> Answering:
    body = json.dumps({"code": status, "status": 42206, "data": data, **more}).encode()
    return Answering(serving(body, status), SECRETS)


@pytest.mark.parametrize("mode", ["reader", "search"])
@requirement("secrets.own", "secrets.output")
async def test_an_answer_is_masked_of_what_was_sent_with_its_call_and_of_nothing_else(mode: str) -> None:
    page: dict[str, Any] = dict.fromkeys(
        ("title", "url", "content", "warning", "source", "publishedTime"), f"{KEY} {SENT} {OTHER}"
    )
    page |= {"links": {f"{KEY} {OTHER}": f"https://a.example/{SENT}/{OTHER}"}}
    fields, shown, _ = await answering([page] if mode == "search" else page).card(mode, sent=(SENT,))
    for text in (shown.content, json.dumps(fields.tool_output)):
        assert KEY not in text
        assert SENT not in text
        assert f"{MASK} {MASK} {OTHER}" in text


@requirement("secrets.own")
async def test_a_page_that_lists_candidates_learns_nothing_from_a_gap() -> None:
    candidates = "\n".join(f"candidate {number} password-of-the-database {SENT}" for number in range(9))
    assert candidates in (await answering({"content": candidates}).output()).content


@requirement("secrets.output")
async def test_a_failure_is_masked_of_every_secret_whole_or_in_a_batch() -> None:
    said = {"readableMessage": f"no {OTHER} and no {KEY}"}
    with pytest.raises(ToolError) as failed:
        await answering(None, 422, **said).output()
    assert f"no {MASK} and no {MASK}" in failed.value.message

    def half(request: httpx.Request) -> httpx.Response:
        good = b"good" in request.content
        body = {"data": {"content": "fine"}} if good else {"status": 42206, "data": None, **said}
        return httpx.Response(200 if good else 422, json=body)

    urls = ["https://good.example/", f"https://a.example/{OTHER}"]
    fields, shown, _ = await Answering(half, SECRETS).card(urls=urls)
    failure = fields.tool_output["state"]["results"][1]["error"]  # type: ignore[index]
    for text in (shown.content.partition("Failed")[2], json.dumps(failure)):
        assert f"no {MASK} and no {MASK}" in text
        assert OTHER not in text


@requirement("secrets.own")
async def test_the_items_of_a_batch_are_named_without_what_was_sent() -> None:
    output = await answering({"content": "x"}).output(urls=[f"https://a.example/{KEY}", f"https://a.example/{OTHER}"])
    for text in (output.content, json.dumps(output.state)):
        assert KEY not in text
        assert f"https://a.example/{MASK}" in text
        assert f"https://a.example/{OTHER}" in text


@requirement("secrets.output")
async def test_a_secret_that_comes_back_as_a_number_is_masked_in_text_and_state() -> None:
    page = {"content": "x", "numPages": 12345678, "title": 87654321}
    fields, shown, _ = await answering(page).card(sent=("12345678",))
    assert f"Pages: {MASK}" in shown.content
    assert fields.tool_output["state"] == {"title": 87654321, "numPages": MASK}  # type: ignore[index]


@pytest.mark.parametrize("field", CUT)
@pytest.mark.parametrize("mode", ["reader", "search"])
@requirement("secrets.cut")
async def test_no_cut_of_a_field_leaves_half_of_a_secret(mode: str, field: str) -> None:
    for before in range(CUT[field] - len(KEY), CUT[field] + 1, 3):
        page = {"content": "x", field: "y" * before + KEY + "z" * 30_000}
        fields, shown, _ = await answering([page] if mode == "search" else page).card(mode)
        for text in (shown.content, json.dumps(fields.tool_output)):
            assert KEY[:6] not in text


@requirement("secrets.cut")
async def test_no_cut_of_a_warning_leaves_half_of_a_secret() -> None:
    for before in (*range(270, 300), *range(1_970, 2_000, 7), *range(19_970, 20_000, 7)):
        warning = "y" * before + OTHER + "z" * 30_000
        with pytest.raises(ToolError) as failed:
            await answering({"content": "", "warning": warning}).output()
        assert OTHER[:6] not in failed.value.message
        _, shown, _ = await answering({"content": "x", "warning": warning.replace(OTHER, KEY)}).card()
        assert KEY[:6] not in shown.content


@requirement("secrets.cut", "secrets.output")
async def test_a_kept_text_has_no_secret_and_no_cut_of_it_half_of_one() -> None:
    for before in range(1_380, 1_520, 9):
        page = {"content": "y" * before + KEY + "z" * 300_000 + KEY + "z" * 300_000}
        tool = Answering(serving(json.dumps({"data": page}).encode()), SECRETS, max_chars=2_000)
        _, shown, artifact = await tool.card()
        assert KEY[:6] not in shown.content
        assert artifact is not None
        assert KEY[:6].encode() not in artifact.content
        assert artifact.content.count(MASK.encode()) == 2
