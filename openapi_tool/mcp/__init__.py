"""The MCP door: results and errors of a gateway as MCP's, over any transport."""
