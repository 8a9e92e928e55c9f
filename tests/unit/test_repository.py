"""The repository itself: documents, locks, licences, wheel, patterns, and the fuzz corpora."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import openapi_tool
from openapi_tool.__main__ import PINNED
from openapi_tool.jina.parameters import READER_PARAMETERS, SEARCH_PARAMETERS
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError
from openapi_tool.settings import Settings
from openapi_tool.settings.sections import fields_of
from openapi_tool.telemetry import metrics
from openapi_tool.tools import argument_names
from openapi_tool.tools.problems import MAX_PROBLEMS
from scripts import dist, docs, mutate
from scripts.docs import CHART_README, DOCUMENTS, claims
from scripts.packages import (
    CLEAN,
    ELSEWHERE,
    LOCK,
    NOT_CHECKED,
    VULNERABLE,
    acceptable,
    audit,
    licence,
    packages,
    sbom,
    verdict,
)
from tests.fuzz import targets
from tests.fuzz.corpora import MAX_INPUTS, MAX_TOTAL_BYTES, saved, seeds
from tests.fuzz.targets import MAX_BYTES, TARGETS
from tests.mutations import MUTATIONS
from tests.private_names import private_names
from tests.requirements import REQUIREMENTS, requirement
from tests.support import each

ROOT = Path(__file__).parent.parent.parent
POSTGRES = {"postgres": {"dsn": "postgresql://127.0.0.1/kernel"}}
CHART = ROOT / "helm" / "openapi-tool"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


PACKAGE = Path(openapi_tool.__file__).parent


def test_the_dockerfile_passes_its_lint() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(  # noqa: S603 - the pinned linter
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_one_version_everywhere() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert PROJECT["version"] == openapi_tool.__version__ == chart["appVersion"]
    assert f"[{openapi_tool.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PINNED)
def test_a_dependency_whose_private_names_are_used_is_of_one_minor_version(name: str) -> None:
    needed, version = PINNED[name]
    major, minor = map(int, version.split("."))
    assert f"{needed}>={version},<{major}.{minor + 1}" in PROJECT["dependencies"]
    for lock in ROOT.glob("requirements*.lock"):
        found = re.findall(rf"^{name}==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
        assert all(one.startswith(f"{version}.") for one in found), lock


def test_private_names_of_dependencies_are_used_in_one_module_for_each_pinned_one() -> None:
    names = private_names(PACKAGE)
    assert names == {
        "jina/connections.py": {"_create_connection", "_factory", "_retry_connection"},
        "nats_client/client.py": {
            *("_build_message", "_close", "_connect_command", "_current_server", "_id", "_io_writer", "_pending"),
            *("_pending_data_size", "_process_connect_init", "_process_err", "_process_headers", "_process_info"),
            *("_process_msg", "_process_op_err", "_process_ping", "_process_pong", "_ps", "_read_loop", "_remove_sub"),
            *("_server_info", "_stop_processing", "_transport", "_ws"),
        },
    }
    assert len(PINNED) == len(names)


@pytest.mark.parametrize("found", ["2.15.0", "2.17.0", "3.0.0", "2.160.0"])
def test_another_minor_version_of_such_a_dependency_is_refused_with_the_remedy(found: str) -> None:
    start = """
