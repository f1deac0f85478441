"""The first call of a block in some way, at real size, and what is learned from it.

[Note: replays] A recomputation runs a block's forward once more. What that does to the world, beside its result, must
not happen twice, and must be done from where the first forward began: a counter counts once, a power iteration does not
go a step further, a generator of the block's own draws the same numbers. So the first call of each block in each way
looks whether a forward changes what the block keeps (its buffers and attributes, Python's and numpy's generators:
profiler/trial/state.py). If not, nothing is done about it any more. If so, the block runs unsplit and eagerly; what it
keeps is remembered before each forward, put back for its replay, and afterwards is what it was before that.

[Note: split against whole] Samples were tried for independence a few at a time (see [Note: trying a block alone]).
Some things happen only to many: an expert that is full drops tokens. So a call that is split is also run whole, once
for each block and then for a few more shapes of one block, without graph and without randomness, where the memory for
it lies below the forecast's peak; else two micro-batches are run together. What differs runs unsplit from then on.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hightide.process.interrupts import in_a_line
from hightide.profiler.model.call_tree import narrow
from hightide.profiler.model.hooks import HookWatch, num_hooks, users_hooks_aside
from hightide.profiler.probe.compare_runs import HOOKED
from hightide.profiler.trial.quiet import Quiet
from hightide.profiler.trial.state import GlobalRandom, ModuleState, contents, same_contents
from hightide.runtime.blocks.micro_batches import dims_of
from hightide.runtime.guards.later_changes import BlockChanges, CodeChanges, Epochs

if TYPE_CHECKING:
    from hightide.runtime.blocks.block_function import BlockCall
    from hightide.runtime.blocks.block_runner import BlockRunner
    from hightide.runtime.run import Run

# Of the size of a tensor, by Euclid. A router that decides anew for one token in a thousand stays below, in 16 bits.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
MAX_SHAPES = 16  # of one block as it is; a loop whose batches all have other lengths does not pay for ever
CHANGES = "a forward changes what it keeps ({}), which must happen once for the whole batch"
FAILS = "it fails on a part of the batch ({}): it may keep a tensor that has all samples"
DIFFERS = "split at its real size, its output {} is another than that of the whole batch"


class BlockState(NamedTuple):
    """Of a block, in its first looks: a look in one says nothing about another."""

    num_hooks: int
    epoch: int = 0
    code: int = 0


_Key = tuple[int, str, BlockState]  # a block, the signature of its call


class FirstLooks:
    """Of one run. `enabled` False: nothing is looked at, as for blocks that are rehearsed."""

    def __init__(self, run: Run, enabled: bool) -> None:
        self._run = run
        self._enabled = enabled
        self._keeps: dict[_Key, bool] = {}
        self._keeping: set[int] = set(run.probed.keeps)  # blocks
        self._compared: set[tuple[Any, ...]] = set()
        self._num_shapes: Counter[tuple[int, BlockState]] = Counter()
        self._blocks: dict[int, BlockChanges] = {}
        self._code = Epochs()
        self._code_then: CodeChanges | None = None  # None: it is to be gathered
        self._num_taken = 0

    def begin_pass(self) -> None:
        """See [Note: what changes later]."""
        if not self._enabled:
            return
        num_taken = sum(block.num_taken for block in self._blocks.values())
        if self._code_then is None or num_taken != self._num_taken or not self._code_then.are_same():
            runners, modules = self._run.runners, self._run.model.modules()
            inside = {id(one): one for module in modules if id(module) in runners for one in module.modules()}
            self._code_then, self._num_taken = CodeChanges(inside.values()), num_taken
            self._code.change_to(self._code_then.key())

    def forget(self) -> None:
        """At the end: what blocks keep may have graphs of calls, which keep the run."""
        self._blocks.clear()
        self._code_then, self._enabled = None, False

    def changes(self, runner: BlockRunner, module: nn.Module) -> BlockChanges | None:
        """None: nobody looks."""
        if self._enabled and runner.index not in self._blocks:
            tapped = [(tap.module, tap.attribute) for tap in runner.taps if tap.attribute]
            self._blocks[runner.index] = BlockChanges(module, tapped)
        return self._blocks.get(runner.index)

    def state(self, runner: BlockRunner, changes: BlockChanges | None) -> BlockState:
        """Of a block that keeps something, only who else sees it: it is looked at each time."""
        hooks = num_hooks(runner.inside)
        if changes is None or runner.index in self._keeping:
            return BlockState(hooks)
        return BlockState(hooks, changes.epoch(hooks), self._code.now)

    def look(self, call: BlockCall) -> Look | None:
        """None: the forward is known to change nothing of the block's."""
        key = call.runner.index, call.signature, call.state
        if not self._enabled or (self._keeps.get(key) is False and key[0] not in self._keeping):
            return None
        return Look(self, key, call)

    def learn(self, key: _Key, changes: bool) -> None:
        """What has changed something once counts as changing it."""
        self._keeps[key] = changes or self._keeps.get(key, False)
        if changes:
            self._keeping.add(key[0])

    def keeps(self, block: int) -> bool:
        return block in self._keeping

    def difference(self, call: BlockCall, tensors: Sequence[Tensor]) -> str:
        """Why a call that would be split must not be; "": it may, or was compared before. See [Note: split against
        whole]."""
        block = call.runner.index
        key = block, call.signature, tuple(tensor.shape for tensor in tensors), call.frame.numbers, call.state
        if not self._enabled or key in self._compared or self._num_shapes[block, call.state] >= MAX_SHAPES:
            return ""
        self._compared.add(key)
        self._num_shapes[block, call.state] += 1
        together = self._most_together(call)
        if together < 2:
            return ""
        try:
            with self._aside(call):
                return _compared(call, tensors, together)
        except torch.OutOfMemoryError:  # the forecast of a block's forward is an estimate
            pass
        self._clear_away()
        return ""

    def leaves_the_same(self, call: BlockCall, tensors: Sequence[Tensor], before: ModuleState) -> bool:
        """Whether a block that was split has left what one forward of the whole batch leaves, and a second one too: a
        length that it remembers, a flag that something was said."""
        if len(call.bounds) < 2 or call.runner.index in self._keeping or self._most_together(call) < len(call.bounds):
            return False
        num_samples = sum(size for _, size in call.bounds)
        unmetered, same = self._run.gpu.unmetered, True
        try:
            with self._aside(call):
                with unmetered():
                    left = contents(call.module)
                    before.restore()
                for _ in range(2):
                    call.tried(call.sliced(tensors, 0, num_samples))
                    with unmetered():
                        same = same and same_contents(left, contents(call.module))
            return same
        except torch.OutOfMemoryError:
            pass
        self._clear_away()
        return False

    @contextmanager
    def _aside(self, call: BlockCall) -> Iterator[None]:
        """Inside, a block runs beside the run that counts: nobody draws, hears of it or measures it, nor does a mode of
        the user's (a checkpoint that keeps some results) see it. What it takes of the GPU counts."""
        gpu, random = self._run.gpu, GlobalRandom(self._run.gpu.device)
        try:
            with (
                gpu.unmetered(),
                _disable_current_modes(),
                gpu.meter("activations"),
                torch.no_grad(),
                users_hooks_aside(call.module),
                call.autocast.restored(),
            ):
                yield
        finally:
            random.restore()
            self._begin_again()

    def _clear_away(self) -> None:
        """What a try has left that ran out of memory: its frames hold tensors, and the block would seem to give them
        back."""
        gc.collect()
        self._begin_again()

    def _begin_again(self) -> None:
        if self._run.observer is not None:
            self._run.observer.begin_again()

    def _most_together(self, call: BlockCall) -> int:
        """Micro-batches for which there is room: all, two or none."""
        if call.call is None:
            return 0
        spec, bounds = self._run.profile.calls[call.call], call.bounds
        used_bytes = self._run.gpu.device_used_bytes - self._run.gpu.outside_bytes
        free_bytes = min(self._run.forecast.gpu_peak_bytes, self._run.plan.gpu_limit_bytes) - used_bytes
        for count in (len(bounds), 2):
            whole, part = sum(size for _, size in bounds[:count]), bounds[0][1]
            result_bytes = spec.outputs.at(whole) + spec.tapped.at(whole)
            part_bytes = max(spec.forward_peak.at(part) + spec.outputs.at(part), 4 * spec.outputs.at(part))
            if result_bytes + max(spec.forward_peak.at(whole), part_bytes) <= free_bytes:
                return count
        return 0


