"""The built-in tools, and the arguments that a model may give them (tool-design section 1).

A definition names one of them in `options.jina.tool`, and so gets its schema and description. The classes of arguments
only declare these schemas; a call's arguments are validated by JSON Schema (`schema.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from openapi_tool.protocol.jsontext import JsonObject
from openapi_tool.tools.operations import READER, SEARCH, Operation

MAX_ITEMS = 10
"""Items of a batch in the schema for models; the executor enforces `tools.max_batch_items`."""

DEFAULT_MAX_TOKENS = 20_000
"""Tokens per page in the definitions of `config/tools`; a model may ask for more."""

_NOT_BLANK = r"\S"
Text = Annotated[str, Field(min_length=1, max_length=2_000, pattern=_NOT_BLANK)]
Address = Annotated[str, Field(min_length=1, max_length=16_000, pattern=_NOT_BLANK)]
Name = Annotated[str, Field(min_length=1)]

_optional = partial(Field, None)
"""Argument that a model may omit, but not set to null."""

_tokens = partial(_optional, ge=500, le=2_000_000)


class _CommonOptions(BaseModel):
    max_result_tokens: int = _optional(description="Most tokens of the result; only lowers its limit.", ge=500)


class _SearchOptions(_CommonOptions):
    count: int = _optional(description="How many results, by default 10. Over 10 costs twice as much.", ge=1, le=20)
    page: int = _optional(
        description="Which page of results, from 1; for more results of the same search.", ge=1, le=1_000
    )
    country: str = _optional(description="Code of the country to search from, such as de.", min_length=2, max_length=2)
    language: str = _optional(description="Language of the results, such as en or zh-cn.", min_length=2, max_length=20)
    location: str = _optional(
        description="City or region to search from, such as Berlin.", min_length=1, max_length=200
    )
    site: list[Text] = _optional(
        description='Only results from these sites, such as ["example.com"].', min_length=1, max_length=20
    )
    exclude_sites: list[Name] = _optional(description="No results from these sites.", min_length=1, max_length=20)
    after: str = _optional(
        description="Only pages from after this date, such as 2025-12-31.", min_length=1, max_length=20
    )
    recency: Literal["day", "week", "month", "year"] = _optional(
        description="Only pages from the past day, week, month or year."
    )
    file_type: str = _optional(description="Only files of this type, such as pdf.", min_length=1, max_length=20)
    title_words: list[Name] = _optional(description="Only titles with one of these.", min_length=1, max_length=20)
    with_content: bool = _optional(
        description="True to read every result's page, too: much slower and longer. Without it: titles, addresses "
        "and snippets, mostly enough to choose pages to read."
    )
    max_tokens: int = _tokens(description="With with_content: cut each page to about this many tokens.")


class _SearchArguments(_SearchOptions):
    query: Text = Field(description="What to search for, in the words that a page about it would use.")


class _SearchManyArguments(_SearchOptions):
    queries: list[Text] = Field(
        description=f"1 to {MAX_ITEMS} searches, run side by side.", min_length=1, max_length=MAX_ITEMS
    )


class _ReadOptions(_CommonOptions):
    format: Literal["content", "markdown", "text", "html"] = _optional(
        description="content (the default): the main text as markdown; markdown: the whole page; text: plain text; "
        "html: the source."
    )
    target_selector: Text = _optional(description="CSS selector: read only these parts. An error when nothing matches.")
    remove_selector: Text = _optional(description="CSS selector: leave these parts out.")
    wait_for_selector: Text = _optional(description="CSS selector: wait until this shows, for pages that load late.")
    with_links: bool = _optional(description="True to list the page's links, too.")
    with_images: bool = _optional(description="True to list the page's images, too.")
    retain_links: Literal["none", "all", "text", "gpt-oss"] = _optional(
        description="Links in the text: all (the default), only their text, none of both, or gpt-oss: numbers."
    )
    retain_images: Literal["none", "all", "alt"] = _optional(
        description="Images in the text: all (the default), only their descriptions, or none."
    )
    link_style: Literal["inlined", "referenced", "discarded"] = _optional(
        description="How links are written; discarded keeps only their text, much shorter."
    )
    max_tokens: int = _tokens(description="Cut the page to about this many tokens, which also costs less.")
    no_cache: bool = _optional(description="True to load the page afresh; it may otherwise be an hour old.")
    timeout: float = _optional(
        description="Give up on slow pages after this many seconds; only shortens.", gt=0, le=3_600
    )


class _ReadArguments(_ReadOptions):
    url: Address = _optional(
        description="Address of the page or PDF, http or https. Give exactly one of url and cursor."
    )
    cursor: str = _optional(
        description="Continues a truncated result from the cursor that it named; costs nothing. Give exactly one "
        "of url and cursor.",
        min_length=1,
        max_length=200,
    )
    pdf_page: int = _optional(description="Read only this page of a PDF, from 1; costs less.", ge=1, le=100_000)
    find: str = _optional(
        description="With cursor: find this text in the whole result instead; free.", min_length=1, max_length=200
    )
    question: str = _optional(
        description="With cursor: passages of the whole result that answer this; free.", min_length=1, max_length=500
    )


class _ReadManyArguments(_ReadOptions):
    urls: list[Address] = Field(
        description=f"Addresses of 1 to {MAX_ITEMS} pages, read side by side.", min_length=1, max_length=MAX_ITEMS
    )


@dataclass(frozen=True, slots=True)
class BuiltInTool:
    """Built-in tool.

    - `name`: the canonical name, such as `jina.read_many`. `api_name` is the name in manifests, such as `readPages`.
    - `purpose`: what the tool is for, in the system role of a manifest.
    - `arguments`: declares the arguments.
    - `suspend_timeout_s`: how long the kernel's worker should wait for a result.
    - `list_argument`: the argument with the items of a batch, such as `urls`; None for a tool that takes one item.
    """

    name: str
    operation: Operation
    api_name: str
    title: str
    description: str
    purpose: str
    arguments: type[BaseModel]
    tags: frozenset[str]
    suspend_timeout_s: int
    list_argument: str | None = None

    def schema(self) -> JsonObject:
        """Return a new copy of the JSON Schema of the arguments (tool-design section 2)."""
        schema: JsonObject = json.loads(_schema_json(self.arguments))
        return schema


@cache
def _schema_json(arguments: type[BaseModel]) -> str:
    """Return the schema, own arguments before inherited ones. Cached: pydantic takes 5 ms."""
    schema = arguments.model_json_schema()
    rules = schema["properties"]
    names = dict.fromkeys((*arguments.__annotations__, *rules))  # each once, own ones first
    properties = {name: _without_pydantics_additions(rules[name]) for name in names}
    required = {"required": schema["required"]} if "required" in schema else {}
    return json.dumps({"type": "object", "additionalProperties": False, "properties": properties, **required})


def _without_pydantics_additions(rule: JsonObject) -> JsonObject:
    return {keyword: value for keyword, value in rule.items() if keyword not in ("title", "default")}


class DuplicateTool(ValueError):
    """Two built-in tools have the same name."""


def catalogue(*tools: BuiltInTool) -> Mapping[str, BuiltInTool]:
    """Return the tools by canonical name. Raises DuplicateTool."""
    found: dict[str, BuiltInTool] = {}
    for tool in tools:
        if tool.name in found:
            raise DuplicateTool(f"the canonical tool name {tool.name!r} is declared twice")
        found[tool.name] = tool
    return found


_SEARCH_TAGS = frozenset({"network", "search"})
_READ_TAGS = frozenset({"network", "read"})

CATALOGUE: Mapping[str, BuiltInTool] = catalogue(
    BuiltInTool(
        name="jina.search",
        operation=SEARCH,
        api_name="search",
        title="Web search",
        description="Searches the web and gives numbered results: title, address, date, snippet. Use it to find pages, "
        "then read the few that matter. For several searches at once use the batch form.",
        purpose="finds pages; gives titles, addresses, dates and snippets, not the pages themselves.",
        arguments=_SearchArguments,
        tags=_SEARCH_TAGS,
        suspend_timeout_s=60,
    ),
    BuiltInTool(
        name="jina.search_many",
        operation=SEARCH,
        api_name="searchMany",
        title="Several web searches",
        description="Runs several web searches side by side in one call. One that fails does not fail the others. "
        "Better than many single searches.",
        purpose="several searches in one call.",
        arguments=_SearchManyArguments,
        tags=_SEARCH_TAGS,
        suspend_timeout_s=60,
        list_argument="queries",
    ),
    BuiltInTool(
        name="jina.read",
        operation=READER,
        api_name="readPage",
        title="Read a page",
        description="Reads a web page or PDF as text: title, address, date, warnings, body. A truncated result says so "
        "at its end and names a cursor: call again with only that cursor for the next part.",
        purpose="the text of one page or PDF.",
        arguments=_ReadArguments,
        tags=_READ_TAGS,
        suspend_timeout_s=90,
    ),
    BuiltInTool(
        name="jina.read_many",
        operation=READER,
        api_name="readPages",
        title="Read several pages",
        description="Reads several web pages or PDFs side by side in one call. A page that fails does not fail the "
        "others. Better than many single reads.",
        purpose="several pages in one call.",
        arguments=_ReadManyArguments,
        tags=_READ_TAGS,
        suspend_timeout_s=90,
        list_argument="urls",
    ),
)
