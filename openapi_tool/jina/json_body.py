"""Parses the JSON of a body, also if a text in it was cut within a character."""

from __future__ import annotations

import re

import orjson

from openapi_tool.protocol.jsontext import loads

# JSON writes a character beyond 16 bits as two escapes, a pair of surrogates: `\ud83d\ude00`.
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|(?P<pair>%b%b)|%b|%b" % (_HIGH, _LOW, _HIGH, _LOW))
"""An escaped backslash, a pair of surrogates, or one surrogate without the other."""


def parsed_body(body: bytes | bytearray | memoryview) -> object:
    """Return the value of a body; None if it is not JSON, or is nested too deeply.

    Some senders cut a text within a pair of surrogates. The half that is left is no valid JSON, so it is replaced by
    the replacement character U+FFFD.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return loads(_ESCAPES.sub(_repaired, bytes(body)))
    except ValueError:
        return None


def _repaired(escape: re.Match[bytes]) -> bytes:
    is_valid = escape["pair"] or escape[0] == rb"\\"
    return escape[0] if is_valid else rb"\ufffd"
