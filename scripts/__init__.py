"""What the maintainers run."""
