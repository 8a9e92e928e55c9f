"""Runs Jina search and reader tool calls of MCP clients and CommonGround agent kernels."""

__version__ = "0.1.0"
