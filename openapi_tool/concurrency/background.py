"""Tasks that serve many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that serves many calls; in its caller's context it would log that call's ids for other projects."""
    return asyncio.create_task(work, name=name, context=Context())
