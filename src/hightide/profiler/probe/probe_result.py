"""The result of a probe: the calls of a model's blocks, and how each divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hightide.ir.block import Affine
from hightide.ir.split import Split
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.kinds import are_alike
from hightide.profiler.model.samples import Samples
from hightide.profiler.probe.tap_search import Taps, merged

NOT_PROBED = "this way of calling the block was not probed"
FAILED = "the probe of the model failed ({})"


@dataclass(frozen=True)
class ProbedCall:
    """One call of a block in one forward. Bytes are those of the whole batch; shapes are those of the example batch."""

    block: int  # index into ProbeResult.blocks
    split: Split
    needs_backward: bool
    input_shapes: tuple[tuple[int, ...], ...]  # per tensor leaf, as in `split`
    output_shapes: tuple[tuple[int, ...], ...]
    new_inputs: Affine
    saved_inputs: Affine
    outputs: Affine  # of its result
    tapped: Affine  # what its taps take out, which lives until backward
    num_saved: int = 1
    without_grad: bool = False  # then it runs unsplit, however it divides


@dataclass(frozen=True)
class ProbeResult:
    num_samples: int
    blocks: tuple[FoundBlock, ...]
    calls: tuple[ProbedCall, ...]  # in execution order; only the part before the failure, if there was one
    uses: Mapping[int, tuple[str, ...]]  # per block: keys of the parameters that its calls used, in order of first use
    loose: frozenset[str]  # keys of parameters used outside of the calls of their blocks
    failure: str  # why the model could not be probed to its end; "" if it could
    on_values: bool = False  # then it was run on values, and all is known: see [Note: a pass on values]
    captured: frozenset[str] = frozenset()  # blocks out of whose middle the model took a tensor in a way that is no tap
    taps: Taps = field(default_factory=dict)  # per block, in this probe
    more_taps: Taps = field(default_factory=dict)  # that it found: probe again with them
    written: frozenset[str] = frozenset()  # keys of parameters that a forward has given other values
    keeps: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # per block: what of it a forward changes
    refusals: Mapping[int, str] = field(default_factory=dict)  # per block: why it cannot be trained like this
    returned: Mapping[int, int | str] = field(default_factory=dict)  # per block: the argument that it fills and returns
    samples: Samples = Samples.FIRST  # where they are in the batch
    shapes: frozenset[tuple[int, ...]] = frozenset()  # of the batch's tensors, whatever the number of samples
    replays_whole: frozenset[int] = frozenset()  # blocks that are recomputed to their end: see Finding

    @property
    def all_taps(self) -> Taps:
        return merged(self.taps, self.more_taps)

    def split(self, block: int, signature: str) -> Split:
        """How a call divides. A block that was not called this way learns from one that is built the same."""
        found = [call for call in self.calls if call.split.signature == signature]
        for call in sorted(found, key=lambda call: call.block != block):
            if call.block == block or are_alike(self.blocks[call.block], self.blocks[block]):
                return call.split
        return Split(signature, (), (), note=FAILED.format(self.failure) if self.failure else NOT_PROBED)

    def after(self, earlier: ProbeResult) -> ProbeResult:
        """With what an earlier probe has found of the blocks, in other ways of calling them."""
        return replace(
            self,
            keeps={**earlier.keeps, **self.keeps},
            returned={**earlier.returned, **self.returned},
            replays_whole=earlier.replays_whole | self.replays_whole,
            shapes=earlier.shapes,  # of the batch that the profile is of
        )
