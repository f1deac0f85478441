"""Random numbers inside blocks that do not depend on the plan.

[Note: dropout and plans] With one micro-batch a block draws from the global generator, in the order in which plain
PyTorch would, and a recomputation replays the state that its forward saw, if it drew anything. With several
micro-batches that order does not exist in plain PyTorch; each (pass, block, call, micro-batch) then gets a seed of its
own, so that neither the order of execution nor recomputation matters.

[Note: dropout in a checkpoint] A checkpoint that the user's code has put around blocks calls them again in backward,
and what the first of them computes is input of the next: it must draw as it did. With one micro-batch the checkpoint
sees to that, by the global generator. With several, a call during a backward is taken for the block's only one of the
pass. If there were more, or more passes whose backward is to come, which of them it repeats is not known; and where the
checkpoint is reentrant, the call that it repeats ran the whole batch at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from hightide.ir.refusal import Refused

REPEATS = (
    "the block {name!r} draws random numbers and is called again in backward, by a checkpoint of your own that is "
    "reentrant, or with several forwards or calls of the block before it: it would draw others than before. hightide "
    "recomputes blocks by itself: leave the checkpoint out, or give micro_batch= the whole batch"
)
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
        self,
        seed: bytes,
        block: int,
        nth_call: int,
        num_micro_batches: int,
        device: torch.device = CPU,
        of_which: str = "",
    ) -> None:
        """`of_which`: the name of a block that repeats a call, but which is not known: it must not draw."""
        self._generators = generators(device)
        self._is_single = num_micro_batches == 1
        self._of = seed, block, nth_call
        self._of_which = of_which
        self._states: list[Tensor] = []  # before the forward of the only micro-batch, if it has drawn any numbers

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        if self._is_single:
            before = self._now()
            yield
            drew = not all(map(torch.equal, before, self._now()))
            self._states = before if drew else []
        else:
            with self._restored():
                self._seed(micro_batch)
                before = self._now() if self._of_which else []
                yield
                if self._of_which and not all(map(torch.equal, before, self._now())):
                    raise Refused(REPEATS.format(name=self._of_which))

    def replay(self, micro_batch: int) -> AbstractContextManager[None]:
        """What has drawn no numbers will draw none: most blocks have no dropout."""
        return nullcontext() if self._is_single and not self._states else self._replayed(micro_batch)

    @contextmanager
    def _replayed(self, micro_batch: int) -> Iterator[None]:
        with self._restored():
            if self._is_single:
                self._set(self._states)
            else:
                self._seed(micro_batch)
            yield

    def _seed(self, micro_batch: int) -> None:
        seed = _derive(*self._of, micro_batch)
        for generator in self._generators:
            generator.manual_seed(seed)

    def _now(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        states = self._now()
        try:
            yield
        finally:
            self._set(states)


def _derive(seed: bytes, block: int, nth_call: int, micro_batch: int) -> int:
    text = f"{block}.{nth_call}.{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, key=seed, digest_size=8).digest(), "little") >> 1
