"""Settings for secrets of tools: which variables a definition may name, and which arguments may take one."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from openapi_tool.jina.parameters import is_documented, secret_problem
from openapi_tool.options import split
from openapi_tool.settings.section import Section
from openapi_tool.tools.arguments import API_KEY
from openapi_tool.tools.secrets import is_executors_own

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


class ServiceEnvs(Section):
    """Service-side `envs` of one target."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable name.")


class JinaToolSettings(Section):
    """Service-side settings of the Jina tools; they override a definition's own."""

    envs: Envs = Field(default_factory=dict, description="Argument to variable, for all targets.")
    services: dict[str, ServiceEnvs] = Field(default_factory=dict, description="The same by target.")

    def envs_of(self, target: str) -> dict[str, str]:
        """Return argument name to variable name for one target."""
        service = self.services.get(target)
        return {**self.envs, **(service.envs if service else {})}


class SecretsSettings(Section):
    """Variables that a definition may name, and arguments that may take one; `NAME_FILE` names a file with a value."""

    allowed_env: Annotated[tuple[VariableName, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Variables for definitions, beside JINA_API_KEY and the service's own `envs`; comma-separated.",
    )
    env_parameters: Annotated[tuple[EnvParameter, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Body members of your own, named `tenant_…`, that a definition's `envs` may fill, beside `api_key` "
        "and the service's own `envs`; comma-separated in the environment.",
    )
