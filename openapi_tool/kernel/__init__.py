"""The kernel door, by which calls arrive from the kernel's bus.

`jetstream` receives commands. `pipeline` has their calls run by the engine, and answers them. `postgres` reads and
writes the rows of a call in the kernel's database.
"""
