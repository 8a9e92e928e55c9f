"""Settings sections that several packages take; the others are in an `options` module of their package."""
