"""Facts about the machine and the model, found by measuring and probing. No decisions."""
