"""What the bounds let into the event loop takes at most MAX_CPU_MS of CPU there.

That holds for a machine on which `_reference` takes `_REFERENCE_MS`. Each cost is compared with that of `_reference` in
the same moment: a busy machine, or a slow one, takes three times as long for both.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from openapi_tool.jina.response import Expected, MayHoldSecret, Received, read_response
from openapi_tool.protocol.errors import ToolError, ToolMisconfigured
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools import compiled_schema, definition_parser
from openapi_tool.tools import inline_bounds as bounds
from openapi_tool.tools.argument_check import ArgumentCheck, check_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition_check import check_definition
from tests.hostile.schemas import PRODUCTS
from tests.requirements import requirement

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))
_RUNS = 3
_REFERENCE_MS = 2.1
_WORDS_OF_JSON = json.dumps([f"word{number} and another one, {number}" for number in range(3_000)])
_WORD = re.compile(r"\w+")
_OPTIONS: Any = {"jina": {"mode": "search"}}
_NAMES = st.one_of(st.text("ab", min_size=30, max_size=40), st.text(max_size=8), st.text("ab", max_size=300))
_TEXTS = st.one_of(st.text(max_size=20), st.integers(0, 15_000).map(lambda size: "a" * size))
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), _TEXTS),
    lambda below: st.one_of(
        st.lists(below, max_size=60),
        st.dictionaries(_NAMES, below, max_size=60),
        st.tuples(below, st.integers(0, 120)).map(lambda pair: [pair[0]] * pair[1]),
    ),
    max_leaves=40,
)
_TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
_PATTERNS = st.sampled_from(
    [r"\S", r"^[a-z]{1,50}$", "(a|b|ab)*c" * 9, r"\d" * 40, r"(?:a?){30}a{30}", "[^a]*b" * 16, "^(a+)+$", r"\w+" * 30]
)
_LEAVES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(_TYPES, st.lists(_TYPES, min_size=1, max_size=3, unique=True)),
        "enum": st.one_of(
            st.lists(_VALUES, min_size=1, max_size=20),
            st.tuples(_TEXTS, st.integers(1, 200)).map(lambda pair: [f"{pair[0]}{n}" for n in range(pair[1])]),
            st.integers(1, 400).map(lambda size: list(range(size))),
        ),
        "const": _VALUES,
        "pattern": _PATTERNS,
        "minLength": st.integers(0, 9),
        "maxLength": st.integers(0, 9),
        "minItems": st.integers(0, 9),
        "maximum": st.integers(-9, 9),
        "description": st.text("such a; .", max_size=2_000),
        "format": st.sampled_from(["date", "email", "uri", "regex"]),
    },
)


def _objects(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"properties": st.dictionaries(_NAMES, below, max_size=40)},
        optional={
            "required": st.lists(_NAMES, max_size=40, unique=True),
            "additionalProperties": st.booleans(),
            "items": below,
            "type": _TYPES,
            "description": st.text("such a; .", max_size=2_000),
        },
    )


_SCHEMAS = _objects(
    st.recursive(_LEAVES, lambda below: st.one_of(_objects(below), below.map(lambda one: {"items": one})))
)


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU time on the machine of the bound: the least of a few runs, each with nothing compiled."""
    costs, references = [], []
    for _ in range(_RUNS):
        references.append(_cpu_s(_reference))
        compiled_schema._cache.clear()  # noqa: SLF001 - the first call of a definition is the costly one
        costs.append(_cpu_s(work))
    return min(costs) / min(references) * _REFERENCE_MS


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _reference() -> None:
    """Do what reading a response mostly is: parse JSON, search texts, make new ones."""
    json.loads(_WORDS_OF_JSON)
    [word.lower() for word in _WORD.findall(_WORDS_OF_JSON)]


