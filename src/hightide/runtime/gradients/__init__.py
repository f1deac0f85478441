"""Sums, norms, and what `p.grad` is between steps."""
