"""`python -m openapi_tool`."""

from openapi_tool.entry import main

main()
