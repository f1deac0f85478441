import re
from dataclasses import replace

import pytest

from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, Selective, Work
from hightide.ir.machine import SIMULATED
from hightide.ir.passes import Passes
from hightide.ir.plan import GradientDtype, Plan, Sharing, Update
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import format_bytes
from hightide.planner.advice.explain import explain
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import bytes_forecast, peaks, reserved_bytes
from hightide.planner.solution import Solution
from unit.planner.advice.test_why import GPU, REAL
from unit.planner.profiles import plan_with, rounded_on_gpu, stack
from unit.planner.ranked import ranked


def text_of(profile, plan, machine=None):
    schedule = lower(profile, plan, Mode.TRAIN)
    plan = replace(plan, forecast=bytes_forecast(schedule, peaks(schedule), machine))
    return explain(profile, Placement(plan), Passes.of(schedule), peaks(schedule))


def test_equal_consecutive_blocks_are_one_row():
    profile = stack(12)
    plan = plan_with(profile)
    blocks = tuple(
        replace(b, params=Tier.GPU, states=Tier.GPU, activation=Activation.KEEP) if 0 < i < 5 else b
        for i, b in enumerate(plan.blocks)
    )
    rows = text_of(profile, replace(plan, blocks=blocks)).splitlines()
    table = [row.split() for row in rows[rows.index(next(r for r in rows if r.startswith("block"))) + 1 :]][:3]
    assert table == [
        ["embed", "host", "host", "recompute", "gpu"],
        ["layers.0", "..", "layers.3", "(4)", "gpu", "gpu", "keep", "gpu"],
        ["layers.4", "..", "head", "(10)", "host", "host", "recompute", "gpu"],
    ]


def test_levels_are_told_in_words_with_blocks_and_bytes():
    rule = Selective(Affine(0, 512), Work(), flop_per_byte=1, num_held=1)
    profile = stack(6)
    profile = replace(profile, calls=tuple(replace(call, selective=rule) for call in profile.calls))
    plan = plan_with(profile)
    ways = {
        1: {"activation": Activation.SELECTIVE},
        2: {"activation": Activation.SELECTIVE, "held": Tier.HOST},
        3: {"activation": Activation.SELECTIVE, "held": Tier.HOST},
        4: {"activation": Activation.KEEP, "held": Tier.HOST},
        5: {"activation": Activation.KEEP},
    }
    blocks = tuple(replace(block, **ways.get(at, {})) for at, block in enumerate(plan.blocks))
    plan = replace(plan, blocks=blocks, micro_batch=plan.num_samples)
    lines = text_of(profile, plan).splitlines()
    part, kept = 512 * plan.num_samples, profile.calls[5].kept.at(plan.num_samples)
    told = lines.index("activations, from forward to backward (of a part, the rest is computed again):")
    assert lines[told + 1 : told + 6] == [
        "  recompute  3 blocks:   backward computes them again",  # the embedding's is nobody's to keep
        f"  in part    1 block:    {format_bytes(part)} of products and attention wait on the GPU",
        f"  swap       2 blocks:   {format_bytes(2 * part)} of products and attention wait on the host",
        f"  swap all   1 block:    {format_bytes(kept)} wait on the host, nothing is computed again",
        f"  keep       1 block:    {format_bytes(kept)} wait on the GPU, nothing is computed again",
    ]
    cells = {line.split()[0]: line[61:72].strip() for line in lines if line.startswith("layers")}
    assert cells == {
        "layers.0": "in part",
        "layers.1": "swap",
        "layers.3": "swap all",
        "layers.4": "keep",
        "layers.5": "recompute",
    }
    assert lines[-1] == f"  of each {format_bytes(2 * part + kept)} swapped activations"
    assert max(map(len, lines)) <= 80
    plain = text_of(profile, plan_with(profile))
    assert "activations, from forward to backward:\n  recompute " in plain and "swapped" not in plain


def test_a_tied_head_is_where_its_owner_is():
    profile = stack(2, tied=True)
    on_gpu = plan_with(profile, Tier.GPU, Tier.GPU)
    head = replace(on_gpu.blocks[-1], params=Tier.HOST, states=Tier.HOST)
    plan = replace(on_gpu, blocks=(*on_gpu.blocks[:-1], head))
    assert lower(profile, plan, Mode.TRAIN) == lower(profile, on_gpu, Mode.TRAIN), "what is said of it means nothing"
    assert text_of(profile, plan) == text_of(profile, on_gpu)
    assert [block.params for block in Placement(plan).blocks_in_effect] == [Tier.GPU] * len(plan.blocks)
    first = replace(on_gpu.blocks[0], states=Tier.HOST)
    moved = replace(on_gpu, blocks=(first, *on_gpu.blocks[1:]))
    assert (Placement(moved).blocks_in_effect[-1].params, Placement(moved).blocks_in_effect[-1].states) == (
        Tier.GPU,
        Tier.HOST,
    )
    assert re.search(r"\nhead +gpu +host +", text_of(profile, moved))


