"""The user's promises about the loop, which pass of a step follows from them, and what is said where one is broken."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

from hightide.ir.action import Mode, Op
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass, Program


class Promises:
    def __init__(
        self,
        programs: Mapping[Mode, Program],
        performer: Performer,
        update: Update,
        accumulate: int,
        names: list[str],
        lanes: Lanes,
    ) -> None:
        """`accumulate`: backwards before each step. Updates in backward: as many exactly, and nobody looks between.
        `lanes`: a step that is missing because one of them has failed is told as that failure."""
        self._programs, self._accumulate, self._names = programs, accumulate, names
        self._performer, self._gradients = performer, performer.gradients
        self._lanes = lanes
        self._in_backward = update is Update.IN_BACKWARD
        self._num_backwards = 0  # of the present step
        self._was_told = False
        self.owes_step = False  # in-backward updates have run, and step() was not called since
        self._has_ended = False  # the backward of these, without an exception
        self._gave_up = False  # its gradients, in a move to another plan
        # By chunk, the tick of the last pass of a step with which its sum is final. Empty: every pass is the last.
        self._final: dict[int, int] = {}
        for index, tick in enumerate(programs[Mode.LAST].ticks if accumulate > 1 else ()):
            if tick.op is Op.BACKWARD and tick.block is not None:
                self._final |= dict.fromkeys(performer.chunks.by_block[tick.block], index)

    def go_on(self, before: Promises) -> None:
        """With what counts whatever the plan."""
        self.owes_step, self._has_ended, self._gave_up = before.owes_step, before._has_ended, before._gave_up
        self._num_backwards, self._was_told = before._num_backwards, before._was_told

    def program(self, exists: bool | None = None) -> Program:
        """Of the next training pass. `exists`: whether there are gradients to which it adds; None: as the backwards so
        far say. A step of several passes that goes on beyond its last adds to it as that did; one of a single pass
        learns of it when backward begins."""
        if self._accumulate == 1:
            return self._programs[Mode.ACCUMULATE if exists else Mode.TRAIN]
        if not (self._num_backwards if exists is None else exists):
            return self._programs[Mode.FIRST]
        is_last = self._num_backwards >= self._accumulate - 1 or Mode.MIDDLE not in self._programs
        return self._programs[Mode.LAST if is_last else Mode.MIDDLE]

    def begin_backward(self) -> tuple[Program, bool]:
        """The pass that it belongs to, and whether it adds to gradients. Only now is it known whether they exist: users
        call zero_grad before or after forward."""
        exists = self._gradients.any_valid()
        if not exists:
            self._num_backwards = 0
        if self._in_backward and (self.owes_step or (exists and not self._num_backwards)):
            missing = "optimizer.step()" if self.owes_step else self._zeroing()
            raise Refused(
                f"backward() came again without {missing} since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the "
                "default) to accumulate over several backwards or to skip steps."
            )
        program = self.program(exists)
        self.uses_up(program)
        self._gradients.are_used_up = self.owes_step
        if self._num_backwards == self._accumulate:
            self._tell(f"a backward followed {self._num_backwards}")
        self._num_backwards += 1
        return program, exists

    def check_forward(self) -> None:
        """Before a forward, whether it trains or not: it would see what updates have made of the weights. After a
        backward that has failed there is no plain result that it could differ from."""
        self._lanes.check()
        if self.has_kept_backward:
            raise Refused(
                "the model was called between backward and optimizer.step(), but it was wrapped with "
                "update='in_backward': the updates have run already, so the result would be that of the next weights. "
                "Call optimizer.step() first, or wrap with update='deferred' (the default) to evaluate in between, to "
                "accumulate over several backwards or to skip steps."
            )

    def check_weights(self, what: str) -> None:
        """Before all weights are read or written."""
        self._lanes.check()
        if self.has_kept_backward:
            raise Refused(
                f"{what} between backward and optimizer.step(), but this model was wrapped with update='in_backward': "
                "the updates have run already. Do that after step(), or wrap with update='deferred' (the default)."
            )

    def uses_up(self, program: Program) -> None:
        """A backward of this pass has begun."""
        self.owes_step, self._has_ended = self._in_backward and program.mode.ends_step, False
        self._gave_up = False

    def end_backward(self) -> None:
        self._has_ended = True

    @property
    def has_kept_backward(self) -> bool:
        """Whether updates have run in a backward that has ended without an exception."""
        return self.owes_step and self._has_ended

    def give_up_gradients(self) -> None:
        """Which updates have used."""
        self._gave_up = True

    @property
    def has_gradients(self) -> bool:
        """Of a backward whose updates have run: unless somebody has dropped them."""
        return self.has_kept_backward and not self._gave_up

    def check_update(self, chunk: int, block: int) -> None:
        """Before anything is added to the chunk's gradient."""
        if self._in_backward and chunk in self._performer.updating.updated:
            raise Refused(
                f"block {self._names[block]!r} ran backward again after its update, but this model was wrapped with "
                "update='in_backward': the promise of one backward per step. Wrap with update='deferred' (the default)."
            )

    def is_final(self, chunk: int, current: Pass | None, index: int | None) -> bool:
        """Whether no tick of the step after this one (None: off the plan) adds to the gradient."""
        if not self._final:
            return True
        is_last = current is not None and current.program.mode.ends_step
        return is_last and index is not None and self._final.get(chunk) == index

    def begin_step(self, leftovers: Callable[[], Iterable[int]]) -> None:
        """`leftovers`: chunks with a gradient that no update has used."""
        is_again = self._in_backward and not self.owes_step and not self._num_backwards
        if is_again and any(map(self._gradients.is_trainable, leftovers())):
            raise Refused(
                "optimizer.step() came again without a backward since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the default)."
            )
        if self._num_backwards not in (0, self._accumulate):
            self._tell(f"step() came after {self._num_backwards}")

    def end_step(self) -> None:
        self.owes_step = False
        self._num_backwards = 0

    def stay_silent(self) -> None:
        """About steps of other lengths: whoever has made the loop knows of them, and the user has promised nothing."""
        self._was_told = True

    def _tell(self, what: str) -> None:
        """A step of one backward has promised nothing."""
        if self._accumulate == 1 or self._was_told:
            return
        self._was_told = True
        warnings.warn(
            f"{what} backwards, but this model was wrapped with accumulate={self._accumulate}: as many before every "
            "step. Results are the same, but such a step is slower than planned; if this is how your loop is, wrap "
            "with the number that it has",
            stacklevel=5,
        )

    def _zeroing(self) -> str:
        """What would have dropped the gradients that there are."""
        unowned = self._gradients.valid_unowned()
        if unowned is None:
            return "optimizer.zero_grad()"
        return f"model.zero_grad() (the optimizer does not know {unowned!r}, so its zero_grad() leaves that gradient)"
