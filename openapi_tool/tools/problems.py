"""Problems of definitions and arguments, YAML parser, suggestions for wrong names, names of tools."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import yaml

from openapi_tool.protocol.jsontext import JsonValue, storable

Path = tuple[str | int, ...]

MAX_PROBLEMS = 20
"""Problems in one error: a model corrects no more at once, and a card with 1,000 of them had 87 MB."""

_PROBLEM_CHARS = 200
_SHORT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem at a path of a definition; with warnings only, it can be registered."""

    path: Path
    message: str
    warning: bool = False

    @property
    def where(self) -> str:
        """Return the path as text."""
        return shown_path(self.path)

    def __str__(self) -> str:
        return f"{short(self.where)}: {self.message}"


def shown_path(path: Path) -> str:
    """Return a path as text, such as `options.args.defaults.site[0]`; `definition` for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".") or "definition"


def argument_path(path: Path) -> str:
    """Return a path in a call's arguments for a model, such as `queries item 2`, counted from 1 as in results."""
    text = "".join(f" item {part + 1}" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".").strip() or "arguments"


def short(text: str, max_chars: int = _SHORT_CHARS) -> str:
    """Truncate a text for a message; names in a definition or call may have 256 kB."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def listed(problems: Sequence[str]) -> list[str]:
    """Return the first problems for an error, each truncated, and the number of the others."""
    shown = [short(problem, _PROBLEM_CHARS) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {left:,} more"] if left else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close, else nothing."""
    return next((f"; did you mean {close!r}?" for close in close_to(name, known)), "")


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Return the closest known name, if one is close."""
    return difflib.get_close_matches(name, list(known), n=1)


def counted(number: int, noun: str, left: str = "") -> str:
    """Return `2,000 items`; with `left`, such as `left out`, also the verb: `1 item is left out`."""
    one = number == 1
    verb = f" {'is' if one else 'are'} {left}" if left else ""
    return f"{number:,} {noun if one else f'{noun}s'}{verb}"


def any_of(words: Iterable[str]) -> str:
    """Return `'a', 'b' or 'c'`."""
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last


MAX_NODES = 20_000
MAX_BYTES = 8_000_000
"""Bytes of a file: more than a definition may have, so that a larger one is parsed and its error gets a line."""

_MERGE = "<<"
_TEXT_TAG, _NUMBER_TAGS = "tag:yaml.org,2002:str", ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_NUMBER_CHARS = 40
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]+|[^:]*:.*")
"""Octal and sexagesimal numbers of YAML 1.1: `010` is 8, `1:30` is 90."""

_IS_TEXT = "YAML reads this as a text; write the number in plain digits, or put it in quotes to mean the text"
_READ_AS_TEXT = re.compile(r"[-+]?(?:0o?[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+)")
"""Texts of YAML 1.1 that look like numbers: `08`, `0o17`, `1e3`."""

LineColumn = tuple[int, int]
"""Both from 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """Parsed definition; `problems` are those of the YAML. With an error `document` is incomplete."""

    document: JsonValue
    problems: list[Problem]
    positions: Mapping[Path, LineColumn]

    def position(self, path: Path) -> LineColumn:
        """Return the position of a path, or of its nearest ancestor."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, (1, 1))


def read_source(text: str) -> Source:
    """Parse YAML with one document; never raises."""
    first, *others = read_sources(text)
    if others:
        return Source(None, [Problem((), f"there are {1 + len(others)} documents; give one")], first.positions)
    return first


def read_sources(text: str) -> list[Source]:
    """Parse YAML documents, up to an invalid one, of JSON's types; never raises.

    Empty ones are ignored unless there is nothing else.
    """
    sources: list[Source] = []
    try:
        for root in yaml.compose_all(text, Loader=yaml.SafeLoader):
            reader = _YamlReader()
            document = reader.value(root, ())
            if document is not None or reader.problems:
                sources.append(Source(document, reader.problems, reader.positions))
    except yaml.YAMLError as error:
        parts = (getattr(error, name, None) for name in ("context", "problem", "reason"))
        reason = ", ".join(str(part) for part in parts if part) or "it cannot be read"
        problem = Problem((), f"is no YAML: {reason}; check indentation, brackets and quotes there")
        mark = getattr(error, "problem_mark", None)
        sources.append(Source(None, [problem], {(): _position(mark)} if mark else {}))
    except RecursionError:
        sources.append(Source(None, [Problem((), "is nested too deeply; flatten it")], {}))
    return sources or [Source(None, [], {})]


def _position(mark: yaml.Mark) -> LineColumn:
    return mark.line + 1, mark.column + 1


@dataclass(slots=True)
class _YamlReader:
    problems: list[Problem] = field(default_factory=list)
    positions: dict[Path, LineColumn] = field(default_factory=dict)
    ancestors: set[int] = field(default_factory=set)
    nodes: int = 0

    def value(self, node: yaml.Node, path: Path) -> JsonValue:
        self.positions.setdefault(path, _position(node.start_mark))
        self.nodes += 1
        if id(node) in self.ancestors or self.nodes > MAX_NODES:
            return self._problem(path, "is too large, or refers to itself; write it out, shorter")
        self.ancestors.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, (*path, place)) for place, item in enumerate(node.value)]
        finally:
            self.ancestors.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*path, key)
            self.positions.setdefault(here, _position(key_node.start_mark))
            if key == _MERGE:
                self._problem(here, "merge keys are not read; write the keys out")
            elif key_node.tag != _TEXT_TAG:
                self._problem(here, "a key must be a text; put it in quotes")
            elif key in values:
                self._problem(here, "is given twice; take one out")
            else:
                values[key] = self.value(value_node, here)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> JsonValue:
        plain = node.value if node.style is None and len(node.value) <= _MAX_NUMBER_CHARS else ""
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError):
            return self._problem(path, "is not a JSON value; put it in quotes")
        if node.tag == _TEXT_TAG and _READ_AS_TEXT.fullmatch(plain):
            self.problems.append(Problem(path, _IS_TEXT, warning=True))
        if node.tag in _NUMBER_TAGS and _NOT_DECIMAL.fullmatch(plain):
            problem = f"YAML reads {plain} as {value}; write {value}, or put it in quotes to mean the text"
        elif isinstance(value, float) and not math.isfinite(value):
            problem = "must be a finite number"
        elif value is not None and not isinstance(value, str | bool | int | float):
            problem = f"YAML reads this as a {type(value).__name__}; put it in quotes"
        elif storable(value) != value:
            problem = "cannot be stored in the database: NUL, half a character, or more than 64 bits; change it"
        else:
            return value
        return self._problem(path, problem)

    def _problem(self, path: Path, message: str) -> JsonValue:
        self.problems.append(Problem(path, message))
        return None


_MAX_COMPARED = 40  # characters, and names: limits the time of difflib
_SYNONYMS = {
    "query": "q searchquery searchterm keywords question text",
    "url": "uri link address href targeturl pageurl website page",
    "count": "n num limit maxresults numresults numberofresults topk size results",
    "country": "gl region countrycode",
    "language": "hl lang languagecode",
    "site": "sites domain domains includedomains includesites",
    "exclude_sites": "excludedomains blockeddomains",
    "after": "since startdate fromdate publishedafter",
    "file_type": "filetype ext extension",
    "title_words": "intitle",
    "with_content": "content includecontent fullcontent rawcontent includerawcontent",
    "format": "respondwith returnformat outputformat",
    "target_selector": "selector css cssselector",
    "max_tokens": "tokens tokenlimit maxlength maxchars",
    "with_links": "links includelinks",
    "with_images": "images includeimages",
    "no_cache": "nocache fresh refresh",
}
_BY_SYNONYM = {other: name for name, others in _SYNONYMS.items() for other in others.split()}
"""Arguments by the folded names that Jina and other search tools give them."""
_PLURALS = {"query": "queries", "url": "urls"}


def fold(name: str) -> str:
    """Return a name in lower case without separators: `target_url`, `targetUrl`, `Target-URL` are equal."""
    return name.replace("_", "").replace("-", "").lower()


def probably_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known argument that an unknown name probably means; long names are ignored."""
    by_folded = {fold(other): other for other in islice(known, _MAX_COMPARED)}
    if len(name) > _MAX_COMPARED or not by_folded:
        return None
    folded = fold(name)
    other = _BY_SYNONYM.get(folded, folded)
    exact = next((name for name in (folded, fold(other), _PLURALS.get(other)) if name in by_folded), None)
    found = exact or next(iter(close_to(folded, by_folded)), None)
    return by_folded[found] if found else None


