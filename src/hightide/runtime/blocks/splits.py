"""How each way of calling a block divides into micro-batches. One that was never probed is probed when it is met."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hightide.ir.refusal import Refused
from hightide.ir.split import Split
from hightide.profiler.model.call_tree import Arguments
from hightide.profiler.probe.probe import probe
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.runtime.blocks.batch import map_tensors

if TYPE_CHECKING:
    from hightide.runtime.run import Run

WRITES = (
    "the block {block!r}, which the example did not call, gives the parameter {name!r} other values in its forward (an "
    "embedding with max_norm, .data), which would be lost: its values are brought in for each use. Change it between "
    "steps with load_state_dict(), or compute what is used from it"
)


class Splits:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_probing = False  # meanwhile the model and its blocks are what they were before
        self.known: dict[tuple[int, str], Split] = {}  # by block and signature
        self._told: set[str] = set()

    def of(self, block: int, signature: str) -> Split:
        key, run = (block, signature), self._run
        if key not in self.known:
            split, batch = run.probed.split(block, signature), run.passes.batch
            if not split.inputs and batch is not None and not run.probed.failure:
                again = self._probed_again(batch)
                split = again.split(block, signature)
                if (reason := again.refusals.get(block)) is not None:
                    raise Refused(f"the block {run.profile.blocks[block].name!r} {reason}")
                written = again.written & {*run.profile.blocks[block].params}
                if written := written - run.chunks.binding.ignored_versions:
                    raise Refused(WRITES.format(block=run.profile.blocks[block].name, name=min(written)))
                if not again.failure:
                    run.probed = again.after(run.probed)
            if not split.inputs and batch is None:
                return split  # called without the whole model: there is no batch to probe with; ask again next time
            self.known[key] = split
            self._tell(block, split.note)
        return self.known[key]

    def never(self, block: int, signature: str, reason: str) -> Split:
        """From now on it runs the whole batch at once."""
        split = self.known[block, signature] = Split(signature, (), (), note=reason)
        self._tell(block, reason)
        return split

    def _tell(self, block: int, reason: str) -> None:
        """If it does, and nobody knew."""
        known = {call.note for call in self._run.profile.calls if call.block == block}
        if reason and reason not in known and reason not in self._told:
            self._told.add(reason)
            name = self._run.profile.blocks[block].name
            warnings.warn(f"block {name!r} runs the whole batch at once: {reason}", stacklevel=2)

    def _probed_again(self, batch: Arguments) -> ProbeResult:
        model, probed, gpu = self._run.model, self._run.probed, self._run.gpu
        with self.probing():
            return probe(
                model, probed.blocks, on_cpu(batch), taps=probed.taps, device=gpu.device, samples=probed.samples
            )

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Inside, the model may be run without values, and nothing is metered: that is done in host memory. Nor does
        a checkpoint that the user's code has put around a block see what is saved and computed."""
        model = self._run.model
        self.is_probing = True
        # A forward that somebody has put on the model has run already, with these arguments as its result. Accelerate's
        # enters autocast, and cannot be entered twice: autocast would stay on for ever.
        patched = vars(model).pop("forward", None)
        try:
            with self._run.gpu.unmetered(), saved_tensors_hooks(_itself, _itself), _disable_current_modes():
                yield
        finally:
            self.is_probing = False
            if patched is not None:
                vars(model)["forward"] = patched


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def on_cpu(batch: Arguments) -> Arguments:
    return Arguments(*map_tensors((batch.args, batch.kwargs), lambda tensor: tensor.cpu()))
