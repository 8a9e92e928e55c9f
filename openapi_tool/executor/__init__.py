"""One call, from command to settlement."""
