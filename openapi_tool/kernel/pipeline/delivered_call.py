"""A call of the kernel from the load of its rows to its settlement, with what the pipeline's steps need of it."""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.engine.call import Call
from openapi_tool.kernel.pipeline.ports import CallSlot
from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.records import CallRecords
from openapi_tool.protocol.report import Acceptance
from openapi_tool.telemetry.calls import CallFacts


@dataclass(slots=True, eq=False)
class DeliveredCall:
    """Call whose turn (the run of the agent that waits for it) accepts a result.

    - `delivery`, `command`: what NATS delivered, and what it says.
    - `records`: the call's rows in the kernel's database when they were loaded.
    - `acceptance`: what the report of its result (inbox row and edge) needs.
    - `call`: the same call as the engine knows it.
    - `slot`: the slot in which it runs here.
    - `facts`: what telemetry shows; each step adds its part.
    - `may_be_parked`: whether an earlier run may have parked a result, so that it is worth looking for one.
    """

    delivery: Delivery
    command: Command
    records: CallRecords
    acceptance: Acceptance
    call: Call
    slot: CallSlot
    facts: CallFacts
    may_be_parked: bool