def is_inline(rule: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments of a valid definition are validated inline."""
    size = bounds.schema_size(rule)
    valid = check_definition(dict(rule), _OPTIONS).as_json() == {"exceeded_limits": [], "schema_defect": None}
    return size is not None and valid and bounds.fits_inline(size, rule, arguments)


def costs_ms(rule: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[float]:
    """Return the CPU time of what runs inline, in ms: parsing, validation without and with defaults."""
    found, size = [], bounds.schema_size(rule)
    if size is not None and len(orjson.dumps([rule, _OPTIONS])) <= bounds.MAX_DEFINITION_BYTES:
        found.append(cpu_ms(lambda: (check_definition(dict(rule), _OPTIONS), bounds.schema_size(rule))))
    if size is not None and is_inline(rule, arguments):
        defaults = {name: arguments[name] for name in sorted(arguments)[::2]}
        rules = {name: value for name, value in rule["properties"].items() if name in defaults}
        checks = (ArgumentCheck(rule, arguments, {}, {}), ArgumentCheck(rule, arguments, defaults, rules))
        found += [cpu_ms(lambda: (bounds.fits_inline(size, rule, arguments), check_arguments(one))) for one in checks]  # noqa: B023
    return found


@pytest.mark.alone
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(rule=_SCHEMAS, arguments=st.dictionaries(_NAMES, _VALUES, max_size=60), data=st.data())
@requirement("loop.bounds")
def test_what_runs_inline_takes_at_most_five_milliseconds(rule: Any, arguments: Any, data: st.DataObject) -> None:
    known = [name for name in rule["properties"] if data.draw(st.booleans())]
    arguments |= {name: data.draw(_VALUES) for name in known[:10]}
    costs = costs_ms(rule, arguments)
    event(f"{len(costs)} inline")
    assert max(costs, default=0.0) <= bounds.MAX_CPU_MS


def _properties(number: int, rule: Any, chars: int = 4) -> dict[str, Any]:
    return {f"{name:0{chars}}": rule for name in range(number)}


_TEXT = {"type": "string"}
LARGEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "properties": (
        {"properties": _properties(160, {"type": "integer", "maximum": 1})},
        dict.fromkeys(_properties(49, 0), "x"),
    ),
    "required": ({"properties": {"a": {"items": {"required": ["b", "c"]}}}}, {"a": [{}] * 27}),
    "enum": ({"properties": {"a": {"items": {"enum": list(range(400))}}}}, {"a": ["x"] * 45}),
    "long enum": ({"properties": {"a": {"enum": ["x" * 5_000, "y" * 5_000]}}}, {"a": "x" * 4_999}),
    "fractions": ({"properties": {"a": {"items": {"maximum": 1e-300, "minimum": 1e300}}}}, {"a": [3e-300] * 11}),
    "patterns": (
        {"properties": _properties(4, {"pattern": r"\d\d-" * 10 + "[^a]*b", "maxLength": 9})},
        dict.fromkeys(_properties(4, 0), "7" * 1_200),
    ),
    "unknown names": (
        {"properties": _properties(40, _TEXT, 6), "additionalProperties": False},
        {f"{name:010}": 1 for name in range(1_000, 1_002)},
    ),
    "long names": (
        {"properties": {"ab" * 20: _TEXT}, "additionalProperties": False},
        {f"{n}" + "ba" * 19: 1 for n in range(3)},
    ),
    "levels": (
        {"properties": {"a": {"items": {"items": {"items": {"items": {"items": {"type": "object"}}}}}}}},
        {"a": [[[[["x" * 19_000]]]]]},
    ),
    "repairs": (
        {"properties": _properties(45, {"type": "array", "items": {"type": "integer"}})},
        dict.fromkeys(_properties(45, 0), "[1, 2"),
    ),
    "texts to split": (
        {"properties": {"urls": {"type": "array", "items": {"type": "string", "maxLength": 3}}}},
        {"urls": "https://a.b/ " * 1_500},
    ),
    "descriptions": (
        {"properties": {"a": {"description": "such as " * 1_900, "items": {"type": "integer"}, "type": "array"}}},
        {"a": ["x"] * 45},
    ),
}
"""Arguments and schemas at the bounds, by the factor that is largest."""


@pytest.mark.alone
@pytest.mark.parametrize("factor", LARGEST)
@requirement("loop.bounds")
def test_the_largest_of_each_factor_takes_at_most_five_milliseconds(factor: str) -> None:
    rule, arguments = LARGEST[factor]
    costs = costs_ms(rule, arguments)
    assert len(costs) == 3, "beyond the bounds: nothing was measured"
    assert max(costs) <= bounds.MAX_CPU_MS


_100 = [f"name_{number:02}" for number in range(100)]
LARGEST_OPTIONS: dict[str, dict[str, Any]] = {
    "unknown names": {"jina": {"mode": "search", **{f"unknown_{number}": 1 for number in range(1_500)}}},
    "values": {
        "jina": {"mode": "search", **dict.fromkeys(("params", "defaults", "headers"), dict.fromkeys(_100, "x"))},
        "envs": dict.fromkeys(_100, "X"),
        "args": dict.fromkeys(("defaults", "fixed"), dict.fromkeys(_100, "x")),
    },
    "wrong values": {
        "jina": {
            "headers": dict.fromkeys(_100, ""),
            "mode": "searching" * 200,
            **dict.fromkeys(("tool", "base_url", "method", "auth_env", "params", "path", "endpoint_template"), 5),
        },
        "envs": dict.fromkeys(_100, ""),
        "args": {"defaults": 1, "fixed": 2},
        "budget": {f"session_token_{number}": 1 for number in range(900)},
        "result_format": "objects" * 500,
        "max_result_tokens": 3,
    },
}


@pytest.mark.alone
@pytest.mark.parametrize("name", LARGEST_OPTIONS)
@requirement("loop.bounds")
def test_the_largest_options_are_parsed_in_five_milliseconds(name: str) -> None:
    options = LARGEST_OPTIONS[name]
    assert len(orjson.dumps([{}, options])) <= bounds.MAX_DEFINITION_BYTES

    def parse() -> None:
        definition_parser._parse_cache.clear()  # noqa: SLF001 - the first call of a definition is the costly one
        with suppress(ToolMisconfigured):
            definition_parser.parse_definition(DefinitionRecord("tool", "suspend", {}, options))

    assert cpu_ms(parse) <= bounds.MAX_CPU_MS


@requirement("loop.bounds")
def test_costly_schemas_are_never_validated_inline() -> None:
    for keyword, (rule, value) in PRODUCTS.items():
        assert not is_inline({"type": "object", "properties": {"query": rule}}, {"query": value}), keyword


@requirement("loop.bounds")
def test_the_built_in_tools_are_validated_inline() -> None:
    urls = [f"https://example.com/a/page/of/usual/length?number={number}" for number in range(10)]
    for name, tool in CATALOGUE.items():
        main = tool.list_argument or tool.operation.argument
        wrong = {main: 7, "unknown": 1, "timeout": 2.5}
        for arguments in ({main: urls if tool.list_argument else urls[0], "timeout": 2.5}, wrong):
            assert is_inline(tool.schema(), arguments), name


# Bodies of responses.

_KEY = "jina_0123456789012345678901234567890"
_SECRETS = ("jina_0123456789abcdefghijABCDEFGHIJ+/-", "a secret/with+escapes%20", "12345678901", "secret%2+value/3")


def _shown(secret: str) -> str:
    """Return a text that holds a secret in the encodings that are masked."""
    value = secret.encode()
    forms = ("%{:02x}", "\\x{:02x}", "\\u{:04x}", "&#{};", "&#x{:x};")
    encoded = [base64.b64encode(bytes(before) + value).decode() for before in range(3)]
    return " ".join([secret, value.hex(), *("".join(map(form.format, value)) for form in forms), *encoded])


_SHOWN = {secret: _shown(secret) for secret in _SECRETS}
_UNITS = (
    *("a", " ", "\n", '"', "\\", "\u0436", "\U0001f600", "\u200b", "a\u200b", "](blob:", "](blob:x)", "data:image/x\n"),
    *("jina_", f"{_KEY} ", "MTIzNDU2Nzg5MDE", "%6a", "&#106;", "https://a.example/ ", "<a> ", "12345678901 "),
    *(f"{_SECRETS[0]} ", base64.b64encode(_SECRETS[0].encode()).decode(), f"{_SHOWN[_SECRETS[0]]} "),
)
_FIELDS = ("title", "url", "description", "content", "text", "html", "warning", "date", "source", "imageUrl")
_LONG = st.tuples(st.sampled_from(_UNITS), st.integers(0, 70_000)).map(lambda pair: pair[0] * (pair[1] // len(pair[0])))
_WORDS = st.one_of(st.text(max_size=30), _LONG, st.sampled_from(list(_SHOWN.values())))
_PAIRS = st.one_of(
    st.lists(st.lists(_WORDS, min_size=2, max_size=2), max_size=300),
    st.dictionaries(_WORDS, _WORDS, max_size=300),
    st.integers(0, 900).map(lambda size: {str(number): f"a,b:{number}" for number in range(size)}),
)
_PAGES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(_FIELDS, _WORDS)
    | {"links": _PAIRS, "images": _PAIRS, "chunks": st.lists(_WORDS, max_size=300)},
)
_LINKS = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("title", "link", "snippet"), _WORDS)), max_size=30)
_RESULTS = st.tuples(_PAGES, _LINKS, st.integers(0, 120)).map(
    lambda parts: [{**parts[0], "siteLinks": parts[1]}] * parts[2]
)


def body_cost_ms(body: bytes, operation: str, secrets: Iterable[str]) -> float | None:
    """Return the CPU time of reading a body inline, None if it is beyond the bounds."""
    received = Received(200, None, frozenset(secrets))
    if not bounds.body_fits_inline(bytearray(body), len(received.secrets)):
        return None

    def read() -> None:
        with suppress(ToolError, MayHoldSecret):
            read_response(body, Expected(operation), received, inline=True)

    return cpu_ms(read)


@pytest.mark.alone
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(_PAGES, _RESULTS), ascii_only=st.booleans(), secrets=st.integers(1, len(_SECRETS)))
@requirement("loop.bounds")
def test_reading_a_response_inline_takes_at_most_five_milliseconds(
    data: Any, *, ascii_only: bool, secrets: int
) -> None:
    body = json.dumps({"data": data}, ensure_ascii=ascii_only).encode()
    cost = body_cost_ms(body, "search" if isinstance(data, list) else "reader", _SECRETS[:secrets])
    event("beyond" if cost is None else "inline")
    assert cost is None or cost <= bounds.MAX_CPU_MS


def _full(prefix: bytes, unit: bytes, suffix: bytes) -> bytes:
    size = bounds.MAX_BODY_BYTES - len(prefix) - len(suffix)
    return prefix + unit * (size // len(unit)) + suffix


def _escaped(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode()


def _texts(secrets: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield bodies that show each of the secrets in all encodings, then one text again and again."""
    shown = _escaped(" ".join(_SHOWN[secret] for secret in _SECRETS[:secrets]) + " ")
    for unit in _UNITS:
        page, search = b'{"data":{"content":"', b'{"data":[{"title":"t","description":"'
        for beginning in (b"", shown):
            kind = f"{unit:.20} {'behind secrets' * bool(beginning)}"
            yield "reader", f"content: {kind}", _full(page + beginning, _escaped(unit), b'"}}')
            yield "search", f"description: {kind}", _full(search + beginning, _escaped(unit), b'"}]}')


def _structures() -> Iterator[tuple[str, str, bytes]]:
    values = bounds.MAX_BODY_VALUES
    links = b",".join(b'"%d":"a,b:%d"' % (number, number) for number in range(values // 2 - 5))
    yield "reader", "links", b'{"data":{"links":{' + links + b"}}}"
    yield "reader", "pairs", b'{"data":{"links":[' + b'["a","b:c"],' * (values // 3 - 5) + b"[]]}}"
    yield "search", "results", b'{"data":[' + b'{"title":"a","url":"b"},' * (values // 3 - 5) + b"{}]}"
    site_links = b'{"title":"a","link":"b:c"},' * (values // 3 - 9)
    yield "search", "site links", b'{"data":[{"siteLinks":[' + site_links + b"{}]}]}"
    yield "search", "empty", b'{"data":[' + b"{}," * (values // 2 - 9) + b"{}]}"
    yield "reader", "half pairs", _full(b'{"data":{"content":"', rb"\ud800", b'"}}')
    yield "reader", "nesting", b'{"data":' + b"[" * (values - 9)


@pytest.mark.alone
@pytest.mark.parametrize("secrets", range(1, len(_SECRETS) + 1))
@requirement("loop.bounds")
def test_the_longest_texts_within_the_bounds_take_at_most_five_milliseconds(secrets: int) -> None:
    for operation, name, body in _texts(secrets):
        cost = body_cost_ms(body, operation, _SECRETS[:secrets])
        assert cost is not None, f"{name} is beyond the bounds: nothing was measured"
        assert cost <= bounds.MAX_CPU_MS, name


@pytest.mark.alone
@requirement("loop.bounds")
def test_the_most_values_within_the_bounds_take_at_most_five_milliseconds() -> None:
    for operation, name, body in _structures():
        cost = body_cost_ms(body, operation, _SECRETS[:1])
        assert cost is not None, f"{name} is beyond the bounds: nothing was measured"
        assert cost <= bounds.MAX_CPU_MS, name


@requirement("loop.bounds")
def test_an_ordinary_page_is_read_inline() -> None:
    paragraph = "A paragraph of prose, with a [link](https://example.com/page) and an image ![](https://a.example/b). "
    page = {"title": "A page", "url": "https://example.com/", "content": paragraph * 500, "usage": {"tokens": 12_000}}
    body = json.dumps({"code": 200, "status": 20000, "data": page}).encode()
    assert len(body) > 50_000
    assert bounds.body_fits_inline(bytearray(body), secrets=1)


@pytest.mark.parametrize("field", ["title", "url", "content", "links"])
@requirement("loop.bounds")
def test_what_may_be_a_secret_is_masked_in_a_worker(field: str) -> None:
    received = Received(200, None, frozenset(_SECRETS[:1]))
    for shown, is_masked in (("a text about jina_ai", False), (f"a text with {_SECRETS[0]}", True)):
        value: Any = {shown: "https://example.com/"} if field == "links" else shown
        body = json.dumps({"data": {"content": "A page.", field: value}}).encode()
        try:
            read_response(body, Expected("reader"), received, inline=True)
        except MayHoldSecret:
            assert is_masked
        else:
            assert not is_masked
