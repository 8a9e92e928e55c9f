"""Sections of the settings that no component takes as options: secrets of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from openapi_tool.jina.parameters import is_documented, secret_problem
from openapi_tool.options.section import Options, split
from openapi_tool.tools.arguments import API_KEY
from openapi_tool.tools.secret_variables import is_executors_own

TARGET = "{target}"  # in an actor id


def _without_unknown_placeholders(actor_id: str) -> str:
    if set("{}") & set(actor_id.replace(TARGET, "")):
        raise ValueError(f"holds an unknown placeholder or a lone brace; the only placeholder is {TARGET}")
    return actor_id


ActorId = Annotated[str, AfterValidator(_without_unknown_placeholders)]


def fields_of(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section, which may be optional; for another type none."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((part.__pydantic_fields__ for part in kinds if hasattr(part, "__pydantic_fields__")), {})


_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _is_not_the_executors_own(variable: str) -> str:
    if is_executors_own(variable):
        raise ValueError(f"{variable} is one of the executor's own settings, which tools are never given; remove it")
    return variable


VariableName = Annotated[str, Field(pattern=_VARIABLE), AfterValidator(_is_not_the_executors_own)]


def _may_take_a_secret(name: str) -> str:
    if not _PARAMETER.fullmatch(name):
        raise ValueError("must be the name of one upstream parameter: letters, digits, '_' and '-'")
    if name != API_KEY and (problem := secret_problem(name)):
        shown = f"{name} " if is_documented(name) else ""  # an unknown name may be a secret that was pasted here
        raise ValueError(f"{shown}{problem}; remove it")
    return name


def _all_may_take_a_secret(envs: dict[str, str]) -> dict[str, str]:
    for name in envs:
        _may_take_a_secret(name)
    return envs


EnvParameter = Annotated[str, AfterValidator(_may_take_a_secret)]
Envs = Annotated[dict[str, VariableName], AfterValidator(_all_may_take_a_secret)]


@validated(frozen=True)
class ServiceEnvs(Options):
    """Service-side `envs` of one target, which the kernel's settings call a service."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable name.")


@validated(frozen=True)
class JinaToolSettings(Options):
    """Service-side settings of the Jina tools; they override a definition's own."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable, for all targets.")
    services: dict[str, ServiceEnvs] = Field(
        default_factory=dict, description="The same for single targets, which overrides `envs`."
    )

    def envs_of(self, target: str) -> dict[str, str]:
        """Map argument names to variable names for one target."""
        service = self.services.get(target)
        return {**self.envs, **(service.envs if service else {})}


@validated(frozen=True)
class SecretsSettings(Options):
    """Variables that definitions may name, and arguments that may take their values.

    Instead of a variable `NAME`, `NAME_FILE` may name a file that contains the value.
    """

    allowed_env: Annotated[tuple[VariableName, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        description="Variables that definitions may name, beside JINA_API_KEY and those in `tools.jina`. Any "
        "definition of any project may name each of them, also in `auth_env`; comma-separated in the environment.",
    )
    env_parameters: Annotated[tuple[EnvParameter, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        description="Body members of your own, named `tenant_…`, that a definition's `envs` may fill, beside `api_key` "
        "and those in `tools.jina`; comma-separated in the environment.",
    )
