"""Whether a block may be cut into micro-batches: tried on values, because shapes do not tell.

[Note: trying a block alone] One block of each kind runs on a few samples, with random numbers in the place of its
parameters (a model may have none yet, and zeros would hide much) and in fp32, so that rounding is small. Its arguments
are those of the recorded call where they have values, random ones where not. Then

- each sample in turn is changed, once to ordinary and once to extreme values (a maximum over the batch hides
  otherwise), and so is the gradient that comes back for it: results and gradients of the *other* samples must stay;
- the call is split: results, gradients of inputs, and sums of the gradients of parameters must be those of the whole
  call; so must scalars, numbers, outputs without gradient;
- what the block keeps (buffers, attributes, generators) must be left by the parts as by the whole;
- random numbers must be drawn sample by sample: one draw for the whole batch would become one for each part.

Whatever fails is told as the reason why the block runs unsplit. Before that, whether or not it could be split, the same
call is made twice, and once with a recomputation: results and gradients must be the same. If they are not, the block
follows something that nobody sees (a global, a closure, a file, the clock), and is refused. Nothing of the user's is
touched: attributes are put back, and hooks do not run (see [Note: hooks in a rehearsal]).

Some twenty runs of a long sequence in fp32, where a GPU may have no attention but the one with a square matrix, would
take minutes and gigabytes. So a call with more than LONG tokens is tried on its first SHORT: how samples depend on each
other does not depend on how long they are, as a rule, and the first step looks again at the whole length. A block that
does not run on fewer, or would be refused, is tried as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from hightide.ir.split import BatchDim
from hightide.process.interrupts import in_a_line, is_interrupt
from hightide.profiler.fake.fake import Originals
from hightide.profiler.model.call_tree import narrow
from hightide.profiler.model.samples import refuse_nested
from hightide.profiler.trial.alone import alone
from hightide.profiler.trial.quiet import Quiet
from hightide.profiler.trial.repeated_call import (
    NO_GRADIENT,
    ROUNDING,
    RepeatedCall,
    TrialOutcome,
    TriedCall,
    largest_of,
)
from hightide.profiler.trial.state import contents, same_contents

CPU = torch.device("cpu")
NUM_SAMPLES = 3
EXTREME = 100.0
# Of the largest value of a tensor. What does not change is the same to the bit but for kernels that sort samples;
# a split has other shapes, other kernels and another order of sums.
UNCHANGED, SAME = ROUNDING, 1e-3
LOW_PRECISION = 30.0  # times these, for a block that only runs in 16 bits
AGAIN = 1e-4  # of the same call: kernels that add in any order, and what they are multiplied by
REPEATED = "gives other results when the same call is made again: it follows something that is not its own"
RECOMPUTED = "has other gradients when it is recomputed in backward"
PATIENCE = 4  # states that are named
LONG, SHORT = 4096, 256  # tokens


@dataclass(frozen=True)
class Finding:
    """About one kind of call."""

    note: str = ""  # why it must run unsplit; "": it need not
    keeps: tuple[str, ...] = ()  # what a forward changes of what the block keeps
    refusal: str = ""  # why it cannot be recomputed
    replays_whole: bool = False  # a recomputation must not end with the last tensor that is saved: see _try_again
    draws: bool = False  # random numbers, on the device


class _Mixed(Exception):
    """The reason why a block must not be split."""


class _NotRepeatable(Exception):
    """The reason why a block cannot be recomputed."""


class _NoValues(Exception):
    """The block gives no numbers that could be compared."""


def examine(call: TriedCall, originals: Originals, device: torch.device) -> Finding:
    """Tries one call. See [Note: trying a block alone]. A call that is not split anyway is only repeated."""
    refuse_nested(call.record.inputs, f"an input of {type(call.module).__name__}")
    if device.type == "cuda":  # else torch warns that autograd's thread has no context yet
        torch.ones((), device=device, requires_grad=True).sin().backward()
    split = call.split
    if not split.splittable and len(split.inputs) != len(call.record.inputs):
        call = replace(call, num_samples=1)  # nobody knows what its samples are
    short = _shortened(call)
    if short is not None:
        finding, _ = _tried(short, originals, device)
        if finding is not None and not finding.refusal:
            return finding
    finding, failure = _tried(call, originals, device)
    if finding is not None:
        return finding
    if not split.splittable:
        return Finding(split.note)
    assert failure is not None
    return Finding(f"whether samples depend on each other could not be tried ({in_a_line(failure)})")


def _tried(call: TriedCall, originals: Originals, device: torch.device) -> tuple[Finding | None, Exception | None]:
    """What was found, or why nothing was."""
    failure: Exception | None = None
    for place in (device, CPU) if device.type == "cuda" else (device,):
        for dtype in (torch.float32, None):
            for count in (NUM_SAMPLES, 2, 1):
                if count > call.num_samples or (count < 2 and call.split.splittable):
                    continue
                try:
                    with originals.as_trained(), alone(call.module, originals, place, dtype) as params:
                        return _Trial(replace(call, num_samples=count), place, dtype, params).finding(), None
                except Exception as error:  # whatever a block raises on numbers that are not the user's
                    if is_interrupt(error):
                        raise
                    failure = error
        if not isinstance(failure, torch.OutOfMemoryError):
            break  # else there is room on the host, as a rule
    return None, failure


def _shortened(call: TriedCall) -> TriedCall | None:
    """The call with the first SHORT of its tokens, if they are more than LONG: what its widest dimension has that is
    neither its samples nor a size of the block's own."""
    inputs, known = call.record.inputs, call.split.inputs
    own = {size for tensor in (*call.module.parameters(), *call.module.buffers()) for size in tensor.shape}
    dims = known if len(known) == len(inputs) else (None,) * len(inputs)
    lengths = [
        size
        for tensor, dim in zip(inputs, dims, strict=True)
        for at, size in enumerate(tensor.shape)
        if size > LONG and size not in own and (dim is None or at != dim.dim)
    ]
    if not lengths:
        return None
    long = max(lengths)

    def first(tensor: Tensor, dim: BatchDim | None) -> Tensor:
        short = tensor.detach()
        for at, size in enumerate(tensor.shape):
            if size == long and (dim is None or at != dim.dim):
                short = short.narrow(at, 0, SHORT)
        return short.requires_grad_(tensor.requires_grad)

    each = iter(dims)
    leaves = [first(leaf, next(each)) if isinstance(leaf, Tensor) else leaf for leaf in call.record.leaves]
    return replace(call, record=replace(call.record, leaves=leaves))


