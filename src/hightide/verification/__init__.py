"""Does this model train in hightide as in plain PyTorch? `verify` trains copies of it in both ways and compares."""
