"""One command of the kernel: load its rows, run its call in the engine, commit the result, publish the doorbell."""