class _Trial:
    def __init__(
        self, call: TriedCall, device: torch.device, dtype: torch.dtype | None, params: list[nn.Parameter]
    ) -> None:
        self._call = RepeatedCall(call, device, dtype, params)
        self._module, self._split, self._num_samples = call.module, call.split, call.num_samples
        self._num_outputs = len(call.record.outputs)
        self._tolerated = 1.0 if dtype is not None else LOW_PRECISION

    def finding(self) -> Finding:
        replays_whole = False
        try:
            base = self._call.run(self._call.leaves)
            keeps = self._call.changes
            draws = self._call.draws
            self._check_values(base)
            try:
                replays_whole = self._try_again(base)
                if not self._split.splittable:
                    return Finding(self._split.note, keeps, replays_whole=replays_whole)
                for sample in range(self._num_samples):
                    for factor in (1.0, EXTREME):
                        self._try_sample(base, sample, factor, draws)
                if keeps and self._try_state(keeps):
                    keeps = ()
                self._try_split(base, draws)
            except _NotRepeatable as reason:
                return Finding(self._split.note, keeps, refusal=str(reason))
            except _Mixed as reason:
                return Finding(str(reason), keeps, replays_whole=replays_whole)
            return Finding("", keeps, replays_whole=replays_whole, draws=draws)
        finally:
            self._call.reset()

    # -- can it be done again ---------------------------------------------------------------------------------------

    def _try_again(self, base: TrialOutcome) -> bool:
        """Results and gradients must be the same when the call is repeated, and when it is recomputed in backward.

        A recomputation ends with the last tensor that is saved. Some operations save a tensor that they fill later
        (the noise of rrelu): then it has to go on to the end. Returns whether it has to."""
        if not self._is_repeated(base, self._call.run(self._call.leaves, with_params=False)):
            raise _NotRepeatable(REPEATED)
        if all(grad is None for grad in (*base.input_grads, *base.param_grads)):
            return False
        for early_stop in (True, False):
            with set_checkpoint_early_stop(early_stop):
                if self._is_repeated(base, self._call.run(self._call.leaves, recompute=True)):
                    return not early_stop
        raise _NotRepeatable(RECOMPUTED)

    def _is_repeated(self, one: TrialOutcome, two: TrialOutcome) -> bool:
        pairs: list[tuple[Tensor | None, Tensor | None]] = [*zip(one.outputs, two.outputs, strict=False)]
        pairs += [*zip(one.input_grads, two.input_grads, strict=True)]
        same = len(one.outputs) == len(two.outputs) and _equal_leaves(one.others, two.others)
        largest = largest_of(one.param_grads)
        if two.param_grads and any(
            (a or NO_GRADIENT).differs([b], AGAIN * self._tolerated, largest)
            for a, b in zip(one.param_grads, two.param_grads, strict=True)
        ):
            return False
        return same and not any(
            (a is None) != (b is None) or (a is not None and b is not None and self._differ(a, b, AGAIN, a))
            for a, b in pairs
        )

    # -- the four questions ---------------------------------------------------------------------------------------

    def _try_sample(self, base: TrialOutcome, sample: int, factor: float, draws: bool) -> None:
        """Only the changed sample's results and gradients may change. Random numbers are others each time: a
        permutation may leave the sample where it is."""
        seed = None
        if draws:
            seed = 1 + sample + (self._num_samples if factor != 1.0 else 0)
            base = self._call.run(self._call.leaves, seed=seed, with_params=False)
        try:
            changed = self._call.run(self._call.varied(sample, factor), varied=sample, seed=seed, with_params=False)
        except Exception as error:
            if factor == 1.0 or is_interrupt(error):
                raise
            return  # code that checks its input has refused the extreme one
        how = ", to extreme values" if factor != 1.0 else ""
        if len(changed.outputs) != len(base.outputs):
            raise _Mixed("how many tensors it returns depends on a sample's values")
        for index, (one, two, dim) in enumerate(zip(base.outputs, changed.outputs, self._split.outputs, strict=True)):
            for part_one, part_two in self._others(one, two, dim, sample):
                if self._differ(part_one, part_two, UNCHANGED, one):
                    what = "changes when another sample does" if dim else "is of the batch as a whole"
                    raise _Mixed(f"samples depend on each other: output {index} {what}{how}")
        for one_grad, two_grad, dim in zip(base.input_grads, changed.input_grads, self._split.inputs, strict=True):
            if dim is None or one_grad is None or two_grad is None:
                continue
            for part_one, part_two in self._others(one_grad, two_grad, dim, sample):
                if self._differ(part_one, part_two, UNCHANGED, one_grad):
                    raise _Mixed(f"samples depend on each other: a gradient changes when another sample does{how}")

    def _try_split(self, base: TrialOutcome, draws: bool) -> None:
        """Parts must add up to the whole."""
        quiet = Quiet() if draws else None
        whole = self._call.run(self._call.leaves, quiet=quiet) if draws else base
        bounds = [(0, 1), (1, self._num_samples - 1)]
        parts = [self._run_part(start, count, Quiet() if draws else None) for start, count in bounds]
        for (start, count), part in zip(bounds, parts, strict=True):
            self._compare_outputs(whole, part, start, count)
        if draws and not _drawn_by_sample(whole.draws, parts[0].draws, self._num_samples):
            raise _Mixed("it draws random numbers for the batch as a whole")
        inputs = [leaf for leaf in self._call.leaves if isinstance(leaf, Tensor)]
        for index, (leaf, dim) in enumerate(zip(inputs, self._split.inputs, strict=True)):
            expected = _or_zero(whole.input_grads[index], leaf)
            pieces = [narrow(leaf, dim, *bound) for bound in bounds]
            found = [_or_zero(part.input_grads[index], piece) for part, piece in zip(parts, pieces, strict=True)]
            if dim is None and self._differ(expected, found[0] + found[1], SAME, expected):
                raise _Mixed(f"split, the gradient of input {index} is another than that of the whole batch")
            if dim is not None and any(
                self._differ(narrow(expected, dim, *bound), grad, SAME, expected)
                for bound, grad in zip(bounds, found, strict=True)
            ):
                raise _Mixed(f"split, the gradient of its input {index} is another")
        largest = largest_of(whole.param_grads)
        for index, gradient in enumerate(whole.param_grads):
            others = [part.param_grads[index] for part in parts]
            if (gradient or NO_GRADIENT).differs(others, SAME * self._tolerated, largest):
                raise _Mixed("split, the gradient of a parameter is another than that of the whole batch")

    def _compare_outputs(self, whole: TrialOutcome, part: TrialOutcome, start: int, count: int) -> None:
        if len(part.outputs) != len(whole.outputs) or not _equal_leaves(part.others, whole.others):
            raise _Mixed("split, it returns other numbers or more of them")
        for index, (one, two, dim) in enumerate(zip(whole.outputs, part.outputs, self._split.outputs, strict=True)):
            expected = narrow(one, dim, start, count)
            if expected.shape != two.shape or self._differ(expected, two, SAME, one):
                raise _Mixed(f"split, its output {index} is another than that of the whole batch")

    def _try_state(self, keeps: tuple[str, ...]) -> bool:
        """What the parts leave must be what the whole leaves. Returns whether another run leaves the same again: then
        no replay does any harm."""
        self._call.run(self._call.leaves)
        left_by_whole = contents(self._module)
        self._call.run(self._call.leaves, fresh=False)
        is_harmless = same_contents(left_by_whole, contents(self._module))
        self._call.reset()
        for start, count in [(0, 1), (1, self._num_samples - 1)]:
            self._run_part(start, count, fresh=False)
        if not same_contents(left_by_whole, contents(self._module)):
            names = ", ".join(keeps[:PATIENCE]) + (" ..." if len(keeps) > PATIENCE else "")
            raise _Mixed(f"a forward changes what it keeps ({names}), which must happen once for the whole batch")
        return is_harmless

    def _run_part(self, start: int, count: int, quiet: Quiet | None = None, fresh: bool = True) -> TrialOutcome:
        try:
            return self._call.run(self._call.part(start, count), (start, count), quiet, fresh=fresh)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the whole call did not fail
            raise _Mixed(f"split, it fails ({in_a_line(error)})") from error

    def _others(self, one: Tensor, two: Tensor, dim: BatchDim | None, sample: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of two results, what belongs to other samples than the changed one."""
        if dim is None:
            yield one, two
            return
        for start, count in ((0, sample), (sample + 1, self._num_samples - sample - 1)):
            if count:
                yield narrow(one, dim, start, count), narrow(two, dim, start, count)

    def _differ(self, one: Tensor, two: Tensor, tolerance: float, like: Tensor) -> bool:
        """By more than a part of the largest value of `like`."""
        if one.shape != two.shape:
            return True
        if not one.is_floating_point():
            return not torch.equal(one, two)
        two = two.to(one.dtype)
        if torch.equal(one, two):  # mostly, and it is told sooner
            return False
        allowed = tolerance * self._tolerated * _size(like) + torch.finfo(torch.float32).tiny
        return not torch.allclose(one, two, rtol=0.0, atol=allowed, equal_nan=True)

    def _check_values(self, base: TrialOutcome) -> None:
        if len(base.outputs) != self._num_outputs:
            raise _NoValues(f"{len(base.outputs)} tensors came back, and {self._num_outputs} from the probe")
        for output in base.outputs:
            if output.is_floating_point() and output.numel() and not bool(output.isfinite().any()):
                raise _NoValues("no finite number came back")


def _drawn_by_sample(whole: list[int], of_one: list[int], num_samples: int) -> bool:
    return len(whole) == len(of_one) and all(all_ == num_samples * one for all_, one in zip(whole, of_one, strict=True))


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _size(tensor: Tensor) -> float:
    """Its largest finite value."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _equal_leaves(one: list[Any], two: list[Any]) -> bool:
    plain = (int, float, str, bool, type(None))
    return len(one) == len(two) and all(
        type(a) is type(b) and (not isinstance(a, plain) or a == b) for a, b in zip(one, two, strict=True)
    )
