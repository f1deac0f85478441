"""The optimizer's update of one chunk: a few contiguous ranges, with the hyper-parameters of the moment in which it
was issued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hightide.ir.block import ModelProfile
from hightide.ir.tier import ChunkKind, Tier
from hightide.optim.host import HostUpdate
from hightide.optim.operands import Operands
from hightide.optim.rule import Rule
from hightide.runtime.chunks import Chunks
from hightide.runtime.gradients import Factor, Gradients, HostNumber
from hightide.runtime.sharing import Sharers


@dataclass(slots=True)
class Range:
    """Neighbouring parameters that update alike, as one range of elements."""

    start: int
    stop: int
    group: int
    step: int
    factor: Factor

    def goes_on(self, start: int, group: int, step: int, factor: Factor) -> bool:
        """Whether a parameter that begins there belongs to it."""
        # Factors from the GPU are compared by identity: one clipping gives all parameters the same tensor.
        same_factor = self.factor is factor or (isinstance(self.factor, float) and self.factor == factor)
        return self.stop == start and self.group == group and self.step == step and same_factor


class ChunkUpdates:
    def __init__(
        self,
        profile: ModelProfile,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        chunks: Chunks,
        gradients: Gradients,
        sharers: Sharers,
    ) -> None:
        self._rule = rule
        self._groups = groups
        self._chunks = chunks
        self._gradients = gradients
        self._group_of = {spec.name: spec.group for spec in profile.params}
        self.num_steps = dict.fromkeys(
            self._group_of, 0
        )  # updates that each parameter has received, of those that use its moments
        self._on_host = HostUpdate(rule, sharers)
        self.used: dict[int, Any] = {}  # hyper-parameters per group of the updates issued since the last step()

    def prepare(self, chunk: int) -> Callable[[], None] | None:
        hypers: dict[int, Any] = {}
        ranges = self._ranges(chunk, hypers)
        if not ranges:
            return None
        self.used.update(hypers)
        return lambda: self._apply(chunk, ranges, hypers)

    def hyper(self, group: int) -> Any:
        return self._rule.read(self._groups[group])

    def _ranges(self, chunk: int, hypers: dict[int, Any]) -> list[Range]:
        """What is to be updated; the hyper-parameters of its groups go to `hypers`."""
        ranges: list[Range] = []
        for entry, factor in self._gradients.ready(chunk):
            group = self._group_of[entry.param]
            if group is None:
                continue
            if group not in hypers:
                hypers[group] = self.hyper(group)
            step = self.num_steps[entry.param] = self.num_steps[entry.param] + self._rule.keeps_states(hypers[group])
            if ranges and ranges[-1].goes_on(entry.offset_numel, group, step, factor):
                ranges[-1].stop = entry.end_numel
            else:
                ranges.append(Range(entry.offset_numel, entry.end_numel, group, step, factor))
        return ranges

    @property
    def kernel(self) -> str:
        """What computes updates on the host: "c" or "torch"."""
        return self._on_host.kernel

    def _apply(self, chunk: int, ranges: list[Range], hypers: dict[int, Any]) -> None:
        spec, on_host = self._chunks.specs[chunk], self._chunks.states_tier(chunk) is Tier.HOST
        numel = spec.optimised_numel
        whole = Operands(
            self._chunks.master(chunk),
            self._gradients.flat(chunk)[:numel],
            tuple(self.moments(chunk)),
            self._chunks.home(chunk)[:numel] if spec.has_master else None,
            self._chunks.remainder(chunk),
        )
        update = self._on_host.update if on_host else self._rule.update
        for part in ranges:
            operands = whole if (part.start, part.stop) == (0, numel) else whole[part.start : part.stop]
            update(operands, part.step, hypers[part.group], _number(part.factor))

    def moments(self, chunk: int) -> list[Tensor]:
        tier = self._chunks.states_tier(chunk)
        return [self._chunks.flat(chunk, ChunkKind.STATE, tier, array) for array in range(self._rule.num_moments)]

    def move_to(self, chunks: Chunks) -> None:
        """Where the states are now."""
        self._chunks = chunks

    def reset(self, key: str) -> None:
        """As if the parameter had never been updated."""
        self.num_steps[key] = 0
        if self._group_of[key] is not None:
            for moment in self.moments_of(key):
                moment.zero_()

    def moments_of(self, key: str) -> list[Tensor]:
        """Views of one parameter's moments, in its shape."""
        chunk, entry = self._chunks.places[key]
        return [self._chunks.view_of(moment, entry) for moment in self.moments(chunk)]


def _number(factor: Factor) -> float | Tensor:
    return float(factor) if isinstance(factor, HostNumber) else factor
