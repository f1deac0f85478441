"""Folders of plain files, there as a whole or not at all. See [Note: a checkpoint] in writer.py."""
