"""Configuration of nats-server that gives each operator's login an account of its own, apart from the streams.

An *account* of NATS is a set of users with subjects and streams of their own. What one account exports, another one can
import.

In one account, permissions do not limit an operator enough: NATS does not check the reply subject of a request. If the
operator names the subject of another request there, such as one that deletes a stream, the server's answer to the
permitted request is taken for that request. Between accounts the server replaces reply subjects, so that the operator
can name only subjects of the own account.

The main account exports the subjects that an operator may use, and the operator's account imports them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from openapi_tool.kernel.jetstream.permissions import Permissions
from openapi_tool.nats_client.client import routed
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.replica_statistics import STATS_REPLIES

MAIN_ACCOUNT = "KERNEL"
OPERATOR_DOMAIN = "openapi_tool"
"""JetStream domain that operators set (`nats.jetstream_domain`), so that their requests reach the main account.

Requests without a domain (`$JS.API.…`) would reach the JetStream of the operator's own account. Those with it
(`$JS.openapi_tool.API.…`) are imported."""

OTHER_USERS = "# the kernel's own users"  # line of the configuration at which an operator adds them


class _SharedSubject(NamedTuple):
    """Subject that the main account exports and an operator's account imports.

    `kind` is `service` for subjects on which the operator publishes, `stream` for one to which it subscribes.
    """

    kind: Literal["service", "stream"]
    subject: str


def account_name(user: NatsUser) -> str:
    """Return the name of a user's own account."""
    return f"OPENAPI_TOOL_{user.upper()}"


def accounts_config(
    executor: Permissions | None, operators: Mapping[NatsUser, Permissions], inboxes: Mapping[NatsUser, str]
) -> str:
    """Return the accounts for the server's configuration: the main one, and one of its own for each operator.

    `executor` and `operators` are permissions without a domain, `inboxes` the prefixes of reply subjects. The
    configuration takes passwords from variables of the server's environment.
    """
    main = [f"  {MAIN_ACCOUNT} {{", "    jetstream: enabled", "    users: [", f"      {OTHER_USERS}"]
    if executor is not None:
        main += _user(NatsUser.EXECUTOR, executor.over(None, inboxes[NatsUser.EXECUTOR]))
    main += ["    ]", "    exports: [", *_exports(operators), "    ]", "  }"]
    own: list[str] = []
    for user, permissions in operators.items():
        own += [
            f"  {account_name(user)} {{",
            "    users: [",
            *_user(user, permissions.over(OPERATOR_DOMAIN, inboxes[user])),
            "    ]",
            "    imports: [",
            *_imports(permissions),
            "    ]",
            "  }",
        ]
    return "\n".join(["accounts {", *main, *own, "}"])


def _user(user: NatsUser, permissions: Permissions) -> list[str]:
    """Return the lines of a user with its permissions."""
    block = permissions.server_config().splitlines()
    password = f"$OPENAPI_TOOL_{user.upper()}_PASSWORD"
    return [f"      {{ user: {user}, password: {password}", *(f"        {line}" for line in block), "      }"]


def _exports(operators: Mapping[NatsUser, Permissions]) -> list[str]:
    """Return what the main account exports: one line per subject, with the accounts that may import it."""
    importers: dict[_SharedSubject, list[str]] = {}
    for user, permissions in operators.items():
        for shared in _shared_subjects(permissions):
            importers.setdefault(shared, []).append(account_name(user))
    return [
        f"      {{ {shared.kind}: {json.dumps(shared.subject)}, accounts: [{', '.join(accounts)}] }}"
        for shared, accounts in importers.items()
    ]


def _imports(permissions: Permissions) -> list[str]:
    """Return what an operator's account imports, each subject under the name that it has in the operator's domain."""
    lines = []
    for kind, subject in _shared_subjects(permissions):
        local = routed(subject, OPERATOR_DOMAIN)
        to = f", to: {json.dumps(local)}" if local != subject else ""
        lines.append(f"      {{ {kind}: {{ account: {MAIN_ACCOUNT}, subject: {json.dumps(subject)} }}{to} }}")
    return lines


def _shared_subjects(permissions: Permissions) -> list[_SharedSubject]:
    """Return what an operator's account imports.

    These are the subjects that the operator publishes to, and that of the replicas' answers, if it gathers statistics.
    """
    shared = [_SharedSubject("service", subject) for subject in permissions.publish]
    if STATS_REPLIES in permissions.subscribe:
        shared.append(_SharedSubject("stream", STATS_REPLIES))
    return shared
