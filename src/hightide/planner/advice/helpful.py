"""Changes that would help: the same problem with one thing changed, by a quick look (nearby.py). What makes a step
faster was planned and simulated before it is named: a search may find still more. Where nothing fits, the smallest
changes that would fit: for each the bytes of the leanest plans were counted, and how fast those are is not known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hightide.ir.block import DTYPE_BYTES
from hightide.ir.chunk import GRAD_BYTES
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import counted, format_bytes, parse_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.search.nearby import fits, least_disk_bytes, nearby_step_s, why_not
from hightide.planner.solution import Searched

LEAST_SPEEDUP = 1.05  # less is within the error of a forecast
MAX_RAISES = 4  # of limits, until it fits
FULL = 0.9  # of the host: beyond, more of it may help
NEARLY_ALL = 0.9  # of the GPU: beyond, all of it is the better advice
LOOK_LONGER = "--look 30"  # seconds: enough for the largest shapes
_NAMES = {Tier.GPU: "GPU memory", Tier.HOST: "host memory", Tier.DISK: "disk"}


@dataclass(frozen=True)
class Circumstances:
    """What else there is to know about what could be changed."""

    gpu_memory_bytes: int  # as much as the GPU has to give; 0: nobody knows
    clips: bool = False  # in-backward updates are out of the problem
    has_own_batch: bool = False  # --sequences does not decide about it


@dataclass(frozen=True)
class Change:
    text: str  # what to change, in words
    option: str  # of the command; "": there is none


_ANY_MICRO_BATCH = Change("micro-batches of another size: leave out --micro-batch", "")


@dataclass(frozen=True)
class Improvement:
    change: Change
    step_s: float
    speedup: float  # of samples per second; at least


@dataclass(frozen=True)
class Improvements:
    found: tuple[Improvement, ...]  # the most helpful first
    untried: tuple[Change, ...]  # for want of time
    num_tried: int
    look_longer: str = ""  # the option that gives it more time; "": nothing is untried


def improvements(found: Searched, circumstances: Circumstances, may_go_on: Callable[[], bool]) -> Improvements:
    """`may_go_on` is asked before each new plan."""
    assert found.candidate is not None, "only the rank that has searched knows where to go on"
    before = found.profile.num_samples / found.step.step_s
    changes = _faster(found, circumstances)
    helpful, untried = [], []
    for change, changed in changes:
        if not may_go_on():
            untried.append(change)
            continue
        num_samples = changed.profile.num_samples
        step_s = nearby_step_s(changed, found.candidate, below_s=num_samples / (before * LEAST_SPEEDUP))
        if step_s < math.inf:
            helpful.append(Improvement(change, step_s, num_samples / step_s / before))
    helpful.sort(key=lambda one: -one.speedup)
    longer = LOOK_LONGER if untried else ""
    return Improvements(tuple(helpful), tuple(untried), len(changes) - len(untried), longer)


def _faster(found: Searched, circumstances: Circumstances) -> list[tuple[Change, Problem]]:
    """What usually helps most comes first: for models that take long to plan there is time for one or two."""
    problem = found.problem
    # What a disk reads and writes in a step does not depend on its samples: where that is the limit, more of them help.
    factors = (2, 4) if _is_limited_by_disk(found) else (2,)
    sizes = [factor * problem.profile.num_samples for factor in factors]
    changes = [(_batch_of(size, problem, circumstances), problem.with_samples(size)) for size in sizes]
    whole = found.placement.is_resident
    if problem.terms.update is Update.DEFERRED and not circumstances.clips and not whole:
        change = Change("in-backward updates, if your loop never clips", "--update in_backward")
        changes.append((change, problem.with_terms(update=Update.IN_BACKWARD)))
    changes += _more_gpu(problem, circumstances)
    if problem.terms.gradients is GradientDtype.FLOAT32 and _has_short_params(problem) and not whole:
        change = Change("gradients rounded to their parameter's dtype", "--gradients param")
        changes.append((change, problem.with_terms(gradients=GradientDtype.PARAM)))
    if problem.terms.micro_batch is not None:
        changes.append((_ANY_MICRO_BATCH, _unpinned(problem)))
    if found.plan.forecast.host_peak_bytes > FULL * problem.terms.host_bytes:
        changes.append(_more(problem, Tier.HOST))
    return changes


def _is_limited_by_disk(found: Searched) -> bool:
    busy_s = found.step.simulated.busy_s
    return max(busy_s, key=lambda lane: busy_s[lane]).shares == Lane.DISK_READ.shares


def fitting(
    problem: Problem,
    refused: InfeasiblePlan,
    circumstances: Circumstances,
    may_go_on: Callable[[], bool],
    cuts: Sequence[Problem] = (),
) -> tuple[Change, ...]:
    """Changes that make it fit, each for itself: more memory, then what needs no other machine. `cuts`: the same step
    in other numbers of calls, if the loop may make them: from a disk it may fit in others than from memory alone."""
    found: list[Change] = []
    options: list[Callable[[], Change | None]] = [
        *_memories(problem, refused, circumstances),
        lambda: _with_disk(cuts or (problem,)),
        lambda: _rounded(problem),
        lambda: _any_micro_batch(problem),
        lambda: _fewer(problem, circumstances),
    ]
    for option in options:
        if may_go_on() and (change := option()) is not None:
            found.append(change)
    return tuple(found)


def _memories(
    problem: Problem, refused: InfeasiblePlan, circumstances: Circumstances
) -> list[Callable[[], Change | None]]:
    """Beyond what the GPU has only where nothing else would do."""
    possible = [limits for limits in refused.enough if limits.get(Tier.GPU, 0) <= circumstances.gpu_memory_bytes]
    return [partial(_enough, problem, limits) for limits in possible or refused.enough]


def _enough(problem: Problem, limits: Mapping[Tier, int]) -> Change | None:
    """Raises limits to what is needed; then, perhaps, that of another tier too."""
    raised: dict[Tier, int] = {}
    for _ in range(MAX_RAISES):
        if all(num_bytes <= raised.get(tier, 0) for tier, num_bytes in limits.items()):
            return None
        for tier, num_bytes in limits.items():
            raised[tier] = parse_bytes(size_option(num_bytes), tier)  # as it will be asked for
            problem = problem.with_limit(tier, raised[tier])
        if fits(problem):
            sizes = {tier: size_option(num_bytes) for tier, num_bytes in raised.items()}
            text = " and ".join(f"{_in_words(size)} of {_NAMES[tier]}" for tier, size in sizes.items())
            return Change(text, " ".join(limit_option(tier, size) for tier, size in sizes.items()))
        limits = why_not(problem).enough[0]
    return None


def _with_disk(cuts: Sequence[Problem]) -> Change | None:
    """Only where its speed is known."""
    if cuts[0].terms.disk_bytes or cuts[0].machine.disk is None:
        return None
    sizes = [size for size in map(least_disk_bytes, cuts) if size is not None]
    if not sizes:
        return None
    size = size_option(min(sizes))
    return Change(f"a disk of {_in_words(size)}", limit_option(Tier.DISK, size))


def limit_option(tier: Tier, size: str) -> str:
    return f"--{tier} {'FOLDER:' if tier is Tier.DISK else ''}{size}"


def _rounded(problem: Problem) -> Change | None:
    if problem.terms.gradients is GradientDtype.PARAM or not _has_short_params(problem):
        return None
    change = Change("gradients rounded to their parameter's dtype", "--gradients param")
    return change if fits(problem.with_terms(gradients=GradientDtype.PARAM)) else None


def _any_micro_batch(problem: Problem) -> Change | None:
    return _ANY_MICRO_BATCH if problem.terms.micro_batch is not None and fits(_unpinned(problem)) else None


def _fewer(problem: Problem, circumstances: Circumstances) -> Change | None:
    num_samples = problem.profile.num_samples
    if num_samples == 1 or not fits(problem.with_samples(1)):
        return None
    while not fits(problem.with_samples(num_samples := num_samples // 2)):
        pass
    return _batch_of(num_samples, problem, circumstances)


def _batch_of(num_samples: int, problem: Problem, circumstances: Circumstances) -> Change:
    """`num_samples`: in each call of the step."""
    terms = problem.terms
    per_step = num_samples * terms.accumulate
    options = [f"--sequences {per_step}"] + ([f"--calls {terms.accumulate}"] if terms.accumulate > 1 else [])
    if terms.micro_batch is not None and terms.micro_batch > num_samples:
        options.append(f"--micro-batch {num_samples}")
    text = f"{counted(per_step, 'sample')} per step"
    return Change(text, "" if circumstances.has_own_batch else " ".join(options))


def _more_gpu(problem: Problem, circumstances: Circumstances) -> list[tuple[Change, Problem]]:
    """A part of what this GPU has left, and all of it; only all of it where that is nearly the same."""
    some = _more(problem, Tier.GPU)
    if not circumstances.gpu_memory_bytes:
        return [some]
    everything = _with_size(problem, Tier.GPU, size_option(circumstances.gpu_memory_bytes, up=False), "all of this GPU")
    most_bytes = everything[1].terms.gpu_bytes
    if problem.terms.gpu_bytes >= most_bytes:
        return []
    return [some, everything] if some[1].terms.gpu_bytes < NEARLY_ALL * most_bytes else [everything]


def _more(problem: Problem, tier: Tier) -> tuple[Change, Problem]:
    """By a third to a half, a power of two: 8 GiB for 24, 32 GiB for 80."""
    limit_bytes = problem.terms.gpu_bytes if tier is Tier.GPU else problem.terms.host_bytes
    more_bytes = 1 << max(0, (limit_bytes // 2).bit_length() - 1)
    text = f"{format_bytes(more_bytes)} more {_NAMES[tier]}"
    return _with_size(problem, tier, size_option(limit_bytes + more_bytes), text)


def _with_size(problem: Problem, tier: Tier, size: str, text: str) -> tuple[Change, Problem]:
    """Asked with what the option says, which is rounded."""
    return Change(text, limit_option(tier, size)), problem.with_limit(tier, parse_bytes(size, tier))


def _unpinned(problem: Problem) -> Problem:
    return problem.with_terms(micro_batch=None)


def _has_short_params(problem: Problem) -> bool:
    return any(spec.trainable and DTYPE_BYTES[spec.dtype] < GRAD_BYTES for spec in problem.profile.params)


def size_option(num_bytes: int, up: bool = True) -> str:
    """As the command's options have it, with one decimal: 26038108160 -> 24.3GiB."""
    unit_bytes, unit = _unit(num_bytes)
    tenths = -(-10 * num_bytes // unit_bytes) if up else 10 * num_bytes // unit_bytes
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{unit}"


def _in_words(size: str) -> str:
    """24.3GiB -> 24.3 GiB."""
    return f"{size[:-3]} {size[-3:]}"


def _unit(num_bytes: int) -> tuple[int, str]:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return 1 << power, unit
    return 1 << 10, "KiB"
