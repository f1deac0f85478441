"""Bytes of chunks, their state machine, slots, moving to another plan, and between ranks."""
