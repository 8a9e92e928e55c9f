"""What one upstream request knows and holds while it runs, from its first attempt to its last."""

from __future__ import annotations

from openapi_tool.engine.call import Call
from openapi_tool.jina.byte_semaphore import ResponseMemory
from openapi_tool.protocol.attempts import MAX_ATTEMPTS, UpstreamAttempt


class RequestContext:
    """One upstream request of `call`, retries included.

    Of `memory`, which is the call's, it holds what the response of the current attempt takes. It also knows:

    - `body_bytes`: bytes of the body of that response so far;
    - `http_status`: its HTTP status, None until it arrives.
    """

    def __init__(self, call: Call, memory: ResponseMemory) -> None:
        self.call = call
        self._memory = memory
        self._held = 0
        self.body_bytes = 0
        self.http_status: int | None = None

    def record_attempt(self, attempt: UpstreamAttempt) -> None:
        """Record in the call that an attempt sends the request now."""
        self.http_status = None
        if len(self.call.attempts) < MAX_ATTEMPTS:
            self.call.attempts.append(attempt)

    def record_permit_wait(self, begin: float, end: float) -> None:
        """Record a wait for a permit in the call; begin and end are seconds of the monotonic clock."""
        if len(self.call.permit_waits) < MAX_ATTEMPTS:
            self.call.permit_waits.append((begin, end))

    async def hold(self, size: int) -> None:
        """Hold `size` bytes in place of those held before. If that is more, wait until they are free."""
        if size > self._held:
            await self._memory.take(size - self._held)
        elif size < self._held:
            self._memory.give(self._held - size)
        self._held = size

    def try_hold(self, size: int) -> bool:
        """Hold at least `size` bytes if that needs no wait; return whether it does."""
        if size > self._held and not self._memory.try_take(size - self._held):
            return False
        self._held = max(size, self._held)
        return True

    def add_body_bytes(self, size: int) -> None:
        """Count bytes of the body of this response."""
        self.body_bytes += size
        self._memory.body_bytes += size

    @property
    def call_body_bytes(self) -> int:
        """Bytes of the bodies of all responses of the call."""
        return self._memory.body_bytes

    def clear(self) -> None:
        """Release the memory and forget the body's bytes, before a retry."""
        self._memory.body_bytes -= self.body_bytes
        self.body_bytes = 0
        if self._held:
            self._memory.give(self._held)
            self._held = 0
