"""Commands for maintainers."""
