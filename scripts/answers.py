"""Compare our text of each answer with that of Jina's own MCP server; fail if ours has more tokens or omits a fact.

The table has a row for each recorded answer, each text of `tests/data/o200k.jsonl` as a page, and each short page of
`tests/data/pages.yaml`. A row has the tokens of both texts at equal options, and the facts that only one of them shows.
Jina's server writes one YAML document for each page or result, with `url`, `title`, `content`, and lists of links and
images if they were requested (jina-api section 8). Tokens are exact if `toktok` can be imported (`make answers`
installs it), else estimated. The last line is one JSON object.

The argument `sizes` prints instead how much of each recorded response a model is shown, and fails if a limit is
exceeded. A search is measured without page text (`content`, `text`, `html` of its results) on both sides, with a limit
over all recordings. A page may exceed the parts that must be shown by a fixed number of characters. `sizes --json`
prints the same rows as JSON.

The argument `links` prints how many links each recorded page has in its text, and its tokens with them, with their
texts only, and with a list of them at the end.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from openapi_tool.local.recordings import Recording, load_recordings
from openapi_tool.protocol.errors import UpstreamRejected
from openapi_tool.tools.frames import Part, framed
from openapi_tool.tools.tokens import estimate_tokens
from tests.support import page_output, search_output

SEARCH_SHARE = 0.6
"""Maximum share of the upstream's JSON that is shown, over all searches."""
READER_EXTRA = 300
"""Maximum characters that are shown of a page besides body, title, url, warnings and the requested lists."""
PAGE_TEXT = ("content", "text", "html")
LISTS = ("links", "images")
_SHOWN_FIELDS = (*PAGE_TEXT, "title", "url", "warning")
_OK = 200


@dataclass(frozen=True)
class Size:
    """One recording in characters; `overhead`, of a page only, is what is shown besides the required parts."""

    name: str
    form: str
    upstream: int
    shown: int
    overhead: int | None = None

    @property
    def share(self) -> float:
        """Return the share of the upstream's characters that is shown."""
        return self.shown / self.upstream


def successes() -> Mapping[str, Mapping[str, Any]]:
    """Return the envelopes of all recorded answers in JSON with results or a page, by name."""
    envelopes = ((recording.name, _envelope(recording)) for recording in load_recordings().values())
    return {name: envelope for name, envelope in envelopes if envelope is not None}


def _envelope(recording: Recording) -> Mapping[str, Any] | None:
    kind = recording.headers.get("Content-Type", "")
    if recording.status != _OK or not kind.startswith("application/json"):
        return None
    envelope = json.loads(recording.body)
    return envelope if isinstance(envelope, dict) and isinstance(envelope.get("data"), dict | list) else None


def is_search(envelope: Mapping[str, Any]) -> bool:
    """Return whether an answer contains search results, not one page."""
    return isinstance(envelope["data"], list)


