"""Random numbers inside blocks that do not depend on the plan.

[Note: dropout and plans] With one micro-batch a block draws from the global generator, in the order in which plain
PyTorch would, and a recomputation replays the state that its forward saw. With several micro-batches that order does
not exist in plain PyTorch; each (pass, block, call, micro-batch) then gets a seed of its own, so that neither the
order of execution nor recomputation matters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")


def generators(device: torch.device) -> list[torch.Generator]:
    """The global generators that code on this device draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def pass_seed(pass_index: int) -> bytes:
    """A seed for one pass, derived from the global generator's state without drawing from it."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return hashlib.blake2b(state, digest_size=16, salt=pass_index.to_bytes(8, "little")).digest()


class Draws:
    """The random numbers of one call of one block: the same in forward and in recomputation."""

    def __init__(
        self, seed: bytes, block: int, nth_call: int, num_micro_batches: int, device: torch.device = CPU
    ) -> None:
        self._generators = generators(device)
        self._seeds = [_derive(seed, block, nth_call, index) for index in range(num_micro_batches)]
        self._states: list[Tensor] | None = None

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        if len(self._seeds) == 1:
            self._states = [generator.get_state() for generator in self._generators]
            yield
        else:
            with self._restored():
                self._seed(micro_batch)
                yield

    @contextmanager
    def replay(self, micro_batch: int) -> Iterator[None]:
        with self._restored():
            if len(self._seeds) == 1:
                assert self._states is not None, "replayed before forward"
                self._set(self._states)
            else:
                self._seed(micro_batch)
            yield

    def _seed(self, micro_batch: int) -> None:
        for generator in self._generators:
            generator.manual_seed(self._seeds[micro_batch])

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            self._set(states)


def _derive(seed: bytes, block: int, nth_call: int, micro_batch: int) -> int:
    text = f"{block}.{nth_call}.{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, key=seed, digest_size=8).digest(), "little") >> 1
