"""The parts of a model: parameters, blocks, and the calls of blocks in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hightide.ir.activation import Activation

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ParamSpec:
    """One parameter object. A tied parameter is one ParamSpec with several names; names[0] is its key everywhere."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPE_BYTES
    trainable: bool
    group: int | None  # index into the optimizer's param_groups; None: not optimised

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        group = "no group" if self.group is None else f"group {self.group}"
        others = "".join(f", also {name!r}" for name in self.names[1:])
        return f"{shape} {self.dtype}, {'trained' if self.trainable else 'frozen'}, in {group}{others}"

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True)
class BlockSpec:
    """One unit of compute. `loose` is the one pseudo-block that holds parameters which the model's own code uses
    outside of any block: they stay on the GPU and plain autograd sees them."""

    index: int
    name: str  # the module's name in the model; "" for the loose pseudo-block
    kind: str  # the module's class name
    params: tuple[
        str, ...
    ]  # keys of the parameters it uses, first use in execution order; shared ones appear in each user
    loose: bool = False
    lazy_head: bool = False  # projection and loss are fused over slices of tokens (see runtime/head/fused_loss.py)
    plain_linear: bool = False  # an nn.Linear and nothing more: its gradient is two matrix products
    plain_embedding: bool = False  # an nn.Embedding and nothing more: its rows can be looked up on the host


@dataclass(frozen=True)
class Affine:
    """Bytes, or operations, as a function of the number of samples: fixed + per_sample * n."""

    fixed: int = 0
    per_sample: int = 0

    @classmethod
    def through(cls, low: int, at_low: int, high: int, at_high: int) -> Affine:
        """The line through two points, rounded up; through the origin, if there is only one or it would fall below
        it."""
        per_sample = -(-(at_high - at_low) // (high - low)) if high > low else -1
        if per_sample < 0 or at_low < per_sample * low:
            return cls(0, max(-(-at_low // low), -(-at_high // high)))
        return cls(at_low - per_sample * low, per_sample)

    def at(self, num_samples: int) -> int:
        return self.fixed + self.per_sample * num_samples

    def at_fraction(self, numerator: int, denominator: int) -> int:
        """At numerator / denominator samples, rounded up."""
        return self.fixed - (-self.per_sample * numerator // denominator)


@dataclass(frozen=True)
class Work:
    """What a GPU has to do for one micro-batch, counted operation by operation."""

    flop: Affine = Affine()  # of matrix products, convolutions and attention; a causal one counts half
    touched_bytes: Affine = Affine()  # read and written by every operation for itself: fused ones touch fewer


@dataclass(frozen=True)
class Selective:
    """A call under Activation.SELECTIVE. Which results are held is told by numbers, since an operation has another name
    on each device."""

    kept: Affine  # bytes that one micro-batch holds from forward to backward beyond inputs
    recompute: Work  # what is repeated
    flop_per_byte: int  # results that take so many operations for each of their bytes are held,
    num_held: int  # so many of them: backward needs nothing of what is made after the last


@dataclass(frozen=True)
class Glue:
    """What the model's own code between blocks takes around one forward or backward of a call, whole batch, where no
    block keeps its inputs."""

    held: Affine = Affine()  # while the call runs: beyond its inputs and the results of the call before; in backward
    # beyond the gradients of its results
    peak: Affine = Affine()  # most bytes alive since the tick before, with all results and gradients of blocks


@dataclass(frozen=True)
class CallSpec:
    """One call of a block in one forward, in execution order. All bytes are those that the accelerator would hold."""

    block: int
    needs_backward: bool
    splittable: bool  # False: the block runs the whole batch at once (reason in `note`)
    note: str
    new_inputs: Affine  # input tensors that no earlier call produced or received (made by glue code), whole batch
    saved_inputs: Affine  # input tensors that carry gradients: what a "checkpoint" of this call is, whole batch
    outputs: Affine  # output tensors, whole batch
    forward_peak: Affine  # most bytes alive in forward beyond inputs and outputs, of one micro-batch, without graph
    kept: Affine  # bytes that the graph of one micro-batch keeps from forward to backward beyond inputs
    backward_peak: Affine  # most bytes alive in recompute + backward of one, beyond inputs, outputs' gradients
    input_grads: Affine  # gradients of inputs, whole batch
    # What leaves the block by another way than its result, whole batch, until the block runs again.
    tapped: Affine = Affine()
    num_saved: int = 1  # how many tensors `saved_inputs` are
    holes: Affine = Affine()  # what torch reserves on a GPU beyond that, for a micro-batch that runs eagerly
    num_kept: int = 16  # how many tensors the graph of one micro-batch keeps, at most
    lasting: Affine = Affine()  # bytes that this graph holds beside those, whatever the level, and never elsewhere
    left: Affine = Affine()  # bytes that a run on one micro-batch leaves in attributes, until the block runs again
    kind: int = 0  # calls of one kind are equal calls of equal blocks: they take equal memory and time
    forward: Work = Work()
    recompute: Work = Work()  # ends with the last tensor that backward needs
    backward: Work = Work()  # without the recomputation
    glue: Glue = Glue()
    glue_backward: Glue = Glue()
    selective: Selective | None = None  # None: nothing in it is worth more than the rest
    tiled: tuple[str, ...] = ()  # modules inside that run tile by tile: profiler/needs/token_tiles.py

    def held(self, activation: Activation) -> Affine:
        """Bytes that one micro-batch holds from forward to backward beyond inputs."""
        if activation is Activation.KEEP:
            return self.kept
        return self.selective.kept if activation is Activation.SELECTIVE and self.selective else Affine()

    def repeated(self, activation: Activation) -> Work:
        """By backward, of forward."""
        if activation is Activation.KEEP:
            return Work()
        return self.selective.recompute if activation is Activation.SELECTIVE and self.selective else self.recompute


@dataclass(frozen=True)
class ModelProfile:
    """Facts about a model and one example batch; no decisions."""

    fingerprint: str  # of names, shapes, dtypes, groups and blocks: a plan for another model is refused by it
    num_samples: int  # in the example batch
    tokens_per_sample: int  # elements per sample of the head's input rows; 1 where the model has no tokens
    batch_bytes: int
    buffer_bytes: int
    params: tuple[ParamSpec, ...]
    blocks: tuple[BlockSpec, ...]  # in order of first call; never-called blocks last
    calls: tuple[CallSpec, ...]
    vocabulary: int  # rows of the lazy head; 0 without one
    glue_end: Affine = Affine()  # most bytes alive between the last backward of a block and the step
    on_values: bool = False  # bytes are of one pass on values: the model asks for them, and may take more another time

    def param(self, key: str) -> ParamSpec:
        return self._by_key[key]

    def facts(self) -> dict[str, str]:
        """All that the fingerprint is of, in words."""
        params = {f"the parameter {spec.name!r}": str(spec) for spec in self.params}
        return params | {f"block {block.index}": block.name or "(loose)" for block in self.blocks}

    @cached_property
    def _by_key(self) -> dict[str, ParamSpec]:
        return {spec.name: spec for spec in self.params}
