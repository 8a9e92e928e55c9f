"""The Helm chart and its alerts."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import prometheus_client
import pytest
import yaml
from kubernetes_validate import utils
from pydantic import ValidationError

from openapi_tool.isolation.limits import pod_bytes
from openapi_tool.protocol.subjects import command_stream
from openapi_tool.settings import Settings
from openapi_tool.tools import secret_variables as placeholders
from scripts.docs import CHART_README, ROOT, Value, settings_schema, values
from tests.requirements import requirement
from tests.support import CHART, each, memory_limit, notes, objects_of, rendered

POSTGRES = {"postgres": {"dsn": "postgresql://127.0.0.1/kernel"}}
DOCUMENTS = list(yaml.safe_load_all((Path(__file__).parents[1] / "data" / "chart.yaml").read_text(encoding="utf-8")))
FEATURES = [document for document in DOCUMENTS if "feature" in document]
REFUSED = [document for document in DOCUMENTS if "refused" in document]
VERSIONS = ("1.25.0", "1.29.0", "1.33.0", "1.37.0")
CUSTOM = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject")

NO_NAMES = {"fullnameOverride": "", "serviceAccount": {}}
FIRST_SELECTOR = {"app.kubernetes.io/name": "openapi-tool", "app.kubernetes.io/instance": "r"}
GATEWAY_SELECTOR = {"app.kubernetes.io/name": "openapi-tool-gateway", "app.kubernetes.io/instance": "r"}
FIRST_NAMES = {
    ("ConfigMap", "r-openapi-tool"),
    ("ConfigMap", "r-openapi-tool-dashboard"),
    ("ConfigMap", "r-openapi-tool-gateway-tools"),
    ("ConfigMap", "r-openapi-tool-tools"),
    ("Deployment", "r-openapi-tool"),
    ("Deployment", "r-openapi-tool-gateway"),
    ("HorizontalPodAutoscaler", "r-openapi-tool"),
    ("HorizontalPodAutoscaler", "r-openapi-tool-gateway"),
    ("Ingress", "r-openapi-tool-gateway"),
    ("Job", "r-openapi-tool-tools"),
    ("NetworkPolicy", "r-openapi-tool"),
    ("NetworkPolicy", "r-openapi-tool-gateway"),
    ("Pod", "r-openapi-tool-check"),
    ("PodDisruptionBudget", "r-openapi-tool"),
    ("PodDisruptionBudget", "r-openapi-tool-gateway"),
    ("PodMonitor", "r-openapi-tool"),
    ("PrometheusRule", "r-openapi-tool"),
    ("ScaledObject", "r-openapi-tool"),
    ("Service", "r-openapi-tool"),
    ("Service", "r-openapi-tool-gateway"),
    ("Service", "r-openapi-tool-gateway-metrics"),
    ("ServiceAccount", "r-openapi-tool"),
    ("ServiceAccount", "r-openapi-tool-gateway"),
    ("ServiceMonitor", "r-openapi-tool"),
    ("ServiceMonitor", "r-openapi-tool-gateway"),
}
"""Output of the first version for the release `r`; entries may be added, none may change."""

WITH_GATEWAY = {"gateway": {"enabled": True, "tokens": {"name": "gateway-tokens"}}}

features = pytest.mark.parametrize("feature", FEATURES, ids=[document["feature"] for document in FEATURES])


def matches(expected: Any, actual: Any) -> bool:
    """Return whether `actual` contains all of `expected`, whose list items may be at any place of the actual list."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and matches(value, actual[key]) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return isinstance(actual, list) and all(any(matches(item, other) for other in actual) for item in expected)
    return bool(expected == actual)


def pod_specs(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the spec of each pod, also those in a Deployment or Job."""
    for document in documents:
        if document["kind"] == "Pod":
            yield document["spec"]
        elif document["kind"] in ("Deployment", "Job"):
            yield document["spec"]["template"]["spec"]


def deployment(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (manifest,) = objects_of(values)["Deployment"]
    return manifest


def container(values: dict[str, Any] | None = None) -> dict[str, Any]:
    result: dict[str, Any] = deployment(values)["spec"]["template"]["spec"]["containers"][0]
    return result


@features
@requirement("chart.values")
def test_each_feature_renders_its_manifests(feature: dict[str, Any]) -> None:
    documents = rendered(feature["values"])
    for expected in feature["expect"]:
        assert any(matches(expected, document) for document in documents), expected
    for unexpected in feature.get("absent", ()):
        assert not any(matches(unexpected, document) for document in documents), unexpected


@requirement("chart.values")
def test_the_chart_passes_the_strict_lint() -> None:
    for feature in FEATURES:
        report = helm_python.lint(CHART, feature["values"], strict=True)
        assert report["errors"] == []
        assert report["messages"] == [], "no advice, either"


@pytest.mark.parametrize("version", VERSIONS)
@requirement("chart.values")
def test_every_manifest_is_valid(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "schema_contents", cache(utils.schema_contents))  # else a megabyte for each object
    manifests = [document for feature in FEATURES for document in rendered(feature["values"])]
    distinct = {json.dumps(document, sort_keys=True): document for document in manifests}
    for document in distinct.values():
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


@features
@requirement("chart.restricted")
def test_every_pod_satisfies_the_restricted_profile(feature: dict[str, Any]) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a read-only root."""
    for spec in pod_specs(rendered(feature["values"])):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["automountServiceAccountToken"] is False
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod.get("runAsUser", 1) > 0, "without it the platform chooses one"
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.get("ports", []))