def test_a_block_without_parameters_is_on_no_tier():
    profile = stack(2)
    bare = replace(profile.blocks[1], params=())
    named = set(profile.blocks[1].params)
    params = tuple(spec for spec in profile.params if not named & set(spec.names))
    profile = replace(profile, params=params, blocks=(profile.blocks[0], bare, *profile.blocks[2:]))
    assert re.search(r"\nlayers.0 +- +- +recompute", text_of(profile, plan_with(profile)))


def test_it_says_whether_it_fits_and_by_how_much():
    profile = stack()
    plan = plan_with(profile)
    peak = peaks(lower(profile, plan, Mode.TRAIN))
    fits = replace(plan, gpu_limit_bytes=peak.gpu_peak_bytes + 1024, host_limit_bytes=peak.host_peak_bytes)
    assert text_of(profile, fits).startswith("fits the limits\n") and "1.0 KiB free" in text_of(profile, fits)
    tight = replace(fits, gpu_limit_bytes=peak.gpu_peak_bytes - 512)
    assert text_of(profile, tight).startswith("DOES NOT FIT") and "512 B TOO MUCH" in text_of(profile, tight)


def test_of_a_real_gpu_the_peak_is_what_torch_reserves_and_tensors_are_a_part_of_it():
    profile = stack()
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    peak = peaks(schedule)
    reserved = reserved_bytes(schedule)
    plan = replace(plan_with(profile), gpu_limit_bytes=reserved + 1024, host_limit_bytes=peak.host_peak_bytes)
    head, gpu, tensors, host, *_ = text_of(profile, plan, REAL).splitlines()
    assert head == "fits the limits" and "1.0 KiB free" in gpu and host.startswith("  host  peak")
    assert gpu.startswith(f"  gpu   peak {format_bytes(reserved):>10} of ")
    beside = format_bytes(reserved - peak.gpu_peak_bytes)
    assert tensors == (
        f"        of it {format_bytes(peak.gpu_peak_bytes)} tensors, {beside} reserved by torch beside them"
    )
    tight = replace(plan, gpu_limit_bytes=reserved - 512)
    too_much = text_of(profile, tight, REAL)
    assert too_much.startswith("DOES NOT FIT") and "512 B TOO MUCH" in too_much
    for machine in (None, GPU):
        assert text_of(profile, tight, machine).startswith("fits the limits\n")
        assert "reserved" not in text_of(profile, tight, machine)


def test_precision_timing_traffic_and_micro_batches_are_stated():
    profile = stack(2, dtype="bfloat16")
    text = text_of(profile, plan_with(profile, update=Update.IN_BACKWARD))
    for words in (
        "  parameters     bfloat16, and compute unless under autocast\n",
        "  gradient sums  float32; norms are of the sums\n",
        "  gradients      float32\n",
        "  master copies  float32, of bfloat16 parameters; 16 bits beside each\n",
        "  moments        2 in float32\n",
        "  loss           ",
        "update: in_backward",
        "6 samples in 3 micro-batches of up to 2",
        "1 call unsplit: integer inputs only",
        "traffic per step:",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("update", "states", "said"),
    [
        (Update.DEFERRED, Tier.HOST, "deferred, begins at step(), runs beside the next forward"),
        (Update.DEFERRED, Tier.GPU, "deferred, on the GPU, at step()"),
        (Update.IN_BACKWARD, Tier.HOST, "in_backward, as soon as a gradient is final"),
        (Update.IN_BACKWARD, Tier.GPU, "in_backward, on the GPU, as soon as a gradient is final"),
    ],
)
def test_when_and_where_updates_run(update: Update, states: Tier, said: str) -> None:
    profile = stack(2)
    assert f"\nupdate: {said}\n" in text_of(profile, plan_with(profile, Tier.GPU, states, update=update))


def test_slots_are_told_of_if_there_are_any() -> None:
    profile = stack(2)
    assert "\nslots: none\n" in text_of(
        profile, replace(plan_with(profile, Tier.GPU, Tier.GPU), num_slots=0, num_grad_slots=0)
    )
    assert re.search(r"\nslots: \d+ of \S+ \S+, \d+ of \S+ \S+ for gradients\n", text_of(profile, plan_with(profile)))


