"""Inputs that are kept from fuzzing: a folder of files, or one file of lines for a target whose inputs are large."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
BROKE = "found-"
"""Names of kept inputs that once broke something; no merge takes them away."""

MOST_FILES, MOST_TOTAL_BYTES = 300, 300_000


def kept(name: str) -> dict[str, bytes]:
    """A target's inputs by name."""
    lines = _lines(name)
    if lines.exists():
        entries = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
        return {entry["name"]: entry["data"].encode("latin-1") for entry in entries}
    folder = CORPUS / name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Keep of these as many of the smallest as there is room for, beside those that once broke something."""
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    sizes = accumulate(map(len, ordered))
    chosen = {known: data for known, data in kept(name).items() if known.startswith(BROKE)}
    for data, size in zip(ordered[:MOST_FILES], sizes, strict=False):
        if size <= MOST_TOTAL_BYTES:
            chosen[hashlib.sha256(data).hexdigest()[:16]] = data
    _write(name, chosen)


def _write(name: str, inputs: Mapping[str, bytes]) -> None:
    if _lines(name).exists():
        entries = ({"name": known, "data": data.decode("latin-1")} for known, data in inputs.items())
        _lines(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
        return
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for known, data in inputs.items():
        (folder / known).write_bytes(data)


def _lines(name: str) -> Path:
    return CORPUS / f"{name}.jsonl"
