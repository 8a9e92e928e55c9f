"""Sources of settings: TOML files, variables, and options that the PostgreSQL driver reads itself.

asyncpg takes options from `PG*` variables and from service, password and TLS files. It reports a mistake there only
when it connects, as an outage, which is retried without end, or as a defect. So they are checked at the start.
"""

from __future__ import annotations

import configparser
import getpass
import os
import re
import ssl
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from pydantic_settings.sources import InitSettingsSource

from openapi_tool.dsn import Dsn, parse_hosts
from openapi_tool.environment import CONFIG_VARIABLE, KERNEL_CONFIG_VARIABLE, PREFIX, SHORT_NAMES, temporary_variable
from openapi_tool.files import (
    MAX_CERTIFICATES_BYTES,
    MAX_CONFIG_BYTES,
    MAX_SECRET_BYTES,
    check_regular_file,
    read_regular_file,
)
from openapi_tool.protocol.jsontext import as_object
from openapi_tool.urls import checked_port

KERNEL_KEYS: Mapping[str, tuple[str, ...]] = {
    "protocol.version": ("protocol", "version"),
    "nats.servers": ("nats", "servers"),
    "nats.tls_enabled": ("nats", "tls"),
    "nats.pull.max_inflight": ("executor", "concurrency"),
    "worker.default_timeout_seconds": ("executor", "worker_timeout_s"),
    "worker.suspend_timeout_seconds": ("executor", "worker_timeout_s"),
    "cardbox.postgres_dsn": ("postgres", "dsn"),
    "tools.jina.envs": ("tools", "jina", "envs"),
    "tools.jina.services": ("tools", "jina", "services"),
}
"""Keys of the kernel's `config.toml`, with their settings; the last key of a setting wins."""

_INFLIGHT = "nats.pull.max_inflight"
_KERNEL_ENVS = ("openapi.envs", "tools.openapi.envs")
_KERNEL_SERVICES = ("openapi.services", "tools.openapi.services", "tools.openapi_services")
"""Sections of the kernel's executor, read for the variables of API keys only; the last wins. A service is a target."""

_KERNEL_CERTIFICATES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}

_ignored_files: ContextVar[frozenset[str]] = ContextVar("ignored_files", default=frozenset())
_config_option: ContextVar[str] = ContextVar("config_option", default="")


def use_settings_file(config: Path | None) -> None:
    """Read the settings from the file of the option --config from now on; messages then name the option."""
    if config is not None and str(config) != os.environ.get(CONFIG_VARIABLE):  # else the value is the variable's
        _config_option.set(str(config))
        os.environ[CONFIG_VARIABLE] = str(config)


@contextmanager
def settings_file(config: Path | None) -> Iterator[None]:
    """Read the settings from the file of the option --config for a while."""
    with temporary_variable(CONFIG_VARIABLE, os.environ.get(CONFIG_VARIABLE, "")):
        use_settings_file(config)
        yield


def named_by(variable: str) -> str:
    """Return what names a settings file: its variable, or the option."""
    is_option = variable == CONFIG_VARIABLE and _config_option.get() == os.environ.get(CONFIG_VARIABLE)
    return "--config" if is_option else variable


class SourceUnreadable(Exception):
    """The settings file that `variable` names cannot be read."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{named_by(variable)}={os.environ[variable]}: {problem}")
        self.variable = variable


@contextmanager
def file_ignored(variable: str) -> Iterator[None]:
    """Do not read a file, so that mistakes elsewhere can be listed."""
    token = _ignored_files.set(_ignored_files.get() | {variable})
    try:
        yield
    finally:
        _ignored_files.reset(token)


def file_sources(settings_class: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
    """Return the sources below `OPENAPI_TOOL__…` that are not empty, in descending precedence. Raises SourceUnreadable.

    They are the variables with short names, the settings file, and the kernel's file.
    """
    return tuple(InitSettingsSource(settings_class, values) for values in (_short_names(), *files().values()) if values)


def files() -> dict[str, dict[str, Any]]:
    """Return the values of the settings file and the kernel's file, by variable. Raises SourceUnreadable."""
    return {
        CONFIG_VARIABLE: _read(CONFIG_VARIABLE),
        KERNEL_CONFIG_VARIABLE: from_kernel(_read(KERNEL_CONFIG_VARIABLE)),
    }


