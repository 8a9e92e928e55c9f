"""The calls that `demo` makes through each door: tools and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_RESULT_CHARS = 2_000
"""Setting `tools.max_result_chars` of a demo: low, so that an ordinary page is truncated."""

_SITE = "http://site.fixture.test:8099"
SAMPLE_CALLS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "double": (
        ("jina_search", {"query": "hello world", "count": 3}),
        ("jina_read_many", {"urls": [f"{_SITE}/doc.pdf", f"{_SITE}/loop", f"{_SITE}/missing"]}),
        ("jina_read", {"url": f"{_SITE}/article"}),
    ),
    "real": (
        ("jina_search", {"query": "NATS JetStream pull consumers", "count": 3}),
        ("jina_read_many", {"urls": ["https://example.com/", "https://no-such-page.example.com/"]}),
        ("jina_read", {"url": "https://docs.nats.io/nats-concepts/jetstream"}),
    ),
}
"""Tools and arguments by the upstream: the double, or the real Jina. The last result is read on by its cursor."""