import sys
from openapi_tool import __main__ as m
installed = m.version
m.version = lambda name: sys.argv.pop() if name == "nats-py" else installed(name)
m.main()
"""
    done = subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-c", start, "--version", found], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"nats-py {found} is installed" in done.stderr
    assert "pip install 'nats-py[nkeys]~=2.16.0'" in done.stderr


def test_an_environment_behind_a_link_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / ".venv").symlink_to("elsewhere")
    for name in ("Makefile", "requirements-dev.lock"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "install"], cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S607
    assert done.returncode == 2
    assert ".venv is a link: remove it" in done.stdout
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_every_dependency_is_explained() -> None:
    explained = (ROOT / "docs" / "internal" / "dependencies.md").read_text(encoding="utf-8")
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = [re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0] for group in groups for requirement in group]
    assert [name for name in names if f"`{name}`" not in explained] == []


@requirement("logs.call", "metrics")
def test_every_action_and_metric_has_a_meaning_and_is_in_the_operations_page() -> None:
    page = docs.OPERATIONS_PAGE.read_text(encoding="utf-8")
    documented = docs.actions()
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r'"action": "([a-z_.]+)"', source)) == documented.keys()
    assert docs.MEANINGS.keys() - documented.keys() == set()
    for name, (_, meaning) in documented.items():
        assert len(meaning) > 10, name
        # Neither a placeholder of the log message nor an optional value at its end is left.
        assert not re.search(r"%[.\d]*[a-z]|\w….$", meaning), name
        assert f"| `{name}` |" in page
    assert [metric.name for metric in metrics.ALL if f"| `{metric.name}" not in page or len(metric.text) < 10] == []


@pytest.mark.parametrize(
    ("existing", "named", "made_again"),
    [("3.12.1", "3.13.0", True), ("3.13.0", "3.13.0", False), ("3.12.1", "", False)],
)
def test_make_replaces_an_environment_of_another_python_if_one_is_named(
    *, existing: str, named: str, made_again: bool, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements-dev.lock", "pyproject.toml", ".venv/.locked", ".venv/.ready"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for path, version in ((tmp_path / ".venv/bin/python", existing), (tmp_path / "another", named)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {version}\n", encoding="ascii")
        path.chmod(0o755)
    command = ["make", "--dry-run", "lint", *([f"PYTHON={tmp_path / 'another'}"] if named else [])]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")}
    done = subprocess.run(  # noqa: S603 - our own Makefile
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ("venv --clear .venv" in done.stdout) == made_again


def test_make_help_begins_with_what_is_needed_every_day() -> None:
    words = ["make", "--no-print-directory", "help"]  # `make test` would have it print the folder
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:5] == ["install", "demo", "dev", "test", "check"]
    assert {"thorough", "chaos", "bench", "image"} <= set(names[5:])


def test_make_figures_passes_its_arguments() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "figures", "FIGURES=--against HEAD"],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert " -m scripts.figures --check --against HEAD\n" in done.stdout


@requirement("supply.locked")
def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)  # noqa: S603 - the pinned build backend
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    assert {name.split("/")[0] for name in sources} == {"openapi_tool"}
    assert [name for name, source in sources.items() if b"os.kill(os.getpid()" in source] == [], "fail points"


@requirement("docs.run")
def test_every_module_that_a_text_names_exists() -> None:
    """A module in back-ticks is named by its path in the package, in the repository, or beside the text."""
    elsewhere = re.compile(r"VERSION\.py$|^retrieval/")  # of a protocol version to come, and of open-webui
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("openapi_tool/**/*.py")]
    named = {(text, name) for text in texts for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", text.read_text())}
    folders = [ROOT, ROOT / "openapi_tool", ROOT / "tests"]
    files = {path.name for folder in folders[1:] for path in folder.rglob("*.py")}
    missing = [
        (text.name, name)
        for text, name in sorted(named)
        if not elsewhere.search(name)
        and not any((folder / name).is_file() for folder in (*folders, text.parent))
        and ("/" in name or name not in files)
    ]
    assert not missing


@requirement("logs.call")
def test_shared_tasks_do_not_inherit_the_context_of_a_call() -> None:
    """A task of `asyncio.create_task` logs with the ids of the call that starts it, which may be another project's."""
    shared = [*(ROOT / "openapi_tool" / "quotas").glob("*.py")]
    assert len(shared) > 10
    assert [path.name for path in shared if "create_task(" in path.read_text(encoding="utf-8")] == []


def test_every_link_of_the_readme_exists_and_is_described() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []
    _, _, rows = text.rpartition("| --- | --- |\n")
    assert [
        row for row in rows.splitlines() if not re.fullmatch(r"\| (\[[^|]+\]\([^|]+\)(, )?)+ \| [^|]{15,} \|", row)
    ] == []
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(links) == set()


