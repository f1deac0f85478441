"""The optimizer's update of one chunk: a few contiguous ranges, with the hyper-parameters of the moment in which it
was issued.

[Note: states later] An update on the host moves bytes, and the next forward waits for it, but only for parameters. So
where a plan says so (`BlockPlan.settles`) it comes in two parts: the first reads everything and writes parameters and
masters; the second, SETTLE, reads gradient and states again and writes the states, while the lane has nothing that
anybody waits for. Both compute the same numbers from the same numbers, so the bits are those of the update as a whole.
Of Adam with bf16 parameters the first part moves 18 bytes per parameter in the place of 26. Between the two the states
are those of before: who reads them, or changes the gradient, waits for the second part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.ir.state_spec import MASTER, REMAINDER, StateSpec
from hightide.optim.groups import Groups
from hightide.optim.host_update import HostUpdate
from hightide.optim.operands import Operands, Part
from hightide.optim.rule import Rule
from hightide.optim.states.moments import Moments
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import UpdateArrays
from hightide.runtime.gradients.factors import Factor, HostNumber
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.lanes.update_threads import UpdateThreads
from hightide.runtime.same_acts import Acts
from hightide.runtime.schedule.in_flight import LaneWork
from hightide.stores.array import Array

BROKEN_PROMISE = (
    "{what} between backward and step(), but this model was wrapped with update='in_backward': the updates have run "
    "already{how}. {act} that after step(), or wrap with update='deferred' (the default)."
)


@dataclass(slots=True)
class Range:
    """Neighbouring parameters that update alike, as one range of elements."""

    start: int
    stop: int
    group: int
    step: int
    factor: Factor


class ChunkUpdates:
    def __init__(
        self,
        rule: Rule,
        groups: Groups,
        chunks: Chunks,
        gradients: Gradients,
        update_threads: UpdateThreads,
        await_states: Callable[[str], object],
        acts: Acts | None = None,
    ) -> None:
        """`await_states`: see LentCopies. `acts`: of one of several ranks."""
        self._rule, self._groups = rule, groups
        self._chunks, self._gradients, self._acts = chunks, gradients, acts
        self.moments = Moments(rule, chunks, await_states)
        self.masters_differ = False  # from the parameters' values: there was an update, or masters were loaded
        self._on_host = HostUpdate(rule, update_threads)
        # By chunk, with the gradient and the states that they were made for.
        self._wholes: dict[int, tuple[Tensor, Mapping[StateSpec, Array], Operands]] = {}
        # Of the updates issued since the last step(). Groups are looked at once, so that all updates see the same.
        self._group_of: dict[str, int] | None = None
        self._used: dict[str, Any] = {}  # hyper-parameters of each parameter
        self._num_steps = 0

    def follow(self) -> None:
        """From now until `end_step` each parameter is in the group in which it is now. What cannot be followed is
        refused before any update is issued."""
        if self._group_of is None:
            groups = self._groups.now()
            self.moments.read_counters()
            self.moments.write_copies()
            self._group_of = groups
            self._gradients.optimised = frozenset(self._group_of)

    def prepare(self, chunk: int, in_parts: bool) -> tuple[LaneWork, LaneWork | None] | None:
        self.follow()
        hypers: dict[int, Any] = {}
        ranges = self._ranges(chunk, hypers)
        if not hypers:
            return None
        self.masters_differ = True
        if not in_parts:
            return partial(self._apply, chunk, ranges, hypers), None
        later: list[LaneWork] = []
        return partial(self._apply, chunk, ranges, hypers, later), partial(_run, later)

    def _ranges(self, chunk: int, hypers: dict[int, Any]) -> list[Range]:
        """What is to be updated; the hyper-parameters of its groups go to `hypers`. Of a chunk that is in shards on
        several ranks what this one has of it; but updates of all its parameters are counted on all ranks."""
        group_of, used = self._group_of, self._used
        assert group_of is not None
        chunks, is_cut = self._chunks, self._chunks.is_cut(chunk)
        counted: dict[int, Callable[[str], int]] = {}  # by group
        ranges: list[Range] = []
        params, how = list[str](), set[tuple[int, int]]()
        last: Range | None = None
        for entry, factor in self._gradients.ready(chunk):
            key = entry.param
            if key not in group_of:
                continue
            group = group_of[key]
            if group not in hypers:
                hypers[group] = hyper = self._groups.hyper(group)
                counted[group] = self.moments.advance if self._rule.keeps_states(hyper) else self.moments.count
            used[key] = hypers[group]
            step = counted[group](key)
            if self._acts is not None:
                params.append(key)
                how.add((group, step))
                self._acts.scales(factor)
            own = chunks.own_entry(key) if is_cut else entry
            if own is None:
                continue
            start, stop = own.offset_numel, own.end_numel
            if (
                last is not None
                and last.stop == start
                and last.group == group
                and last.step == step
                # Factors from the GPU are compared by identity: one clipping gives all parameters the same tensor.
                and (last.factor is factor or (isinstance(last.factor, float) and last.factor == factor))
            ):
                last.stop = stop
            else:
                last = Range(start, stop, group, step, factor)
                ranges.append(last)
        if self._acts is not None and params:
            self._acts.updates(params, hypers, how)
        return ranges

    def end_step(self) -> None:
        self._num_steps += 1
        self._group_of = None
        self._used.clear()

    # -- the promise of update="in_backward" ----------------------------------------------------------------------

    @property
    def used(self) -> Collection[str]:
        """Parameters whose updates have run in backward."""
        return self._used.keys()

    def check_promise(self) -> None:
        """Refuses a step() whose updates have run in backward with other hyper-parameters, or other parameters."""
        if self._group_of is None:
            return
        now = self._groups.now()
        hypers = {group: self._groups.hyper(group) for group in set(now.values())}
        for key in sorted(now.keys() ^ self._group_of.keys()):
            moved = "put into a group" if key in now else "taken out of its group"
            raise Refused(
                BROKEN_PROMISE.format(what=f"{key!r} was {moved}", how=", without regard to that", act="Change")
            )
        for key, used in self._used.items():
            if (hyper := hypers[now[key]]) != used:
                what = f"the hyper-parameters of {key!r}, now in group {now[key]}, changed (from {used} to {hyper})"
                raise Refused(BROKEN_PROMISE.format(what=what, how=", with the old ones", act="Change"))

    def refuse_if_issued(self, what: str) -> None:
        """Between backward and step(), of updates that have run in backward."""
        if self._used:
            raise Refused(BROKEN_PROMISE.format(what=what, how="", act="Do"))

    @property
    def moment(self) -> tuple[int, bool]:
        """It changes with every update that is issued, whichever thread does so, until the step has ended."""
        return self._num_steps, bool(self._used)

    def begin_saving(self) -> Callable[[str], bool]:
        self.refuse_if_issued("values are saved")
        self.moments.read_counters()
        self.moments.flush_copies()
        return self.moments.__contains__

    @property
    def kernel(self) -> str:
        """What computes updates on the host: "c" or "torch"."""
        return self._on_host.kernel

    def _apply(
        self, chunk: int, ranges: list[Range], hypers: dict[int, Any], later: list[LaneWork] | None = None
    ) -> None:
        """`later`: gets the second part of what can be done in two."""
        update = self._rule.update if self._chunks.placed[chunk].is_updated_on_gpu else self._on_host.update
        arrays = self._chunks.update_arrays(chunk)
        is_memory = arrays.is_memory
        if not is_memory:  # what is in buffers is gone by then
            later = None
        for start, piece in ((0, self._whole(chunk, arrays)),) if is_memory else self._pieces(chunk, arrays):
            stop = start + len(piece)
            for part in ranges:
                begin, end = max(start, part.start), min(stop, part.stop)
                if begin < end:
                    operands = piece if (begin, end) == (start, stop) else piece[begin - start : end - start]
                    hyper, factor = hypers[part.group], _number(part.factor)
                    if later is not None and self._on_host.has_parts(operands, hyper):
                        factor = float(factor)  # the number may be another one by then
                        self._on_host.update(operands, part.step, hyper, factor, Part.PARAMS)
                        states = partial(self._on_host.update, operands, part.step, hyper, factor, Part.STATES)
                        later.append(states)
                    else:
                        update(operands, part.step, hyper, factor)

    def _pieces(self, chunk: int, arrays: UpdateArrays) -> Iterator[tuple[int, Operands]]:
        """(start, operands) of a chunk of which something is on disk."""
        for start, param, gradient, states in arrays.tiles(self._chunks.shards[chunk].optimised_numel):
            yield start, self._operands(chunk, param, gradient, states)

    def _whole(self, chunk: int, arrays: UpdateArrays) -> Operands:
        """Only a gradient, and what has come from a disk, may be at another place than last time."""
        param, gradient, kept = arrays
        known = self._wholes.get(chunk)
        if known is None or known[0] is not gradient.view or known[1] is not kept:
            states, numel = (
                {state: array.view for state, array in kept.items()},
                self._chunks.shards[chunk].optimised_numel,
            )
            operands = self._operands(chunk, param.view[:numel], gradient.view[:numel], states)
            known = self._wholes[chunk] = (gradient.view, kept, operands)
        return known[2]

    def _operands(self, chunk: int, param: Tensor, grad: Tensor, kept: Mapping[StateSpec, Tensor]) -> Operands:
        has_master = self._chunks.specs[chunk].has_master
        return Operands(
            kept.get(MASTER, None if has_master else param),
            grad,
            tuple(kept[state] for state in self._rule.states),
            param if has_master else None,
            kept.get(REMAINDER),
            tuple(state.per_numel for state in self._rule.states),
        )

    def move_to(self, chunks: Chunks) -> None:
        """Where the states are now."""
        self.close()
        self._chunks = chunks
        self.moments.move_to(chunks)

    def close(self) -> None:
        self._wholes.clear()


def _run(works: list[LaneWork]) -> None:
    for work in works:
        work()
    works.clear()


def _number(factor: Factor) -> float | Tensor:
    return float(factor) if isinstance(factor, HostNumber) else factor
