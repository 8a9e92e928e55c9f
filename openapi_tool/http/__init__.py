"""HTTP door of a gateway: tools over plain HTTP, MCP over streamable HTTP, and open-webui's end points."""
