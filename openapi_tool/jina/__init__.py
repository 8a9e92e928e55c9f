"""Jina's search and reader APIs; the only package with access to the internet."""