def origin(path: Sequence[str], flags: Mapping[str, Any], from_files: Mapping[str, dict[str, Any]]) -> str:
    """Return the variable of a setting, or "in FILE" if `from_files` has it; empty for a flag or a default."""
    if _contains(flags, path):
        return ""
    names = {name.upper() for name, value in os.environ.items() if value.strip()}
    variables = (PREFIX + "__".join(path[:length]).upper() for length in range(len(path), 0, -1))
    short = (name for name, setting in SHORT_NAMES.items() if setting == tuple(path[:2]))
    if variable := next((name for name in (*variables, *short) if name in names), None):
        return variable
    return next(
        (f"in {os.environ[variable]}" for variable, values in from_files.items() if _contains(values, path)), ""
    )


def _contains(values: Any, path: Sequence[str]) -> bool:
    """Return whether these values contain a setting, or a wrong value in place of its table."""
    for part in path:
        if not isinstance(values, dict):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


def _short_names() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, path in SHORT_NAMES.items():
        if (value := os.environ.get(variable, "")).strip():
            _put(values, path, value)
    return values


def _read(variable: str) -> dict[str, Any]:
    path = os.environ.get(variable)
    if not path or variable in _ignored_files.get():
        return {}
    try:
        return tomllib.loads(read_regular_file(path, MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise SourceUnreadable(variable, f"cannot be read: {error.strerror}; name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourceUnreadable(variable, f"is no TOML in UTF-8: {error}; correct it there") from None
    except (ValueError, RecursionError):
        raise SourceUnreadable(variable, "has too long a number, or is nested too deep; correct it there") from None


def from_kernel(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the executor's settings in the kernel's `config.toml`."""
    values: dict[str, Any] = {}
    for key, path in KERNEL_KEYS.items():
        value = _get(config, key)
        # The kernel's own executor runs one call at a time, so its config.toml has 1, too low here.
        if value is not None and not (key == _INFLIGHT and value == 1):
            _put(values, path, value)
    _add_api_keys(config, values)
    folder = _get(config, "nats.cert_dir")
    if folder is not None and _get(config, "nats.tls_enabled"):
        for key, name in _KERNEL_CERTIFICATES.items():
            _put(values, ("nats", key), str(Path(str(folder)) / name))
    return values


def _add_api_keys(config: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Add the variables of API keys of the kernel's own executor, unless `tools.jina` has some."""
    envs: dict[str, Any] = {}
    for section in _KERNEL_ENVS:
        envs |= _key_of(_get(config, section))
    services: dict[str, dict[str, Any]] = {}
    for section in _KERNEL_SERVICES:
        for target, service in as_object(_get(config, section)).items():
            services.setdefault(target, {}).update(_key_of(as_object(service).get("envs")))
    own = _get(values, "tools.jina") or {}
    if envs and isinstance(own.get("envs", {}), dict):
        _put(values, ("tools", "jina", "envs"), {**envs, **own.get("envs", {})})
    for target, keys in services.items():
        if keys and _get(own, f"services.{target}.envs") is None:
            _put(values, ("tools", "jina", "services", target, "envs"), keys)


def _key_of(envs: Any) -> dict[str, Any]:
    return {"api_key": envs["api_key"]} if isinstance(envs, dict) and "api_key" in envs else {}


def kernel_remarks() -> list[str]:
    """Return a line for each ignored value of the kernel's file. Raises SourceUnreadable."""
    if _get(_read(KERNEL_CONFIG_VARIABLE), _INFLIGHT) != 1:
        return []
    where = f"{_INFLIGHT} = 1 of {KERNEL_CONFIG_VARIABLE}"
    return [f"{where} is ignored: it is the kernel's own executor's; set executor.concurrency = 1 for the same"]


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, leaf = path
    for parent in parents:
        values = values.setdefault(parent, {})
    values[leaf] = value


_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFYING = ("require", "verify-ca", "verify-full")
"""Modes that verify the server's certificate; `require` only if there is a file with a CA, as in libpq."""

_TLS_VERSIONS = ("", "TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sslmode": (*_MODES, "verify_ca", "verify_full"),  # the driver accepts the underscores, too
    "sslnegotiation": ("postgres", "direct"),
    "ssl_min_protocol_version": _TLS_VERSIONS,
    "ssl_max_protocol_version": _TLS_VERSIONS,
    "target_session_attrs": ("any", "primary", "standby", "prefer-standby", "read-write", "read-only"),
    "gsslib": ("gssapi", "sspi"),
}
_DEFAULT_FILES: Mapping[str, str] = {
    "sslrootcert": "root.crt",
    "sslcrl": "root.crl",
    "sslcert": "postgresql.crt",
    "sslkey": "postgresql.key",
}
_DEFAULT_HOSTS = 5  # tried by the driver if none is named: four directories of Unix sockets, and localhost
_FIELD_END = re.compile(r"(?<!\\):")


class Option(NamedTuple):
    """Value of an option, and the setting, variable or file that it comes from."""

    value: str
    where: str


class DriverOptions:
    """Effective options of a connection string: from its query, else its service file, else the environment.

    Raises ValueError for a service file that cannot be parsed.
    """

    def __init__(self, dsn: Dsn, environment: Mapping[str, str], home: Path | None) -> None:
        self._dsn = dsn
        self._environment = environment
        self._home = home
        self._service = self._read_service()

    def option(self, name: str) -> Option | None:
        """Return an option. An empty value counts as present, as for the driver."""
        if name in self._dsn.query:
            return Option(self._dsn.query[name], f"postgres.dsn: {name}")
        if name in self._service:
            return Option(self._service[name], f"postgres.dsn: {name} in the service file")
        variable = "PG" + name.replace("_", "").upper()
        return Option(self._environment[variable], variable) if variable in self._environment else None

    def problems(self) -> Iterator[str]:
        """Yield a line for each option that the driver would refuse, without its value."""
        for name, choices in _CHOICES.items():
            option = self.option(name)
            if option and option.value not in choices:
                yield f"{option.where}: must be one of {', '.join(filter(None, choices))}"
        yield from self._user_problems()
        yield from self._host_problems()
        yield from self._tls_problems()

    def passwords(self) -> Iterator[Option]:
        """Yield the passwords that the driver may use beside those of the connection string.

        It chooses a line of the password file by server and user; yield all.
        """
        for name in ("password", "sslpassword"):
            if self._service.get(name):
                yield Option(self._service[name], "postgres.dsn")
        if password := self._environment.get("PGPASSWORD"):
            yield Option(password, "PGPASSWORD")
        elif not self._dsn.password:
            yield from self._password_file()

    def _read_service(self) -> Mapping[str, str]:
        name = self._dsn.query.get("service")
        file = self._home and self._home / ".pg_service.conf"
        if (path := self._environment.get("PGSERVICEFILE")) is not None:
            file = Path(path)
        if name is None or file is None:
            return {}
        parser = configparser.ConfigParser()
        try:
            parser.read_string(read_regular_file(file, MAX_SECRET_BYTES).decode())
            return dict(parser[name]) if name in parser.sections() else {}  # the driver ignores an unknown service
        except (FileNotFoundError, PermissionError):  # the driver ignores it, too
            return {}
        except OSError as error:
            raise ValueError(f"postgres.dsn: the service file cannot be read: {error.strerror}") from None
        except (configparser.Error, ValueError):
            raise ValueError("postgres.dsn: the service file cannot be parsed; check its syntax") from None

    def _user_problems(self) -> Iterator[str]:
        if not (self._dsn.user or self._service.get("user") or self._environment.get("PGUSER")):
            try:
                getpass.getuser()
            except (KeyError, OSError):  # a container whose user has no name
                yield "postgres.dsn: names no user, and the process has none; write postgresql://USER@… or set PGUSER"

    def _host_problems(self) -> Iterator[str]:
        ports = self.option("port")
        host_count = len(self._dsn.hosts)
        if host_count:
            if "port" not in self._dsn.query:  # then the driver ignores the port of a service file
                ports = Option(self._environment.get("PGPORT", ""), "PGPORT")
        elif hosts := self.option("host"):
            try:
                host_count = len(parse_hosts(hosts.value)) or _DEFAULT_HOSTS
            except ValueError as problem:
                yield f"{hosts.where}: {problem}"
        else:
            host_count = _DEFAULT_HOSTS
        if ports is None or not ports.value:
            return
        try:
            numbers = [checked_port(port) for port in ports.value.split(",")]
        except ValueError as problem:
            yield f"{ports.where}: {problem}"
        else:
            if len(numbers) not in (1, host_count):
                yield f"{ports.where}: must have one port, or one for each of {host_count} hosts"

    def _tls_problems(self) -> Iterator[str]:
        option = self.option("sslmode") or Option("prefer", "")
        mode = option.value.replace("_", "-")
        negotiation = self.option("sslnegotiation")
        if mode not in _VERIFYING and negotiation and negotiation.value == "direct":
            yield f"{negotiation.where}: direct needs sslmode require, verify-ca or verify-full"
        if mode == "disable":
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if mode in _VERIFYING:
            for name in ("sslrootcert", "sslcrl"):
                if file := self._file(name):
                    yield from _load_problems(partial(context.load_verify_locations, file.value), [file])
            if mode != "require" and not self._file("sslrootcert"):
                yield f"{option.where}: verification needs sslrootcert, the file with the CA of the server (PEM)"
        certificate, key = self._file("sslcert"), self._file("sslkey")
        password = self._dsn.query.get("sslpassword") or self._service.get("sslpassword") or ""
        if certificate:
            # For an encrypted key OpenSSL calls this function; without one it would ask on the terminal.
            load = partial(context.load_cert_chain, certificate.value, key and key.value, lambda: password)
            yield from _load_problems(load, [certificate, *([key] if key else [])])

    def _file(self, name: str) -> Option | None:
        named = self.option(name)
        if named and named.value:
            return named
        default = self._home and self._home / ".postgresql" / _DEFAULT_FILES[name]
        try:
            exists = default is not None and default.exists()
        except OSError:  # in a folder that is closed to this user
            exists = False
        return Option(str(default), f"~/.postgresql/{_DEFAULT_FILES[name]}") if exists else None

    def _password_file(self) -> Iterator[Option]:
        named = self.option("passfile")
        file = Path(named.value) if named else self._home and self._home / ".pgpass"
        if not file:
            return
        try:
            text = read_regular_file(file, MAX_SECRET_BYTES).decode("utf-8", "replace")
        except OSError:  # the driver ignores it, too
            return
        for line in text.splitlines():
            password = _FIELD_END.split(line.strip(), maxsplit=4)[-1]
            # as written, and unescaped as the driver sends it
            for value in {password, password.replace(r"\:", ":").replace("\\\\", "\\")}:
                if value and not line.startswith("#"):
                    yield Option(value, named.where if named else "~/.pgpass")


def _load_problems(load: Callable[[], None], files: Sequence[Option]) -> Iterator[str]:
    for file in files:
        try:
            check_regular_file(file.value, MAX_CERTIFICATES_BYTES)
        except OSError as error:
            yield f"{file.where}: cannot be used: {error.strerror}"
            return
    try:
        load()
    except OSError as error:
        yield f"{files[0].where}: cannot be used: {error}"
