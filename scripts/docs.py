"""Generate documents: references of settings and tools, requirements, `config/tools`, licences, chart schema.

`python -m scripts.docs` writes them; `--check` fails if one is out of date.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from openapi_tool.settings import PREFIX, SHORT_NAMES, Settings
from openapi_tool.settings.sections import fields_of
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.exports import as_yaml, registration
from scripts.chart import CHART, chart_readme, values_schema
from scripts.licences import PAGE as LICENCES
from scripts.licences import licences_page
from scripts.operations import PAGE as OPERATIONS
from scripts.operations import operations_page
from scripts.tools_reference import PAGE, tools_page
from tests.requirements import REQUIREMENTS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


def claims() -> Iterator[tuple[str, str]]:
    """Yield every (requirement, test) pair that the suite claims, read from its sources."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "requirement":
                        where = f"{path.relative_to(TESTS)}::{node.name}"
                        yield from ((ast.literal_eval(argument), where) for argument in decorator.args)


def conformance() -> str:
    """Return each requirement with its source and its test modules, as Markdown."""
    modules = defaultdict(set)
    for claimed, test in claims():
        modules[claimed].add(test.partition("::")[0])
    lines = [
        "# Conformance",
        "",
        "Every requirement, and the test modules below `tests/` that show it; the tests carry its id. The headings",
        "are the sources: the kernel's protocol, Jina's API and the design of the tools for models (tool-design),",
        "each with its section, or else the design of this service. Written by `make docs` from",
        "`tests/requirements.py`; the suite fails for a requirement without a test and for a test of an unknown",
        "requirement.",
    ]
    source = ""
    for requirement in sorted(REQUIREMENTS, key=lambda requirement: requirement.source):
        if requirement.source != source:
            source = requirement.source
            lines += [
                "",
                f"## {source[0].upper()}{source[1:]}",
                "",
                "| id | requirement | tests |",
                "| --- | --- | --- |",
            ]
        tests = ", ".join(f"`{module}`" for module in sorted(modules[requirement.id]))
        lines.append(f"| `{requirement.id}` | {requirement.text} | {tests} |")
    return "\n".join(lines) + "\n"


def settings_reference() -> str:
    """Return every setting with its variable, default and meaning, as Markdown."""
    short = {target: name for name, target in SHORT_NAMES.items()}
    lines = [
        "# Settings",
        "",
        "Sources in ascending precedence: defaults, the kernel's own `config.toml` (`CG_CONFIG_TOML`), a",
        "TOML file (`OPENAPI_TOOL_CONFIG`, [sample](../config/openapi-tool.toml)), the environment, flags",
        "(`openapi-tool serve --help`). Written by `make docs` from the models.",
        "",
        "Keys of the upstream are no settings: they are environment variables that tool definitions name",
        "(`JINA_API_KEY`, and what `secrets.allowed_env` adds). Instead of `NAME`, `NAME_FILE` may name a mounted",
        "file that contains the value (white space around it and a byte order mark do not count); to set both is an",
        "error, and so is a character beyond ASCII. Values are read at the start, those of files also when they",
        "change. `SSL_CERT_FILE` adds a CA for the upstream.",
        "",
        "The connection string of PostgreSQL may have all that its driver takes: several hosts with ports, sockets,",
        "`[::1]`, everything in the query. Names and passwords are percent-encoded (`%` as `%25`, `/` as `%2F`, `?`",
        "as `%3F`, `#` as `%23`, `@` as `%40`, `[` as `%5B`, `]` as `%5D`); one that could be misread is an error",
        "that shows nothing of it. What the driver reads in addition (`PGPORT`, `PGSSLMODE`, …, a service, TLS files)",
        "is checked, too. The same holds for the URLs of proxy and collector. The client of NATS decodes nothing: a",
        "user and password with such characters must be set as `nats.user` and `nats.password`.",
    ]
    for name, field in Settings.model_fields.items():
        section: Any = field.annotation
        lines += ["", f"## {name}", "", section.__doc__.strip(), "", "| key | environment | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for key, detail in fields_of(section).items():
            variable = f"`{PREFIX}{name.upper()}__{key.upper()}`"
            if (name, key) in short:
                variable += f", `{short[name, key]}`"
            lines.append(f"| `{key}` | {variable} | {_default(detail)} | {detail.description} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, tuple):
        return f"`{', '.join(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def shipped_definition(tool: BuiltInTool) -> str:
    """Return the definition of a built-in tool for `config/tools`."""
    return f"# Written by `make docs` from openapi_tool/tools/catalogue.py.\n{as_yaml(registration(tool))}"


SHIPPED = {
    ROOT / "config" / "tools" / f"{registration(tool)['tool_name']}.yaml": partial(shipped_definition, tool)
    for tool in CATALOGUE.values()
}
DOCUMENTS: dict[Path, Callable[[], str]] = {
    **SHIPPED,
    LICENCES: licences_page,
    CHART / "README.md": chart_readme,
    CHART / "values.schema.json": values_schema,
    ROOT / "docs" / "protocol-conformance.md": conformance,
    ROOT / "docs" / "settings.md": settings_reference,
    OPERATIONS: operations_page,
    PAGE: tools_page,
}


def main() -> int:
    """Write or check every document; return 1 if a checked one is out of date."""
    stale = [
        path for path, make in DOCUMENTS.items() if not path.exists() or path.read_text(encoding="utf-8") != make()
    ]
    if "--check" in sys.argv:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(ROOT)} is stale: make docs\n")
        return int(bool(stale))
    for path in stale:
        path.write_text(DOCUMENTS[path](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
