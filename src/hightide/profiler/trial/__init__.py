"""One block of each kind, tried on values."""
