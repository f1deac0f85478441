"""From forward to backward: inputs of blocks and what they hold wait on the GPU, the host or the disk."""
