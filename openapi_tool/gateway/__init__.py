"""Tool calls without a kernel: tools, callers, stored texts and usage of the doors that agents call directly.

A *kernel* is the part of an agent platform that runs agents. Where there is none, agents call a gateway directly.

Two packages are doors: `mcp` and `http`. They find out who calls, pass the call to `calls.Gateway`, and send the answer
to the client. The processes of a gateway share a *state* (`state.py`): limits, budgets, tokens, stored texts and a row
for each finished call. The state is a file (`file_state.py`), or in NATS (`nats_state.py`).
"""
