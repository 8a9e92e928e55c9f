"""The kernel door: `jetstream` receives commands, `pipeline` has calls run and answers them, `postgres` holds rows."""
