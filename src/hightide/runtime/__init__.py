"""Executes a schedule: lanes, residency, chunks, and the autograd function that runs a block."""