def test_lock_files_pin_every_package_with_hashes() -> None:
    for name in ("requirements.lock", "requirements-build.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        packages = re.findall(r"^([a-z0-9][\w.-]*)==", text, re.MULTILINE)
        assert len(packages) >= 7
        assert text.count("--hash=sha256:") >= len(packages)
        assert "://" not in text, "a lock file names no index"


def _documented(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in fields_of(section).items():
        kind: Any = field.annotation
        if fields_of(kind) and not get_args(kind):  # an optional section is one setting; another section has its keys
            yield from _documented(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


@requirement("settings.sources")
def test_the_sample_shows_every_setting_with_its_default() -> None:
    text = (ROOT / "config" / "openapi-tool.toml").read_text(encoding="utf-8")
    shown = tomllib.loads(re.sub(r"^#(?=[\w\[])", "", text, flags=re.MULTILINE))
    defaults = Settings.model_validate(POSTGRES).model_dump(mode="json")
    for path, field in _documented(Settings):
        sample: Any = shown
        default: Any = defaults
        for part in path.split("."):
            assert part in sample, f"{path} is not in config/openapi-tool.toml"
            sample, default = sample[part], default[part]
        assert field.description, path
        if default is not None and path not in (
            "postgres.dsn",
            "tools.jina.envs",
            "tools.jina.services",
            "policy.projects",
            "fairness.weights",
            "limits.keys",
            "limits.pools",
            "budgets.projects",
        ):
            assert sample == default, path


def test_every_error_code_and_parameter_is_documented() -> None:
    text = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    codes = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolError)}
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []
    names = {
        parameter.name
        for parameter in (*SEARCH_PARAMETERS, *READER_PARAMETERS)
        if not parameter.name.startswith("markdown.")
    }
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


# Image: base pinned, packages licensed, listed and audited.


FOUND = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": ""}


def looked_up(name: str, *vulnerabilities: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulnerabilities)}


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": "not found and could not be audited"}


@requirement("supply.locked")
def test_the_image_installs_only_what_the_lock_pins() -> None:
    installs = re.findall(
        r"pip (?:--python \S+ )?(?:install|wheel) ([^&\n]+)", (ROOT / "Dockerfile").read_text(encoding="utf-8")
    )
    assert len(installs) == 5
    for arguments in installs:
        assert arguments.startswith(("--require-hashes ", "--no-deps --no-")), arguments
    builds = re.findall(r"pip wheel ([^&\n]+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(builds) == 2
    assert all("--no-build-isolation" in arguments for arguments in builds), (
        "else pip fetches an unpinned build backend"
    )


@requirement("supply.locked")
def test_a_package_without_a_wheel_is_built_by_what_is_locked() -> None:
    without_wheel = [package.name for package in packages() if len(package.hashes) == 1]
    assert without_wheel == ["nkeys"]
    assert re.search(r"^setuptools==", (ROOT / "requirements-build.lock").read_text(encoding="utf-8"), re.MULTILINE)


@requirement("supply.locked")
def test_the_wheel_of_the_source_distribution_is_the_same(tmp_path: Path) -> None:
    wheel, sdist = dist.build(tmp_path / "one")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again, _ = dist.build(tmp_path / "two", tmp_path / sdist.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {name: first.read(name) for name in first.namelist()} == {
            name: second.read(name) for name in second.namelist()
        }


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "make images IMAGE=registry.example.org/openapi-tool"),
        (["IMAGE=registry.example.org/openapi-tool"], 0, "buildx build --platform linux/amd64,linux/arm64"),
        (["IMAGE=x/y", "PLATFORMS=linux/arm64"], 0, "--platform linux/arm64 "),
    ],
)
@requirement("image.steps")
def test_an_image_for_several_architectures_goes_to_a_registry(arguments: list[str], code: int, said: str) -> None:
    base = f"BASE=python:3.11-slim-bookworm@sha256:{'0' * 64}"
    done = subprocess.run(  # noqa: S603 - our own Makefile
        ["make", "--no-print-directory", "images", "DOCKER=echo", base, *arguments],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert said in done.stdout


@requirement("supply.locked")
def test_every_package_of_the_lock_is_read() -> None:
    listed = list(packages())
    assert [package.name for package in listed] == re.findall(r"^([a-z0-9][\w.-]*)", LOCK.read_text(), re.MULTILINE)
    assert sum(len(package.hashes) for package in listed) == LOCK.read_text().count("--hash=sha256:")


@requirement("supply.locked")
def test_every_licence_is_known_and_may_be_used() -> None:
    assert [(package.name, package.licence) for package in packages() if not acceptable(package.licence)] == []
    # They are not installed here, or `licence` could read theirs; Windows installs colorama.
    assert {name for name in ELSEWHERE if licence(name)} <= ({"colorama"} if sys.platform == "win32" else set())


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-2.0-or-later", False),
        ("MIT AND (GPL-2.0-only OR AGPL-3.0-only)", False),
        ("LGPL-3.0-only", False),
        ("Proprietary", False),
        ("", False),
    ],
)
@requirement("supply.locked")
def test_a_licence_is_accepted_only_if_every_part_of_it_is_known(expression: str, expected: bool) -> None:  # noqa: FBT001
    assert acceptable(expression) is expected


