"""Name of this process among the replicas, for log lines and `openapi-tool inspect`."""

from __future__ import annotations

import os
import socket

INSTANCE = f"{socket.gethostname()}-{os.getpid()}"  # such as `executor-7f9c-1`
