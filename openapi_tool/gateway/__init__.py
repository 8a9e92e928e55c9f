"""Tool calls without a kernel: tools, callers, stored texts and usage of the doors that agents call directly.

Two packages are doors: `mcp` and `http`. They find out who calls, pass the call to `calls.Gateway`, and send the answer
to the client. The processes of a gateway share a *state* (`state.py`): limits, budgets, tokens, stored texts and a row
for each finished call. The state is a file (`file_state.py`), or in NATS (`nats_state.py`).
"""
