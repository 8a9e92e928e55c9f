"""Settings sections that components take as their options, beside those in `bus`, `jina` and `quotas`."""
