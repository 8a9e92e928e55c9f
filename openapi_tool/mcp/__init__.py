"""The MCP door: tools and calls of a gateway over MCP, by standard streams (`stdio.py`) or HTTP (`http/mcp.py`)."""
