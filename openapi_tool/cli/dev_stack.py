"""The stack of `dev`: the embedded servers, an executor or several, and the files by which other commands find it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openapi_tool.cli.embedded import running, this_program
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.local.dev import prepare
from openapi_tool.local.dev_state import (
    ClaimedState,
    announce,
    automatic_names,
    claimed_state,
    database_of,
    persistent_folder,
    running_stacks,
    state_path,
)
from openapi_tool.protocol.dialect import ProtocolVersion
from openapi_tool.settings import PREFIX
from openapi_tool.tools.secret_variables import FILE_SUFFIX

if TYPE_CHECKING:
    from openapi_tool.cli.dev_settings import DevSettings
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack


@dataclass(frozen=True, slots=True)
class DevFlags:
    """Flags of the command. With `keep` the data stays in that folder; a port of 0 is any free one.

    `name` is the name of the stack for `openapi-tool --dev NAME`; without it the first free one of `automatic_names`.
    """

    upstream: UpstreamChoice
    protocol: ProtocolVersion
    keep: Path | None
    name: str | None
    pg_port: int
    nats_port: int
    page_port: int
    replicas: int


@dataclass(frozen=True, slots=True)
class DevStack:
    """The running stack. `command_prefix` is the beginning of a command that finds it, such as `openapi-tool `."""

    servers: EmbeddedStack
    version: ProtocolVersion
    executors: list[ExecutorProcess]
    command_prefix: str

    @property
    def dsn(self) -> str:
        """Address of the database of the simulated kernel."""
        return self.servers.postgres.dsn(database_of(self.version))

    @property
    def variables(self) -> list[str]:
        """Shell assignments by which other commands find the kernel."""
        return _variables(self.servers, self.version)


@contextmanager
def running_dev_stack(options: DevFlags, settings: DevSettings) -> Iterator[DevStack]:
    """Run the stack, and announce it to other commands. Raises DevError, ServerFailed, OSError."""
    from openapi_tool.local.stack import EmbeddedStack  # noqa: PLC0415 - needs the extra [local]

    version = options.protocol
    with ExitStack() as exits:
        # The stack holds these locks until it has stopped, even if this process is killed.
        hold = [exits.enter_context(persistent_folder(options.keep))] if options.keep else []
        state = exits.enter_context(claimed_state(options.name))  # None if no automatic name is free
        if state is not None:
            hold.append(state.descriptor)
        servers = EmbeddedStack(
            settings.key_names, keep=options.keep, pg_port=options.pg_port, nats_port=options.nats_port, hold=hold
        )
        if state is not None:
            servers.guard.delete_at_end(state_path(state.name))

        executors = _start(servers, options, settings, exits)
        prefix = _command_prefix(servers, version, state)  # before `announce`, as it asks for other stacks
        stack = DevStack(servers, version, executors, prefix)
        if state is not None:
            announce(state.descriptor, stack.dsn, servers.nats.url, version, _keys(options, settings))
        yield stack


def _keys(options: DevFlags, settings: DevSettings) -> tuple[str, ...]:
    """Return the variables with keys that the executors have: all with the double, else those that the user has set."""
    if options.upstream is UpstreamChoice.DOUBLE:
        return settings.key_names
    set_by_user = settings.environment.keys()
    return tuple(name for name in settings.key_names if {name, name + FILE_SUFFIX} & set_by_user)


def _start(servers: EmbeddedStack, options: DevFlags, settings: DevSettings, exits: ExitStack) -> list[ExecutorProcess]:
    """Start the servers, prepare the simulated kernel, and start the executors; `exits` stops them."""
    from openapi_tool.local.sample_calls import demo_tools  # noqa: PLC0415 - needs the extra [local]
    from openapi_tool.local.stack import kernel_schema  # noqa: PLC0415 - the same

    version, database = options.protocol, database_of(options.protocol)
    prepare_kernel = partial(prepare, version=version, schema=kernel_schema(version), tools=demo_tools(version))
    executors = [exits.enter_context(running(servers, database, prepare_kernel, settings.environment))]
    environment = {**settings.environment, f"{PREFIX}HEALTH__PORT": "0"}  # off: the first executor uses the port
    real_upstream = options.upstream is UpstreamChoice.REAL
    for number in range(2, options.replicas + 1):
        executor = servers.executor(f"executor{number}", database, environment, real_upstream=real_upstream)
        executor.start()
        exits.callback(executor.stop)
        executors.append(executor)
    return executors


def _command_prefix(servers: EmbeddedStack, version: ProtocolVersion, state: ClaimedState | None) -> str:
    """Return the beginning of a command that uses this stack; without its name if it is the only `dev`."""
    program = shlex.join(this_program())
    if state is None:
        return f"{' '.join(_variables(servers, version))} {program} "
    is_only_one = not running_stacks()
    first_name = next(automatic_names())
    if is_only_one and state.name == first_name:
        return f"{program} "
    return f"{program} --dev {state.name} "


def _variables(servers: EmbeddedStack, version: ProtocolVersion) -> list[str]:
    values = {
        "PG_DSN": servers.postgres.dsn(database_of(version)),
        "NATS_SERVERS": servers.nats.url,
        f"{PREFIX}PROTOCOL__VERSION": version.value,
    }
    return [f"{name}={shlex.quote(value)}" for name, value in values.items()]
