"""The quick search, by which small models are planned: few simulations, the same promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hightide.ir.activation import Activation
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.loss_tiles import loss_tile_tokens
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.activation_bytes import ActivationBytes
from hightide.planner.search.search import search
from hightide.planner.solution import Solution
from hightide.planner.verify.check_plan import check_plan
from hightide.this_machine import simulated_machine
from unit.planner.profiles import UNLIMITED, Sketch, build, call, param, profiles, stack

MACHINE = simulated_machine()
MOST_SIMULATED = 4


def quick(
    profile: ModelProfile,
    gpu_bytes: int = UNLIMITED,
    host_bytes: int = UNLIMITED,
    update: Update = Update.DEFERRED,
    micro_batch: int | None = None,
) -> Plan:
    terms = Terms(gpu_bytes, host_bytes, update, micro_batch)
    result = search(Problem(profile, estimate(profile, MACHINE), MACHINE, terms, quick=True))
    assert result.num_simulated <= MOST_SIMULATED
    return result.plan


def leanest_bytes(profile: ModelProfile, micro_batch: int | None = None, update: Update = Update.DEFERRED) -> int:
    with pytest.raises(InfeasiblePlan) as caught:
        quick(profile, gpu_bytes=1, micro_batch=micro_batch, update=update)
    return caught.value.num_bytes


def whole_bytes(profile: ModelProfile) -> int:
    return quick(profile).forecast.gpu_peak_bytes


def test_what_fits_wholly_stays_on_the_gpu_and_keeps_its_activations() -> None:
    plan = quick(stack())
    assert all(block.params is block.states is Tier.GPU for block in plan.blocks)
    assert [b.activation for b in plan.blocks][:-1] == [Activation.KEEP] * 6 and plan.micro_batch == 6
    assert (plan.num_slots, plan.num_grad_slots, plan.forecast.host_peak_bytes) == (0, 0, 0)
    assert "everything stays on the GPU" in plan.explain()


def test_more_memory_is_used_and_never_more_than_there_is() -> None:
    profile = stack(12)
    least, most = leanest_bytes(profile), whole_bytes(profile)
    seconds, seen = [], set()
    for step in range(9):
        limit = least + (most - least) * step // 8
        plan = quick(profile, limit)
        check_plan(profile, plan)
        assert plan.forecast.gpu_peak_bytes <= limit
        seconds.append(plan.forecast.step_s)
        seen.add(tuple(block.states for block in plan.blocks))
    assert len(seen) >= 4
    assert all(later <= 1.05 * earlier for earlier, later in pairwise(seconds))


def test_the_leanest_limit_works_and_one_byte_less_is_refused_with_numbers_and_remedy() -> None:
    profile = stack(12)
    least = leanest_bytes(profile)
    assert quick(profile, least).forecast.gpu_peak_bytes <= least
    with pytest.raises(
        InfeasiblePlan, match=rf": 1 bytes .* missing on the gpu, the most during bwd\.\d+; .*Limits\(gpu={least}\)"
    ):
        quick(profile, least - 1)


def test_a_host_too_small_is_refused_with_numbers() -> None:
    profile = stack(12)
    limit = leanest_bytes(profile) * 2
    too_little = quick(profile, limit).forecast.host_peak_bytes // 2
    with pytest.raises(
        InfeasiblePlan, match=r"missing on the host; give it Limits\(host=\d+\), or Limits\(gpu"
    ) as caught:
        quick(profile, limit, too_little)
    raised = {caught.value.tier: caught.value.num_bytes}  # whichever grows least
    limits = raised.get(Tier.GPU, limit), raised.get(Tier.HOST, too_little)
    forecast = quick(profile, *limits).forecast
    assert forecast.gpu_peak_bytes <= limits[0] and forecast.host_peak_bytes <= limits[1]


def test_a_refusal_is_exact_where_the_sum_of_a_choice_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    added_up = ActivationBytes.gpu_bytes
    monkeypatch.setattr(ActivationBytes, "gpu_bytes", lambda self, choice: added_up(self, choice) // 2)
    profile = stack(12)
    least = leanest_bytes(profile)
    assert quick(profile, least).forecast.gpu_peak_bytes <= least


@given(profiles(), st.sampled_from(list(Update)), st.floats(0.2, 1.5), st.floats(0.2, 1.5))
@settings(max_examples=8, deadline=None)
def test_the_limits_that_a_refusal_names_are_enough(
    profile: ModelProfile, update: Update, gpu_share: float, host_share: float
) -> None:
    """Each of them alone, and all of what it names for several tiers."""
    assume(profile.params)
    least = leanest_bytes(profile, update=update)
    host_bytes = quick(profile, least, update=update).forecast.host_peak_bytes
    given_bytes = {Tier.GPU: int(gpu_share * least), Tier.HOST: int(host_share * host_bytes)}
    try:
        quick(profile, given_bytes[Tier.GPU], given_bytes[Tier.HOST], update)
    except InfeasiblePlan as refused:
        for enough in refused.enough:
            limits = given_bytes | dict(enough)
            quick(profile, limits[Tier.GPU], limits[Tier.HOST], update)


def test_a_pinned_micro_batch_is_kept_and_a_wrong_one_refused() -> None:
    assert quick(stack(), micro_batch=4).micro_batch == 4
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=rf"micro_batch={wrong} .* 6 samples"):
            quick(stack(), micro_batch=wrong)


def test_less_memory_means_a_smaller_micro_batch() -> None:
    profile = stack(12, num_samples=8)
    layers = {block.index for block in profile.blocks if block.name.startswith("layers")}
    wide = tuple(replace(c, backward_peak=Affine(0, 40_000)) if c.block in layers else c for c in profile.calls)
    profile = replace(profile, calls=wide)
    sizes = [quick(profile, limit).micro_batch for limit in (leanest_bytes(profile), UNLIMITED)]
    assert sizes == [1, 8]


def test_inputs_go_to_the_host_when_they_do_not_fit() -> None:
    profile = stack(12)
    wide = tuple(replace(c, saved_inputs=Affine(0, 40_000), outputs=Affine(0, 40_000)) for c in profile.calls)
    profile = replace(profile, calls=wide)
    plan = quick(profile, leanest_bytes(profile) + 1000)
    assert {block.inputs for block in plan.blocks if block.name.startswith("layers")} == {Tier.HOST}
    assert {block.inputs for block in quick(profile).blocks} == {Tier.GPU}


def test_never_called_blocks_live_on_the_gpu_only_where_there_is_room_and_loose_ones_always() -> None:
    specs = [param("a", 900), param("u", 900), param("l", 9)]
    profile = build(specs, [Sketch("a", ["a"]), Sketch("u", ["u"]), Sketch("", ["l"], loose=True)], [call(0)])
    roomy = quick(profile)
    assert [block.params for block in roomy.blocks] == [Tier.GPU, Tier.GPU, Tier.GPU]
    tight = quick(profile, roomy.forecast.gpu_peak_bytes - 1)
    assert [block.params for block in tight.blocks] == [Tier.GPU, Tier.HOST, Tier.GPU]
    assert tight.forecast.gpu_peak_bytes < roomy.forecast.gpu_peak_bytes


def test_the_loss_tile_depends_on_model_and_batch_only() -> None:
    profile = stack(12)
    plans = [quick(profile, limit, micro_batch=2) for limit in (leanest_bytes(profile, 2), UNLIMITED)]
    assert {plan.loss_tile_tokens for plan in plans} == {48}  # 6 samples of 8 tokens
    llama = replace(profile, vocabulary=128_256, tokens_per_sample=2048, num_samples=16)
    assert loss_tile_tokens(llama) == 2048  # 1 GiB of fp32 logits
    half = replace(llama, params=tuple(replace(spec, dtype="bfloat16") for spec in llama.params))
    assert loss_tile_tokens(half) == 4096
    assert loss_tile_tokens(replace(half, vocabulary=50_257)) == 8192  # 10,624 would fit: four equal tiles
    assert loss_tile_tokens(replace(half, num_samples=3)) == 3072  # two equal tiles of 3 x 2048 tokens
    assert loss_tile_tokens(replace(half, vocabulary=10_000_000)) == 128


def test_logits_are_kept_only_of_a_plain_linear_head() -> None:
    profile = stack(12)
    assert quick(profile).loss_kept_tokens == 0
    head = next(block for block in profile.blocks if block.lazy_head)
    plain = replace(profile, blocks=tuple(replace(block, plain_linear=block is head) for block in profile.blocks))
    plain = replace(plain, params=tuple(replace(spec, dtype="float16") for spec in plain.params))
    full = quick(plain)
    assert full.loss_kept_tokens == 48 and "those of 48 kept" in full.explain()


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, "float32"), (8000, "float32"), (8000, "float16")])
def test_gradients_of_the_head_are_made_in_forward_where_that_takes_less_than_all_logits(
    num_tokens: int, dtype: str
) -> None:
    profile = stack(12)
    blocks = tuple(replace(block, plain_linear=block.lazy_head) for block in profile.blocks)
    params = tuple(replace(spec, dtype=dtype) for spec in profile.params)
    long = replace(profile, blocks=blocks, params=params, tokens_per_sample=num_tokens, vocabulary=8)
    plan = quick(long)
    assert plan.loss_in_forward == (num_tokens > 1 and dtype != "float16")
    assert plan.loss_kept_tokens == (0 if plan.loss_in_forward else 6 * num_tokens)
    assert ("made in forward" in plan.explain()) == plan.loss_in_forward


def test_a_plan_survives_its_file(tmp_path) -> None:
    plan = quick(stack())
    assert plan.forecast.step_s > 0
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@given(profiles(), st.sampled_from(list(Update)), st.floats(0, 1.2), st.booleans())
@settings(max_examples=12, deadline=None)
def test_plans_always_verify(profile: ModelProfile, update: Update, fraction: float, pin: bool) -> None:
    assume(profile.params)
    micro_batch = 1 if pin else None
    least = leanest_bytes(profile, micro_batch, update)
    most = quick(profile, update=update, micro_batch=micro_batch).forecast.gpu_peak_bytes
    plan = quick(profile, max(least, int(least + fraction * (most - least))), UNLIMITED, update, micro_batch)
    check_plan(profile, plan)
    Solution.of(profile, replace(plan, host_limit_bytes=plan.forecast.host_peak_bytes)).verify()
    assert max(len(line) for line in plan.explain().splitlines()) <= 80
