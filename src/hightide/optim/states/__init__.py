"""States of the optimizer: where they lie in chunks, and as users and state dicts see them."""
