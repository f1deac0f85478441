"""What waits from forward to backward: inputs of blocks and what they hold, on the GPU, the host or the disk."""
