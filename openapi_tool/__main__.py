"""`python -m openapi_tool`."""

from openapi_tool.cli import main

main()
