"""A block as one autograd function."""
