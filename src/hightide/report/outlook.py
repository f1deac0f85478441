"""The answer of `hightide plan` as data: the keys of its --json. Sizes are bytes, times are seconds of one step."""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.action import ActionKey, Op
from hightide.ir.block import ModelProfile
from hightide.ir.plan import BlockPlan, GradientDtype, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.advice.explain import precisions
from hightide.planner.advice.helpful import Change, Improvements
from hightide.planner.advice.why import Reasons
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.floor import floors
from hightide.planner.predict.light import light_s, needed_flop
from hightide.planner.predict.save_forecast import SaveForecast
from hightide.planner.predict.wear import Wear, wear
from hightide.planner.problem import Problem
from hightide.planner.solution import Searched


@dataclass(frozen=True)
class Subject:
    """What was asked about."""

    model: str
    num_params: int
    num_trained_params: int
    num_samples: int  # per step
    tokens_per_sample: int  # 1: the model has no tokens
    machine: str
    machine_is_measured: bool  # False: at least one of its numbers is an estimate
    costs: str  # where times of blocks come from
    gpu_limit_bytes: int
    host_limit_bytes: int
    disk_limit_bytes: int  # 0: none was given
    gpus_per_node: int = 1  # of which each has such a batch, and these limits
    nodes: int = 1


@dataclass(frozen=True)
class TierUse:
    tier: Tier
    peak_bytes: int  # on a real GPU what torch reserves
    tensor_bytes: int  # of the peak
    limit_bytes: int
    free_bytes: int
    peak_at: str  # the action of the schedule; "": always


@dataclass(frozen=True)
class LaneUse:
    lane: Lane
    busy_s: float
    stall_s: float  # that compute waits for it
    floor_s: float  # what it would need alone; compute: with everything on the GPU and nothing computed twice


@dataclass(frozen=True)
class Precision:
    state: str
    dtype: str  # in words


@dataclass(frozen=True)
class Scaling:
    """Several GPUs against one of the same machine, which has the whole node to itself."""

    replicas: int  # groups of ranks that have a copy of everything; 1: shards are of all ranks
    alone_samples_per_s: float | None  # None: one alone cannot hold it
    efficiency: float | None  # samples per second, over those of as many that are alone
    node_host_bytes: int  # of all ranks of a node together
    node_disk_bytes: int


@dataclass(frozen=True)
class Outlook:
    """A plan that fits."""

    step_s: float
    samples_per_s: float  # of all ranks
    tokens_per_s: float | None  # None: the model has no tokens
    floor_s: float  # the longest of the lanes' floors
    floor_share: float  # of step_s
    needed_flop: int  # of the model's forward and backward, once each: nothing is recomputed
    light_s: float | None  # what they take at the rate of the GPU's large products. None: the simulated accelerator
    light_share: float | None  # of step_s
    limiting_lane: Lane  # the busiest
    issue_s: float  # of the thread that runs the model; equal to step_s: it is the limit
    tiers: tuple[TierUse, ...]
    lanes: tuple[LaneUse, ...]
    precisions: tuple[Precision, ...]
    calls: int  # of the model per step, each with a forward and a backward
    samples_per_call: int
    micro_batch: int
    update: Update
    gradients: GradientDtype
    blocks: tuple[BlockPlan, ...]  # of one with tied parameters only: the tiers of the block that owns them
    wear: Wear | None  # of the disk; None: nothing is written to one
    save: SaveForecast  # of a checkpoint


@dataclass(frozen=True)
class TierShortage:
    tier: Tier
    needed_bytes: int
    missing_bytes: int


@dataclass(frozen=True)
class Refusal:
    message: str
    tier: Tier | None  # that is short; None: it is not for want of memory
    needed_bytes: int
    moment: str  # the action of the schedule; "": always
    when: str  # the same in words
    shortages: tuple[TierShortage, ...]  # of all tiers that are short at once


@dataclass(frozen=True)
class PlanReport:
    subject: Subject
    fits: bool
    outlook: Outlook | None  # if it fits
    refusal: Refusal | None  # if not
    would_fit: tuple[Change, ...] = ()  # each change would make it fit
    would_help: Improvements | None = None  # changes that would make it faster
    why: Reasons | None = None  # of one block
    scaling: Scaling | None = None  # of several ranks


def subject(name: str, problem: Problem) -> Subject:
    profile, machine = problem.profile, problem.machine
    return Subject(
        model=name,
        num_params=sum(spec.numel for spec in profile.params),
        num_trained_params=sum(spec.numel for spec in profile.params if spec.trainable),
        num_samples=profile.num_samples * problem.terms.accumulate,
        tokens_per_sample=profile.tokens_per_sample,
        machine=machine.name,
        machine_is_measured=machine.is_measured,
        costs=problem.costs.source,
        gpu_limit_bytes=problem.terms.gpu_bytes,
        host_limit_bytes=problem.terms.host_bytes,
        disk_limit_bytes=problem.terms.disk_bytes,
        gpus_per_node=problem.terms.ranks // nodes_of(problem),
        nodes=nodes_of(problem),
    )


