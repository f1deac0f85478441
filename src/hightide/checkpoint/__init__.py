"""Checkpoints: a model and its optimizer saved beside training, and loaded under any plan."""
