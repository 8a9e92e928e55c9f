"""Options that the PostgreSQL driver reads in addition to the connection string, as libpq does.

Their sources are variables (`PG*`), service, password and TLS files. The driver, asyncpg, would report a mistake only
when it connects: most by its ClientConfigurationError, which counts as an outage and is retried without end, a port by
a bare ValueError, which counts as a defect. So check all of them at the start.
"""

from __future__ import annotations

import configparser
import getpass
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from openapi_tool.settings.urls import Dsn, checked_port, parse_hosts

_VARIABLES: Mapping[str, str] = {
    "host": "PGHOST",
    "port": "PGPORT",
    "sslmode": "PGSSLMODE",
    "sslnegotiation": "PGSSLNEGOTIATION",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcrl": "PGSSLCRL",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "gsslib": "PGGSSLIB",
    "passfile": "PGPASSFILE",
    "password": "PGPASSWORD",
}
_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFYING = ("require", "verify-ca", "verify-full")
"""Modes that verify the server's certificate; `require` does so only if there is a file with a CA, as in libpq."""

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
_MAX_FILE_BYTES = 64 * 1024
_FIELD_END = re.compile(r"(?<!\\):")


class Option(NamedTuple):
    """Effective value of an option, and the setting, variable or file that it comes from."""

    value: str
    where: str


class DriverOptions:
    """Effective options of a connection string: from its query, else its service file, else the environment.

    `home` is the user's home directory, if any. Raises ValueError for a service file that cannot be parsed.
    """

    def __init__(self, dsn: Dsn, environment: Mapping[str, str], home: Path | None) -> None:
        self._dsn = dsn
        self._environment = environment
        self._home = home
        self._service = self._read_service()

    def option(self, name: str) -> Option | None:
        """Return an option, or None. An empty value is not absent: the driver uses it."""
        if name in self._dsn.query:
            return Option(self._dsn.query[name], f"postgres.dsn: {name}")
        if name in self._service:
            return Option(self._service[name], f"postgres.dsn: {name} in the service file")
        variable = _VARIABLES[name]
        return Option(self._environment[variable], variable) if variable in self._environment else None

    def problems(self) -> Iterator[str]:
        """Yield a line for each option that the driver would refuse, with its source and without its value."""
        for name, choices in _CHOICES.items():
            option = self.option(name)
            if option and option.value not in choices:
                yield f"{option.where}: must be one of {', '.join(filter(None, choices))}"
        yield from self._user_problems()
        yield from self._host_problems()
        yield from self._tls_problems()

    def passwords(self) -> Iterator[Option]:
        """Yield every password that the driver may use in addition to those of the connection string.

        They are masked in all output. Which one the driver uses depends on server and user, so return all.
        """
        for name in ("password", "sslpassword"):
            if self._service.get(name):
                yield Option(self._service[name], "postgres.dsn")
        if variable := self._environment.get("PGPASSWORD"):
            yield Option(variable, "PGPASSWORD")
        elif not self._dsn.password:
            yield from self._password_file()

    def _read_service(self) -> Mapping[str, str]:
        name, path = self._dsn.query.get("service"), self._environment.get("PGSERVICEFILE")
        file = Path(path) if path is not None else self._home and self._home / ".pg_service.conf"
        if name is None or file is None:
            return {}
        parser = configparser.ConfigParser()
        try:
            parser.read(file)
            return dict(parser[name]) if name in parser.sections() else {}  # the driver ignores an unknown service
        except (configparser.Error, ValueError):
            raise ValueError("postgres.dsn: the service file cannot be parsed; check its syntax") from None

    def _user_problems(self) -> Iterator[str]:
        if not (self._dsn.user or self._service.get("user") or self._environment.get("PGUSER")):
            try:
                getpass.getuser()
            except (KeyError, OSError):  # a container whose user has no name
                yield "postgres.dsn: names no user, and the process has none; write postgresql://USER@… or set PGUSER"

    def _host_problems(self) -> Iterator[str]:
        host_count, ports = len(self._dsn.hosts), self.option("port")
        named = None if host_count else self.option("host")
        if host_count and "port" not in self._dsn.query:  # then the driver ignores the port of a service file
            ports = Option(self._environment.get("PGPORT", ""), "PGPORT")
        try:
            host_count = host_count or len(parse_hosts(named.value if named else "")) or _DEFAULT_HOSTS
        except ValueError as problem:
            yield f"{named.where if named else ''}: {problem}"
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
        """Load every TLS file as the driver does, and yield the errors."""
        option, negotiation = self.option("sslmode") or Option("prefer", ""), self.option("sslnegotiation")
        mode = option.value.replace("_", "-")
        if mode not in _VERIFYING and negotiation and negotiation.value == "direct":
            yield f"{negotiation.where}: direct needs sslmode require, verify-ca or verify-full"
        if mode == "disable":
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if mode in _VERIFYING:
            for name in ("sslrootcert", "sslcrl"):
                if file := self._file(name):
                    yield from _load_problems(partial(context.load_verify_locations, file.value), file)
            if mode != "require" and not self._file("sslrootcert"):
                yield f"{option.where}: verification needs sslrootcert, the file with the CA of the server (PEM)"
        certificate, key = self._file("sslcert"), self._file("sslkey")
        password = self._dsn.query.get("sslpassword") or self._service.get("sslpassword") or ""
        if certificate:
            # Without a password OpenSSL would ask for that of an encrypted key on the terminal. As a function, as the
            # driver passes it, it is used only if the key is encrypted.
            load = partial(context.load_cert_chain, certificate.value, key and key.value, lambda: password)
            yield from _load_problems(load, certificate)

    def _file(self, name: str) -> Option | None:
        """Return the TLS file that an option names, else the default one in `~/.postgresql` if it exists."""
        named = self.option(name)
        if named and named.value:
            return named
        default = self._home and self._home / ".postgresql" / _DEFAULT_FILES[name]
        return Option(str(default), f"~/.postgresql/{_DEFAULT_FILES[name]}") if default and default.exists() else None

    def _password_file(self) -> Iterator[Option]:
        named = self.option("passfile")
        file = Path(named.value) if named else self._home and self._home / ".pgpass"
        if not file or not file.is_file():
            return
        try:
            with file.open("rb") as opened:
                text = opened.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError:  # the driver ignores it, too
            return
        for line in text.splitlines():
            password = _FIELD_END.split(line.strip(), maxsplit=4)[-1]
            # As written, and unescaped as the driver sends it.
            for value in {password, password.replace(r"\:", ":").replace("\\\\", "\\")}:
                if value and not line.startswith("#"):
                    yield Option(value, named.where if named else "~/.pgpass")


def _load_problems(load: Callable[[], None], file: Option) -> Iterator[str]:
    try:
        load()
    except OSError as error:
        yield f"{file.where}: cannot be used: {error}"
