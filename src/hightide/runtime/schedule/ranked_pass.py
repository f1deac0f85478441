"""A pass of several ranks: what one tells the others of where it is, and what it does so that all issue the same."""

from __future__ import annotations

from collections.abc import Sequence

from hightide.ir.action import Mode, Op
from hightide.ir.plan import Update
from hightide.ir.tier import Lane
from hightide.runtime.schedule.demand import Demands
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.in_use import InUse
from hightide.runtime.schedule.issuer import Issuer
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass
from hightide.shard.watchman import Watchman


class RankedPass:
    def __init__(
        self,
        watchman: Watchman,
        flight: InFlight,
        performer: Performer,
        demands: Demands,
        issuer: Issuer,
        in_use: InUse,
        update: Update,
        names: Sequence[str],
    ) -> None:
        assert performer.ranked is not None
        self._watchman, self._gradients, self._chunks = watchman, performer.ranked, performer.chunks
        self._flight, self._demands, self._issuer, self._in_use = flight, demands, issuer, in_use
        self._update, self._names = update, names

    def count(self, what: str, is_evaluating: bool = False) -> None:
        self._watchman.own.calls[what] += 1
        self._watchman.own.is_evaluating = is_evaluating

    def enter(self, op: Op, block: int, mode: Mode) -> None:
        """Says at which block this rank is."""
        self._watchman.own.is_evaluating = not mode.trains
        evaluated = "" if mode.trains else ", of an evaluation"
        self._watchman.doing = f"{op} of block {self._names[block]!r}{evaluated}"

    def pass_over(self, current: Pass, index: int) -> None:
        """A tick that other ranks may run: this one takes part in what is gathered, and in averages with zeros."""
        self._issuer.run_before(current, index, current.backward_begun, without=Op.UPDATE)
        tick = current.program.ticks[index]
        if current.backward_begun and tick.op is Op.BACKWARD and tick.block is not None:
            for chunk in self._chunks.by_block[tick.block]:
                self._in_use.bring_sum(chunk)
                self._gradients.pass_over(chunk)
        self.agree_in_backward(current, index)

    def agree_in_backward(self, current: Pass, index: int) -> None:
        """Updates in backward must know at once which parameters have gradients."""
        tick = current.program.ticks[index]
        is_last = current.program.mode.ends_step and current.backward_begun
        if self._update is Update.IN_BACKWARD and is_last and tick.op is Op.BACKWARD and tick.block is not None:
            self._gradients.agree(self._chunks.by_block[tick.block])

    def average_the_rest(self, current: Pass) -> None:
        """Once all gradients are summed: those that plain autograd has made, and norms."""
        gradients, is_last = self._gradients, current.program.mode.ends_step
        unreduced = gradients.agree()
        gradients.will_have_norms(None)
        loose = [chunk for chunk in range(len(self._chunks.specs)) if gradients.has_loose(chunk)]
        if not is_last:
            gradients.unreduced.update(loose, unreduced)  # also others': a step that comes now averages the same here
            return
        if current.is_agreed:  # another backward through the same pass
            unreduced = sorted({*unreduced, *loose})
        else:
            for chunk in loose:
                gradients.begin_averaging(chunk)
            current.is_agreed = True
            self._issuer.issue(current, current.cursor - 1)
            for chunk in loose:
                self._flight.wait(self._flight.exits[chunk], Lane.REDUCE)
                gradients.end_averaging(chunk)
            unreduced = [chunk for chunk in unreduced if chunk not in loose]
        for chunk in unreduced:  # a block was called more often than the plan foresaw
            self._demands.reduce(chunk)
        if gradients.takes_norms:
            gradients.will_have_norms(self._demands.sum_norms())

    def begin_step(self, owes_step: bool) -> None:
        """`owes_step`: the latest backward has not been stepped after."""
        self._watchman.doing = "step()"
        if self._gradients.any_valid() if self._update is Update.DEFERRED else owes_step:
            self.count("step()")  # one that changes something, on all ranks: whoever has the gradients
        for chunk in sorted(self._gradients.unreduced):  # it comes earlier than was promised
            self._demands.reduce(chunk)
