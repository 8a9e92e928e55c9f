"""What is fuzzed, by name; each takes bytes and raises where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fuzz import address, answer, arguments, command

CORPUS = Path(__file__).parent / "corpus"
TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "command": command.check,
    "arguments": arguments.check,
    "address": address.check,
    "answer": answer.check,
}