@requirement("supply.locked")
def test_the_sbom_names_every_file_of_the_lock_and_nothing_of_the_machine() -> None:
    document = sbom()
    assert document == sbom()
    assert [(part["name"], part["version"]) for part in document["components"]] == [
        (package.name, package.version) for package in packages()
    ]
    hashes = [entry["content"] for part in document["components"] for entry in part["externalReferences"][0]["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:(\w{64})", LOCK.read_text()))
    assert all(part["licenses"] for part in document["components"])
    assert str(ROOT) not in json.dumps(document)


@pytest.mark.parametrize(
    ("findings", "code", "message"),
    [
        ([looked_up("a"), looked_up("b")], CLEAN, "2 packages, nothing known"),
        ([looked_up("a"), looked_up("b", FOUND)], VULNERABLE, "b: PYSEC-1, fixed in 2.0"),
        ([skipped("a"), looked_up("b", FOUND)], VULNERABLE, "NOT CHECKED: no vulnerability data for 1 of 2"),
        ([looked_up("a"), skipped("b")], NOT_CHECKED, "NOT CHECKED: no vulnerability data for 1 of 2"),
        ([looked_up("a")], NOT_CHECKED, "for 1 of 2"),
        ([], NOT_CHECKED, "for 2 of 2"),
    ],
)
@requirement("supply.locked")
def test_an_audit_is_clean_only_if_every_package_was_looked_up(
    findings: list[dict[str, Any]], code: int, message: str
) -> None:
    exit_code, text = verdict(findings, {"a", "b"})
    assert exit_code == code
    assert message in text


