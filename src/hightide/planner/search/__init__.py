"""Candidates, the space of them, moves between them, trials."""
