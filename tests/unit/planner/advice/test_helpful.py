"""What would help is what was planned with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hightide.doctor.known import load_machine
from hightide.ir.machine import SIMULATED
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import parse_bytes
from hightide.planner.advice import helpful as helpful_module
from hightide.planner.advice.helpful import (
    LEAST_SPEEDUP,
    Circumstances,
    Improvements,
    fitting,
    improvements,
    size_option,
)
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.floor import floors
from hightide.planner.problem import Problem, Terms
from hightide.planner.search import search as search_module
from hightide.planner.search.calls import leanest_cuts
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.moves import Moves
from hightide.planner.search.nearby import fits, least_disk_bytes, why_not
from hightide.planner.search.search import quick_step_s, search
from hightide.planner.search.standing_bytes import StandingBytes
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched
from unit.planner.advice.test_why import solved
from unit.planner.predict.test_step_seconds import COSTS, with_gpu
from unit.planner.profiles import plan_with, stack

FAST = with_gpu(1e16, 1e12)  # with links of 1 MB/s
FAST = replace(FAST, gpu=replace(FAST.gpu, name=SIMULATED))  # where torch reserves nothing beside tensors
NO_MORE = Circumstances(gpu_memory_bytes=0)


def problem(gpu_bytes: int = 160_000, host_bytes: int = 2**30, **options: object) -> Problem:
    """A stack that streams: links and updates are the limit."""
    profile = stack(12, dtype="bfloat16")
    return Problem(profile, estimate(profile, FAST), FAST, Terms(gpu_bytes, host_bytes, **options))  # type: ignore[arg-type]


ASKED = problem()


@cache
def answer() -> Searched:
    return search(ASKED)


def improve(circumstances: Circumstances = NO_MORE) -> Improvements:
    return improvements(answer(), circumstances, lambda: True)


def test_the_most_helpful_comes_first_and_little_help_is_none() -> None:
    found = improve(Circumstances(gpu_memory_bytes=2**30))
    speedups = [one.speedup for one in found.found]
    assert speedups == sorted(speedups, reverse=True) and speedups[-1] >= LEAST_SPEEDUP and not found.untried
    by_option = {one.change.option: one for one in found.found}
    everything = by_option["--gpu 1GiB"]
    faster_s = search(ASKED.with_terms(gpu_bytes=2**30)).step.step_s
    assert everything.step_s == pytest.approx(faster_s, rel=0.02)  # a search may find more, but not much
    assert everything.speedup == answer().step.step_s / everything.step_s


def test_a_larger_batch_counts_by_samples_per_second() -> None:
    twice = next(one for one in improve().found if one.change.option == "--sequences 12")
    bigger = search(ASKED.with_samples(12))
    assert bigger.plan.num_samples == 12
    assert twice.speedup == pytest.approx(2 * answer().step.step_s / bigger.step.step_s, rel=0.03)
    own = improve(Circumstances(0, has_own_batch=True)).found
    assert {one.change.option for one in own if "12 samples" in one.change.text} == {""}


def test_changes_that_are_out_of_the_question_are_not_named() -> None:
    assert "--update in_backward" in {one.change.option for one in improve().found}
    assert "--update in_backward" not in {one.change.option for one in improve(Circumstances(0, clips=True)).found}
    done = ASKED.with_terms(update=Update.IN_BACKWARD, gradients=GradientDtype.PARAM)
    untried = improvements(replace(answer(), problem=done), NO_MORE, lambda: False).untried
    assert untried and not {"--update in_backward", "--gradients param"} & {change.option for change in untried}


@pytest.mark.parametrize("host_bytes", [2**30, 1_234_567, 999_999])
@pytest.mark.parametrize("gpu_bytes", [160_000, 234_567])
@pytest.mark.parametrize("gpu_memory_bytes", [0, 500_001, 24_114_102_272])
def test_what_is_priced_is_what_the_option_says(
    gpu_bytes: int, host_bytes: int, gpu_memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: dict[float, Problem] = {}

    def record(changed: Problem, known: Candidate, below_s: float) -> float:
        step_s = below_s / (2 + len(priced))
        priced[step_s] = changed
        return step_s

    monkeypatch.setattr(helpful_module, "nearby_step_s", record)
    asked = ASKED.with_terms(gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    full = replace(answer().plan.forecast, host_peak_bytes=host_bytes)
    placement = answer().placement.of(replace(answer().plan, forecast=full))
    found = replace(answer(), problem=asked, placement=placement)
    sizes = {"--gpu": "gpu_bytes", "--host": "host_bytes"}
    named = improvements(found, Circumstances(gpu_memory_bytes), lambda: True).found
    words = [(one, *one.change.option.split()) for one in named]
    assert {option for _, option, _ in words} >= set(sizes)
    for one, option, size in words:
        if option in sizes:
            assert getattr(priced[one.step_s].terms, sizes[option]) == parse_bytes(size, option), one.change


@pytest.mark.parametrize(
    ("gpu_bytes", "gpu_memory_bytes", "expected"),
    [
        ("16GiB", 24_114_102_272, ["--gpu 22.4GiB"]),  # a third more would be beyond it
        ("40GiB", 80_350_000_000, ["--gpu 56GiB", "--gpu 74.8GiB"]),
        ("40GiB", 61 * 2**30, ["--gpu 61GiB"]),  # 56 would be nearly the same
        ("24GiB", 24_114_102_272, []),
        ("24GiB", 0, ["--gpu 32GiB"]),  # nobody knows how much it has
    ],
)
def test_no_more_gpu_memory_is_named_than_there_is_and_no_two_nearly_equal(
    gpu_bytes: str, gpu_memory_bytes: int, expected: list[str]
) -> None:
    asked = ASKED.with_terms(gpu_bytes=parse_bytes(gpu_bytes, "--gpu"))
    untried = improvements(replace(answer(), problem=asked), Circumstances(gpu_memory_bytes), lambda: False).untried
    assert [change.option for change in untried if change.option.startswith("--gpu")] == expected


def test_what_there_was_no_time_for_is_said() -> None:
    times = iter([True, False, False, False, False])
    found = improvements(answer(), NO_MORE, lambda: next(times))
    assert len(found.found) <= found.num_tried == 1 and len(found.untried) >= 2


def test_a_pinned_micro_batch_may_be_what_is_slow() -> None:
    pinned = ASKED.with_terms(gpu_bytes=2**20, micro_batch=1)
    costs = replace(ASKED.costs, calls=tuple(replace(one, issue_s=1.0) for one in ASKED.costs.calls))
    asked = replace(pinned, costs=costs)
    found = improvements(search(asked), NO_MORE, lambda: True).found
    freed = [one for one in found if "leave out --micro-batch" in one.change.text]
    assert freed and freed[0].speedup > 2 and not freed[0].change.option, "no option would do it"


@pytest.mark.parametrize(("gpu_bytes", "host_bytes"), [(8_000, 2**30), (160_000, 600_000), (8_000, 100_000)])
def test_the_memory_that_would_fit_fits(gpu_bytes: int, host_bytes: int) -> None:
    asked = problem(gpu_bytes, host_bytes)
    with pytest.raises(InfeasiblePlan) as refused:
        search(asked)
    enough, *_ = fitting(asked, refused.value, NO_MORE, lambda: True)
    words = enough.option.split()
    for option, size in zip(words[::2], words[1::2], strict=True):
        asked = asked.with_limit(Tier(option.removeprefix("--")), parse_bytes(size, option))
    assert fits(asked)


def test_each_tier_that_would_do_is_named_without_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(160_000, 600_000)
    with pytest.raises(
        InfeasiblePlan, match=r"missing on the host.*Limits\(host=\d+\), or Limits\(gpu=\d+\)"
    ) as refused:
        search(asked)
    monkeypatch.setattr(search_module._Search, "run", lambda self: pytest.fail("whether it fits needs no search"))
    tiers = [next(iter(limits)) for limits in refused.value.enough]
    assert tiers == [Tier.HOST, Tier.GPU]
    for circumstances, expected in (
        (Circumstances(2**30), ["--host", "--gpu"]),
        (NO_MORE, ["--host"]),
    ):  # as much as the GPU has
        named = [change.option.split()[0] for change in fitting(asked, refused.value, circumstances, lambda: True)]
        assert [option for option in named if option in ("--host", "--gpu")] == expected


def test_what_is_less_than_the_chunks_fits_nothing_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem()
    least = StandingBytes(Trials(asked).space).least_bytes((Tier.GPU, Tier.HOST))
    needed = answer().plan.forecast
    assert least <= needed.gpu_peak_bytes + needed.host_peak_bytes
    monkeypatch.setattr(Moves, "leanest", lambda *_: pytest.fail("looked"))
    memory = {"gpu_bytes": least // 4, "host_bytes": least // 4}
    rest = least - 2 * (least // 4)
    for short in ({"gpu_bytes": least // 2, "host_bytes": least - least // 2 - 1}, {**memory, "disk_bytes": rest - 1}):
        assert not fits(asked.with_terms(**short))
        with pytest.raises(InfeasiblePlan):
            quick_step_s(asked.with_terms(**short))
    with pytest.raises(pytest.fail.Exception, match="looked"):
        fits(asked.with_terms(**memory, disk_bytes=rest))


def test_other_changes_that_fit_are_named_too() -> None:
    sizes = range(2**20, 0, -(2**14))
    asked = next(asked for size in sizes if not fits(asked := problem(host_bytes=size)))  # just too little
    with pytest.raises(InfeasiblePlan) as refused:
        search(asked)
    options = [change.option for change in fitting(asked, refused.value, NO_MORE, lambda: True)]
    assert options[0].startswith(("--host ", "--gpu ")) and "--gradients param" in options
    (fewer,) = [option for option in options if option.startswith("--sequences")]
    assert fits(asked.with_samples(int(fewer.split()[1])))


def test_a_disk_is_named_where_it_helps_in_several_calls_only() -> None:
    """Block inputs of all samples are too many for the host, and for the buffers on their way to a disk."""
    profile = stack(12, num_samples=32, dtype="bfloat16")
    whole = Problem(
        profile, estimate(profile, FAST), replace(FAST, disk=load_machine("h200").disk), Terms(100_000, 150_000)
    )
    assert least_disk_bytes(whole) is None
    asked = whole, why_not(whole), NO_MORE, lambda: True
    assert not any("--disk" in change.option for change in fitting(*asked))
    (option,) = (change.option for change in fitting(*asked, leanest_cuts(whole)) if "--disk" in change.option)
    size = parse_bytes(option.removeprefix("--disk FOLDER:"), Tier.DISK)
    assert [fits(cut.with_limit(Tier.DISK, size)) for cut in leanest_cuts(whole)] == [False, True]


def test_sizes_are_rounded_to_the_safe_side() -> None:
    for num_bytes in (1, 1023, 1024, 1025, 2**20 - 1, 24 * 2**30 + 12345, 2**42 + 1):
        assert 0 <= parse_bytes(size_option(num_bytes), "") - num_bytes <= max(1024, num_bytes // 10)
        assert parse_bytes(size_option(2**20 + num_bytes, up=False), "") <= 2**20 + num_bytes
    assert size_option(24 * 2**30) == "24GiB" and size_option(26_038_108_160) == "24.3GiB"


def test_the_floor_counts_no_recomputation_and_each_lane_alone() -> None:
    profile = stack()
    plan = replace(plan_with(profile, micro_batch=2), profile=profile)
    found = floors(solved(plan, COSTS))
    moved_bytes = sum(chunk.grad_bytes for chunk in plan.layout.chunks)  # gradients go home once, in fp32
    assert found[Lane.D2H] == pytest.approx(moved_bytes / 1e6)
    layer = COSTS.calls[1]
    assert found[Lane.COMPUTE] >= 4 * (layer.forward_kept_s.at(6) + layer.backward_s.at(6))
    kept = replace(plan_with(profile, Tier.GPU, Tier.GPU, micro_batch=6), profile=profile)
    assert floors(solved(kept, COSTS))[Lane.COMPUTE] == found[Lane.COMPUTE]
    assert floors(solved(kept, COSTS))[Lane.H2D] == 0
