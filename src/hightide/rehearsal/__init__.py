"""One block of each kind runs on the device before the model does: what it takes, in seconds and bytes."""
