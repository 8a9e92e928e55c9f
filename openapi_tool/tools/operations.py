"""The upstream's operations, search and reader: their hosts and paths, and how a definition names them.

Each built-in tool (`catalogue.py`) calls one operation. Egress rules derive from these declarations, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Operation of the upstream; `jina/endpoints.py` adds what definitions and egress rules do not need.

    Its *main parameter* is the query of a search, or the address of the page.

    - `name` and `aliases`: values of `mode` in a definition.
    - `ability`: completes `You can` in exports.
    - `limits`: the prefix of its settings in `[limits]`.
    - `argument`: the model's name of the main parameter. `main_parameter` is the upstream's name of it.
      `main_parameter_names` are all names of it, folded (`argument_names.fold`).
    - `paths`: maps `path` of a definition to the path that is requested. `template` is the path of a GET request with
      the main parameter in it, such as `/{url}`; None if the operation has no such request.
    - `min_tokens`: the tokens that a request is charged at least (jina-api section 5).
    """

    name: str
    host: str
    ability: str
    limits: Literal["search", "reader"]
    argument: str
    main_parameter: str
    main_parameter_names: frozenset[str]
    paths: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    template: str | None = None
    min_tokens: int = 1

    def urls(self, path: str) -> tuple[str, str]:
        """Return the URL of a path, without and with the default port."""
        return f"https://{self.host}{path}", f"https://{self.host}:443{path}"


SEARCH = Operation(
    name="search",
    host="s.jina.ai",
    ability="search the web",
    limits="search",
    argument="query",
    main_parameter="q",
    main_parameter_names=frozenset({"query", "q"}),
    paths={"": "/", "/": "/", "/search": "/search", "/search/": "/search"},
    min_tokens=10_000,
)
READER = Operation(
    name="reader",
    host="r.jina.ai",
    ability="read pages",
    limits="reader",
    argument="url",
    main_parameter="url",
    main_parameter_names=frozenset({"url", "targeturl"}),
    paths={"": "/", "/": "/", "/{url}": "/{url}"},
    aliases=("read", "crawl"),
    template="/{url}",
)
OPERATIONS = (SEARCH, READER)
