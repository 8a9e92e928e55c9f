"""Tokens of a gateway: who calls, and which tools they may call.

A token is `oat_ID_SECRET`; the id finds its record, which holds only a hash of the secret. The secret has 256 random
bits, so one round of SHA-256 is enough: no dictionary can find it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import orjson
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from openapi_tool.files import read_regular_file
from openapi_tool.protocol.errors import ExecutorError, Unavailable
from openapi_tool.protocol.subjects import is_token
from openapi_tool.state.change import change
from openapi_tool.state.port import ListedRecords
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

MAX_TOKENS = 10_000  # all are in the memory of each process
MAX_AGENT_CHARS = 128  # also of a project
_MAX_FILE_BYTES = 16 * 2**20
_PREFIX = "oat"
_ID_CHARS = 12  # of the public part of a token
_NO_HASH = "0" * 64  # compared with an unknown token's, so that it takes as long as a known one


class TokensInvalid(ExecutorError):
    """A token or a file of tokens cannot be used; the message names the field and the remedy."""


class JwtRefused(Exception):
    """A JWT of an external issuer is not accepted."""


class ClaimUnusable(JwtRefused):
    """A right JWT does not say who calls; the message names the claim."""


def _check_id(name: str) -> str:
    if not is_token(name) or len(name) > MAX_AGENT_CHARS:
        raise ValueError(f"is no id: empty, over {MAX_AGENT_CHARS} characters, or with blanks or `.*>`")
    return name


Id = Annotated[str, AfterValidator(_check_id)]
Time = Annotated[float, Field(ge=0, le=253_402_300_799)]  # until the year 9999, for which a date can be shown
Pattern = Annotated[str, Field(min_length=1, max_length=200)]


@validated(frozen=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Token:
    """Record of a token. Times are in seconds since the epoch; `expires` and `revoked` are None for never.

    `tools` are patterns of names. With `any_agent` a caller may name its agent in X-Agent-Id. `hash` is the SHA-256 of
    the secret in hexadecimal.
    """

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    project: Id
    agent: Id
    created: Time
    tools: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=100)] = ("*",)
    any_agent: bool = False
    expires: Time | None = None
    revoked: Time | None = None

    def usable(self, now: float) -> bool:
        """Return whether the token is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


_RECORD = TypeAdapter(Token)
_RECORDS = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")], Token])


