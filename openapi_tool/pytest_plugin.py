"""pytest fixtures for tests of your own tool definitions (`openapi_tool.testing`); needs the extra [testing].

pytest loads this module wherever the package is installed, so fixtures import what needs the extra.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import respx

    from openapi_tool.testing import ToolResult


@pytest.fixture
def openapi_tool_settings() -> Mapping[str, Any]:
    """Settings of the executor by section; override this fixture to change them."""
    return {}


@pytest.fixture
def openapi_tool_environment() -> Mapping[str, str]:
    """Variables that definitions may name; override this fixture to set some."""
    return {}


@pytest.fixture
def jina() -> respx.Router:
    """Router in place of s.jina.ai and r.jina.ai."""
    import respx  # noqa: PLC0415 - see the docstring of the module

    return respx.Router(assert_all_called=False)


@pytest.fixture
def run_tool(
    jina: respx.Router, openapi_tool_settings: Mapping[str, Any], openapi_tool_environment: Mapping[str, str]
) -> Iterator[Callable[..., ToolResult]]:
    """Call a tool; takes what `InProcessExecutor.run_tool` takes. All calls of a test share one executor."""
    from openapi_tool.testing import InProcessExecutor  # noqa: PLC0415 - see the docstring of the module

    executor = InProcessExecutor(jina, settings=openapi_tool_settings, environment=openapi_tool_environment)
    with asyncio.Runner() as runner:

        def run(*call: Any, **options: Any) -> ToolResult:
            if asyncio._get_running_loop() is not None:  # noqa: SLF001 - get_running_loop raises without one
                raise RuntimeError("in an asynchronous test use: await InProcessExecutor(jina).run_tool(…)")
            return runner.run(executor.run_tool(*call, **options))

        yield run