def nodes_of(problem: Problem) -> int:
    links = problem.machine.links
    return 1 if links is None or problem.terms.ranks == 1 else links.num_nodes


def scaling(found: Searched, alone: Searched | None) -> Scaling:
    """`alone`: the same model on one GPU; None: it does not fit."""
    ranks, nodes, forecast = found.plan.ranks, nodes_of(found.problem), found.plan.forecast
    alone_per_s = None if alone is None else outlook(alone).samples_per_s
    return Scaling(
        replicas=found.plan.replicas,
        alone_samples_per_s=alone_per_s,
        efficiency=None if alone_per_s is None else outlook(found).samples_per_s / (ranks * alone_per_s),
        node_host_bytes=ranks // nodes * forecast.host_peak_bytes,
        node_disk_bytes=ranks // nodes * forecast.disk_peak_bytes,
    )


def outlook(found: Searched, rated_bytes: int | None = None) -> Outlook:
    """`rated_bytes`: that may be written to the disk in its life; None: what the machine says."""
    profile, plan, step = found.profile, found.plan, found.step
    placement = found.placement
    alone = floors(found)
    lanes = tuple(
        LaneUse(lane, step.simulated.busy_s[lane], step.simulated.stall_s.get(lane, 0.0), alone[lane]) for lane in Lane
    )
    num_samples = profile.num_samples * plan.accumulate
    samples_per_s = plan.ranks * num_samples / step.step_s
    fastest_s = light_s(profile, num_samples, found.problem.machine)
    return Outlook(
        step_s=step.step_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * profile.tokens_per_sample if profile.tokens_per_sample > 1 else None,
        floor_s=max(alone.values()),
        floor_share=max(alone.values()) / step.step_s,
        needed_flop=needed_flop(profile, num_samples),
        light_s=fastest_s,
        light_share=None if fastest_s is None else fastest_s / step.step_s,
        limiting_lane=max(lanes, key=lambda one: one.busy_s).lane,
        issue_s=step.issue_s,
        tiers=_tiers(found),
        lanes=lanes,
        precisions=tuple(Precision(*row) for row in precisions(profile, placement).items()),
        calls=plan.accumulate,
        samples_per_call=plan.num_samples,
        micro_batch=plan.micro_batch,
        update=plan.update,
        gradients=plan.gradients,
        blocks=placement.blocks_in_effect,
        wear=_wear(found, rated_bytes),
        save=found.save,
    )


def _wear(found: Searched, rated_bytes: int | None) -> Wear | None:
    written_bytes, disk = found.passes.moved_bytes(Lane.DISK_WRITE), found.problem.machine.disk
    rated = rated_bytes if disk is None else rated_bytes or disk.rated_bytes
    return wear(written_bytes, found.step.step_s, rated) if written_bytes else None


def refusal(error: InfeasiblePlan, problem: Problem) -> Refusal:
    limits = problem.terms.limits
    short = tuple(TierShortage(tier, size, size - limits[tier]) for tier, size in error.enough[0].items())
    return Refusal(
        str(error), error.tier, error.num_bytes, error.moment, _in_words(error.moment, problem.profile), short
    )


_MOMENTS = {
    Op.FORWARD: "in forward of {}",
    Op.BACKWARD: "in backward of {}",
    Op.STASH: "when what {} leaves for its backward is on the host",
    Op.UNSTASH: "when what {} has left for its backward comes back to the GPU",
}


def _in_words(moment: str, profile: ModelProfile) -> str:
    if not moment:
        return "all the time"
    assert isinstance(moment, ActionKey)
    of_call = moment if moment.op in _MOMENTS else moment.at  # what moves a chunk says for which tick
    if of_call is None or of_call.op not in _MOMENTS or of_call.number is None:  # updates, and the step itself
        return "when parameters are updated"
    return _MOMENTS[of_call.op].format(profile.blocks[profile.calls[of_call.number].block].name)


def _tiers(found: Searched) -> tuple[TierUse, ...]:
    forecast, limits, peaks = found.plan.forecast, found.plan.limits, found.peaks.by_tier
    tensors = {**forecast.by_tier, Tier.GPU: forecast.gpu_peak_bytes}
    return tuple(
        TierUse(tier, used, tensors[tier], limits[tier], limits[tier] - used, peaks[tier][1])
        for tier, used in forecast.by_tier.items()
        if tier is not Tier.DISK or limits[tier]
    )
