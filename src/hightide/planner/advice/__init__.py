"""Explanations, refusals, changes that would help, corrections by the first steps."""
