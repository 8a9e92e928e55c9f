"""The linter finds each known mistake at its path, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.jina.definition_checks import definition_problems, source_problems
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options import ToolOptions
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import COLUMNS, registration
from openapi_tool.tools.lint import LintLimits
from openapi_tool.tools.meta_schema import META_SCHEMA
from openapi_tool.tools.problems import MAX_BYTES, Problem, read_source, read_sources
from tests.requirements import requirement
from tests.support import each

ROOT = Path(__file__).parent.parent.parent
BROKEN_FILE = ROOT / "tests" / "data" / "broken_tools.yaml"
"""Each line `--- # name` starts a definition; a comment below it has the path of its mistake."""
_PARTS = re.split(r"(?m)^--- # (\w+)\n", BROKEN_FILE.read_text(encoding="utf-8"))[1:]
BROKEN = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True))
SHIPPED = sorted((ROOT / "config" / "tools").glob("*.yaml"))
DEMO = sorted((ROOT / "openapi_tool" / "local" / "data" / "tools").glob("*.yaml"))
KEY = "jina_000000000000example111111111111"
SEARCH: dict[str, Any] = {
    "tool_name": "web_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "after_execution": "suspend",
}


ALLOWED = ("JINA_API_KEY", "SEARCH_API_KEY", "DOCS_READER_KEY", "HOME_TOWN", "SITE_COOKIE")
"""Variables that tools may use in these tests."""


def problems_of(text: str) -> list[Problem]:
    limits = LintLimits(env_parameters=frozenset({"tenanttoken"}), allowed_env=frozenset(ALLOWED))
    return [problem for source in read_sources(text) for problem in source_problems(source, limits, UrlPolicy())]


def messages(text: str) -> list[str]:
    """Return the findings that the linter must print for a broken definition, in any order."""
    return sorted(re.findall(r"^# says: (.*)$", text, re.MULTILINE))


def expectation(text: str) -> tuple[str, bool]:
    match = re.match(r"# expects( warning)?: (.+)", text)
    assert match, text
    return match[2], match[1] is not None


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tools", *arguments])


@requirement("definition.lint")
def test_the_corpus_is_large() -> None:
    assert len(BROKEN) >= 60


@requirement("definition.lint")
@each("name", BROKEN)
def test_each_mistake_is_found_at_its_path(name: str) -> None:
    found = {(problem.where, problem.warning) for problem in problems_of(BROKEN[name])}
    assert found == {expectation(BROKEN[name])}


@requirement("definition.lint")
@each("name", BROKEN)
def test_the_command_prints_position_and_remedy_of_each_mistake(name: str) -> None:
    text, (path, warning) = BROKEN[name], expectation(BROKEN[name])
    settings = {"ALLOWED_ENV": ",".join(ALLOWED), "ENV_PARAMETERS": "tenant_token"}
    environment = {f"OPENAPI_TOOL__SECRETS__{key}": value for key, value in settings.items()}
    for flags, code in ([], int(not warning)), (["--strict"], 1):
        done = CliRunner().invoke(app, ["tools", "lint", "-", *flags], input=text, env=environment)
        assert done.exit_code == code
        lines = done.stdout.splitlines()
        found = [re.fullmatch(r"-:(\d+):(\d+): (error|warning): (.*)", line) for line in lines]
        assert all(found), lines
        assert all(1 <= int(one[1]) <= text.count("\n") + 1 for one in found if one)
        severity = "warning" if warning else "error"
        assert sorted(one[4] for one in found if one) == sorted(f"{path}: {message}" for message in messages(text))
        assert {one[3] for one in found if one} == {severity}


@requirement("definition.lint")
@pytest.mark.parametrize("file", [*SHIPPED, *DEMO], ids=lambda file: file.stem)
def test_the_shipped_definitions_have_no_problems(file: Path) -> None:
    assert problems_of(file.read_text(encoding="utf-8")) == []


@requirement("definition.lint")
@pytest.mark.parametrize(
    "options",
    [
        {"jina": {"mode": "read"}},
        {"jina": {"mode": "crawl", "base_url": "https://r.jina.ai/"}},
        {"jina": {"base_url": "https://s.jina.ai:443"}},
        {"jina": {"mode": "search", "path": "/search", "method": "GET", "auth_env": "JINA_API_KEY"}},
        {"jina": {"mode": "search", "defaults": {"num": 3}, "timeout": 20, "headers": {"X-No-Cache": "true"}}},
        {"jina": {"mode": "reader", "params": {"engine": "browser"}, "timeout_s": 20}},
        {"jina": {"mode": "reader", "endpoint_template": "https://r.jina.ai/{url}", "method": "get"}},
        {"jina": {"tool": "jina.search_many"}},
        {"openapi": {"base_url": "https://s.jina.ai", "path": "/search", "method": "GET", "timeout": 20}},
        {"openapi": {"base_url": "https://r.jina.ai", "headers": {"X-Timeout": "10"}, "auth": {"env": "JINA_API_KEY"}}},
        {
            "args": {"defaults": {"session_id": "{agent_turn_id}"}, "fixed": {"project_id": "{project_id}"}},
            "envs": {"api_key": "SEARCH_API_KEY"},
            "jina": {"mode": "search", "base_url": "https://s.jina.ai", "path": "/search", "auth_env": "JINA_API_KEY"},
            "suspend_timeout_seconds": 60,
            "result_format": "object",
            "ui_allowed": True,
        },
    ],
)
def test_legacy_forms_have_no_problems(options: dict[str, Any]) -> None:
    assert definition_problems({**SEARCH, "options": options}) == []
    del options
    assert definition_problems({"name": "web_search"} | {k: v for k, v in SEARCH.items() if k != "tool_name"})


@requirement("definition.lint")
def test_a_key_in_the_place_of_a_name_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    options = {"jina": {"mode": "search"}, "args": {"fixed": {KEY: 1}}}
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    for flags in ([], ["--json"]):
        done = run("lint", str(file), *flags)
        assert done.exit_code == 1
        assert "options.args.fixed.[redacted]" in done.output
        assert KEY[5:] not in done.output


@requirement("definition.lint")
def test_a_file_of_mistakes_prints_a_thousand_lines_at_most(tmp_path: Path) -> None:
    unknown = {f"unknown_{number}": 1 for number in range(1_500)}
    file = tmp_path / "tool.yaml"
    file.write_text(
        json.dumps({**SEARCH, "options": {"jina": {"mode": "search"}, "args": {"fixed": unknown}}}), encoding="utf-8"
    )
    done = run("lint", str(file))
    assert done.exit_code == 1
    assert "only the first 1,000 are shown" in done.output
    assert len(done.output.splitlines()) < 1_010


@requirement("definition.lint")
@pytest.mark.parametrize("where", ["envs", "auth_env", "params", "description", "name"])
def test_a_pasted_key_is_refused_and_never_shown(where: str, tmp_path: Path) -> None:
    jina: dict[str, Any] = {"mode": "search"}
    document: dict[str, Any] = {**SEARCH, "options": {"jina": jina}}
    if where == "envs":
        document["options"]["envs"] = {"api_key": KEY}
    elif where == "description":
        document["description"] = f"Uses {KEY}."
    elif where == "name":
        document["tool_name"] = KEY
    else:
        jina[where] = KEY if where == "auth_env" else {"locale": KEY}
    file = tmp_path / "tool.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    for flags in ([], ["--json"]):
        done = run("lint", str(file), *flags)
        assert done.exit_code == 1
        assert "looks like a key" in done.output
        assert KEY[5:] not in done.output


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ({"optoins": {}}, "did you mean 'options'?"),
        ({"options": {"jina": {"mode": "search"}, "arg": {}}}, "did you mean 'args'?"),
        ({"options": {"jina": {"mode": "search"}, "params": {"num": 3}}}, "'params' belongs in options.jina"),
        ({"options": {"jina": {"mode": "search", "tool": "jina.serach"}}}, "did you mean 'jina.search'?"),
        ({"options": {"jina": {"mode": "search"}, "args": {"fixed": {"contry": "de"}}}}, "did you mean 'country'?"),
        ({"options": {"jina": {"mode": "search"}, "args": {"fixed": {"url": "x"}}}}, "it is one of 'jina.read'"),
    ],
)
def test_a_typo_gets_a_suggestion(mistake: dict[str, Any], hint: str) -> None:
    options = {"options": {"jina": {"mode": "search"}}}
    assert any(hint in problem.message for problem in definition_problems({**SEARCH, **options, **mistake}))


@requirement("definition.lint", "options.envs")
def test_a_secret_is_allowed_only_in_the_parameters_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"jina": {"mode": "search"}, "envs": {"api_key": "A_KEY", "Tenant-Token": "A_KEY", "tenant_pin": "A_KEY"}}
    file = tmp_path / "tool.yaml"
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    refused = run("lint", str(file))
    assert refused.exit_code == 1
    assert re.findall(r"options\.envs\.(\S+): may not take a secret", refused.output) == ["Tenant-Token", "tenant_pin"]
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ENV_PARAMETERS", "tenant_token")
    monkeypatch.setenv("OPENAPI_TOOL__TOOLS__JINA__ENVS", '{"tenant_pin": "A_KEY"}')
    assert run("lint", str(file)).exit_code == 0


QUERY = ("parameters", "properties", "query")


@requirement("definition.lint", "definition.bounds")
@pytest.mark.parametrize(
    ("rule", "where", "says"),
    [
        ({"enum": [f"{n}" for n in range(501)]}, (*QUERY, "enum"), "has more than 500 values"),
        ({"pattern": "a" * 501}, (*QUERY, "pattern"), "has more than 500 characters"),
        ({"pattern": "(a{1000}){60}"}, (*QUERY, "pattern"), "is no supported regular expression"),
        ({"description": "x" * 300_000}, (), "is larger than 262,144 bytes"),
        ({"examples": ["x"] * 2_500}, ("parameters",), "holds more than 2,000 values"),
    ],
)
def test_values_that_the_executor_would_refuse_are_found_at_their_path(
    rule: dict[str, Any], where: tuple[str, ...], says: str
) -> None:
    query = {"type": "string", "description": "What to search for.", **rule}
    schema = {"type": "object", "additionalProperties": False, "required": ["query"], "properties": {"query": query}}
    document = {**SEARCH, "parameters": schema, "options": {"jina": {"mode": "search"}}}
    (problem,) = definition_problems(document)
    assert problem.path == where
    assert says in problem.message


@requirement("definition.lint")
def test_lint_uses_the_limits_of_the_executor() -> None:
    options = {"jina": {"mode": "search", "timeout_s": 200}, "suspend_timeout_seconds": 300}
    assert definition_problems({**SEARCH, "options": options}, LintLimits(tools=ToolOptions(max_timeout_s=290))) == []
    assert definition_problems({**SEARCH, "options": options})[0].where == "options.jina.timeout_s"


@requirement("definition.lint")
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["options", "jina", "args", "fixed", "parameters", "properties", "query", "type", "items"]
                )
                | st.sampled_from(COLUMNS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_json_value_makes_the_linter_fail(document: Any) -> None:
    assert all(problem.message for problem in definition_problems(document))


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all members of a JSON value."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name)
        if isinstance(item, dict | list):
            yield from paths_of(item, (*path, name))


@requirement("definition.lint")
@pytest.mark.parametrize("wrong", [None, True, 5, 0.5, "x", [], [1], {}, {"x": 1}], ids=repr)
@pytest.mark.parametrize("tool", ["jina.search", "jina.read_many"])
def test_no_value_of_a_wrong_type_makes_the_linter_fail(tool: str, wrong: Any) -> None:
    """Without checks of types 166 of 19,720 such definitions ended the linter with a traceback."""
    row = registration(CATALOGUE[tool])
    args = {"defaults": {"page": 2}, "fixed": {"urls": ["https://example.com"]}}
    row["options"] |= {"args": args, "envs": {"a": "B"}}
    for *above, last in paths_of(row):
        document: Any = deepcopy(row)
        part = document
        for name in above:
            part = part[name]
        part[last] = wrong
        assert all(problem.message for problem in definition_problems(document))


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 2024-01-01", "date; put it in quotes"),
        ("a: !!binary x", "put it in quotes"),
        ("a: .nan", "finite"),
        ('a: "\\0"', "cannot be stored in the database"),
        ("a: 99999999999999999999", "cannot be stored in the database"),
        ("a: 1\na: 2", "given twice"),
        ("2024: 1", "a key must be a text"),
        ("a: &x\n  b: *x", "refers to itself"),
        ("a: [" * 500, "is n"),
    ],
)
def test_yaml_values_without_json_equivalent_are_reported(text: str, message: str) -> None:
    assert any(message in problem.message for problem in read_source(text).problems)


@requirement("definition.lint")
@given(st.text(alphabet="ab:-[]{}&*!<> \n\t'\"|0.", max_size=40))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    problems_of(text)


@requirement("definition.lint")
def test_all_problems_of_all_files_are_reported_with_line_and_column(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "tool_name: fork_join\ntarget_subject: cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search\n"
        "after_execution: resume\noptions:\n  jina:\n    mode: search\n    params:\n      num: 99\n",
        encoding="utf-8",
    )
    two.write_text("tool_name: [\n", encoding="utf-8")
    done = run("lint", str(one), str(two))
    assert done.exit_code == 1
    places = [line.split(": ")[0].rpartition("/")[2] for line in done.stdout.splitlines()]
    assert places == ["one.yaml:1:1", "one.yaml:3:1", "one.yaml:8:7", "two.yaml:2:1"]
    objects = [json.loads(line) for line in run("lint", str(one), "--json").stdout.splitlines()]
    assert [(item["line"], item["path"]) for item in objects][2] == (8, "options.jina.params.num")


@requirement("definition.lint")
def test_warnings_fail_only_with_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "accept_given.yaml"
    file.write_text(BROKEN["accept_given"], encoding="utf-8")
    assert run("lint", str(file)).exit_code == 0
    assert run("lint", str(file), "--strict").exit_code == 1
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ALLOWED_ENV", "DOCS_READER_KEY")
    assert run("lint", *map(str, SHIPPED), "--strict").exit_code == 0


@requirement("definition.lint")
@pytest.mark.parametrize(("own", "warns"), [(9, False), (10, True), (11, True)])
def test_a_budget_that_lowers_nothing_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, *, warns: bool
) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__BUDGETS__SESSION_REQUESTS", "10")
    file = tmp_path / "tool.yaml"
    options = {"jina": {"mode": "search"}, "budget": {"session_requests": own}}
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    done = run("lint", str(file))
    says = "warning: options.budget.session_requests: changes nothing: budgets.session_requests is 10, and a definition"
    assert (done.exit_code, says in done.stdout) == (0, warns), done.output


@requirement("definition.lint")
@pytest.mark.parametrize("wrong", ["base_url", "mode", "tool_name", "auth_env", "parameters"])
def test_no_mistake_hides_another(wrong: str) -> None:
    """Otherwise each run of the linter would show one more mistake."""
    jina: dict[str, Any] = {"mode": "search", "params": {"proxyUrl": "x", "engine": 5}, "headers": {"Cookie": "x"}}
    options = {"jina": jina, "envs": {"locale": "A_KEY"}, "args": {"fixed": {"colour": "x"}}}
    document: dict[str, Any] = {**SEARCH, "options": options}
    expected = {"options.envs.locale"}
    if wrong == "tool_name":
        document["tool_name"] = "no name"
        expected |= {"tool_name"}
    elif wrong == "parameters":
        document["parameters"] = {"properties": {"query": {"$ref": "#/x"}}}
        jina["base_url"] = "https://evil.example"
        expected |= {"parameters.properties.query.$ref", "options.jina.base_url"}
    else:
        jina[wrong] = {"base_url": "https://evil.example", "mode": "searching", "auth_env": "PG_DSN"}[wrong]
        expected |= {f"options.jina.{wrong}"}
    places = ("jina.params.proxyUrl", "jina.params.engine", "jina.headers.Cookie", "args.fixed.colour")
    expected |= {f"options.{place}" for place in places}  # a misspelt mode is treated as the one that was meant
    assert expected <= {problem.where for problem in definition_problems(document) if not problem.warning}


@requirement("definition.lint")
def test_the_meta_schema_is_a_json_schema() -> None:
    jsonschema_rs.meta.validate(META_SCHEMA)


def written(folder: Path, **documents: Any) -> list[str]:
    """Write definitions to files of these names; return their paths."""
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(json.dumps(document), encoding="utf-8")
    return [str(folder / f"{name}.yaml") for name in documents]


def lines_of(result: Any) -> list[str]:
    """Return the output of the linter without folders."""
    return [re.sub(r"\S*/", "", line) for line in result.stdout.splitlines()]


PLAIN = {**SEARCH, "options": {"jina": {"mode": "search"}}}


@requirement("definition.lint", "options.envs")
@pytest.mark.parametrize("where", ["auth_env", "envs", "legacy"])
def test_an_unknown_variable_is_an_error_if_the_executors_settings_are_given(where: str, tmp_path: Path) -> None:
    forms: dict[str, Any] = {
        "auth_env": {"jina": {"mode": "search", "auth_env": "MY_DOSC_KEY"}},
        "envs": {"jina": {"mode": "search"}, "envs": {"api_key": "MY_DOSC_KEY"}},
        "legacy": {"openapi": {"base_url": "https://s.jina.ai", "auth": {"env": "MY_DOSC_KEY"}}},
    }
    place = {"auth_env": "jina.auth_env", "envs": "envs.api_key", "legacy": "openapi.auth.env"}[where]
    (file,), config = written(tmp_path, a={**SEARCH, "options": forms[where]}), tmp_path / "executor.toml"
    config.write_text('[secrets]\nallowed_env = ["MY_DOCS_KEY"]\n')
    says = f"options.{place}: MY_DOSC_KEY is no variable that these settings pass to tools"
    alone, checked = run("lint", file), run("lint", file, "--config", str(config))
    assert alone.exit_code == 0
    assert f"warning: {says}; list it in secrets.allowed_env" in alone.stdout
    assert checked.exit_code == 1
    assert f"error: {says}; did you mean 'MY_DOCS_KEY'?" in checked.stdout
    config.write_text('[secrets]\nallowed_env = ["MY_DOSC_KEY"]\n')
    assert run("lint", file, "--config", str(config), "--strict").exit_code == 0


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("text", "says"), [(None, "No such file"), ("[secrets", "executor.toml"), ("[x]", "executor.toml): is not")]
)
def test_an_unreadable_configuration_is_reported(text: str | None, says: str, tmp_path: Path) -> None:
    (file,), config = written(tmp_path, a=PLAIN), tmp_path / "executor.toml"
    if text is not None:
        config.write_text(text)
    done = run("lint", file, "--config", str(config))
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


@requirement("definition.lint")
def test_folders_and_standard_input_are_read(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    written(tmp_path, b={**PLAIN, "after_execution": "x"}, a=PLAIN)
    (tmp_path / "below" / "c.yml").write_text("tool_name: c")
    (tmp_path / "notes.txt").write_text("no: definition")
    done = run("lint", str(tmp_path))
    assert done.exit_code == 1
    places = ["b.yaml:1:2: error: tool_name", "b.yaml:1:105: error: after_execution"]
    assert [line.rsplit(": ", 1)[0] for line in lines_of(done)][:2] == places
    assert "c.yml:1:1: error: options" in done.stdout
    assert "notes" not in done.output
    assert done.stderr.startswith("3 files, ")
    text = (tmp_path / "a.yaml").read_text()
    assert CliRunner().invoke(app, ["tools", "lint", "-"], input=text).exit_code == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run("lint", str(empty))
    assert done.exit_code == 2
    assert "empty: holds no file whose name ends in .yaml or .yml" in done.stderr


@requirement("definition.lint", "definition.exports")
def test_a_kernel_export_can_be_linted_and_exported_again(tmp_path: Path) -> None:
    odd = {"type": "string", "description": "Where.", "enum": ["010", "1:30", "1e3", "08", "no", "2024-01-01"]}
    document = {**PLAIN, "parameters": {**CATALOGUE["jina.search"].schema()}}
    document["parameters"]["properties"] |= {"location": odd}
    exported = run("export", "--format", "kernel", *written(tmp_path, a=document), *map(str, SHIPPED)).stdout
    assert len(read_sources(exported)) == 1 + len(SHIPPED)
    done = CliRunner().invoke(app, ["tools", "lint", "-"], input=exported)
    assert done.exit_code == 0, done.output
    (tmp_path / "all.yaml").write_text(exported)
    assert run("export", "--format", "kernel", str(tmp_path / "all.yaml")).stdout == exported
    assert run("render", str(tmp_path / "all.yaml"), "--project", "p").exit_code == 1
    assert run("lint", "-").exit_code == 1  # empty input contains no definition


@requirement("definition.lint")
def test_problems_of_each_document_have_the_line_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    text = "".join(f"---\n{json.dumps({**PLAIN, 'tool_name': name})}\n" for name in ("one", "fork_join", "three"))
    file.write_text(text + "---\ntool_name: [\n")
    done = run("lint", str(file))
    assert done.exit_code == 1
    assert [line.split(" error: ")[0] for line in lines_of(done)] == ["two.yaml:4:2:", "two.yaml:9:1:"]


@requirement("definition.lint")
@pytest.mark.parametrize("command", ["lint", "export"])
def test_two_definitions_with_one_name_are_both_named(command: str, tmp_path: Path) -> None:
    done = run(command, *written(tmp_path, a=PLAIN, b={**PLAIN, "after_execution": "terminate"}))
    assert done.exit_code == 1
    (line,) = [re.sub(r"\S*/", "", line) for line in done.output.splitlines() if "error: " in line]
    says = "is the name of the definition at a.yaml:1, too; a project has each name once"
    assert line == f"b.yaml:1:2: error: tool_name: {says}"


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("chars", "says"),
    [
        (5_000_000, "description: has 5,000,000 characters, at most 10,000 are stored"),
        (MAX_BYTES, "definition: is larger than 8,000,000 bytes; split it, or shorten its texts"),
    ],
)
def test_an_overlong_text_is_reported(chars: int, says: str, tmp_path: Path) -> None:
    done = run("lint", *written(tmp_path, a={**PLAIN, "description": "x" * chars}))
    assert done.exit_code == 1
    assert f"error: {says}" in done.stdout


@requirement("definition.lint")
def test_a_file_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"tool_name: \xff")
    assert lines_of(run("lint", str(file))) == ["a.yaml:1:1: error: definition: is not UTF-8 text; save it as UTF-8"]
    assert run("lint", str(tmp_path / "b.yaml")).exit_code == 2
