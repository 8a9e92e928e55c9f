"""The record of one token: who calls, and which tools the token's bearer may call.

A token is the text `oat_ID_SECRET`, which a client sends with each request. Its id finds its record, which holds only a
hash of the secret. The secret has 256 random bits, so one round of SHA-256 is enough: no dictionary can find it.
`token_stores` says where records are stored, and `tokens` which tokens a process accepts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import asdict, replace
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from openapi_tool.protocol.errors import ExecutorError
from openapi_tool.protocol.subjects import is_token as is_subject_token
from openapi_tool.tools.wording import short

MAX_NAME_CHARS = 128
"""Longest name of a project or an agent."""

_PREFIX = "oat"
_ID_CHARS = 12
_SECRET_BYTES = 32
_NO_HASH = "0" * 64  # compared with the secret of an unknown token, so that this takes as long as for a known one


class TokensInvalid(ExecutorError):
    """A token or a file of tokens cannot be used; the message names the field and the remedy."""


def _check_name(name: str) -> str:
    """Return a name if it may be a part of the names of shared records and of subjects. Raises ValueError."""
    if not is_subject_token(name) or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"is no id: empty, over {MAX_NAME_CHARS} characters, or with blanks or `.*>`")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Time = Annotated[float, Field(ge=0, le=253_402_300_799)]  # until the year 9999, for which a date can be shown
Pattern = Annotated[str, Field(min_length=1, max_length=200)]
TokenId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


@validated(frozen=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Token:
    """Record of a token. Times are in seconds since the epoch.

    - `hash`: SHA-256 of the secret in hexadecimal.
    - `project`, `agent`: who calls.
    - `tools`: patterns of the names of tools that may be called, such as `jina_*`.
    - `any_agent`: whether a caller may name another agent of the project in the header X-Agent-Id.
    - `expires`, `revoked`: from when on the token is refused; None for never.
    """

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    project: Name
    agent: Name
    created: Time
    tools: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=100)] = ("*",)
    any_agent: bool = False
    expires: Time | None = None
    revoked: Time | None = None

    def usable(self, now: float) -> bool:
        """Return whether the token is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


class NewToken(NamedTuple):
    """Text of a new token, which nothing but its bearer knows from then on, its id and its record."""

    text: str
    id: str
    record: Token


def new_token(project: str, agent: str, tools: tuple[str, ...], *, any_agent: bool, expires: float | None) -> NewToken:
    """Return a new token. Raises TokensInvalid."""
    token_id = secrets.token_hex(_ID_CHARS // 2)
    secret = secrets.token_hex(_SECRET_BYTES)
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
        raise TokensInvalid("; ".join(problems_of(error))) from None
    return NewToken(f"{_PREFIX}_{token_id}_{secret}", token_id, record)


def revoked_now(token: Token) -> Token:
    """Return the token as revoked; one that is revoked already keeps its time."""
    return token if token.revoked is not None else replace(token, revoked=time.time())


def id_and_secret(text: str) -> tuple[str, str]:
    """Return id and secret of `oat_ID_SECRET`, unchecked; two empty texts for a text with another prefix."""
    prefix, _, after_prefix = text.partition("_")
    token_id, _, secret = after_prefix.partition("_")
    return (token_id, secret) if prefix == _PREFIX else ("", "")


def has_secret(token: Token | None, secret: str) -> bool:
    """Return whether this is the secret of the token; False for an unknown token, None.

    The time that this takes depends neither on whether the token is known, nor on how much of the secret is right.
    """
    is_right = hmac.compare_digest(_hash(secret), token.hash if token else _NO_HASH)
    return token is not None and is_right


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def id_of(text: str) -> str:
    """Return the id of a token that is given by its id or as a whole. Raises TokensInvalid."""
    token_id = text
    if text.startswith(f"{_PREFIX}_"):
        token_id, _ = id_and_secret(text)
    if len(token_id) != _ID_CHARS or not _is_hexadecimal(token_id):
        raise TokensInvalid(f"{short(token_id, _ID_CHARS)!r} is no id of a token")
    return token_id


def _is_hexadecimal(text: str) -> bool:
    try:
        return int(text, 16) >= 0  # `int` takes a minus, too
    except ValueError:
        return False


def shown(token_id: str, token: Token, now: float) -> dict[str, Any]:
    """Return a token for display, without its hash."""
    state = "usable" if token.usable(now) else "expired"
    if token.revoked is not None:
        state = "revoked"
    fields = {name: value for name, value in asdict(token).items() if name != "hash"}
    return {"id": token_id, "state": state, **fields}


_RECORD = TypeAdapter(Token)
_RECORDS = TypeAdapter(dict[TokenId, Token])


def encoded(token: Token) -> bytes:
    """Return a token as it is stored in the state."""
    return orjson.dumps(asdict(token))


def decoded(token_id: str, value: bytes) -> Token:
    """Return a token that was stored in the state. Raises TokensInvalid."""
    try:
        return _RECORD.validate_json(value)
    except ValidationError:
        raise TokensInvalid(f"the record of token {token_id} is damaged, or of a newer version; update") from None


def decoded_file(content: bytes) -> dict[str, Token]:
    """Return the tokens of a file, a JSON object of records by id. Raises pydantic's ValidationError."""
    return _RECORDS.validate_json(content)


def problems_of(error: ValidationError) -> list[str]:
    """Return what is wrong with records, each with its place, such as `project: is no id: …`."""
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, problem["loc"]))  # of a file it begins with the token's id
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        found.append(f"{place}: {message}" if place else message)
    return found