def new_token(
    project: str, agent: str, tools: tuple[str, ...], *, any_agent: bool, expires: float | None
) -> tuple[str, str, Token]:
    """Return the text of a new token, its id and its record. Raises TokensInvalid."""
    token_id, secret = secrets.token_hex(_ID_CHARS // 2), secrets.token_hex(32)
    try:
        record = Token(
            hash=_hash(secret),
            project=project,
            agent=agent,
            created=time.time(),
            tools=tools,
            any_agent=any_agent,
            expires=expires,
        )
    except ValidationError as error:
        raise TokensInvalid("; ".join(_problems(error))) from None
    return f"{_PREFIX}_{token_id}_{secret}", token_id, record


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _problems(error: ValidationError) -> list[str]:
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        found.append(f"{place}: {message}" if place else message)
    return found


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
        self._unreadable: set[str] = set()

    async def all(self) -> dict[str, Token]:
        """Return all tokens by id. Raises Unavailable, TokensInvalid."""
        tokens = {}
        for token_id, value in (await self._records.all()).items():
            try:
                tokens[token_id] = _decoded(token_id, value)
            except TokensInvalid as invalid:  # this one is refused; the others are not affected
                if token_id not in self._unreadable:
                    self._unreadable.add(token_id)
                    log.error("refusing one token: %s", invalid, extra={"action": "token.unreadable"})  # noqa: TRY400 - no defect
        return tokens

    async def add(self, token_id: str, token: Token) -> None:
        """Store a new token. Raises Unavailable, TokensInvalid."""
        if len(await self._records.all()) >= MAX_TOKENS:
            raise TokensInvalid(f"there are {MAX_TOKENS:,} tokens already; `state purge` deletes them with all else")
        await self._records.put(token_id, _encoded(token))

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none. Raises Unavailable, TokensInvalid."""

        def revoked(value: bytes | None) -> bytes | None:
            token = None if value is None else _decoded(token_id, value)
            return None if token is None or token.revoked is not None else _encoded(_revoked(token))

        return (await change(self._records, token_id, revoked)).value is not None


class TokenFile:
    """Tokens in a JSON object by id, for deployments whose configuration is in files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def all(self) -> dict[str, Token]:
        """Return all tokens by id. Raises Unavailable, TokensInvalid."""
        return self.load()

    async def add(self, token_id: str, token: Token) -> None:
        """Store a new token. Raises Unavailable, TokensInvalid."""
        tokens = self.load() if self.path.exists() else {}
        self._save(tokens | {token_id: token})

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none. Raises Unavailable, TokensInvalid."""
        tokens = self.load()
        if (token := tokens.get(token_id)) is None:
            return False
        self._save(tokens | {token_id: _revoked(token)})
        return True

    def load(self) -> dict[str, Token]:
        """Return the tokens. Raises TokensInvalid."""
        try:
            return _RECORDS.validate_json(read_regular_file(self.path, _MAX_FILE_BYTES))
        except OSError as error:
            raise TokensInvalid(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except ValidationError as error:
            raise TokensInvalid(f"{self.path}: {'; '.join(_problems(error)[:10])}") from None

    def _save(self, tokens: Mapping[str, Token]) -> None:
        content = orjson.dumps({key: asdict(each) for key, each in tokens.items()}, option=orjson.OPT_INDENT_2)
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content + b"\n")
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise TokensInvalid(f"{self.path}: cannot be written: {error.strerror or error}") from None


def _revoked(token: Token) -> Token:
    return token if token.revoked is not None else replace(token, revoked=time.time())


def _encoded(token: Token) -> bytes:
    return orjson.dumps(asdict(token))


def _decoded(token_id: str, value: bytes) -> Token:
    try:
        return _RECORD.validate_json(value)
    except ValidationError:
        raise TokensInvalid(f"the record of token {token_id} is damaged, or of a newer version; update") from None


@dataclass(slots=True)
class _Source:
    """Store of tokens, and what was read of it last, at a time of the monotonic clock."""

    store: TokenStore
    tokens: Mapping[str, Token] = field(default_factory=dict)
    read_at: float = -math.inf

    async def read(self) -> None:
        began = time.monotonic()
        self.tokens = await self.store.all()
        self.read_at = began


class Tokens:
    """Tokens that a process accepts, of all stores; `refresh` makes changes take effect.

    Of a store that cannot be read, those that were read last are accepted for `grace_s` seconds.
    """

    def __init__(
        self, stores: list[TokenStore], clock: Callable[[], float] = time.time, grace_s: float = math.inf
    ) -> None:
        self._sources = [_Source(store) for store in stores]
        self._clock = clock
        self._grace_s = grace_s
        self._problem = ""

    def __len__(self) -> int:
        """Number of known tokens, also revoked and expired ones."""
        return sum(len(source.tokens) for source in self._sources)

    async def load(self) -> None:
        """Read the tokens. Raises Unavailable, TokensInvalid."""
        for source in self._sources:
            await source.read()

    async def refresh(self) -> str:
        """Read the tokens again; return why that is impossible. The last known ones then stay in use."""
        problems = []
        for source in self._sources:
            try:
                await source.read()
            except (Unavailable, TokensInvalid) as error:
                problems.append(str(error))
        problem = "; ".join(problems)
        if problem and problem != self._problem:
            log.error(
                "cannot read the tokens; the old ones stay in use for %s s: %s",
                self._grace_s,
                problem,
                extra={"action": "tokens.read_failed"},
            )
        self._problem = problem
        return problem

    @property
    def outdated(self) -> bool:
        """Return whether some store could not be read for so long that its tokens are accepted no more."""
        return any(map(self._is_outdated, self._sources))

    def _is_outdated(self, source: _Source) -> bool:
        return time.monotonic() - source.read_at > self._grace_s

    def find(self, text: str) -> tuple[str, Token] | None:
        """Return id and record of a usable token, in a time that does not depend on how much of it is right."""
        known = self._known(text)
        return known if known is not None and known[1].usable(self._clock()) else None

    def find_ended(self, text: str) -> tuple[str, Token] | None:
        """Return id and record of a token that is right, but expired or revoked."""
        known = self._known(text)
        return None if known is None or known[1].usable(self._clock()) else known

    def _known(self, text: str) -> tuple[str, Token] | None:
        prefix, _, rest = text.partition("_")
        token_id, _, secret = rest.partition("_")
        # If several stores have the id, the last one counts.
        source = next((each for each in reversed(self._sources) if token_id in each.tokens), None)
        token = source.tokens[token_id] if source and not self._is_outdated(source) else None
        is_right = hmac.compare_digest(_hash(secret), token.hash if token else _NO_HASH)
        return (token_id, token) if token is not None and is_right and prefix == _PREFIX else None


def shown(token_id: str, token: Token, now: float) -> dict[str, Any]:
    """Return a token for display, without its hash."""
    state = "usable" if token.usable(now) else "expired"
    if token.revoked is not None:
        state = "revoked"
    fields = {name: value for name, value in asdict(token).items() if name != "hash"}
    return {"id": token_id, "state": state, **fields}


def id_of(text: str) -> str:
    """Return the id of a token that is given by its id or as a whole. Raises TokensInvalid."""
    found = text.split("_")[1] if text.startswith(f"{_PREFIX}_") else text
    with suppress(ValueError):
        if len(found) == _ID_CHARS and int(found, 16) >= 0:
            return found
    raise TokensInvalid(f"{short(found, _ID_CHARS)!r} is no id of a token; `tokens list` shows them")