def test_buffers_and_parked_gradients_are_counted() -> None:
    profile = stack(2)
    plan = replace(
        plan_with(profile, Tier.DISK, Tier.DISK), num_read_buffers=1, num_grad_buffers=2, num_state_buffers=3
    )
    said = " ".join(text_of(profile, plan).split())
    assert re.search(r"buffers on the host: 1 of \S+ \S+ from disk to the GPU, 2 of \S+ \S+ for gradients, 3 of ", said)
    assert "park" not in said
    at_once = plan_with(profile, Tier.DISK, Tier.DISK, update=Update.IN_BACKWARD)
    blocks = tuple(replace(block, late=number == 1) for number, block in enumerate(at_once.blocks))
    said = " ".join(text_of(profile, replace(at_once, blocks=blocks)).split())
    assert re.search(r"gradients park on the host until their update: \S+ \S+ at most; 1 block is updated late", said)


def test_a_plan_without_master_copies_says_why():
    profile = stack(2)
    assert "  master copies  none: all trained is float32\n" in text_of(profile, plan_with(profile))


def test_gradients_that_are_rounded_say_so_and_move_half_the_bytes():
    profile = stack(2, dtype="bfloat16")
    plan = plan_with(profile)
    rounded = replace(plan, gradients=GradientDtype.PARAM)
    assert "  gradients      bfloat16: the sum, rounded after each backward\n" in text_of(profile, rounded)
    moved = {made.gradients: lower(profile, made, Mode.TRAIN).lane(Lane.D2H) for made in (plan, rounded)}
    sums = {dtype: sum(action.num_bytes for action in actions) for dtype, actions in moved.items()}
    assert sums[GradientDtype.FLOAT32] == 2 * sums[GradientDtype.PARAM] > 0
    same = stack(2)
    assert text_of(same, plan_with(same)) == text_of(same, replace(plan_with(same), gradients=GradientDtype.PARAM))


def test_rounded_gradients_that_wait_on_the_gpu_are_told():
    profile = stack(6, dtype="bfloat16")
    plan = rounded_on_gpu(profile, plan_with(profile, params=Tier.GPU, states=Tier.GPU))
    waiting = sum(place.grad_bytes for place in Placement(plan).chunks)
    said = f"rounded gradients: those of 9 blocks wait for step() on the GPU, {format_bytes(waiting)}\n"
    assert said in text_of(profile, plan)
    assert "rounded gradients" not in text_of(profile, replace(plan, rounded_on_gpu=False))


def test_long_names_do_not_break_the_columns():
    profile = stack(2)
    plan = plan_with(profile)
    named = replace(plan, blocks=tuple(replace(b, name="a.very.long.module.path." * 4 + b.name) for b in plan.blocks))
    assert max(map(len, text_of(profile, named).splitlines())) <= 80


def test_a_plan_that_was_edited_says_so_until_it_is_described_again(tmp_path):
    profile = stack(6)
    plan = plan_with(profile)
    plan = Solution.of(profile, plan).described().plan
    plan.save(tmp_path / "plan.json")
    assert not Plan.load(tmp_path / "plan.json").is_edited and plan.explain() == plan.explanation
    edited = replace(plan, num_slots=plan.num_slots + 1)
    assert edited.is_edited and edited.explain().startswith("EDITED since it was made")
    assert max(map(len, edited.explain().splitlines())) <= 80
    again = Solution.of(profile, edited).described().plan
    assert not again.is_edited and again.decisions == edited.decisions != plan.decisions
    assert again.forecast.gpu_peak_bytes > plan.forecast.gpu_peak_bytes and again.explain() != plan.explain()
    assert not replace(edited, described="").is_edited, "of a file from before: nobody knows"


def test_what_ranks_hold_of_blocks_is_told_in_words():
    profile = stack(6)
    plan = plan_with(profile)
    blocks = tuple(replace(block, params=Tier.GPU, states=Tier.GPU) for block in plan.blocks)
    plan = ranked(profile, replace(plan, blocks=blocks), 2, Sharing.SHARDED, Sharing.PARAMS_REPLICATED)
    lines = text_of(profile, plan).splitlines()
    at = lines.index("ranks: 2; memory and traffic are of one rank")
    num_blocks = len({chunk.block for chunk in plan.layout.chunks})
    assert lines[at + 1 : at + 4] == [
        "  of blocks whose parameters stay on GPUs, each rank holds:",
        f"    {-(-num_blocks // 2):>4} in part: parameters and states are divided among the ranks",
        f"    {num_blocks // 2:>4} with all parameters; states are divided among the ranks",
    ]


def test_a_simulated_accelerator_is_called_one():
    profile = stack(3)
    solution = Solution.of(profile, plan_with(profile))
    simulated = replace(REAL, gpu=replace(REAL.gpu, name=SIMULATED))
    note = '  no GPU here: "gpu" is the simulated accelerator, a bounded part of host memory'
    told = solution.described(simulated)
    assert note in told.plan.explain().splitlines()
    assert note in told.moving_in((), 0, 0).plan.explain().splitlines()
    assert note not in solution.described(REAL).plan.explain()
