"""Name of this process among the replicas."""

from __future__ import annotations

import os
import socket

INSTANCE = f"{socket.gethostname()}-{os.getpid()}"
"""Name of this process among the replicas."""
