"""pytest fixtures for tests of your own tool definitions (`openapi_tool.testing`); needs the extra [testing].

pytest loads this module in every project in whose environment the package is installed. Such a project may have
fixtures of the same names, so there are none without the extra. And fixtures import what they need only when they are
used, so that pytest starts as fast as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import respx

    from openapi_tool.testing import ToolResult


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures if the extra [testing] is installed."""
    if find_spec("respx") is not None:
        config.pluginmanager.register(_Fixtures(), "openapi_tool_fixtures")


class _Fixtures:
    @pytest.fixture
    def openapi_tool_settings(self) -> Mapping[str, Any]:
        """Settings of the executor by section; override this fixture to change them."""
        return {}

    @pytest.fixture
    def openapi_tool_environment(self) -> Mapping[str, str]:
        """Variables that definitions may name; override this fixture to set some."""
        return {}

    @pytest.fixture
    def jina(self) -> respx.Router:
        """Router in place of s.jina.ai and r.jina.ai."""
        import respx  # noqa: PLC0415 - only where the fixture is used

        return respx.Router(assert_all_called=False)

    @pytest.fixture
    def run_tool(
        self,
        jina: respx.Router,
        openapi_tool_settings: Mapping[str, Any],
        openapi_tool_environment: Mapping[str, str],
    ) -> Iterator[Callable[..., ToolResult]]:
        """Call a tool; takes what `InProcessExecutor.run_tool` takes. All calls of a test share one executor."""
        import asyncio  # noqa: PLC0415 - only where the fixture is used

        from openapi_tool.testing import InProcessExecutor  # noqa: PLC0415 - the same

        executor = InProcessExecutor(jina, settings=openapi_tool_settings, environment=openapi_tool_environment)
        with asyncio.Runner() as runner:

            def run(*call: Any, **options: Any) -> ToolResult:
                try:
                    asyncio.get_running_loop()
                except RuntimeError:  # a synchronous test
                    pass
                else:
                    raise RuntimeError("in an asynchronous test use: await InProcessExecutor(jina).run_tool(…)")
                return runner.run(executor.run_tool(*call, **options))

            yield run
