"""Corpora of the fuzz targets: one JSON Lines file each, an input a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
BROKE = "found-"
"""Names of kept inputs that once broke something; no merge takes them away."""

MAX_INPUTS, MAX_TOTAL_BYTES = 300, 300_000


def kept(name: str) -> dict[str, bytes]:
    """A target's inputs by name."""
    if not _file(name).exists():
        return {}
    entries = map(json.loads, _file(name).read_text(encoding="utf-8").splitlines())
    return {entry["name"]: entry["data"].encode("latin-1") for entry in entries}


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Keep of these as many of the smallest as there is room for, beside those that once broke something."""
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    sizes = accumulate(map(len, ordered))
    chosen = {known: data for known, data in kept(name).items() if known.startswith(BROKE)}
    for data, size in zip(ordered[:MAX_INPUTS], sizes, strict=False):
        if size <= MAX_TOTAL_BYTES:
            chosen[hashlib.sha256(data).hexdigest()[:16]] = data
    entries = ({"name": known, "data": data.decode("latin-1")} for known, data in chosen.items())
    _file(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _file(name: str) -> Path:
    return CORPUS / f"{name}.jsonl"
