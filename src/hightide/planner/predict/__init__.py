"""Seconds, simulation, peaks of memory, bounds, the tide."""