def not_taken(name: str, known: Iterable[str]) -> str:
    """Return the problem of an argument that a tool does not take."""
    other = probably_meant(name, known)
    return f"is not an argument that this tool takes{f'; did you mean {other}?' if other else ''}"


RESERVED_NAMES = frozenset({"delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"})
"""Names of the kernel's own tools (protocol section 4)."""

MAX_CHARS = 64
_ALLOWED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_AMBIGUOUS = ("__", "_.", "._", "..")
_WORD_END = re.compile(r"[._-]+(.)?")


def mangled(name: str) -> str:
    """Return a name for model providers that allow no dots: `jina__search`."""
    return name.replace(".", "__")


def unmangled(name: str) -> str:
    """Return the tool's name; exact if `name_problem` accepts it."""
    return name.replace("__", ".")


def name_problem(name: str) -> str | None:
    """Return why a tool cannot have this name, or None."""
    if name in RESERVED_NAMES:
        return f"{name!r} is reserved by the kernel; choose another name"
    if not _ALLOWED.fullmatch(name) or name.endswith("."):
        return "must begin with a letter and contain only letters, digits, '_', '-' and '.'"
    if any(pair in name for pair in _AMBIGUOUS):
        return "may not contain '__', nor a dot beside '_' or '.': '__' replaces a dot for some model providers"
    if len(mangled(name)) > MAX_CHARS:
        return f"may have at most {MAX_CHARS} characters, a dot counted twice"
    return None


def camel_case(name: str) -> str:
    """Return `webSearch` for `web_search`."""
    return _WORD_END.sub(lambda match: (match[1] or "").upper(), name)


def in_words(name: str) -> str:
    """Return `Web search` for `web_search`."""
    text = _WORD_END.sub(lambda match: f" {match[1]}" if match[1] else "", name)
    return text[:1].upper() + text[1:]


def one_line(text: str) -> str:
    """Return the text with runs of white space and control characters as one blank."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())
