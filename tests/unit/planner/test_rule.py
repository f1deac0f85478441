from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.action import Mode
from hightide.ir.block import Affine
from hightide.ir.plan import Activation, Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.check import check_plan
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.loss import loss_tile_tokens
from hightide.planner.lower import lower
from hightide.planner.memory import peaks
from hightide.planner.rule import FILL_FRACTION, plan_by_rule
from hightide.planner.verify import verify
from unit.planner.profiles import UNLIMITED, Sketch, build, call, param, profiles, stack


def rule(profile, gpu_bytes=UNLIMITED, host_bytes=UNLIMITED, update=Update.DEFERRED, micro_batch=None):
    return plan_by_rule(profile, gpu_bytes, host_bytes, update, micro_batch)


def leanest_bytes(profile, micro_batch=None):
    """What the rule itself says it needs at least."""
    with pytest.raises(InfeasiblePlan) as caught:
        rule(profile, gpu_bytes=1, micro_batch=micro_batch)
    return caught.value.num_bytes


def whole_bytes(profile):
    return rule(profile).forecast.gpu_peak_bytes


def test_what_fits_wholly_stays_on_the_gpu_and_keeps_its_activations():
    plan = rule(stack())
    assert all(block.params is block.states is Tier.GPU for block in plan.blocks)
    assert [b.activation for b in plan.blocks][:-1] == [Activation.KEEP] * 6 and plan.micro_batch == 6
    assert (plan.num_slots, plan.num_grad_slots, plan.forecast.host_peak_bytes) == (0, 0, 0)
    assert "everything stays on the GPU" in plan.explain()


def test_the_gpu_fills_in_execution_order_and_never_over_the_limit():
    profile = stack(12)
    least, most = leanest_bytes(profile), whole_bytes(profile)
    seen = set()
    for step in range(9):
        limit = least + (most - least) * step // 8
        plan = rule(profile, limit)
        check_plan(profile, plan)
        assert plan.forecast.gpu_peak_bytes <= limit
        layers = [block for block in plan.blocks if block.name.startswith("layers")]
        on_gpu = [(block.params, block.states) for block in layers]
        assert on_gpu == sorted(on_gpu)  # (gpu, gpu), then (gpu, host), then (host, host)
        keeps = [block.activation for block in layers]
        assert keeps == sorted(keeps, key=lambda activation: activation is Activation.KEEP)
        seen.add(sum(block.states is Tier.GPU for block in layers))
    assert len(seen) >= 4


def test_tiny_blocks_become_persistent_first():
    profile = stack(12)
    least, most = leanest_bytes(profile), whole_bytes(profile)
    plan = rule(profile, least + (most - least) // 3)
    norm = next(block for block in plan.blocks if block.name == "norm")
    assert norm.states is Tier.GPU and any(block.params is Tier.HOST for block in plan.blocks)


def test_the_leanest_limit_works_and_one_byte_less_is_refused_with_numbers_and_remedy():
    profile = stack(12)
    least = leanest_bytes(profile)
    assert rule(profile, least).micro_batch == 1
    with pytest.raises(
        ValueError, match=rf"gpu.* needs {least} .* limit is {least - 1} .* 1 bytes .*micro_batch.*Limits"
    ):
        rule(profile, least - 1)


def test_a_host_too_small_is_refused_with_numbers():
    profile = stack(12)
    limit = leanest_bytes(profile) * 2
    needed = rule(profile, limit).forecast.host_peak_bytes
    rule(profile, limit, needed)
    with pytest.raises(InfeasiblePlan, match=rf"host: it needs {needed} .*Limits\(host") as caught:
        rule(profile, limit, needed - 1)
    assert caught.value.tier is Tier.HOST


def test_a_pinned_micro_batch_is_kept_and_a_wrong_one_refused():
    assert rule(stack(), micro_batch=4).micro_batch == 4
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=rf"micro_batch={wrong} .* 6 samples"):
            rule(stack(), micro_batch=wrong)


def test_less_memory_means_a_smaller_micro_batch():
    profile = stack(12, num_samples=8)
    sizes = [rule(profile, limit).micro_batch for limit in (leanest_bytes(profile), whole_bytes(profile))]
    assert sizes == [1, 8]


