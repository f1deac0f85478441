"""Facts about a model, found by probing and trying it. No decisions."""
