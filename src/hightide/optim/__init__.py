"""Update rules on chunks, their states, timing and clipping; kernels in C."""