def test_inputs_go_to_the_host_when_they_do_not_fit():
    profile = stack(12)
    wide = tuple(replace(c, saved_inputs=Affine(0, 40_000), outputs=Affine(0, 40_000)) for c in profile.calls)
    profile = replace(profile, calls=wide)
    plan = rule(profile, leanest_bytes(profile) + 1000)
    assert {block.inputs for block in plan.blocks if block.name.startswith("layers")} == {Tier.HOST}
    assert {block.inputs for block in rule(profile).blocks} == {Tier.GPU}


def test_never_called_blocks_stay_on_the_host_and_loose_ones_on_the_gpu():
    specs = [param("a", 900), param("u", 900), param("l", 9)]
    profile = build(specs, [Sketch("a", ["a"]), Sketch("u", ["u"]), Sketch("", ["l"], loose=True)], [call(0)])
    assert [block.params for block in rule(profile).blocks] == [Tier.GPU, Tier.HOST, Tier.GPU]


def test_the_loss_tile_depends_on_model_and_batch_only():
    profile = stack(12)
    plans = [rule(profile, limit, micro_batch=2) for limit in (leanest_bytes(profile, 2), UNLIMITED)]
    assert {plan.loss_tile_tokens for plan in plans} == {48}  # 6 samples of 8 tokens
    llama = replace(profile, vocabulary=128_256, tokens_per_sample=2048, num_samples=16)
    assert loss_tile_tokens(llama) == 2048  # 1 GiB of fp32 logits
    half = replace(llama, params=tuple(replace(spec, dtype="bfloat16") for spec in llama.params))
    assert loss_tile_tokens(half) == 4096
    assert loss_tile_tokens(replace(half, vocabulary=50_257)) == 8192  # 10,624 would fit: four equal tiles
    assert loss_tile_tokens(replace(half, num_samples=3)) == 3072  # two equal tiles of 3 x 2048 tokens
    assert loss_tile_tokens(replace(half, vocabulary=10_000_000)) == 128


def test_logits_are_kept_before_activations_and_only_of_a_plain_linear_head():
    profile = stack(12)
    assert rule(profile, UNLIMITED).loss_kept_tokens == 0
    head = next(block for block in profile.blocks if block.lazy_head)
    blocks = tuple(replace(block, plain_linear=block is head) for block in profile.blocks)
    plain = replace(profile, blocks=blocks)
    full = rule(plain, UNLIMITED)
    assert full.loss_kept_tokens == 48 and "those of 48 kept" in full.explain()
    assert rule(plain, leanest_bytes(plain)).loss_kept_tokens == 0
    less = rule(plain, full.forecast.gpu_peak_bytes - 1000)
    assert less.loss_kept_tokens == 48
    assert [block.activation for block in less.blocks].count(Activation.RECOMPUTE) > 1


def test_a_plan_survives_its_file(tmp_path):
    plan = rule(stack())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@given(profiles(), st.sampled_from(list(Update)), st.floats(0, 1.2), st.booleans())
@settings(max_examples=50, deadline=None)
def test_plans_by_the_rule_always_verify(profile, update, fraction, pin):
    micro_batch = 1 if pin else None
    try:
        rule(profile, 1, update=update, micro_batch=micro_batch)
        raise AssertionError("nothing fits one byte")
    except InfeasiblePlan as error:
        least = error.num_bytes
    most = rule(profile, update=update, micro_batch=micro_batch).forecast.gpu_peak_bytes
    limit = max(least, int(least + fraction * (most - least)))
    plan = rule(profile, limit, update=update, micro_batch=micro_batch)
    check_plan(profile, plan)
    for mode in Mode:
        if mode is Mode.ACCUMULATE and update is Update.IN_BACKWARD:
            continue
        verify(profile, plan, lower(profile, plan, mode), limit, plan.forecast.host_peak_bytes)
    assert max(len(line) for line in plan.explain().splitlines()) <= 80


def test_optional_things_leave_a_margin():
    profile = stack(12)
    limit = (leanest_bytes(profile) + whole_bytes(profile)) // 2
    plan = rule(profile, limit)
    assert any(block.states is Tier.GPU for block in plan.blocks)
    assert peaks(lower(profile, plan, Mode.TRAIN)).gpu_peak_bytes <= FILL_FRACTION * limit
