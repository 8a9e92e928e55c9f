"""Render the chart as `helm install r --namespace n` would."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parent.parent / "helm" / "openapi-tool"


def rendered(values: Mapping[str, Any] | None = None, *, name: str = "r") -> list[dict[str, Any]]:
    """Return every object in the order of its templates. Raises HelmError for values that are refused."""
    return _rendered(json.dumps(values or {}, sort_keys=True), name)


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return what `helm install` prints."""
    texts = _chart().render(dict(values or {}), name="r", namespace="n")
    return next(text for path, text in texts.items() if path.endswith("NOTES.txt"))


@cache
def _rendered(values: str, name: str) -> list[dict[str, Any]]:
    texts = _chart().render(json.loads(values), name=name, namespace="n")
    return [document for path, text in texts.items() if not path.endswith("NOTES.txt") for document in _documents(text)]


@cache
def _documents(text: str) -> list[dict[str, Any]]:
    """Return what a file of YAML holds; most files are the same whatever the values are."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def objects_of(values: Mapping[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return every object by its kind."""
    found = defaultdict(list)
    for document in rendered(values):
        found[document["kind"]].append(document)
    return found
