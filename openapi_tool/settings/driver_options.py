"""Options of the PostgreSQL connection that the driver, asyncpg, reads by itself, and a check of them at the start.

Like libpq, asyncpg takes options not only from the connection string, but also from

- a *service file*, by default `~/.pg_service.conf`: named groups of options, of which the connection string may name
  one (`?service=mine` is the section `[mine]`);
- variables such as `PGHOST` and `PGSSLMODE`;
- a password file (`~/.pgpass`), and certificates in `~/.postgresql`.

It reports a mistake there only when it connects, as an outage, which is retried without end, or as a defect. So they
are checked when the program starts. The passwords among them must be known, too, so that logs can be masked.
"""

from __future__ import annotations

import configparser
import getpass
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from openapi_tool.dsn import Dsn, parse_hosts
from openapi_tool.files import MAX_CERTIFICATES_BYTES, MAX_SECRET_BYTES, check_regular_file, read_regular_file
from openapi_tool.urls import checked_port

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
"""Values that the driver accepts for an option."""

_DEFAULT_FILES: Mapping[str, str] = {
    "sslrootcert": "root.crt",
    "sslcrl": "root.crl",
    "sslcert": "postgresql.crt",
    "sslkey": "postgresql.key",
}
"""Files in `~/.postgresql` that are used if they exist and the option names no other."""

_DEFAULT_HOSTS = 5  # tried by the driver if none is named: four directories of Unix sockets, and localhost

# A colon without a backslash, which separates the fields of a line in a password file: `host:port:database:user:pass`.
_FIELD_END = re.compile(r"(?<!\\):")
_SEPARATORS = 4  # in such a line


class Option(NamedTuple):
    """Value of an option, and the setting, variable or file that it comes from, for messages."""

    value: str
    where: str


class DriverOptions:
    """Effective options of a connection string: from its query, else its service file, else the environment.

    `home` is the user's home folder, None without one. Raises ValueError for a service file that cannot be parsed.
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
        if variable in self._environment:
            return Option(self._environment[variable], variable)
        return None

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

        It chooses a line of the password file by server and user; yield those of all lines.
        """
        for name in ("password", "sslpassword"):
            if self._service.get(name):
                yield Option(self._service[name], "postgres.dsn")
        if password := self._environment.get("PGPASSWORD"):
            yield Option(password, "PGPASSWORD")
        elif not self._dsn.password:  # else the driver does not read the file
            yield from self._password_file()

    def _read_service(self) -> Mapping[str, str]:
        """Return the options of the service that the connection string names; none if it names no service."""
        name = self._dsn.query.get("service")
        file = self._service_file()
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

    def _service_file(self) -> Path | None:
        named = self._environment.get("PGSERVICEFILE")
        if named is not None:
            return Path(named)
        return self._home and self._home / ".pg_service.conf"

    def _user_problems(self) -> Iterator[str]:
        if self._dsn.user or self._service.get("user") or self._environment.get("PGUSER"):
            return
        try:
            getpass.getuser()  # the driver's default
        except (KeyError, OSError):  # a container whose user has no name
            yield "postgres.dsn: names no user, and the process has none; write postgresql://USER@… or set PGUSER"

    def _host_problems(self) -> Iterator[str]:
        """Yield what is wrong with hosts from elsewhere than the connection string, and with the number of ports."""
        host_count = len(self._dsn.hosts)
        if not host_count:
            hosts = self.option("host")
            if hosts is None:
                host_count = _DEFAULT_HOSTS
            else:
                try:
                    host_count = len(parse_hosts(hosts.value)) or _DEFAULT_HOSTS
                except ValueError as problem:
                    yield f"{hosts.where}: {problem}"
        ports = self._ports()
        if ports is None or not ports.value:
            return
        try:
            numbers = [checked_port(port) for port in ports.value.split(",")]
        except ValueError as problem:
            yield f"{ports.where}: {problem}"
            return
        if len(numbers) not in (1, host_count):
            yield f"{ports.where}: must have one port, or one for each of {host_count} hosts"

    def _ports(self) -> Option | None:
        """Return the ports. If the connection string names hosts, the driver ignores those of a service file."""
        if self._dsn.hosts and "port" not in self._dsn.query:
            return Option(self._environment.get("PGPORT", ""), "PGPORT")
        return self.option("port")

    def _tls_problems(self) -> Iterator[str]:
        sslmode = self.option("sslmode") or Option("prefer", "")
        mode = sslmode.value.replace("_", "-")
        negotiation = self.option("sslnegotiation")
        if mode not in _VERIFYING and negotiation and negotiation.value == "direct":
            yield f"{negotiation.where}: direct needs sslmode require, verify-ca or verify-full"
        if mode == "disable":
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if mode in _VERIFYING:
            for name in ("sslrootcert", "sslcrl"):
                file = self._tls_file(name)
                if file:
                    yield from _load_problems(partial(context.load_verify_locations, file.value), [file])
            if mode != "require" and not self._tls_file("sslrootcert"):
                yield f"{sslmode.where}: verification needs sslrootcert, the file with the CA of the server (PEM)"
        yield from self._client_certificate_problems(context)

    def _client_certificate_problems(self, context: ssl.SSLContext) -> Iterator[str]:
        certificate = self._tls_file("sslcert")
        if certificate is None:
            return
        key = self._tls_file("sslkey")
        password = self._dsn.query.get("sslpassword") or self._service.get("sslpassword") or ""

        def load() -> None:
            # For an encrypted key OpenSSL calls this function; without one it would ask on the terminal.
            context.load_cert_chain(certificate.value, key.value if key else None, lambda: password)

        yield from _load_problems(load, [certificate, key] if key else [certificate])

    def _tls_file(self, name: str) -> Option | None:
        """Return the file that an option names, else the default one if it exists."""
        named = self.option(name)
        if named and named.value:
            return named
        if self._home is None:
            return None
        default = self._home / ".postgresql" / _DEFAULT_FILES[name]
        try:
            exists = default.exists()
        except OSError:  # in a folder that is closed to this user
            return None
        return Option(str(default), f"~/.postgresql/{_DEFAULT_FILES[name]}") if exists else None

    def _password_file(self) -> Iterator[Option]:
        """Yield the passwords in the password file, each as it is written there, and as the driver sends it."""
        named = self.option("passfile")
        if named:
            file, where = Path(named.value), named.where
        elif self._home:
            file, where = self._home / ".pgpass", "~/.pgpass"
        else:
            return
        try:
            text = read_regular_file(file, MAX_SECRET_BYTES).decode("utf-8", "replace")
        except OSError:  # the driver ignores it, too
            return
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            written = _FIELD_END.split(line.strip(), maxsplit=_SEPARATORS)[-1]
            unescaped = written.replace(r"\:", ":").replace("\\\\", "\\")
            for password in {written, unescaped}:
                if password:
                    yield Option(password, where)


def _load_problems(load: Callable[[], None], files: Sequence[Option]) -> Iterator[str]:
    """Yield why `load` cannot load these files, if so; its own error does not say which, so the first one is named."""
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
