"""What `openapi-tool serve` runs: it builds the parts of the process, connects them, and ends them in order.

`process.py` is the entry. `process_parts.py` builds what needs no connection to the kernel, `kernel_parts.py` the rest.
"""
