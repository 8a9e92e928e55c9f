"""A standalone executor for Jina search and reader tool calls of CommonGround agent kernels."""

__version__ = "0.1.0"
