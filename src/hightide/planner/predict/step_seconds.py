"""Seconds of the compute lane's actions, and of a whole step.

[Note: what the compute lane does] A FORWARD is the block's micro-batches one after the other, and where there are
several a copy of each into the whole batch's output. A BACKWARD is the same way back; when it is done the gradient's
norms are taken (deferred updates only: for clipping) and it is rounded (plan.gradients). Rounding on the way home runs
on another stream, but takes its memory traffic from the block that computes meanwhile, so it counts here too. A head
with a fused loss goes by tiles of tokens. The forward of an embedding on the host is the gathering of its rows, for
which compute waits; its backward one copy. STEP stands for the model's own code between blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.ir.costs import Costs, Curve, LossCost
from hightide.ir.machine import Links
from hightide.ir.passes import Passes
from hightide.ir.plan import Plan, Update
from hightide.ir.split import micro_batches
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lookup import is_looked_up, rows_bytes
from hightide.planner.loss_tiles import early_gradient_bytes, num_rows
from hightide.planner.mechanism import Mechanism, Mechanisms
from hightide.planner.placement import Placement
from hightide.planner.predict.collective_seconds import collective_s, links_of
from hightide.planner.predict.simulator import Simulated, simulate, simulated_step_s
from hightide.planner.problem import Problem
from hightide.planner.waiting import micro_batch_of

NO_BYTES = Affine()

# Seconds of the thread that runs the model, over what blocks took in a rehearsal: in training it starts copies and
# updates too, and shares Python's lock with the threads of the lanes. Measured: docs/log.md, "Bookkeeping of Python".
ISSUE_FACTOR = 1.35

# Read and written by the thread that runs the model while it gathers rows of a table on the host (on two cores: 10e9).
GATHER_BYTES_PER_S = 8e9


@dataclass(frozen=True)
class StepForecast:
    simulated: Simulated
    issue_s: float  # what the thread that runs the model needs; it runs ahead of the GPU, unless this is the longer one

    @property
    def step_s(self) -> float:
        return max(self.simulated.step_s, self.issue_s)


def forecast(problem: Problem, placement: Placement, schedule: Schedule | Passes) -> StepForecast:
    """The steady state of training steps under a plan, which was lowered to this."""
    simulated = simulate(_restricted(schedule, problem.terms.without), _seconds(problem, placement), problem.machine)
    return StepForecast(simulated, _issue_s(problem.profile, placement.plan, problem.costs))


def forecast_step_s(problem: Problem, placement: Placement, schedule: Schedule | Passes, num_steps: int) -> float:
    """As `forecast`, for those who compare plans."""
    limited = _restricted(schedule, problem.terms.without)
    step_s = simulated_step_s(limited, _seconds(problem, placement), problem.machine, num_steps)
    return max(step_s, _issue_s(problem.profile, placement.plan, problem.costs))


def _seconds(problem: Problem, placement: Placement) -> Callable[[Action], float]:
    plan = placement.plan
    return seconds_of(problem.profile, plan, problem.costs, placement, links_of(problem.machine, plan))


def _restricted(step: Schedule | Passes, without: Mechanisms) -> Passes:
    """Without overlap of updates, a step begins when all updates of the one before are through: its first fetch, and
    its first block."""
    passes = Passes.of(step)
    if Mechanism.UPDATE_OVERLAP not in without:
        return passes
    updates = tuple(action.id for action in passes.last.lane(Lane.CPU) if action.op is Op.UPDATE)
    (schedule, count), *rest = passes.runs
    first = {schedule.ticks[0].id, *(action.id for action in schedule.lane(Lane.H2D)[:1])}
    waiting = [
        action.changed(after_prev=tuple(dict.fromkeys((*action.after_prev, *updates))))
        if action.id in first
        else action
        for action in schedule.actions
    ]
    return Passes(((replace(schedule, actions=tuple(waiting)), count), *rest))


def _issue_s(profile: ModelProfile, plan: Plan, costs: Costs) -> float:
    kinds = Counter((call.kind, call.splittable) for call in profile.calls)
    calls = {(call.kind, call.splittable): call for call in profile.calls}
    issued_s = sum(
        count * costs.calls[kind].issue_s * len(_micro_batches(plan, calls[kind, splittable]))
        for (kind, splittable), count in kinds.items()
    )
    return plan.accumulate * (costs.glue_s + ISSUE_FACTOR * issued_s)


def with_peaks(profile: ModelProfile, costs: Costs) -> ModelProfile:
    """The profile with the bytes that a rehearsal has measured in the place of those of tensors without values, which
    know nothing of compiled blocks. What lasts has a place of its own in a plan, and is measured with what is kept."""
    if not costs.peaks:
        return profile
    _check_costs(profile, costs)
    calls = []
    for call in profile.calls:
        measured = costs.peaks[call.kind]
        if measured.forward_bytes.points:
            call = replace(
                call,
                forward_peak=_line(measured.forward_bytes),
                kept=_line(measured.kept_bytes, call.lasting),
                backward_peak=_line(measured.backward_bytes),
                holes=Affine() if costs.is_compiled and not call.tiled else call.holes,
            )
            if call.selective is not None and measured.selective_bytes.points:
                call = replace(
                    call, selective=replace(call.selective, kept=_line(measured.selective_bytes, call.lasting))
                )
        calls.append(call)
    return replace(profile, calls=tuple(calls))


def _line(curve: Curve, without: Affine = NO_BYTES) -> Affine:
    """Never below the curve between its ends, since peaks are convex: see [Note: two sizes are enough]. `without`: what
    is no part of it."""
    if not curve.points:
        return NO_BYTES
    sizes = [curve.points[index].num_samples for index in (0, -1)]
    (low, at_low), (high, at_high) = ((size, max(0, int(curve.at(size)) - without.at(size))) for size in sizes)
    return Affine.through(low, at_low, high, at_high)


def seconds_of(
    profile: ModelProfile, plan: Plan, costs: Costs, placement: Placement | None = None, links: Links | None = None
) -> Callable[[Action], float]:
    """How long an action of the compute lane takes, and with links one of a collective lane, alone. See [Note: what the
    compute lane does], and [Note: what a collective takes] in collective_seconds.py."""
    _check_costs(profile, costs)
    return _Seconds(profile, placement or Placement(plan), costs, links)


def _check_costs(profile: ModelProfile, costs: Costs) -> None:
    if costs.fingerprint != profile.fingerprint:
        raise ValueError(
            f"these costs are of another model: they have the fingerprint {costs.fingerprint}, the model has "
            f"{profile.fingerprint}; rehearse or estimate it again"
        )
    num_kinds = 1 + max((call.kind for call in profile.calls), default=-1)
    for what, num_known in (("costs", len(costs.calls)), ("peaks", len(costs.peaks) or num_kinds)):
        if num_known != num_kinds:
            raise ValueError(
                f"{what} of {num_known} kinds of calls, but the model has {num_kinds}: they were made for another "
                "batch; rehearse or estimate it again"
            )
    if costs.loss is None and any(profile.blocks[call.block].lazy_head for call in profile.calls):
        raise ValueError(
            "these costs know no loss, but the head of this model is fused with one: they were made for "
            "another batch; rehearse or estimate it again"
        )


class _Seconds:
    def __init__(self, profile: ModelProfile, placement: Placement, costs: Costs, links: Links | None) -> None:
        self._profile, self._plan, self._placement, self._costs = profile, placement.plan, placement, costs
        self._links = links
        self._known: dict[tuple[Op, int, Activation, bool], float] = {}  # of calls of one kind

    def __call__(self, action: Action) -> float:
        if self._links is not None and action.chunk is not None and action.lane in COLLECTIVES:
            return collective_s(self._links, self._plan, action.op, self._placement.chunks[action.chunk])
        assert action.lane is Lane.COMPUTE, f"{action.id} is of the lane {action.lane}"
        if action.op is Op.FORWARD:
            return self._of_call(action, self._forward)
        if action.op is Op.BACKWARD:
            return self._of_call(action, self._backward) + self._finish_gradients(action)
        if action.op is Op.UPDATE:
            return action.num_bytes / self._costs.update_bytes_per_s
        if action.op is Op.CLEAR:
            return self._touch(action.num_bytes)
        if action.op in (Op.FETCH, Op.WRITE_BACK):  # of a gradient, between its slot and its place on the GPU
            assert action.chunk is not None
            return self._touch(self._placement.chunks[action.chunk].chunk.grad_bytes + action.num_bytes)
        return self._costs.glue_s if action.op is Op.STEP else 0.0

    def _of_call(self, action: Action, seconds: Callable[[CallSpec], float]) -> float:
        assert action.call is not None
        call = self._profile.calls[action.call]
        key = (action.op, call.kind, self._activation(call), is_looked_up(self._plan, call))
        if key not in self._known:
            self._known[key] = self._costs.load_factor * seconds(call)
        return self._known[key]

    def _forward(self, call: CallSpec) -> float:
        if is_looked_up(self._plan, call):  # before its rows can go
            return 2 * rows_bytes(self._plan, call) / GATHER_BYTES_PER_S
        if self._is_fused(call):
            return self._num_tiles() * (self._loss.forward_s + (self._loss.backward_s if self._is_early else 0.0))
        cost, sizes = self._costs.calls[call.kind], _micro_batches(self._plan, call)
        curve = cost.forward(self._activation(call))
        return sum(curve.at(size) for size in sizes) + self._gather(call.outputs.at(sum(sizes)), sizes)

    def _backward(self, call: CallSpec) -> float:
        if is_looked_up(self._plan, call):
            return self._touch(2 * rows_bytes(self._plan, call))
        if self._is_fused(call):
            if self._is_early:  # scaled, and added to the sum: each read twice and written once
                return self._touch(3 * early_gradient_bytes(self._profile, call, self._plan.num_samples))
            kept = min(self._plan.loss_kept_tokens, self._num_rows()) / self._loss.tile_tokens
            projected_s = (self._num_tiles() - kept) * self._loss.project_s
            return self._num_tiles() * self._loss.backward_s + projected_s
        cost, sizes = self._costs.calls[call.kind], _micro_batches(self._plan, call)
        repeated = cost.repeated(self._activation(call))
        seconds = sum(cost.backward_s.at(size) + repeated.at(size) for size in sizes)
        return seconds + self._gather(call.input_grads.at(sum(sizes)), sizes)

    def _finish_gradients(self, action: Action) -> float:
        assert action.block is not None
        return sum(self._touch(self._finishing_bytes(place)) for place in self._placement.by_block[action.block])

    def _finishing_bytes(self, place: ChunkPlace) -> int:
        """Read and written when a block's backward is done: norms, and rounding of the sum."""
        if place.is_looked_up:  # the host has it
            return 0
        norms = place.shard.grad_bytes if self._plan.update is Update.DEFERRED else 0
        if place.rounds_to is None or self._plan.accumulate > 1:  # then once in many passes
            return norms
        if place.is_rounded_home:  # by an action of its own; fp16 before the norms are taken, too
            return norms + (2 * (place.shard.grad_bytes + place.grad_bytes) if place.rounds_to == "float16" else 0)
        there = place.shard.grad_bytes + place.grad_bytes
        return norms + (2 * there if place.rounds_in_place else 0) + (0 if place.states is Tier.GPU else there)

    def _gather(self, num_bytes: int, sizes: list[int]) -> float:
        return self._touch(2 * num_bytes) if len(sizes) > 1 else 0.0

    def _touch(self, num_bytes: int) -> float:
        return num_bytes / self._costs.memory_bytes_per_s

    def _is_fused(self, call: CallSpec) -> bool:
        return self._profile.blocks[call.block].lazy_head

    def _activation(self, call: CallSpec) -> Activation:
        return self._plan.blocks[call.block].activation

    def _num_rows(self) -> int:
        return num_rows(self._profile, self._plan.num_samples)

    @property
    def _loss(self) -> LossCost:
        assert self._costs.loss is not None
        return self._costs.loss

    @property
    def _is_early(self) -> bool:
        return self._plan.loss_in_forward

    def _num_tiles(self) -> float:
        return self._num_rows() / self._loss.tile_tokens


def _micro_batches(plan: Plan, call: CallSpec) -> list[int]:
    return [size for _, size in micro_batches(plan.num_samples, micro_batch_of(plan, call, Mode.TRAIN))]