class Look:
    """One forward of a block of which it is not known that it keeps nothing."""

    def __init__(self, looks: FirstLooks, key: _Key, call: BlockCall) -> None:
        self._looks, self._key, self._call, self._gpu = looks, key, call, call.runner.run.gpu
        with self._gpu.unmetered():  # it is in the plan: see examined() in profiler/probe/probe.py
            self.before = ModuleState(call.module, shared_random=True, hooks=call.state.num_hooks > 0)
        self._hooks = HookWatch(call.module) if call.state.num_hooks else None
        if self._hooks is not None:
            self._hooks.open()

    def close(self) -> None:
        """After the forward, however it has ended."""
        if self._hooks is not None:
            self._hooks.close()

    def end(self, tensors: Sequence[Tensor]) -> str:
        """What the forward has changed, as a reason not to split it. "": nothing, or nothing that matters."""
        with self._gpu.unmetered():
            changes = sorted(self.before.changes())
        replaces = self._hooks is not None and self._hooks.replaces
        if changes and not replaces and self._looks.leaves_the_same(self._call, tensors, self.before):
            changes = []
        self._looks.learn(self._key, bool(changes or replaces))
        if changes:
            return CHANGES.format(", ".join(changes[:4]) + (" ..." if len(changes) > 4 else ""))
        return HOOKED if replaces else ""


