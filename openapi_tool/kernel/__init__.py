"""The kernel door: `jetstream` receives commands, `pipeline` runs a call, `postgres` holds the rows of the kernel."""
