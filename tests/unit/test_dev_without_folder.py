"""Commands where no file can be written, as in a pod."""

from __future__ import annotations

import tempfile
from typing import NoReturn

import pytest

from openapi_tool.cli.dev_choice import names_of_dev
from tests.requirements import requirement


@requirement("cli.dev", "cli.check")
def test_no_stack_is_looked_for_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> NoReturn:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert names_of_dev() == ""
