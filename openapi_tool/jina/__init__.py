"""Jina's search and reader: the only room with a window to the internet."""
