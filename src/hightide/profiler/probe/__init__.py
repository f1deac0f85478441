"""A model run without values, and written down: the calls of its blocks, how they divide, what leaves them."""
