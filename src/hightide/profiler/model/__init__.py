"""Blocks, their order, shapes, bytes and work."""
