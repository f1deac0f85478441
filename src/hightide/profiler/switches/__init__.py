"""Switched off while a model trains: caches, packing, its own checkpointing."""
