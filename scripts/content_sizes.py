"""Print how much of each recorded response a model is shown, and fail if a limit is exceeded.

A search is measured without page text (`content`, `text`, `html` of its results) on both sides, with a limit over all
recordings. A page is limited by the parts that must be shown. `--json` prints the same rows as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from openapi_tool.jina.content import page_output, search_output
from openapi_tool.local.recordings import Recording, load_recordings
from openapi_tool.protocol.errors import UpstreamRejected

SEARCH_SHARE = 0.6
"""Maximum share of the upstream's JSON that is shown, over all searches."""
READER_EXTRA = 300
"""Maximum characters of a page besides body, title, url, warnings and the requested lists."""
PAGE_TEXT = ("content", "text", "html")
LISTS = ("links", "images")
_SHOWN_FIELDS = (*PAGE_TEXT, "title", "url", "warning")
_OK = 200


@dataclass(frozen=True)
class Row:
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
    """Return what a model reads of an answer: the content, or the message of an error."""
    if is_search(envelope):
        return search_output(envelope, "a query").content
    try:
        return page_output(envelope).content
    except UpstreamRejected as nothing:
        return nothing.message


def measure(name: str, envelope: Mapping[str, Any]) -> Row:
    """Return the sizes of one recording."""
    if is_search(envelope):
        bare = without_page_text(envelope)
        return Row(name, _form("search", envelope["data"]), _characters(bare), len(shown(bare)))
    page, content = envelope["data"], shown(envelope)
    required = sum(len(page.get(field) or "") for field in _SHOWN_FIELDS)
    required += sum(_characters(page[field]) for field in LISTS if page.get(field))
    return Row(name, _form("page", [page]), _characters(envelope), len(content), len(content) - required)


def _form(kind: str, items: list[Mapping[str, Any]]) -> str:
    parts = [field for field in (*PAGE_TEXT, "chunks", *LISTS, "warning") if any(item.get(field) for item in items)]
    return f"{kind}: {', '.join(parts) or ('no page text' if items else 'no results')}"


def _characters(value: Any) -> int:
    """Return the length as JSON without blanks, as the upstream writes it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def totals(rows: list[Row]) -> Iterator[Row]:
    """Yield one row over all searches, and one over all pages with their largest overhead."""
    for kind in ("search", "page"):
        of_kind = [row for row in rows if row.form.startswith(kind)]
        upstream, characters = sum(row.upstream for row in of_kind), sum(row.shown for row in of_kind)
        largest = max((row.overhead for row in of_kind if row.overhead is not None), default=None)
        yield Row("total", f"{kind}: {len(of_kind)} recordings", upstream, characters, largest)


def broken(rows: list[Row]) -> list[str]:
    """Return a message for each exceeded limit."""
    search, page = totals(rows)
    faults = [f"searches show {search.share:.1%} of the upstream's JSON"] if search.share > SEARCH_SHARE else []
    if page.overhead is not None and page.overhead > READER_EXTRA:
        over = [f"{row.name}: {row.overhead}" for row in rows if (row.overhead or 0) > READER_EXTRA]
        faults.append(f"pages show more than is stored: {', '.join(over)}")
    return faults


def _line(row: Row) -> str:
    last = f"{row.share:9.1%}" if row.overhead is None else f"{row.overhead:+9}"
    return f"{row.name:40} {row.form:40} {row.upstream:9} {row.shown:9} {last}\n"


def main() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    rows = [measure(name, envelope) for name, envelope in successes().items()]
    faults = broken(rows)
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


if __name__ == "__main__":
    sys.exit(main())
