"""The engine: runs one tool call, whichever door it came through."""
