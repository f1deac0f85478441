"""Update rules on chunks and kernels in C; the optimizer that `wrap` returns."""
