"""Composition root of `serve`: builds the parts of the process, runs and reloads them."""