@pytest.mark.parametrize("output", ["", "Traceback", "[]", '{"dependencies": []}', "{}"])
@requirement("supply.locked")
def test_a_failing_auditor_gives_no_clean_result(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", encoding="utf-8")
    tool.chmod(0o755)
    assert audit(str(tool)) == NOT_CHECKED
    assert capsys.readouterr().out.startswith("NOT CHECKED")


# Regular expressions of the package.

WAYS = ("search", "match", "fullmatch", "split", "findall", "sub", "subn")


def patterns() -> Iterator[tuple[str, re.Pattern[Any], set[str]]]:
    """Return name, pattern and used methods of each pattern that a module compiles at its import."""
    for found in pkgutil.walk_packages(openapi_tool.__path__, "openapi_tool."):
        if found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                yield f"{found.name} {name}", value, set(re.findall(rf"\b{name}\.(\w+)", source)) & {*WAYS}


@pytest.mark.thorough
@requirement("loop.answers")
def test_no_pattern_takes_more_than_linear_time() -> None:
    """Texts repeat letters and words of the pattern. No proof, but it has found all slow patterns so far."""
    found = list(patterns())
    assert len(found) > 50
    for name, pattern, ways in found:
        binary = isinstance(pattern.pattern, bytes)
        for pump in _pumps(pattern.pattern.decode("latin-1") if binary else pattern.pattern):
            text: Any = (pump * 20_000)[:20_000]
            text = text.encode("latin-1", "replace") if binary else text
            began = time.process_time()
            for way in ways:
                getattr(pattern, way)(*([text[:0]] if way.startswith("sub") else []), text)
            assert time.process_time() - began < 0.5, (name, pattern, pump)  # a few ms; wide, because load lengthens it


def _pumps(source: str) -> set[str]:
    words = {word for word in re.split(r"[^A-Za-z0-9:/_-]+", source) if word}
    plain = {*words, *(word.lower() for word in words), *"aA0 .:/,'\"?=@[](){}%\\_-<\n"}
    return plain | {word + mark for word in words for mark in " :(=/.'"} | {"a ", "a.", "a:", "](", "[(", "(a"}


MAX_S = 1.0
SAVED = [(name, input_name, data) for name in TARGETS for input_name, data in saved(name).items()]


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    yield
    targets.close_client()


def checked(name: str, data: bytes) -> None:
    """Run a target within a limit of CPU time, which other processes do not lengthen."""
    began = time.process_time()
    TARGETS[name](data)
    assert time.process_time() - began < MAX_S


@each(("name", "input_name", "data"), SAVED)
@requirement("fuzz.corpora")
def test_saved_input_breaks_nothing(name: str, input_name: str, data: bytes) -> None:
    checked(name, data)


@requirement("fuzz.corpora")
def test_similar_names_are_searched_only_for_problems_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 475 unknown arguments took 55 ms."""
    among: list[list[str]] = []

    def probably_meant(_: str, known: Iterable[str]) -> None:
        among.append(list(known))

    monkeypatch.setattr(argument_names, "probably_meant", probably_meant)
    TARGETS["whole"](saved("whole")["found-unknown-arguments"])
    assert len(among) > MAX_PROBLEMS >= sum(map(bool, among)) > 0


@pytest.mark.parametrize("name", TARGETS)
@requirement("fuzz.corpora")
def test_no_seed_breaks_anything(name: str) -> None:
    found = seeds(name)
    assert found
    for data in found:
        checked(name, data)


@pytest.mark.parametrize("name", TARGETS)
@requirement("fuzz.corpora")
def test_saved_corpus_is_small(name: str) -> None:
    sizes = list(map(len, saved(name).values()))
    assert 0 < len(sizes) <= MAX_INPUTS
    assert sum(sizes) <= MAX_TOTAL_BYTES
    assert max(sizes) <= MAX_BYTES[name]


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
@requirement("fuzz.corpora", "arguments.prepared")
def test_any_bytes_make_arguments_that_are_prepared_or_refused(data: bytes) -> None:
    checked("arguments", data)


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
@requirement("fuzz.corpora", "card.result")
def test_any_bytes_make_an_answer_that_can_be_stored_or_a_typed_failure(data: bytes) -> None:
    checked("answer", b"G" + data)  # a JSON object drawn from the data
    checked("answer", data)  # the data as body


NEW_OPERATION = """
import asyncio, json
from dataclasses import replace
import respx
from pydantic import SecretStr
from openapi_tool.tools import catalogue, operations

segment = replace(
    operations.SEARCH, name="segment", ability="split texts", argument="content", main_parameter="content",
    main_parameter_names=frozenset({"content"}), paths={"": "/segment", "/": "/segment"}, limits="reader",
    min_tokens=30_000,
)
class Arguments(catalogue._CommonOptions):
    content: catalogue.Text
tool = replace(catalogue.CATALOGUE["jina.search"], name="jina.segment", operation=segment, arguments=Arguments)
operations.OPERATIONS += (segment,)
catalogue.CATALOGUE = {**catalogue.CATALOGUE, tool.name: tool}

from openapi_tool.jina import conversions, endpoints, failure_rules, parameters, response, timeouts
from openapi_tool.jina.rendering import usage_of
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.permits import PermitRequest
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.state.port import Stored
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.telemetry import metrics
from openapi_tool.testing import InProcessExecutor
from openapi_tool.tools.exports import system_role
from openapi_tool.tools.shown_tools import all_built_in
from openapi_tool.tools.stored_rows import registration
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.output import Item, ToolOutput

def render(envelope, _parameters, _context):
    return ToolOutput((Item(envelope["text"]),), {}, usage_of(envelope))

table = (parameters.Parameter("content", conversions.text(), model=True),)
segment_timeouts = timeouts.Timeouts(15, needs_timeout=lambda _: False)
endpoints.ENDPOINTS["segment"] = endpoints.Endpoint(
    segment, table, segment_timeouts, cheaper=lambda parameters, *_: ["less than " + parameters["content"]],
)
response.RESPONSES["segment"] = response.Responses(
    render, failure_rules.Failures({42299: failure_rules.Rule(BadRequest, "The text cannot be split; shorten it.")})
)

class Store:
    async def read(self, name):
        return Stored()

    async def write(self, name, value, revision):
        return revision + 1

async def limits():
    options = LimitOptions(search_tokens_per_minute=60_000, reader_tokens_per_minute=50_000)
    limiter = Limiter("replica", options, Store(), lambda: 1e6, None)
    counted = [(found.labels, found.value) for found in metrics.samples(metrics.RATE_LIMITED)]
    assert ({"endpoint": "segment"}, 0) in counted
    wanted = PermitRequest("KEY", "segment", AgentKey("p", "a"), Deadline.after(5), SecretStr("key"))
    permit = await limiter.acquire(wanted)
    permit.done(1)
    limit = limiter._limits["KEY", "segment"]
    print(limit.rates.tokens, limit.tokens_each, endpoints.ENDPOINTS["segment"].min_tokens({}))
    await limiter.aclose()

async def call(tool, arguments, url, answer, status=200):
    router = respx.Router()
    router.post(url).respond(status, json=answer)
    result = await InProcessExecutor(router).run_tool(registration(tool), arguments)
    if status != 200:
        return result.error["message"]
    assert result.status == "success", result.text
    return json.loads(result.requests[0].content), result.text.rpartition("[")[2]

async def main():
    search, _ = await call(catalogue.CATALOGUE["jina.search"], {"query": "x"}, "https://s.jina.ai/", {"data": []})
    answer = {"text": "one", "meta": {"usage": {"tokens": 30_000}}}
    print(search["q"], *await call(tool, {"content": "y"}, "https://s.jina.ai/segment", answer))
    for status, answer in ((422, {"status": 42299}), (451, {})):
        print(await call(tool, {"content": str(status)}, "https://s.jina.ai/segment", answer, status))
    await limits()
    tools = all_built_in()
    for shown in (tools, [tools[0], tools[-1]]):
        print(system_role(shown).partition(".")[0], "Search first" in system_role(shown))

asyncio.run(main())
"""


@requirement("definition.lint")
def test_an_operation_at_the_host_of_another_one_needs_its_parts_only() -> None:
    done = subprocess.run([sys.executable, "-c", NEW_OPERATION], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.stdout.splitlines(), done.returncode) == (
        [
            "x {'content': 'y'} This result cost 30,000 tokens. Cheaper: less than y.]",
            "The text cannot be split; shorten it.",
            "This target is blocked for legal reasons; use another source.",
            "50000 30000 30000",
            "You can search the web, read pages and split texts True",
            "You can search the web and split texts False",
        ],
        0,
    ), done.stderr


def test_every_requirement_has_a_test_and_every_claim_a_requirement() -> None:
    claimed, listed = {claim for claim, _ in claims()}, {one.id for one in REQUIREMENTS}
    assert sorted(listed - claimed) == [], "requirements without a test"
    assert sorted(claimed - listed) == [], "tests of unknown requirements"


def test_no_requirement_stands_twice() -> None:
    ids = [one.id for one in REQUIREMENTS]
    assert len(ids) == len(set(ids))
    assert all(one.text.endswith(".") for one in REQUIREMENTS)


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda document: document.name)
@requirement("settings.reference")
def test_derived_documents_are_fresh(document: Path) -> None:
    assert document.read_text(encoding="utf-8") == DOCUMENTS[document](), "run: make docs"


def test_a_changed_row_or_a_lost_mark_in_the_readme_of_the_chart_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, copy = CHART_README.read_text(encoding="utf-8"), tmp_path / "README.md"
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setitem(docs.PARTS, copy, docs.PARTS[CHART_README])
    copy.write_text(text.replace("| `replicaCount` | `2` |", "| `replicaCount` | `3` |"), encoding="utf-8")
    assert copy.read_text(encoding="utf-8") != docs.with_parts(copy) == text
    copy.write_text(text.replace("<!-- end -->", ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"README\.md lacks the marks of its generated part values"):
        docs.with_parts(copy)


def test_every_mutation_still_applies() -> None:
    """`make mutations`, which takes some minutes, shows that each turns its test red."""
    assert list(mutate.problems(MUTATIONS)) == []
