"""Stores of a gateway's tokens (`token_record`): the state, which all its processes share, and a file.

The commands `openapi-tool tokens` write to them, and each process reads all tokens every second (`tokens`).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import orjson
from pydantic import ValidationError

from openapi_tool.files import read_regular_file
from openapi_tool.gateway.token_record import (
    Token,
    TokensInvalid,
    decoded,
    decoded_file,
    encoded,
    problems_of,
    revoked_now,
)
from openapi_tool.state.change import change
from openapi_tool.state.port import ListedRecords

log = logging.getLogger(__name__)

MAX_TOKENS = 10_000
"""Tokens that the state holds at most: a gateway keeps all of them in its memory."""

_MAX_FILE_BYTES = 16 * 2**20
_MAX_SHOWN_PROBLEMS = 10
_WANTED = (
    "name a file of tokens: a JSON object of records by id, which "
    "`openapi-tool tokens create --project P --file NEW` makes"
)


class TokenStore(Protocol):
    """Where tokens are stored."""

    async def all(self) -> dict[str, Token]:
        """Return all tokens by id. Raises Unavailable, TokensInvalid."""

    async def add(self, token_id: str, token: Token) -> None:
        """Store a new token. Raises Unavailable, TokensInvalid."""

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none. Raises Unavailable, TokensInvalid."""


class StoredTokens:
    """Tokens in the state, which all processes share."""

    def __init__(self, records: ListedRecords) -> None:
        self._records = records
        self._logged_as_unreadable: set[str] = set()  # ids of tokens

    async def all(self) -> dict[str, Token]:
        """Return all tokens by id, without those whose record cannot be read: they are refused. Raises Unavailable."""
        tokens = {}
        stored = await self._records.all()
        for token_id, value in stored.items():
            try:
                tokens[token_id] = decoded(token_id, value)
            except TokensInvalid as invalid:  # the others stay in use
                self._log_once(token_id, invalid)
        return tokens

    def _log_once(self, token_id: str, invalid: TokensInvalid) -> None:
        if token_id not in self._logged_as_unreadable:
            self._logged_as_unreadable.add(token_id)
            log.error("refusing one token: %s", invalid, extra={"action": "token.unreadable"})

    async def add(self, token_id: str, token: Token) -> None:
        """Store a new token. Raises Unavailable, TokensInvalid if there are too many."""
        if len(await self._records.all()) >= MAX_TOKENS:
            raise TokensInvalid(f"there are {MAX_TOKENS:,} tokens already; `state purge` deletes them with all else")
        await self._records.put(token_id, encoded(token))

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none. Raises Unavailable, TokensInvalid if it cannot be read."""

        def revoked(value: bytes | None) -> bytes | None:
            """Return the new record; None if nothing is to be written."""
            if value is None:
                return None
            token = decoded(token_id, value)
            return encoded(revoked_now(token)) if token.revoked is None else None

        stored = await change(self._records, token_id, revoked)
        return stored.value is not None


class TokenFile:
    """Tokens in a file, a JSON object of records by id, for deployments whose configuration is in files.

    Every method raises TokensInvalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def all(self) -> dict[str, Token]:
        """Return all tokens by id."""
        return self._load()

    async def add(self, token_id: str, token: Token) -> None:
        """Store a new token; create a missing file."""
        tokens = self._load(missing_is_empty=True)
        self._save(tokens | {token_id: token})

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none."""
        tokens = self._load()
        if token_id not in tokens:
            return False
        self._save(tokens | {token_id: revoked_now(tokens[token_id])})
        return True

    def _load(self, *, missing_is_empty: bool = False) -> dict[str, Token]:
        try:
            return decoded_file(read_regular_file(self.path, _MAX_FILE_BYTES))
        except OSError as error:
            if missing_is_empty and isinstance(error, FileNotFoundError):
                return {}
            raise TokensInvalid(f"{self.path}: cannot be read: {error.strerror or error}; {_WANTED}") from None
        except ValidationError as error:
            problems = "; ".join(problems_of(error)[:_MAX_SHOWN_PROBLEMS])
            raise TokensInvalid(f"{self.path}: {problems}; {_WANTED}") from None

    def _save(self, tokens: Mapping[str, Token]) -> None:
        records = {token_id: asdict(token) for token_id, token in tokens.items()}
        content = orjson.dumps(records, option=orjson.OPT_INDENT_2) + b"\n"
        try:
            _replace_file(self.path, content)
        except OSError as error:
            raise TokensInvalid(f"{self.path}: cannot be written: {error.strerror or error}") from None


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole: who reads it meanwhile finds either the old content or the new one. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # readable for this user alone
    new_file = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        new_file.replace(path)
    except BaseException:
        new_file.unlink(missing_ok=True)
        raise
