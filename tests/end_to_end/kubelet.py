"""Minimal kubelet that runs a rendered container: environment, files, user, probes and termination.

Without containers: volumes are folders, and paths below their mounts are rewritten in environment and arguments. As
root the process gets the container's user and a read-only file system; otherwise user and file system of the test.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from openapi_tool.local.servers import ServerProcess, free_port
from openapi_tool.local.stack import EmbeddedStack

USER = 10_001
"""User id of the image."""
ROOT = "/etc/openapi-tool"
STATE = "/var/lib/openapi-tool"
_SCRIPT = Path(sys.executable).parent / "openapi-tool"
_ENTRY_POINT = (
    [sys.executable, "-m", "openapi_tool"] if _SCRIPT.read_bytes().startswith(b"#!/bin/sh") else [str(_SCRIPT)]
)
"""The installed script, or the module: in a folder with a space in its path pip writes a shell script instead, which
another user may not be able to run."""

_PROBE_S = 5.0
_POLL_S = 0.02
_COMMAND_S = 30.0
_ISOLATED = """
mount --make-rprivate /
while read -r _ mount _; do mount -o remount,bind,ro "$mount" || true; done < /proc/self/mounts
! touch "$1/writable" 2> /dev/null || exit 99
user=$2 writable=$3; shift 3
if [ "$writable" ]; then mount -t tmpfs -o "mode=2777,gid=$user" tmpfs "$writable"; fi
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all "$@"
"""

Objects = Mapping[str, Mapping[str, str]]
"""Secrets or ConfigMaps: name to their data."""


class Pod:
    """Pod of a rendered Deployment or Job, with its own ports instead of its own network."""

    def __init__(
        self, stack: EmbeddedStack, name: str, template: Mapping[str, Any], secrets: Objects, config_maps: Objects
    ) -> None:
        self.spec: dict[str, Any] = template["spec"]
        (self.container,) = self.spec["containers"]
        self.port = free_port()
        self.client_port = free_port()
        self._objects = {"secret": secrets, "configMap": config_maps}
        self._user = self.spec["securityContext"]["runAsUser"]
        self._folder = stack.folder / name
        assert self.container["securityContext"]["readOnlyRootFilesystem"]
        self._write_volumes()
        ports = {"OPENAPI_TOOL__HEALTH__PORT": str(self.port), "OPENAPI_TOOL__GATEWAY__PORT": str(self.client_port)}
        environment = {**self.environment(), "PATH": os.environ["PATH"], **ports}
        prefix = isolated(self._folder, self._user, self._writable)
        command = [*prefix, *_ENTRY_POINT, *map(self._relocated, self.container["args"])]
        self.process = ServerProcess(name, command, stack.guard, stack.folder / f"{name}.log", environment=environment)

    def environment(self) -> dict[str, str]:
        """Return the variables, with values of Secrets, and with the paths of this pod's files."""
        return {
            entry["name"]: self._relocated(entry.get("value") or self._secret(entry)) for entry in self.container["env"]
        }

    def _relocated(self, text: str) -> str:
        """Return `text` with paths below the mounts replaced by this pod's folder."""
        return text.replace(ROOT, str(self._folder)).replace(STATE, str(self._folder / "state"))

    def _secret(self, entry: Mapping[str, Any]) -> str:
        reference = entry["valueFrom"]["secretKeyRef"]
        return self._objects["secret"][reference["name"]][reference["key"]]

    def _write_volumes(self) -> None:
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        self._writable: Path | None = None
        for mount in self.container["volumeMounts"]:
            folder = Path(self._relocated(mount["mountPath"]))
            if "subPath" in mount:
                folder = folder.parent
            folder.mkdir(parents=True, exist_ok="subPath" in mount)
            if "emptyDir" in volumes[mount["name"]]:
                if _can_isolate():
                    folder.chmod(0o777)  # as the kubelet does; elsewhere it is no mount point, so it must be private
                self._writable = folder
                continue
            assert mount["readOnly"]
            for path, text, mode in self._files(volumes[mount["name"]]):
                if path != mount.get("subPath", path):
                    continue
                (folder / path).write_text(text, encoding="utf-8")
                (folder / path).chmod(mode)
                if _is_root():
                    os.chown(folder / path, 0, self.spec["securityContext"]["fsGroup"])

    def _files(self, volume: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
        if "configMap" in volume:
            for path, text in self._objects["configMap"][volume["configMap"]["name"]].items():
                yield path, text, 0o644
        else:
            for item in volume["secret"]["items"]:
                data = self._objects["secret"][volume["secret"]["secretName"]]
                yield item["path"], data[item["key"]], volume["secret"]["defaultMode"]

    def start(self) -> tuple[float, float]:
        """Start it and wait as the kubelet does: startup first, then readiness.

        Returns CPU seconds, and seconds until ready, which depend on other load of the machine.
        """
        began, limit_s = time.monotonic(), self._patience_s("startup")
        self.process.start(lambda: True)
        for name in ("startup", "readiness"):
            while not self.probe(name):
                assert self.process.alive, self.process.log_tail()
                assert time.monotonic() - began < limit_s, self.process.log_tail()
                time.sleep(_POLL_S)
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system), time.monotonic() - began

    def run(self) -> tuple[int, str]:
        """Run a command to its end. Returns exit code and output."""
        self.process.start(lambda: True)
        return self.process.wait(_COMMAND_S), self.process.log.read_text(errors="replace")

    def _patience_s(self, name: str) -> float:
        probe = self.container[f"{name}Probe"]
        return float(probe["periodSeconds"] * probe["failureThreshold"])

    def probe(self, name: str) -> bool:
        """Run a probe once."""
        action = self.container[f"{name}Probe"]["httpGet"]
        assert action["port"] in {port["name"] for port in self.container["ports"]}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}{action['path']}", timeout=_PROBE_S) as response:
                return bool(200 <= response.status < 400)
        except (urllib.error.URLError, OSError):
            return False

    def delete(self) -> tuple[int, float]:
        """Run preStop, send SIGTERM, wait for the grace period, then kill. Returns exit code and seconds."""
        began = time.monotonic()
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook:
            subprocess.run(hook, check=True, timeout=self.spec["terminationGracePeriodSeconds"])  # noqa: S603 - ours
            assert self.probe("readiness")
        self.process.signal(signal.SIGTERM)
        code = self.process.wait(self.spec["terminationGracePeriodSeconds"] - (time.monotonic() - began))
        return code, time.monotonic() - began


def isolated(folder: Path, user: int, writable: Path | None = None) -> list[str]:
    """Return the prefix of a command that runs as `user` on a read-only file system; it fails if `folder` is writable.

    `writable` is a folder that it finds empty and may write to. Return an empty list where that is impossible: as
    another user than root, in a container without CAP_SYS_ADMIN, or with an interpreter in a folder that is closed to
    other users.
    """
    if not _can_isolate():
        return []
    return ["unshare", "--mount", "--", "sh", "-c", _ISOLATED, "sh", str(folder), str(user), str(writable or "")]


@cache
def _can_isolate() -> bool:
    if not _is_root() or not shutil.which("setpriv") or not shutil.which("unshare"):
        return False
    user = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups"]
    tried = ["/usr/bin/env", "unshare", "--mount", "--", *user, sys.executable, "-c", ""]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0  # noqa: S603 - our own interpreter


def _is_root() -> bool:
    return os.geteuid() == 0
