"""What a call costs, beside the least that it could cost: see docs/performance.md."""
