"""Embedded stack for demonstrations and tests."""
