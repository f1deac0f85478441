"""Bytes and operations, metered: of one call of a block, and of the model's own code between blocks."""
