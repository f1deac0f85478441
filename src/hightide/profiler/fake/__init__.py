"""Other tensors in the place of a model's own: without values, or with them for a block at a time."""
