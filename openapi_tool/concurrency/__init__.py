"""Helpers for asyncio; imports no other package of this project."""
