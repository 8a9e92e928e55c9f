"""Chart, image and metadata: valid, and true to the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

import openapi_tool
from openapi_tool.jina.parameters import READER, SEARCH
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError
from openapi_tool.settings import Settings
from tests.promises import requirement
from tests.support import memory_limit

ROOT = Path(__file__).parent.parent.parent
POSTGRES = {"postgres": {"dsn": "postgresql://127.0.0.1/kernel"}}
CHART = ROOT / "helm" / "openapi-tool"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rendered(values: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    chart = helm_python.Chart.load(CHART)
    for text in chart.render(values or {}, name="r", namespace="n").values():
        yield from (document for document in yaml.safe_load_all(text) if document)
    chart.close()


def test_the_chart_passes_the_strict_lint() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.25.0", "1.30.0", "1.34.0"])
@pytest.mark.parametrize("values", [{}, {"config": "[executor]\nconcurrency = 8\n", "allowedEnv": ["SEARCH_API_KEY"]}])
def test_every_manifest_is_valid(version: str, values: dict[str, Any]) -> None:
    documents = list(rendered(values))
    assert {document["kind"] for document in documents} == {"Deployment"} | ({"ConfigMap"} if values else set())
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_pod_gets_its_keys_by_name_only() -> None:
    (deployment,) = rendered({"allowedEnv": ["SEARCH_API_KEY"]})
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    for name in ("PG_DSN", "JINA_API_KEY", "SEARCH_API_KEY"):
        assert environment[name]["valueFrom"]["secretKeyRef"]["key"] == name
    assert environment["OPENAPI_TOOL__SECRETS__ALLOWED_ENV"]["value"] == "SEARCH_API_KEY"


def test_the_pod_has_time_to_drain() -> None:
    (deployment,) = rendered()
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > Settings.model_validate(POSTGRES).executor.drain_s + 5


def limit_of(**sections: Any) -> str:
    """The pod's memory limit that settings ask for."""
    settings = Settings.model_validate({**POSTGRES, **sections})
    kept = settings.egress.body_budget_bytes + settings.cache.max_bytes
    return f"{-(-memory_limit(kept, settings.executor.concurrency) // 2**20)}Mi"


@pytest.mark.parametrize(
    ("config", "sections"),
    [
        ("", {}),
        ("[egress]\nbody_budget_bytes = 512_000_000\n", {"egress": {"body_budget_bytes": 512_000_000}}),
        (
            "[cache]\nmax_bytes = 0\n[executor]\nconcurrency = 8\n",
            {"cache": {"max_bytes": 0}, "executor": {"concurrency": 8}},
        ),
    ],
)
@requirement("memory.limit")
def test_the_memory_limit_of_the_pod_follows_from_the_settings(config: str, sections: dict[str, Any]) -> None:
    deployment = next(document for document in rendered({"config": config}) if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": limit_of(**sections)}
    assert container["resources"]["requests"] == {"cpu": "250m", "memory": "128Mi"}


def test_a_memory_limit_that_is_set_counts() -> None:
    (deployment,) = rendered({"resources": {"limits": {"memory": "1Gi"}}})
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize("values", [{"replicaCount": "two"}, {"unknown": 1}, {"allowedEnv": ["not a name"]}])
def test_values_that_the_schema_does_not_know_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        list(rendered(values))


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


def test_every_dependency_is_explained() -> None:
    explained = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = [re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0] for group in groups for requirement in group]
    assert [name for name in names if f"`{name}`" not in explained] == []


def test_lock_files_pin_every_package_with_hashes() -> None:
    for name in ("requirements.lock", "requirements-build.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        packages = re.findall(r"^([a-z0-9][\w.-]*)==", text, re.MULTILINE)
        assert len(packages) >= 7
        assert text.count("--hash=sha256:") >= len(packages)
        assert "://" not in text, "a lock file names no index"


def _documented(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if hasattr(kind, "model_fields"):
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
        ):
            assert sample == default, path


def test_every_error_code_and_parameter_is_documented() -> None:
    text = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    codes = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolError)}
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []
    names = {parameter.name for parameter in (*SEARCH, *READER) if not parameter.name.startswith("markdown.")}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
