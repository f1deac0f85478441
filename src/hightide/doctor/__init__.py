"""This machine: measurements, their meaning, bad settings. Machine files."""