@features
@requirement("chart.values")
def test_every_path_is_in_a_mount(feature: dict[str, Any]) -> None:
    for spec in pod_specs(rendered(feature["values"])):
        container = spec["containers"][0]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        files = {"/etc/openapi-tool/config/openapi-tool.toml"}
        for mount in container["volumeMounts"]:
            items = volumes[mount["name"]].get("secret", {}).get("items", [])
            files |= {f"{mount['mountPath']}/{item['path']}" for item in items}
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        named = {entry["value"] for entry in container["env"] if entry.get("value", "").startswith("/")}
        assert named <= files | writable


@requirement("chart.names")
def test_names_and_selectors_are_those_of_the_first_version() -> None:
    """A Deployment's selector cannot be changed, and another name would be another release's object."""
    documents = [document for feature in FEATURES for document in rendered({**feature["values"], **NO_NAMES})]
    assert {(document["kind"], document["metadata"]["name"]) for document in documents} == FIRST_NAMES
    selectors = [
        (document["metadata"]["name"], document["spec"]["selector"].get("matchLabels", document["spec"]["selector"]))
        for document in documents
        if document["kind"] in ("Deployment", "Service", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor")
    ]
    for name, selector in selectors:
        assert selector == (GATEWAY_SELECTOR if "-gateway" in name else FIRST_SELECTOR), name
    for document in documents:
        if document["kind"] == "Deployment":
            container = document["spec"]["template"]["spec"]["containers"][0]
            assert container["name"] == ("gateway" if "-gateway" in document["metadata"]["name"] else "executor")


@requirement("chart.names")
def test_another_name_of_the_chart_is_in_names_labels_and_selectors() -> None:
    tools = {"toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}}
    objects = objects_of({"nameOverride": "search", "networkPolicy": {"enabled": True}, **tools})
    assert {
        document["metadata"]["name"].removesuffix("-tools").removesuffix("-check")
        for kind in objects.values()
        for document in kind
    } == {"r-search"}
    (made,) = objects["Deployment"]
    selector = {"app.kubernetes.io/name": "search", "app.kubernetes.io/instance": "r"}
    assert made["spec"]["selector"] == {"matchLabels": selector}
    assert selector.items() <= made["spec"]["template"]["metadata"]["labels"].items()
    (job,) = objects["Job"]
    assert job["metadata"]["labels"]["app.kubernetes.io/name"] == "search-job"
    assert "search-job" in str(objects["NetworkPolicy"])


@requirement("chart.values")
def test_further_objects_are_rendered_as_templates() -> None:
    made = {"apiVersion": "example.org/v1", "kind": "Made", "metadata": {"name": "{{ .Release.Name }}-made"}}
    (found,) = objects_of({"extraObjects": [made]})["Made"]
    assert found == {**made, "metadata": {"name": "r-made"}}


@requirement("chart.values")
def test_security_contexts_can_be_left_out() -> None:
    specs = list(pod_specs(rendered({"podSecurityContext": None, "securityContext": None, **WITH_GATEWAY})))
    assert len(specs) == 3
    for spec in specs:
        assert "securityContext" not in spec
        assert all("securityContext" not in made for made in spec["containers"])


@requirement("chart.values")
def test_what_clusters_ask_of_charts_is_there_for_both_deployments() -> None:
    """Values of the charts of cert-manager and KEDA for the pods of any Deployment, under the names that we have."""
    of_pods: dict[str, Any] = {
        "affinity": {"nodeAffinity": {}},
        "dnsConfig": {"nameservers": ["192.0.2.53"]},
        "dnsPolicy": "None",
        "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["proxy.example.org"]}],
        "imagePullSecrets": [{"name": "registry"}],
        "initContainers": [{"name": "waits", "image": "mesh"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "priorityClassName": "high",
        "runtimeClassName": "gvisor",
        "tolerations": [{"operator": "Exists"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    }
    others: dict[str, Any] = {
        "extraContainers": [{"name": "shipper", "image": "logs"}],
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
        "podAnnotations": {"scraped": "yes"},
        "podLabels": {"tier": "back"},
        "commonLabels": {"team": "search"},
        "commonAnnotations": {"owner": "search"},
        "revisionHistoryLimit": 3,
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "securityContext": {"readOnlyRootFilesystem": False},
        "nameOverride": "search",
    }
    deployments = objects_of({**of_pods, **others, **WITH_GATEWAY})["Deployment"]
    assert [made["metadata"]["name"] for made in deployments] == ["r-search", "r-search-gateway"]
    for made in deployments:
        spec = made["spec"]["template"]["spec"]
        assert {name: spec[name] for name in of_pods} == of_pods
        assert made["spec"]["revisionHistoryLimit"] == 3
        assert spec["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
        container, shipper = spec["containers"]
        assert shipper == others["extraContainers"][0]
        assert container["securityContext"]["readOnlyRootFilesystem"] is False
        assert container["envFrom"] == others["envFrom"]
        assert others["extraEnv"][0] in container["env"]
        assert others["extraVolumeMounts"][0] in container["volumeMounts"]
        assert others["extraVolumes"][0] in spec["volumes"]
        metadata = made["spec"]["template"]["metadata"]
        assert metadata["annotations"].items() >= {"scraped": "yes"}.items()
        assert metadata["labels"].items() >= {"tier": "back", "team": "search"}.items()
        assert made["metadata"]["annotations"] == {"owner": "search"}
        assert made["spec"]["selector"]["matchLabels"].items() <= metadata["labels"].items()
    overridden = objects_of({"fullnameOverride": "tools", **WITH_GATEWAY})["Deployment"]
    assert [made["metadata"]["name"] for made in overridden] == ["tools", "tools-gateway"]


@requirement("chart.names")
def test_no_selector_of_one_deployment_matches_pods_of_the_other() -> None:
    executor, gateway = objects_of(WITH_GATEWAY)["Deployment"]
    for one, other in ((executor, gateway), (gateway, executor)):
        selector = one["spec"]["selector"]["matchLabels"].items()
        assert selector <= one["spec"]["template"]["metadata"]["labels"].items()
        assert not selector <= other["spec"]["template"]["metadata"]["labels"].items()


@requirement("chart.metrics")
def test_each_panel_of_the_dashboard_says_what_it_shows_and_names_alerts_that_exist() -> None:
    monitoring = {"dashboard": True, "runbookUrl": "https://wiki.example.org/tools/runbook"}
    (text,) = next(
        made["data"]
        for made in objects_of({"monitoring": monitoring})["ConfigMap"]
        if made["metadata"]["name"] == "r-openapi-tool-dashboard"
    ).values()
    dashboard = json.loads(text)
    assert [link["url"] for link in dashboard["links"]] == ["https://wiki.example.org/tools/runbook"]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["description"].endswith(".") for panel in panels)
    named = {name for panel in panels for name in re.findall(r"\bOpenapiTool\w+", panel["description"])}
    assert len(named) > 10
    assert named <= {rule["alert"] for rule in rules()}
    places = sorted((panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in dashboard["panels"])
    assert len(set(places)) == len(places)
    assert dashboard["panels"][0]["type"] == "row"


@requirement("chart.metrics")
def test_alerts_link_to_the_runbook_where_the_team_reads_it() -> None:
    monitoring = {"rules": True, "runbookUrl": "https://wiki.example.org/tools/runbook"}
    (rule,) = objects_of({"monitoring": monitoring})["PrometheusRule"]
    for alert in rule["spec"]["groups"][0]["rules"]:
        anchor = alert["alert"].lower()
        assert alert["annotations"]["runbook_url"] == f"https://wiki.example.org/tools/runbook#{anchor}"
        assert "runbook" not in alert["annotations"]


@requirement("chart.names")
def test_pods_of_jobs_are_not_selected_as_executors() -> None:
    job_values = {"toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}}
    objects = objects_of(job_values)
    selector = objects["Deployment"][0]["spec"]["selector"]["matchLabels"]
    labels = objects["Job"][0]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items()
    assert not selector.items() <= objects["Pod"][0]["metadata"]["labels"].items()


@requirement("chart.names")
def test_names_of_a_long_release_fit() -> None:
    tools = {"toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}}
    names = [document["metadata"]["name"] for document in rendered(tools, name="r" * 53)]
    assert max(map(len, names)) <= 63
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names)


@requirement("chart.refused")
def test_no_value_is_replaced_by_a_variable_of_the_container() -> None:
    """Kubernetes replaces `$(PG_DSN)` in arguments; the name of a project would show the connection string."""
    tools = {"enabled": True, "projects": ["p$(PG_DSN)"], "definitions": {"a.yaml": "tool_name: a"}}
    (job,) = objects_of({"toolsJob": tools})["Job"]
    assert "--project=p$$(PG_DSN)" in job["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.thorough
@pytest.mark.parametrize("document", REFUSED, ids=[document["refused"] for document in REFUSED])
@requirement("chart.refused")
def test_invalid_values_are_refused_with_a_sentence(document: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(document["values"])
    assert document["refused"] in str(refused.value)


@requirement("chart.refused")
@pytest.mark.parametrize(
    "variable",
    [*sorted(placeholders._OWN_NAMES), *(f"{prefix}X" for prefix in placeholders._OWN_PREFIXES), "http_proxy_file"],  # noqa: SLF001 - all of them
)
def test_no_variable_of_the_executor_is_passed_to_tools(variable: str) -> None:
    assert placeholders.is_executors_own(variable)
    with pytest.raises(helm_python.HelmError, match="one of the executor's own settings"):
        rendered({"allowedEnv": [variable]})


def configured(config: dict[str, Any]) -> Settings:
    """Return the settings that an executor reads from the rendered ConfigMap."""
    (config_map,) = objects_of({"config": config})["ConfigMap"]
    return Settings.model_validate({**POSTGRES, **tomllib.loads(config_map["data"]["openapi-tool.toml"])})


def test_config_becomes_equivalent_toml() -> None:
    config = {
        "executor": {"concurrency": 8, "drain_timeout_s": 12.5},
        "egress": {"body_budget_bytes": 512_000_000, "public_addresses_only": True},
        "retry": {"initial_backoff_s": 1e-7},
        "policy": {"allow": ["jina.*"], "projects": {'a "b" \\ é.c': {"deny": ["tag:search"]}}},
        "tools": {"jina": {"envs": {"api_key": "SEARCH_API_KEY"}, "services": {"jina": {"envs": {}}}}},
        "telemetry": {"otlp_endpoint": "https://collector:4318/v1/traces"},
    }
    assert configured(config) == Settings.model_validate({**POSTGRES, **config})
    (config_map,) = objects_of({"config": config})["ConfigMap"]
    assert "concurrency = 8\n" in config_map["data"]["openapi-tool.toml"]


@requirement("chart.refused")
def test_the_schema_of_config_is_that_of_the_settings() -> None:
    schema = settings_schema()
    assert schema["properties"].keys() == Settings.model_fields.keys()
    assert "$ref" not in json.dumps(schema)
    defaults = Settings.model_validate(POSTGRES).model_dump(mode="json", exclude_none=True)
    del defaults["postgres"], defaults["nats"]["servers"], defaults["secrets"]["allowed_env"], defaults["health"]
    del defaults["gateway"]["host"], defaults["gateway"]["port"]
    assert configured(defaults) == Settings.model_validate(POSTGRES)


@pytest.mark.parametrize(
    "config",
    [{}, {"protocol": {"target": "search"}}, {"nats": {"durable": "mine"}, "protocol": {"project": "proj"}}],
)
def test_keda_asks_for_the_stream_and_durable_of_the_settings(config: dict[str, Any]) -> None:
    autoscaling = {"kind": "keda", "keda": {"monitoringEndpoint": "nats:8222"}}
    (scaled,) = objects_of({"autoscaling": autoscaling, "config": config})["ScaledObject"]
    trigger = scaled["spec"]["triggers"][0]["metadata"]
    settings = Settings.model_validate({**POSTGRES, **config})
    assert trigger["consumer"] == settings.durable
    assert trigger["stream"] == command_stream(settings.protocol.version)[0]


def limit_of(**sections: Any) -> str:
    """Return the pod's memory limit for these settings."""
    settings = Settings.model_validate({**POSTGRES, **sections})
    budget = settings.egress.body_budget_bytes + settings.cache.max_bytes
    process = memory_limit(budget, settings.executor.concurrency)
    return f"{-(-(process + settings.isolation.workers * pod_bytes(settings.egress.max_response_bytes)) // 2**20)}Mi"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"egress": {"body_budget_bytes": 512_000_000}},
        {"cache": {"max_bytes": 0}, "executor": {"concurrency": 8}},
        {"isolation": {"workers": 4}},
        {"egress": {"max_response_bytes": 2_000_000}},
    ],
)
@requirement("memory.limit")
def test_the_memory_limit_of_the_pod_follows_from_the_settings(config: dict[str, Any]) -> None:
    resources = container({"config": config})["resources"]
    assert resources == {"limits": {"memory": limit_of(**config)}, "requests": {"cpu": "250m", "memory": "128Mi"}}


@requirement("memory.limit")
@pytest.mark.parametrize(("config", "more_mib"), [({}, 64 + 1024), ({"gateway": {"max_connections": 100}}, 64 + 100)])
def test_the_memory_limit_of_the_gateway_adds_its_server_and_a_body_per_connection(
    config: dict[str, Any], more_mib: int
) -> None:
    *_, made = objects_of({**WITH_GATEWAY, "config": config})["Deployment"]
    (container,) = made["spec"]["template"]["spec"]["containers"]
    limit = int(limit_of(**config).removesuffix("Mi")) + more_mib
    assert container["resources"]["limits"] == {"memory": f"{limit}Mi"}


def test_an_explicit_memory_limit_is_used() -> None:
    assert container({"resources": {"limits": {"memory": "1Gi"}}})["resources"]["limits"] == {"memory": "1Gi"}


def test_a_changed_config_starts_new_pods() -> None:
    checksums = {
        deployment({"config": config})["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for config in ({}, {"executor": {"concurrency": 8}})
    }
    assert len(checksums) == 2


@requirement("chart.metrics")
def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    importlib.import_module("openapi_tool.telemetry.health_server")  # registers them
    text = (CHART / "files" / "alerts.yaml").read_text() + (CHART / "files" / "dashboard.json").read_text()
    known = {
        f"{family.name}{suffix}"
        for family in prometheus_client.REGISTRY.collect()
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_count")}.get(family.type, ("",))
    }
    used = set(re.findall(r"\b(?:openapi_tool|process)_[a-z_]+(?=[{\[,)])", text))
    assert len(used) > 10
    assert used - known == set()


@requirement("chart.metrics")
def test_alerts_are_of_this_release_and_say_what_to_do() -> None:
    (rule,) = objects_of({"monitoring": {"rules": True}, **WITH_GATEWAY})["PrometheusRule"]
    groups = rule["spec"]["groups"]
    assert [group["name"] for group in groups] == ["r-openapi-tool", "r-openapi-tool-gateway"]
    for group in groups:
        for alert in group["rules"]:
            assert f'{{namespace="n",pod=~"{group["name"]}-[a-z0-9]+-[a-z0-9]+"' in alert["expr"]
            assert alert["labels"]["severity"] in ("critical", "warning")
            assert len(alert["annotations"]["description"]) > 20
    assert [group["rules"][0]["annotations"]["summary"] for group in groups] == [
        "No executor reports metrics",
        "No gateway reports metrics",
    ]


@requirement("chart.runs")
def test_pods_are_replaced_one_by_one_unless_the_values_ask_for_a_gap() -> None:
    """`Recreate` is for versions that would not share limits."""
    [deployment] = objects_of()["Deployment"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert deployment["spec"]["strategy"] == rolling
    [deployment] = objects_of({"strategy": {"type": "Recreate"}})["Deployment"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert "--set strategy.type=Recreate" in CHART_README.read_text(encoding="utf-8")
    assert "`strategy.type: Recreate`" in " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())


def test_the_readme_alone_is_enough_to_render_a_release() -> None:
    """The example has a NATS with password and TLS, PostgreSQL and keys, in under 20 lines."""
    example = re.findall(r"```yaml\n(.*?)```", CHART_README.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(example.splitlines()) < 20
    environment = {entry["name"] for entry in container(yaml.safe_load(example))["env"]}
    assert {"PG_DSN", "JINA_API_KEY", "OPENAPI_TOOL__NATS__PASSWORD_FILE", "OPENAPI_TOOL__NATS__CA_FILE"} <= environment
    assert "helm/openapi-tool/README.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_notes_of_a_gateway_say_how_clients_reach_it() -> None:
    text = notes({"serve": {"enabled": False}, **WITH_GATEWAY})
    assert "kubectl --namespace n rollout status deployment/r-openapi-tool-gateway\n" in text
    assert "http://r-openapi-tool-gateway.n.svc:8090/mcp" in text
    assert "helm test" not in text
    assert "tools apply" not in text
    hosts = {"ingress": {"enabled": True, "hosts": ["tools.example.org"]}}
    assert "tools.example.org" in notes({"gateway": {**WITH_GATEWAY["gateway"], **hosts}})
    in_nats = {"gateway": {"enabled": True, "nats": {"servers": ["nats://nats"]}}}
    assert "tokens create" in notes(in_nats), "its pods do not start before there is one"


def test_the_notes_give_the_next_commands() -> None:
    assert "kubectl --namespace n rollout status deployment/r-openapi-tool\n" in notes()
    assert "helm test r --namespace n --logs\n" in notes()
    assert "openapi-tool tools apply" in notes()
    tools = {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}
    assert "openapi-tool tools apply" not in notes({"toolsJob": tools})


@requirement("chart.values")
def test_every_value_is_described() -> None:
    assert [value.path for value in every(values()) if not value.description] == []


def every(values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        yield value
        yield from every(value.children)


# Values of the chart beyond single features: null, names, settings that do not fit together, two releases.


NAMED = next(document for document in FEATURES if document["feature"].startswith("names, labels and numbers"))
PODS = {"bcd": "4b", "56f8d9c7b4": "x2zkq", "7d4": "bbbbb"}
"""Hash of a ReplicaSet and suffix of a pod, as Kubernetes generates them."""


@pytest.fixture(autouse=True, scope="module")
def _schemas_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utils, "schema_contents", cache(utils.schema_contents))  # else a megabyte for each object
        yield


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return `value` at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    inner: dict[str, Any] = value
    return inner


@pytest.mark.thorough
@requirement("chart.refused")
@each("value", every(values()))
def test_null_is_the_default_where_that_is_empty_and_refused_elsewhere(value: Value) -> None:
    if value.default in ("", [], {}, None):
        assert rendered(nested(value.path, None)) == rendered()
    elif "null" in value.constraints.get("type", ()):
        assert rendered(nested(value.path, None)) != rendered(), "it is left out"
    else:
        with pytest.raises(helm_python.HelmValuesError, match=f"missing property '{value.key}'"):
            rendered(nested(value.path, None))


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return both values files as Helm merges them."""
    both = {
        key: merged(values[key], value)
        for key, value in more.items()
        if isinstance(value, dict) and isinstance(values.get(key), dict)
    }
    return {**values, **more, **both}


EVERYTHING = {
    "autoscaling": {"kind": "keda", "keda": {"monitoringEndpoint": "nats:8222"}},
    "monitoring": {"monitor": "service", "rules": True, "dashboard": True},
    "networkPolicy": {"enabled": True},
    "secrets": {"nats": {"name": "nats", "credentialsKey": "creds"}, "natsTls": {"name": "tls"}, "proxy": {"name": ""}},
    "gateway": {
        "enabled": True,
        "nats": {"servers": ["nats://nats"], "name": "nats", "credentialsKey": "creds"},
        "natsTls": {"name": "tls"},
        "tokens": {"name": "tokens"},
        "tools": {"b.yaml": "tool_name: b"},
        "ingress": {"enabled": True, "hosts": ["tools.example.org"]},
        "autoscaling": {"enabled": True},
    },
    "toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}},
}
ODD: tuple[Any, ...] = ("a b", "x\n  y: z", "1234", -1, 1e18, [{}], {"a": 1})
TEMPLATE_ERRORS = ("nil pointer", "error calling", "wrong type", "can't evaluate", "incompatible types", "executing")


@pytest.mark.thorough
@requirement("chart.refused")
@each(("path", "odd"), [(value.path, odd) for value in every(values()) if not value.children for odd in ODD])
def test_an_odd_value_is_refused_in_a_sentence_or_renders_what_kubernetes_accepts(path: str, odd: Any) -> None:
    try:
        documents = rendered(merged(EVERYTHING, nested(path, odd)))
    except helm_python.HelmError as refused:
        assert [text for text in TEMPLATE_ERRORS if text in str(refused)] == []
    else:
        assert [problem for document in documents for problem in refused_by_kubernetes(json.dumps(document))] == []


@cache
def refused_by_kubernetes(text: str) -> list[str]:
    """Return why Kubernetes would refuse an object; nothing for kinds that it does not know itself."""
    document = json.loads(text)
    try:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


@requirement("chart.names")
@pytest.mark.parametrize("release", ["r", "true", "1e3"])
def test_names_and_labels_are_strings_whatever_they_look_like(release: str) -> None:
    for document in rendered(NAMED["values"], name=release):
        assert [(path, text) for path, text in strings(document) if not isinstance(text, str)] == []


def strings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that must be strings: names, keys of Secrets, labels, annotations, values of variables."""
    if isinstance(node, dict):
        for key, value in node.items():
            is_name = path.endswith((".labels", ".annotations", ".matchLabels", ".nodeSelector", ".data", ".metadata"))
            is_name = is_name or key in ("name", "value", "key", "path", "secretName", "account")
            is_name = is_name or key.endswith(("ClassName", "AccountName"))
            if is_name and not isinstance(value, dict | list):
                yield f"{path}.{key}", value
            yield from strings(value, f"{path}.{key}")
    if isinstance(node, list):
        for item in node:
            yield from strings(item, path)


@requirement("chart.names")
@pytest.mark.parametrize("release", ["1st", "a.b", "1234"])
def test_a_release_name_that_no_service_can_have_needs_an_override(release: str) -> None:
    with pytest.raises(helm_python.HelmError, match="is not a valid name of a Service"):
        rendered(name=release)
    assert rendered({"fullnameOverride": "tools"}, name=release)


def pods_of(deployment: str) -> list[str]:
    """Return the names of its pods, truncated as by Kubernetes (k8s.io/apiserver names.SimpleNameGenerator)."""
    return [f"{f'{deployment}-{digest}-'[:58]}{suffix}" for digest, suffix in PODS.items()]


@pytest.mark.thorough
@requirement("chart.metrics")
@pytest.mark.parametrize("length", range(1, 64))
def test_alerts_match_the_pods_of_this_release_however_long_its_name(length: int) -> None:
    name = "tools".ljust(length, "x")[:length]
    values = {"fullnameOverride": name, "monitoring": {"rules": True}}
    expression = objects_of(values)["PrometheusRule"][0]["spec"]["groups"][0]["rules"][0]["expr"]
    (pattern,) = re.findall('pod=~"([^"]*)"', expression)
    assert all(re.fullmatch(pattern, pod) for pod in pods_of(name))
    assert not any(re.fullmatch(pattern, pod) for pod in pods_of("y" + name))
    if length <= 42:  # above, truncated names of the other release's pods look alike
        assert not any(re.fullmatch(pattern, pod) for pod in pods_of(f"{name}-two"))


@requirement("chart.metrics")
def test_two_releases_have_two_dashboards() -> None:
    values = {"monitoring": {"dashboard": True}}
    parsed = [
        document["data"]
        for release in ("one", "two")
        for document in rendered(values, name=release)
        if document["metadata"]["name"].endswith("-dashboard")
    ]
    assert len({file for data in parsed for file in data}) == 2
    dashboards = [json.loads(text) for data in parsed for text in data.values()]
    for key in ("uid", "title", "panels"):
        assert dashboards[0][key] != dashboards[1][key]
    assert all(len(dashboard["uid"]) <= 40 for dashboard in dashboards)
    for dashboard in dashboards:
        assert "$namespace" not in json.dumps(dashboard)
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource"]


@requirement("chart.restricted")
def test_the_job_gets_only_the_secrets_that_it_needs() -> None:
    values = {
        "allowedEnv": ["SEARCH_API_KEY"],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "extraEnv": [{"name": "PGSSLMODE", "value": "require"}, {"name": "TZ", "value": "UTC"}],
        "extraVolumes": [{"name": "extra", "secret": {"secretName": "extra"}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "secrets": {
            "postgres": {"caKey": "ca.crt"},
            "nats": {"name": "nats", "credentialsKey": "user.creds"},
            "natsTls": {"name": "nats-tls"},
            "session": {"name": "session"},
            "proxy": {"name": "proxy"},
            "upstreamCa": {"name": "upstream-ca"},
            "keys": {"asFiles": True},
        },
    }
    tools = {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}
    assert job_secrets({**values, "toolsJob": {**tools, "postgresSecret": "writer"}}) == {
        "writer",
        "openapi-tool-postgres",
    }
    assert job_secrets({**values, "toolsJob": {**tools, "api": "http://kernel:8000"}}) == set()
    (job,) = objects_of({**values, "toolsJob": tools})["Job"]
    variables = {entry["name"] for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables == {"OPENAPI_TOOL_CONFIG", "PG_DSN", "PGSSLROOTCERT", "PGSSLMODE"}


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"telemetry": {"otlp_endpoint": "https://collector/?key=KEY"}}},
        {"toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a\nkey: KEY\n"}}},
        {"extraEnv": [{"name": "SEARCH", "value": "KEY"}]},
    ],
    ids=["config", "definitions", "extraEnv"],
)
@requirement("chart.refused")
def test_no_manifest_contains_what_looks_like_a_key(values: dict[str, Any]) -> None:
    key = f"jina_{'0a' * 16}"
    with_key = json.loads(json.dumps(values).replace("KEY", key))
    with pytest.raises(helm_python.HelmError, match="looks like a") as refused:
        objects_of(with_key)
    assert key not in str(refused.value)


def job_secrets(values: dict[str, Any]) -> set[str]:
    """Return the names of the Secrets that the Job's pod refers to."""
    (job,) = objects_of(values)["Job"]
    text = json.dumps(job["spec"]["template"]["spec"])
    assert "envFrom" not in text
    return set(re.findall(r'"(?:secretName|secretKeyRef)": (?:\{[^}]*"name": )?"([^"]+)"', text))


CROSS = [
    ("executor", "worker_timeout_s", (3, 3.5, 20, 29, 30)),
    ("executor", "commit_margin_s", (1, 29, 30)),
    ("executor", "requeue_delay_s", (26.9, 27)),
    ("executor", "max_lost_runs", (1, 4, 5)),
    ("nats", "ack_wait_s", (8.9, 9, 27)),
    ("tools", "default_timeout_s", (120, 121)),
    ("tools", "max_timeout_s", (1, 60)),
    ("retry", "initial_backoff_s", (8, 8.1)),
    ("retry", "max_backoff_s", (0.4, 0.5)),
    ("egress", "max_response_bytes", (17_066_666, 17_066_667)),
    ("egress", "body_budget_bytes", (149_999_999, 150_000_000)),
    ("protocol", "project", ("*", "one")),
    ("protocol", "channel", ("*", "one")),
]


@requirement("chart.refused")
@each("config", [{section: {key: value}} for section, key, refused in CROSS for value in refused])
def test_the_chart_refuses_numbers_that_the_executor_refuses_and_no_others(config: dict[str, Any]) -> None:
    try:
        Settings.model_validate({**POSTGRES, **config})
    except ValidationError:
        with pytest.raises(helm_python.HelmError, match=r"config\.[a-z_.]+: "):
            rendered({"config": config})
    else:
        assert rendered({"config": config})


README = CHART_README.read_text(encoding="utf-8")
INSTALLED, *EXAMPLES = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))


@requirement("chart.values")
@pytest.mark.parametrize("example", EXAMPLES, ids=[", ".join(example) for example in EXAMPLES])
def test_examples_of_the_readme_render_beside_that_of_the_installation(example: dict[str, Any]) -> None:
    if "toolsJob" in example:
        file = re.search(r"--set-file 'toolsJob\.definitions\.(\w+)\\\.yaml=(\S+)'", README)
        assert file
        definition = {f"{file[1]}.yaml": (ROOT / file[2]).read_text(encoding="utf-8")}
        example = {"toolsJob": {**example["toolsJob"], "definitions": definition}}
    documents = rendered(merged(INSTALLED, example), name="openapi-tool")
    assert documents != rendered(INSTALLED, name="openapi-tool"), "it changes something"


@requirement("chart.names")
def test_commands_of_the_readme_name_objects_of_its_release() -> None:
    tools = {"toolsJob": {"enabled": True, "projects": ["p"], "definitions": {"a.yaml": "tool_name: a"}}}
    documents = rendered({**INSTALLED, **tools}, name="openapi-tool")
    known = {f"{document['kind'].lower()}/{document['metadata']['name']}" for document in documents}
    named = set(re.findall(r"\b(?:deployment|job)/[a-z-]+", README))
    assert len(named) == 2
    assert named <= known


PROMTOOL = shutil.which("promtool")
RUNBOOK = Path(__file__).parent.parent.parent / "docs" / "runbook.md"
POD = 'namespace="n",pod="r-openapi-tool-abc12-x1y2z"'
MINUTES = 45

# For each alert, series with which it fires, as `name{labels}: values` in promtool's notation for one sample a minute.
FIRE: dict[str, dict[str, str]] = {
    "OpenapiToolMissing": {"up": "0x60"},
    "OpenapiToolDependencyDown": {'dependency_up{dependency="postgres"}': "0x60"},
    "OpenapiToolDeadLetters": {'dead_letters_total{reason="stale_turn"}': "0x40 1x20"},
    "OpenapiToolDeadLettersDiscarded": {'dead_letters_discarded_total{cause="full"}': "0x40 1x20"},
    "OpenapiToolCallsFail": {
        'calls_total{status="failed",error_code="auth_failed"}': "0+30x60",
        'calls_total{status="success"}': "0+60x60",
    },
    "OpenapiToolCommandsRequeued": {"commands_requeued_total": "0+2x60"},
    "OpenapiToolSlow": {
        'call_seconds_bucket{le="20.0"}': "0+50x60",
        'call_seconds_bucket{le="30.0"}': "0+60x60",
        'call_seconds_bucket{le="+Inf"}': "0+60x60",
    },
    "OpenapiToolSaturated": {"commands_waiting": "5x60"},
    "OpenapiToolWorkersNotWoken": {"doorbells_missed_total": "0x40 1x20"},
    "OpenapiToolEventLoopBlocked": {
        'event_loop_lag_seconds_bucket{le="0.5"}': "0+50x60",
        'event_loop_lag_seconds_bucket{le="1.0"}': "0+60x60",
        'event_loop_lag_seconds_bucket{le="+Inf"}': "0+60x60",
    },
    "OpenapiToolKeyRefused": {'key_unusable{variable="JINA_API_KEY",endpoint="search",state="invalid"}': "0x40 1x20"},
    "OpenapiToolLimitUsedUp": {'rate_limited_total{endpoint="search"}': "0+5x60"},
    "OpenapiToolKeyPaused": {'limit_paused_seconds{variable="JINA_API_KEY",endpoint="search"}': "7 0 0 " * 20},
    "OpenapiToolUpstreamFails": {
        'upstream_request_seconds_count{error_code="rate_limited"}': "0+30x60",
        "upstream_request_seconds_count": "0+60x60",
    },
    "OpenapiToolDatabaseSlow": {
        'phase_seconds_bucket{phase="commit",le="1.0"}': "0+50x60",
        'phase_seconds_bucket{phase="commit",le="2.5"}': "0+60x60",
        'phase_seconds_bucket{phase="commit",le="+Inf"}': "0+60x60",
    },
    "OpenapiToolBacklog": {"durable_pending": "200x60"},
    "OpenapiToolDurableFull": {
        "durable_unacknowledged": "95000x60",
        "durable_max_unacknowledged": "100000x60",
    },
    "OpenapiToolCommandHeldLong": {"oldest_held_command_seconds": "200x60"},
    "OpenapiToolFlood": {"commands_evicted_total": "0x40 5x20"},
    "OpenapiToolRedeliveries": {"redeliveries_total": "0x40 50x20"},
    "OpenapiToolSpansDropped": {"spans_dropped_total": "0x40 5x20"},
    "OpenapiToolLogLinesDropped": {"log_lines_dropped_total": "0x40 5x20"},
    "OpenapiToolResponseMemory": {"response_memory_waiting": "2x60"},
    "OpenapiToolBudgetLow": {'budget_used_ratio{scope="project_day"}': "0.7x40 0.85x20"},
    "OpenapiToolLimitsNotShared": {'limit_not_shared{variable="JINA_API_KEY",endpoint="search"}': "1x60"},
    "OpenapiToolBudgetsNotShared": {"budgets_not_shared": "1x60"},
    "OpenapiToolClockOffset": {"clock_offset_seconds": "-28x60"},
}
QUIET = {
    'dependency_up{dependency="postgres"}': "1x60",
    'dead_letters_total{reason="stale_turn"}': "7x60",
    'dead_letters_discarded_total{cause="full"}': "0x60",
    'calls_total{status="failed",error_code="auth_failed"}': "0+1x60",
    'calls_total{status="success"}': "0+60x60",
    'call_seconds_bucket{le="20.0"}': "0+60x60",
    'call_seconds_bucket{le="+Inf"}': "0+60x60",
    "commands_waiting": "0x20 9x5 0x40",
    "calls_running": "3x60",
    "doorbells_missed_total": "2x60",
    'keys_refused_total{variable="JINA_API_KEY",endpoint="search"}': "0x60",
    'key_unusable{variable="JINA_API_KEY",endpoint="search",state="invalid"}': "0x60",
    'rate_limited_total{endpoint="search"}': "0x40 5x20",
    'limit_paused_seconds{variable="JINA_API_KEY",endpoint="search"}': "0x40 9x2 0x20",
    "upstream_request_seconds_count": "0+60x60",
    'phase_seconds_bucket{phase="commit",le="1.0"}': "0+60x60",
    'phase_seconds_bucket{phase="commit",le="+Inf"}': "0+60x60",
    "durable_pending": "60x60",
    "durable_unacknowledged": "64x60",
    "durable_max_unacknowledged": "100000x60",
    "oldest_held_command_seconds": "12x60",
    "commands_evicted_total": "0x60",
    "redeliveries_total": "0x40 3x20",
    "spans_dropped_total": "0x60",
    "log_lines_dropped_total": "0x60",
    "commands_requeued_total": "0x5 3x55",
    "response_memory_waiting": "0x20 3x2 0x40",
    "clock_offset_seconds": "0.2x60",
    'budget_used_ratio{scope="project_day"}': "0.79x60",
    'budget_used_ratio{scope="session"}': "1x60",
    "budgets_not_shared": "0x20 1x2 0x40",
    'limit_not_shared{variable="JINA_API_KEY",endpoint="search"}': "0x20 1x2 0x40",
}


@functools.cache
def rules() -> list[dict[str, Any]]:
    (rule,) = objects_of({"monitoring": {"rules": True}})["PrometheusRule"]
    parsed: list[dict[str, Any]] = rule["spec"]["groups"][0]["rules"]
    return parsed


def firing_alerts(series: Mapping[str, str], folder: Path, minute: int) -> set[str]:
    """Return the alerts that fire at a minute of these series."""
    return _fired([(series, [rule["alert"] for rule in rules()])], folder, minute)


def _fired(runs: Iterable[tuple[Mapping[str, str], Iterable[str]]], folder: Path, minute: int) -> set[str]:
    """Return the alerts that fire at a minute; a run is a set of series with the expected alerts."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules()}]}))
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in names],
        }
        for series, names in runs
    ]
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    assert PROMTOOL is not None
    command = [PROMTOOL, "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - found above
    output = done.stdout + done.stderr
    fired = set(re.findall(r"alertname: (\w+), time:", output))
    assert bool(fired) == (done.returncode != 0), output
    return fired


def _named(series: Mapping[str, str]) -> dict[str, str]:
    """Return series under their whole names, of one pod."""
    parts = {name: name.partition("{") for name in series}
    labels = {name: ",".join(filter(None, (POD, part[2].rstrip("}")))) for name, part in parts.items()}
    return {f"openapi_tool_{parts[name][0]}{{{labels[name]}}}": values for name, values in series.items()}


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")


@needs_promtool
@requirement("chart.metrics")
def test_each_alert_fires_for_its_condition(tmp_path: Path) -> None:
    runs = [(_named(series), [alert]) for alert, series in FIRE.items()]
    assert _fired(runs, tmp_path, MINUTES) == FIRE.keys()


@needs_promtool
@requirement("chart.metrics")
def test_no_alert_fires_for_quiet_metrics(tmp_path: Path) -> None:
    assert firing_alerts(_named(QUIET), tmp_path, MINUTES) == set()


@requirement("chart.metrics")
def test_each_alert_has_its_case_and_its_section_in_the_runbook() -> None:
    sections = {line[3:] for line in RUNBOOK.read_text(encoding="utf-8").splitlines() if line.startswith("## ")}
    alerts = {rule["alert"]: rule for rule in rules()}
    assert alerts.keys() == FIRE.keys() == sections
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


@needs_promtool
@requirement("chart.metrics")
def test_promtool_accepts_each_rule_and_each_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', (CHART / "files" / "dashboard.json").read_text())
    shown = [
        query.replace('\\"', '"').replace("$__rate_interval", "5m").replace("$namespace", "n") for query in queries
    ]
    recorded = [{"record": f"panel{place}", "expr": query} for place, query in enumerate(shown)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [*rules(), *recorded]}]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(recorded) > 20
