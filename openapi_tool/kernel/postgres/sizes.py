"""SQL that measures a jsonb column before it is read, so that a huge value takes no memory here.

`pg_column_size` is the stored, possibly compressed size, and costs nothing. The text may be larger by far, and to make
it costs time in PostgreSQL. So each condition begins with the cheap measures.
"""

from __future__ import annotations

from openapi_tool.tools.bounds import MAX_ROW_BYTES

MAX_HEADER_BYTES = 64 * 1024
"""Limit of a turn's headers and of a card's metadata. NATS allows no more in headers."""

MAX_NAME_CHARS = 4_096
"""Limit of a value that becomes a token of a subject or is compared with a name."""

_SMALL_BYTES = 1_024  # stored size up to which a value is small (`is_small`)

_MAX_UNCOUNTED_BYTES = 16_384
"""Uncompressed size up to which long numbers are not counted: the text of such a value has at most 28 MB."""

_MAX_DIGITS = 4_300  # of an integer: Python refuses longer ones
_LONG_DIGITS = 500  # digits from which on a number is counted as long


def fits(column: str, max_bytes: int) -> str:
    """Return the SQL condition that a jsonb column's text has at most `max_bytes` bytes; null if Python cannot read it.

    The measures become more expensive from the first to the last. Without the condition 24 concurrent calls with 30 MB
    each took 1 GB of memory in the executor.
    """
    text_fits = f"octet_length({column}::text) <= {max_bytes}"
    return (
        f"case when pg_column_size({column}) > {max_bytes} then false "
        f"when {is_small(column)} then {text_fits} "
        f"when {uncompressed_bytes(column)} > {max_bytes} then false "
        f"when {has_large_number(column)} then null "
        f"else {text_fits} end"
    )


def is_small(column: str) -> str:
    """Return the SQL condition that a value has at most _SMALL_BYTES, uncompressed: its text can be measured at once.

    1,024 bytes of jsonb hold at most a hundred numbers such as 1e131071, of 131 kB of text each. These are 13 MB, which
    PostgreSQL measures in 50 ms.
    """
    return f"(pg_column_compression({column}) is null and pg_column_size({column}) <= {_SMALL_BYTES})"


def uncompressed_bytes(column: str) -> str:
    """Return the SQL of a value's uncompressed size.

    PostgreSQL makes an uncompressed copy for that, which may have 250 times the stored size.
    """
    return f"pg_column_size(jsonb_path_query_first({column}, 'strict $'))"


def has_large_number(column: str) -> str:
    """Return the SQL condition that a value contains a number that Python refuses."""
    large = f"@ >= 1e{_MAX_DIGITS} || @ <= -1e{_MAX_DIGITS}"
    return f"""jsonb_path_exists({column}, 'strict $.** ? (@.type() == "number" && ({large}))')"""


def has_many_long_numbers() -> str:
    """Return the SQL condition that the long numbers of a definition alone take more than MAX_ROW_BYTES bytes of text.

    A number that another program than the kernel wrote can have 16,383 decimal places. Numbers of at least _LONG_DIGITS
    digits are counted, each as _LONG_DIGITS bytes.
    """
    columns = ("parameters", "options")
    numbers = " || ".join(
        f"""jsonb_path_query_array({column}, 'strict $.** ? (@.type() == "number")')""" for column in columns
    )
    is_long = f"scale(n::numeric) >= {_LONG_DIGITS} or abs(n::numeric) >= 1e{_LONG_DIGITS}"
    count = f"select count(*) from jsonb_array_elements({numbers}) as n where {is_long}"  # noqa: S608 - columns
    total_bytes = " + ".join(map(uncompressed_bytes, columns))
    return f"case when {total_bytes} > {_MAX_UNCOUNTED_BYTES} then ({count}) > {MAX_ROW_BYTES // _LONG_DIGITS} end"
