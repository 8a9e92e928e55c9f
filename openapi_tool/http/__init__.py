"""HTTP door of a gateway: tools over plain HTTP, MCP over streamable HTTP, and open-webui's end points.

A call of plain HTTP passes through:

1. `access.py`: check host, origin, token and size. `senders.py` finds the `Caller` by the token: project, agent, tools.
2. `tools.py`: the route. A repeated `Idempotency-Key` gets the result of the first such request (`idempotency.py`).
3. `calls.py`: `while_connected` runs the call and stops it if its client leaves. If all that was paid for has arrived,
   the call may end first, and its result is stored for an identical call.
4. `gateway/calls.py`: `Gateway.call` checks that the caller may use the tool, looks for such a stored result, waits for
   a slot, runs the call in the engine, stores the whole text of a truncated result, and records the call.
5. `tools.py` responds with the result, or `problems.py` with the error.

MCP enters at step 4: over HTTP by `mcp.py`, after step 1; over stdio by `cli/mcp.py`, whose command line names the
caller.
"""
