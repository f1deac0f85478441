"""What an optimizer keeps of each parameter: where it lies in chunks, and as users and state dicts see it."""