def without_page_text(envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a search's answer without page text."""
    items = [{field: value for field, value in item.items() if field not in PAGE_TEXT} for item in envelope["data"]]
    return {**envelope, "data": items}


def shown(envelope: Mapping[str, Any]) -> str:
    """Return the text that a model reads of an answer: the content, or the message of an error."""
    if is_search(envelope):
        return search_output(envelope, "a query").content
    try:
        return page_output(envelope).content
    except UpstreamRejected as error:
        return error.message


def size_of(name: str, envelope: Mapping[str, Any]) -> Size:
    """Return the sizes of one recording."""
    if is_search(envelope):
        bare = without_page_text(envelope)
        return Size(name, _form("search", envelope["data"]), _characters(bare), len(shown(bare)))
    page, content = envelope["data"], shown(envelope)
    required = sum(len(page.get(field) or "") for field in _SHOWN_FIELDS)
    required += sum(_characters(page[field]) for field in LISTS if page.get(field))
    return Size(name, _form("page", [page]), _characters(envelope), len(content), len(content) - required)


def _form(kind: str, items: list[Mapping[str, Any]]) -> str:
    parts = [field for field in (*PAGE_TEXT, "chunks", *LISTS, "warning") if any(item.get(field) for item in items)]
    return f"{kind}: {', '.join(parts) or ('no page text' if items else 'no results')}"


def _characters(value: Any) -> int:
    """Return the length as JSON without blanks, as the upstream writes it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def totals(rows: list[Size]) -> Iterator[Size]:
    """Yield one row over all searches, and one over all pages with their largest overhead."""
    for kind in ("search", "page"):
        of_kind = [row for row in rows if row.form.startswith(kind)]
        upstream, characters = sum(row.upstream for row in of_kind), sum(row.shown for row in of_kind)
        largest = max((row.overhead for row in of_kind if row.overhead is not None), default=None)
        yield Size("total", f"{kind}: {len(of_kind)} recordings", upstream, characters, largest)


def exceeded(rows: list[Size]) -> list[str]:
    """Return a message for each exceeded limit."""
    search, page = totals(rows)
    faults = [f"searches show {search.share:.1%} of the upstream's JSON"] if search.share > SEARCH_SHARE else []
    if page.overhead is not None and page.overhead > READER_EXTRA:
        over = [f"{row.name}: {row.overhead}" for row in rows if (row.overhead or 0) > READER_EXTRA]
        faults.append(f"pages show more than is stored: {', '.join(over)}")
    return faults


def _line(row: Size) -> str:
    last = f"{row.share:9.1%}" if row.overhead is None else f"{row.overhead:+9}"
    return f"{row.name:40} {row.form:40} {row.upstream:9} {row.shown:9} {last}\n"


def sizes() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    rows = [size_of(name, envelope) for name, envelope in successes().items()]
    faults = exceeded(rows)
    out = sys.stdout.write
    if "--json" in sys.argv:
        measured = {"rows": rows, "totals": list(totals(rows))}
        out(json.dumps({name: [asdict(row) for row in those] for name, those in measured.items()} | {"broken": faults}))
        return int(bool(faults))
    out(f"{'recording':40} {'form':40} {'upstream':>9} {'shown':>9} {'':>9}\n")
    for row in (*rows, *totals(rows)):
        out(_line(row))
    out(f"searches: at most {SEARCH_SHARE:.0%} of the upstream's JSON over all, without page text on both sides\n")
    out(f"pages: at most body, title, url, warnings and lists, and {READER_EXTRA} characters (+ is the overhead)\n")
    out("".join(f"BROKEN: {fault}\n" for fault in faults))
    return int(bool(faults))


DATA = Path(__file__).parent.parent / "tests" / "data"
MAX_MORE = 60
"""Maximum tokens by which one answer may exceed Jina's form."""
ERROR, ERROR_TOKENS = 0.05, 5
"""Error of estimated tokens: a share of the tokens in Jina's form, and tokens per answer for its frame."""
_GAINS = ("Published: ", "Description: ", "Warning: ", "[Warning", "Pages: ")
_ONLY_OURS = ("html", "text", "chunks", "screenshotUrl", "pageshotUrl")
_RESULT_FACTS = ("title", "url", "snippet", "date", "source", "imageUrl", "content")
_WIDTH = 80
NOTHING_TO_READ = "t-204-json"
"""The recording of an empty page whose server reported an error. This executor returns an error for it."""


@dataclass(frozen=True)
class Row:
    """One answer: its group, tokens here and in Jina's form, names of facts that only one of them shows."""

    group: str
    name: str
    ours: int
    theirs: int
    gains: tuple[str, ...] = ()
    losses: tuple[str, ...] = field(default=())


def answers() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield group, name and envelope of every answer with text, in a form that Jina's MCP server has, too."""
    for name, envelope in successes().items():
        items = envelope["data"] if is_search(envelope) else [envelope["data"]]
        other_form = any(item.get(other) for item in items for other in _ONLY_OURS)
        if not other_form and name != NOTHING_TO_READ:
            yield "recording", name, envelope
    for number, line in enumerate((DATA / "o200k.jsonl").read_text("utf-8").splitlines()):
        text = json.loads(line)
        yield "text", f"{text['kind']} {number}", _page(text["kind"], text["text"], number)
    for number, page in enumerate(yaml.safe_load((DATA / "pages.yaml").read_text("utf-8"))):
        yield "short page", f"{page['warns'] or 'ordinary'} {number}", _page(page["title"], page["text"], number)


def _page(title: str, text: str, number: int) -> Mapping[str, Any]:
    return {"data": {"title": title, "url": f"https://site{number}.example/page", "content": text}}


def ours(envelope: Mapping[str, Any]) -> str:
    """Return an answer as it is shown to a model here."""
    if is_search(envelope):
        with_pages = any(item.get("content") for item in envelope["data"])
        output = search_output(envelope, "a query", with_pages=with_pages)
    else:
        output = page_output(envelope)
    return framed([Part(item.text, item.caption) for item in output.items])


def theirs(envelope: Mapping[str, Any]) -> str:
    """Return an answer as Jina's MCP server writes it."""
    return "".join(as_yaml(facts) for facts in shown_by_jina(envelope))


def shown_by_jina(envelope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the facts of each document. `links` maps texts to urls, or numbers to `text,url` (jina-api 3.1)."""
    for item in envelope["data"] if is_search(envelope) else [envelope["data"]]:
        facts = {**item, "snippet": item.get("description")}
        names = _RESULT_FACTS if is_search(envelope) else ("url", "title")
        shown = {name: facts[name] for name in names if facts.get(name) or name in ("url", "title")}
        if links := item.get("links"):
            pairs = [
                url.split(",", 1) if text == str(n) else (text, url) for n, (text, url) in enumerate(links.items())
            ]
            shown["links"] = [{"anchorText": text, "url": url} for text, url in pairs]
        if images := item.get("images"):
            shown["images"] = images
        yield shown if is_search(envelope) else {**shown, "content": item.get("content") or ""}


def as_yaml(value: Any, indent: str = "") -> str:
    """Return YAML as npm's yaml writes it: texts of several lines as blocks, longer lines folded at 80."""
    if isinstance(value, dict):
        return "".join(f"{indent}{key}:{_value(item, indent)}" for key, item in value.items())
    return "".join(f"{indent}- {as_yaml(item, indent + '  ').lstrip()}" for item in value)


def _value(value: Any, indent: str) -> str:
    inner = f"{indent}  "
    if isinstance(value, dict | list):
        return f"\n{as_yaml(value, inner)}"
    text = str(value)
    if "\n" not in text:
        lines = _folded(text, len(inner) + len(text.split(" ", 1)[0]))
        return f" {lines[0]}\n" + "".join(f"{inner}{line}\n" for line in lines[1:]) if text else ' ""\n'
    if all(len(line) <= _WIDTH - len(inner) for line in text.splitlines()):
        return " |-\n" + "".join(f"{inner}{line}\n" if line else "\n" for line in text.splitlines())
    folded = ""
    for line in text.split("\n"):  # an empty line means a line end
        gap = "\n" if not line else "\n\n" if folded else ""
        folded += gap + "\n".join(f"{inner}{piece}" for piece in _folded(line, 2) if piece)
    return f" >-\n{folded}\n"


def _folded(text: str, used: int) -> list[str]:
    """Break a text at blanks into lines of at most 80 characters; `used` are those before the first line's text."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and used + len(line) + len(word) >= _WIDTH:
            lines.append(line)
            line, used = word, 2
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def measure(group: str, name: str, envelope: Mapping[str, Any], tokens: Callable[[str], int]) -> Row:
    """Return the row of an answer; a fact is lost if a text, an address or a link of Jina's form is not shown here."""
    text = ours(envelope)
    flat = " ".join(text.split())
    facts = [item for facts in shown_by_jina(envelope) for item in _flat(facts)]
    lost = tuple(fact[:40] for fact in facts if " ".join(fact.split()) not in flat)
    more = [line.partition(": ")[0].strip("[") for line in text.splitlines() if line.startswith(_GAINS)]
    return Row(group, name, tokens(text), tokens(theirs(envelope)), tuple(dict.fromkeys(more)), lost)


def _flat(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)
    elif value:
        yield str(value)


def table(tokens: Callable[[str], int] = estimate_tokens) -> list[Row]:
    """Return a row for each answer."""
    return [measure(*answer, tokens) for answer in answers()]


def violations(rows: list[Row], error: float = 0.0, error_tokens: int = 0) -> list[str]:
    """Return each violated claim, given the error of the token counter."""
    violations = [f"{row.name} loses {', '.join(row.losses)}" for row in rows if row.losses]
    violations += [
        f"{row.name} costs {row.ours - row.theirs} more"
        for row in rows
        if row.ours - row.theirs > MAX_MORE + error_tokens + error * row.theirs
    ]
    here, jina = sum(row.ours for row in rows), sum(row.theirs for row in rows)
    if here > jina * (1 + error):
        violations.append(f"all answers cost {here:,} tokens, and {jina:,} in Jina's form")
    return violations


_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()\s]*\))?)*)\]\((https?://[^()\s]+)(?: \"[^\"]*\")?\)")


_MANY_LINKS = "made: a page of 300 links"


def pages_with_links() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the recorded pages with links in their text, and one that is made of links."""
    for name, envelope in successes().items():
        page = envelope["data"]
        if not is_search(envelope) and not page.get("links") and _LINK.search(page.get("content") or ""):
            yield name, page
    lines = [
        f"* [Article {n} of the list](https://site{n % 9}.example/section/{n}/article-{n}.html)" for n in range(300)
    ]
    yield _MANY_LINKS, {"title": "List", "url": "https://site.example/", "content": "\n".join(lines)}


def links(tokens: Callable[[str], int]) -> int:
    """Print the tokens of each recorded page with its links, with their texts only, and with a list of them."""
    out = sys.stdout.write
    out(f"{'page':36} {'links':>6} {'with':>8} {'texts':>8} {'listed':>8}\n")
    total = [0, 0, 0, 0]
    for name, page in pages_with_links():
        targets = dict(_LINK.findall(page["content"]))
        bare = {**page, "content": _LINK.sub(r"\1", page["content"])}
        forms = (page, bare, {**bare, "links": targets})
        numbers = [len(targets), *(tokens(ours({"data": form})) for form in forms)]
        out(f"{name:36} {numbers[0]:6,} " + " ".join(f"{number:8,}" for number in numbers[1:]) + "\n")
        if name != _MANY_LINKS:
            total = [before + number for before, number in zip(total, numbers, strict=True)]
    out(f"{'total of the recorded pages':36} {total[0]:6,} " + " ".join(f"{number:8,}" for number in total[1:]) + "\n")
    return 0


def counter() -> Callable[[str], int] | None:
    """Return an exact count of o200k tokens, None if its package is not installed."""
    try:
        batch_count = import_module("toktok").batch_count
    except ImportError:
        return None
    return lambda text: int(batch_count([text], "o200k_base")[0])


def main() -> int:
    """Print the table; return 1 if a claim is violated."""
    exact = counter()
    rows = table(exact or estimate_tokens)
    out = sys.stdout.write
    out(f"{'answer':36} {'ours':>7} {'Jina':>7} {'more':>6}  shown here only; lost\n")
    for row in rows:
        notes = [", ".join(row.gains), f"LOST: {', '.join(row.losses)}" if row.losses else ""]
        more = f"{row.ours - row.theirs:+6}"
        out(f"{row.name:36} {row.ours:7,} {row.theirs:7,} {more}  {'; '.join(filter(None, notes))}\n")
    faults = violations(rows) if exact else violations(rows, ERROR, ERROR_TOKENS)
    out("".join(f"BROKEN: {fault}\n" for fault in faults))
    totals: dict[str, Any] = {"counted": "o200k" if exact else "estimate"}
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        here, jina = sum(row.ours for row in of_group), sum(row.theirs for row in of_group)
        totals[group] = {"answers": len(of_group), "ours": here, "jina": jina}
    out(json.dumps({**totals, "most_more": max(row.ours - row.theirs for row in rows), "broken": faults}) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    if "links" in sys.argv:
        sys.exit(links(counter() or estimate_tokens))
    sys.exit(sizes() if "sizes" in sys.argv else main())
