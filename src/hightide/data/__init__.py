"""Batches on their way to the model: few shapes out of many lengths."""
