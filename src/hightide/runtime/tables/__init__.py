"""Embeddings whose table stays on the host: rows go to the GPU, their gradients are summed at home."""