def _compared(call: BlockCall, tensors: Sequence[Tensor], count: int) -> str:
    """Runs `count` micro-batches together and one by one."""
    bounds = call.bounds[:count]
    num_samples = sum(size for _, size in bounds)
    before = ModuleState(call.module, shared_random=True)

    def tried(start: int, size: int) -> list[Tensor]:
        try:
            return call.tried(call.sliced(tensors, start, size))
        finally:
            before.restore()

    with Quiet():
        whole = tried(0, num_samples)
        dims = dims_of(whole, call.output_dims, num_samples) or [None] * len(whole)
        for index, (output, dim) in enumerate(zip(whole, dims, strict=True)):
            if dim is not None and output.shape[dim.dim] != dim.rows * num_samples:
                return DIFFERS.format(index)
        errors: list[list[Tensor]] = [[] for _ in whole]  # per output and micro-batch: its size, and that of the error
        for start, size in bounds:
            try:
                parts = tried(start, size)
            except torch.OutOfMemoryError:  # a GPU's own: in our words it is said outside of this
                raise
            except Exception as failure:  # the whole batch has run
                return FAILS.format(in_a_line(failure))
            if len(parts) != len(whole):
                return DIFFERS.format(min(len(parts), len(whole)))
            for index, (expected, part, dim) in enumerate(zip(whole, parts, dims, strict=True)):
                expected = narrow(expected, dim, start, size)
                if expected.shape != part.shape:
                    return DIFFERS.format(index)
                error = expected ^ part if part.dtype == torch.bool else expected - part
                errors[index] += [_size(expected), _size(error)]
            del parts, expected, part, error
    for index, (tensor, found) in enumerate(zip(whole, errors, strict=True)):
        tolerance = TOLERANCE.get(tensor.dtype, TOLERANCE[torch.bfloat16])
        sizes = torch.stack(found).view(-1, 2).norm(dim=0)
        if not bool(sizes[1] <= tolerance * sizes[0]):
            return DIFFERS.format(index)
    return ""


def _size(values: Tensor) -> Tensor:
    """By Euclid. What is no number is none in both, as a rule: it does not count."""
    values = values.nan_to_num(0.0, 0.0, 0.0) if values.is_floating_point() else values.float()
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dtype=dtype).float()
