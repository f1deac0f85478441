"""One test per trap of the recipes that goes silently wrong without care. `TRAPS` says for each where its test is: many
are here, others in the tests of their own file."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from unit.runtime.steps import Twins, adamw, train_step, twins


def streamed(activation: Activation = Activation.RECOMPUTE, inputs: Tier = Tier.GPU):
    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(b, params=Tier.HOST, states=Tier.HOST, inputs=inputs, activation=activation) if b.name else b
            for b in plan.blocks
        ]
        return replace(plan, blocks=tuple(blocks), num_slots=2, num_grad_slots=2, gpu_limit_bytes=2**23)

    return edit


class Layer(nn.Module):
    """x + tanh(linear(x)), with hooks for what a test wants to plant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


HERE = "whole/test_traps.py"
TRAPS = {
    # the block function
    "a deep copy computes with the original's weights": (
        "unit/runtime/test_surgery.py",
        "test_copies_are_refused_with_a_remedy",
    ),
    "a block without differentiable inputs gets no backward": (
        HERE,
        "test_trap_anchor_a_block_behind_a_frozen_embedding_still_gets_its_backward",
    ),
    "autograd.grad and backward(inputs=) touch parameters": (
        HERE,
        "test_trap_anchor_autograd_grad_of_inputs_leaves_parameters_alone",
    ),
    "a second backward doubles gradients": (HERE, "test_trap_save_for_backward_a_second_backward_raises"),
    "a double backward": (HERE, "test_trap_save_for_backward_double_backward_raises"),
    "an input changed in place": (HERE, "test_trap_save_for_backward_a_changed_block_input_raises"),
    "an inner graph that leaks": (
        "unit/runtime/waiting/test_activations.py",
        "test_graphs_that_are_dropped_leave_nothing_behind",
    ),
    "a kept graph after its backward": (
        "unit/runtime/waiting/test_activations.py",
        "test_a_kept_graph_is_gone_after_its_backward",
    ),
    "non-batch inputs and outputs": (HERE, "test_trap_non_batch_inputs_are_summed_and_non_batch_outputs_count_once"),
    "T5's position bias": (HERE, "test_trap_non_batch_inputs_position_bias_of_t5"),
    "inputs shared by blocks": (
        "unit/runtime/waiting/test_activations.py",
        "test_a_shared_input_is_whole_for_each_of_its_readers_over_a_slow_link",
    ),
    "splitting breaks the cache of generate": (
        "parity/test_between.py",
        "test_evaluation_and_generation_between_steps",
    ),
    "a cache in training": (HERE, "test_trap_use_cache_is_off_in_training_and_on_in_generation"),
    "the model's own gradient checkpointing": (HERE, "test_trap_gradient_checkpointing_of_the_model_is_switched_off"),
    "autocast is off inside backward": (
        "unit/runtime/blocks/test_autocast.py",
        "test_autocast_was_really_on_in_recomputation",
    ),
    "autocast's cast cache": (
        "unit/runtime/blocks/test_autocast.py",
        "test_every_level_gives_the_same_bits_under_autocast",
    ),
    "dropout depends on the plan": ("parity/test_invariance.py", "test_every_plan_gives_the_same_bits"),
    "draws repeat": ("parity/test_invariance.py", "test_dropout_draws_differ_between_steps_blocks_and_micro_batches"),
    "a block that mutates its input": (
        "unit/profiler/probe/test_probe.py",
        "test_a_block_that_changes_its_input_is_not_split",
    ),
    "BatchNorm": ("unit/profiler/probe/test_probe.py", "test_batch_normalisation_is_not_split_in_training"),
    "tensors captured inside a block": (
        "unit/profiler/probe/test_probe.py",
        "test_an_auxiliary_loss_keeps_a_block_whole",
    ),
    "when a gradient is final: repeated blocks": ("parity/test_layer_drop.py", "test_a_block_twice_in_some_steps"),
    "no gradient is not a zero gradient": (
        "parity/test_frozen.py",
        "test_parameters_that_receive_a_gradient_only_sometimes",
    ),
    "backward on another thread": (HERE, "test_trap_backward_in_another_thread_as_on_cuda"),
    # the batch dimension
    "rows per sample": (
        "unit/profiler/probe/test_probe.py",
        "test_rows_per_sample_and_another_batch_dimension_are_found",
    ),
    "masks depend on data": ("unit/profiler/probe/test_probe.py", "test_a_mask_is_an_input_of_padded_batches_only"),
    "a path that was never probed": ("parity/test_batches.py", "test_padded_batches_after_unpadded_ones"),
    "a probe that fails": (
        "unit/profiler/model/test_model_profile.py",
        "test_a_model_that_asks_for_values_is_profiled_unsplit_with_a_warning",
    ),
    # parameters that come and go
    "the optimizer's reference": ("unit/runtime/test_surgery.py", "test_parameters_stay_the_same_objects"),
    "values of absent parameters": ("unit/runtime/chunks/test_absent.py", "test_values_are_refused_with_a_remedy"),
    "a loss of absent parameters": (
        "unit/runtime/chunks/test_absent.py",
        "test_a_regulariser_over_absent_parameters_is_refused_and_names_weight_decay",
    ),
    "graphs that save views of a slot": (
        "unit/runtime/waiting/test_activations.py",
        "test_a_kept_graph_finds_its_weights_in_another_slot",
    ),
    "slots that are read after release": (
        "unit/runtime/waiting/test_activations.py",
        "test_slots_poisoned_on_release_change_nothing",
    ),
    "recompilation": ("parity/test_compiled.py", "test_steps_equal_plain_pytorch_with_one_compilation"),
    # recomputation
    "the last projection, eager": ("parity/test_compiled.py", "test_recomputation_skips_the_last_projection"),
    "the last projection, compiled": ("parity/test_compiled.py", "test_a_compiled_backward_skips_the_last_projection"),
    # sums of gradients
    "sums of bf16 gradients": (
        "parity/test_rounded_gradients.py",
        "test_bf16_training_equals_plain_pytorch_with_fp32_masters",
    ),
    "the embedding's dense gradient": (
        "unit/profiler/needs/test_needs.py",
        "test_an_unsplit_embedding_counts_its_dense_gradient",
    ),
    # head and loss
    "all logits at once": ("whole/test_capacity.py", "test_logits_are_counted_by_slice_and_never_exist_at_once"),
    "losses of many models": ("unit/runtime/head/test_fused_loss.py", "test_hugging_face_losses_are_fused_unchanged"),
    "other uses of logits": (
        "unit/runtime/head/test_fused_loss.py",
        "test_other_operations_see_whole_logits_with_one_warning",
    ),
    # optimizer and loop
    "clipping does nothing": (HERE, "test_trap_placeholder_clipping_is_not_silent"),
    "a GradScaler": ("whole/test_review.py", "test_a_grad_scaler_with_a_fused_optimizer"),
    "hyper-parameters of pending updates": (
        HERE,
        "test_trap_hyper_parameters_a_scheduler_right_after_step_does_not_reach_pending_updates",
    ),
    "zero_grad and pending updates": (HERE, "test_trap_zero_grad_does_not_touch_gradients_that_pending_updates_read"),
    "schedulers made earlier": (HERE, "test_trap_param_groups_a_scheduler_made_before_wrapping_still_works"),
    "the norm of several backwards": ("parity/test_covering.py", "test_every_pair_of_features"),
    "state_dict and pending updates": (HERE, "test_trap_state_dict_waits_for_pending_updates"),
    "state_dict of views": ("parity/test_state_dict.py", "test_its_tensors_own_their_storage"),
    # the schedule
    "an order that the plan did not foresee": ("parity/test_layer_drop.py", "test_layers_in_another_order_each_step"),
    "a batch larger than planned": ("unit/observe/test_larger_batches.py", "test_larger_batches_are_planned_anew"),
    "a forward without backward": ("parity/test_loops.py", "test_a_forward_without_backward_leaves_no_trace"),
}


def test_every_trap_has_its_test() -> None:
    tests = Path(__file__).parents[1]
    for trap, (file, name) in TRAPS.items():
        assert f"def {name}(" in (tests / file).read_text(), f"{trap}: {file} has no {name}"


BATCH = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))


# -- the block function --------------------------------------------------------------------------------------------


def test_trap_anchor_a_block_behind_a_frozen_embedding_still_gets_its_backward() -> None:
    """No input of the first trainable block needs a gradient: without an anchor its own would be silently zero."""
    model, batch = models.gpt2()
    model.requires_grad_(False)
    for param in model.transformer.h[0].mlp.parameters():
        param.requires_grad_(True)
    pair = twins(model, batch, edit=streamed())
    before = pair.model.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    pair.assert_equal(*pair.step())
    assert not torch.equal(pair.model.state_dict()["transformer.h.0.mlp.c_fc.weight"], before)
    pair.close()


@pytest.mark.parametrize("activation", list(Activation))
def test_trap_anchor_autograd_grad_of_inputs_leaves_parameters_alone(activation: Activation) -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed(activation))
    for _ in range(2):
        x, y = (BATCH.clone().requires_grad_() for _ in range(2))
        (ours,) = torch.autograd.grad(pair.model(x).square().mean(), x)
        (expected,) = torch.autograd.grad(pair.plain(y).square().mean(), y)
        assert torch.allclose(ours, expected, atol=1e-7)
        pair.model(x).square().mean().backward(inputs=[x])
        assert torch.allclose(x.grad, expected, atol=1e-7)
        assert all(param.grad is None for param in pair.model.parameters())
        pair.assert_equal(*pair.step())
    pair.close()


class InPlace(nn.Module):
    """The model's own code changes what a block has saved, after the block's forward."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        y = self.layers[1](x)
        if self.change:
            with torch.no_grad():
                x.mul_(2)
        return self.layers[2](y)


@pytest.mark.parametrize("inputs", [Tier.GPU, Tier.HOST])
def test_trap_save_for_backward_a_changed_block_input_raises(inputs: Tier) -> None:
    pair = twins(InPlace(change=False), BATCH, edit=streamed(inputs=inputs))
    pair.assert_equal(*pair.step())
    pair.model.change = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        models.loss_of(pair.model, BATCH).backward()


@pytest.mark.parametrize(
    ("inputs", "activation"),
    [(Tier.GPU, Activation.KEEP), (Tier.GPU, Activation.RECOMPUTE), (Tier.HOST, Activation.RECOMPUTE)],
)
def test_trap_save_for_backward_a_second_backward_raises(inputs: Tier, activation: Activation) -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed(activation, inputs))
    loss = models.loss_of(pair.model, BATCH)
    loss.backward(retain_graph=True)
    gradients = [param.grad.clone() for param in pair.model.parameters()]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert len(gradients) == 6


def test_trap_save_for_backward_double_backward_raises() -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed())
    x = BATCH.clone().requires_grad_()
    (grad,) = torch.autograd.grad(pair.model(x).square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        grad.sum().backward()


def test_trap_version_counters_a_kept_graphs_tensor_that_changed_raises() -> None:
    """Saved-tensor hooks switch off autograd's own check; here the block itself changes what it has saved."""

    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            z = y.exp()  # saves its result
            with torch.no_grad():
                z.mul_(1.0)
            return z * x

    model = nn.Sequential(Layer(), Spoiled(), Layer())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        models.loss_of(model, BATCH).backward()
    pair = twins(model, BATCH, edit=streamed(Activation.KEEP))  # recomputed, it is as under torch's own checkpoint
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        models.loss_of(pair.model, BATCH).backward()


class SharedBias(nn.Module):
    """As T5: one position bias, without batch dimension, is an input of every layer and has a gradient."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            norm = self.linear.weight.square().sum() + bias.sum()  # an output without batch dimension
            return x + torch.tanh(self.linear(x) + bias), norm

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 32)
        self.layers = nn.ModuleList(self.Biased() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table.weight.sum(1)
        penalty = x.new_zeros(())
        for layer in self.layers:
            x, norm = layer(x, bias)
            penalty = penalty + norm
        return torch.cat([x.flatten(), 0.01 * penalty.reshape(1)])


@pytest.mark.parametrize("activation", list(Activation))
def test_trap_non_batch_inputs_are_summed_and_non_batch_outputs_count_once(activation: Activation) -> None:
    """Three micro-batches: the bias's gradient is the sum over them, the penalty's enters once."""
    pair = twins(SharedBias(), BATCH, edit=streamed(activation))
    for _ in range(3):
        pair.assert_equal(*pair.step())
    pair.close()


def test_trap_non_batch_inputs_position_bias_of_t5() -> None:
    pair = twins(*models.t5(), edit=streamed())
    for _ in range(2):
        pair.assert_equal(*pair.step())
    pair.close()


# -- transformers --------------------------------------------------------------------------------------------------


def test_trap_use_cache_is_off_in_training_and_on_in_generation() -> None:
    """Left on, a cache leaks keys and values of one micro-batch into the next: GPT-2's gradients are off by 20%."""
    model, batch = models.gpt2()
    model.config.use_cache = True
    pair = twins(model, batch, edit=streamed())
    pair.assert_equal(*pair.step())

    def asking(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> torch.Tensor:
        return train_step(model, optimizer, {**batch, "use_cache": True})

    pair.assert_equal(*pair.step(asking))
    assert pair.model(**batch).past_key_values is None
    pair.model.eval()
    pair.plain.eval()
    with torch.no_grad():
        assert pair.model(input_ids=batch["input_ids"][:2]).past_key_values is not None
    start = batch["input_ids"][:2, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(start)}
    assert torch.equal(pair.model.generate(start, **options), pair.plain.generate(start, **options))
    pair.close()


def test_trap_gradient_checkpointing_of_the_model_is_switched_off() -> None:
    model, batch = models.llama()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    pair = twins(model, batch, edit=streamed())
    assert not pair.model.is_gradient_checkpointing
    pair.assert_equal(*pair.step())
    pair.close()


# -- optimizer and loop --------------------------------------------------------------------------------------------


def slow_updates(pair: Twins) -> threading.Event:
    """Holds the cpu lane until the event is set: everything that step() issued is still to come."""
    gate = threading.Event()
    pair.run.lanes.submit("gate", Lane.CPU, -1, [], lambda: gate.wait(20))
    return gate


def test_trap_hyper_parameters_a_scheduler_right_after_step_does_not_reach_pending_updates() -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed())
    pair.step()
    models.loss_of(pair.model, BATCH).backward()
    gate = slow_updates(pair)
    pair.optimizer.step()
    pair.optimizer.param_groups[0]["lr"] = 100.0
    pair.optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    gate.set()
    loss = train_step(pair.plain, pair.plain_optimizer, BATCH)
    pair.assert_equal(loss, loss)
    pair.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_trap_zero_grad_does_not_touch_gradients_that_pending_updates_read(set_to_none: bool) -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed())
    models.loss_of(pair.model, BATCH).backward()
    gate = slow_updates(pair)
    pair.optimizer.step()
    pair.optimizer.zero_grad(set_to_none=set_to_none)
    gate.set()
    loss = train_step(pair.plain, pair.plain_optimizer, BATCH)
    pair.assert_equal(loss, loss)
    pair.close()


def test_trap_state_dict_waits_for_pending_updates() -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed())
    for read in (lambda: pair.model.state_dict(), lambda: pair.optimizer.state_dict()):
        models.loss_of(pair.model, BATCH).backward()
        gate = slow_updates(pair)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        read()
        assert gate.is_set()
        timer.join()
        loss = train_step(pair.plain, pair.plain_optimizer, BATCH)
        pair.assert_equal(loss, loss)
    pair.close()


def test_trap_placeholder_clipping_is_not_silent() -> None:
    """With `.grad` None, clip_grad_norm_ returns 0 and clips nothing."""
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed())

    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = models.loss_of(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    norms: list[float] = []
    for _ in range(3):
        pair.assert_equal(*pair.step(clipped))
        assert norms[-2] > 0.01 and norms[-2] == pytest.approx(norms[-1], rel=1e-6)
    pair.close()


def test_trap_param_groups_a_scheduler_made_before_wrapping_still_works() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    model, wrapped = hightide.wrap(
        model, optimizer, BATCH, limits=hightide.Limits(gpu="1MiB", host="8MiB"), micro_batch=2
    )
    train_step(model, wrapped, BATCH)
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert wrapped.param_groups is optimizer.param_groups
    hightide.unwrap(model)


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", list(Activation))
def test_trap_backward_in_another_thread_as_on_cuda(activation: Activation) -> None:
    pair = twins(nn.Sequential(*(Layer() for _ in range(3))), BATCH, edit=streamed(activation))
    for _ in range(2):
        loss = models.loss_of(pair.model, BATCH)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.assert_equal(loss, train_step(pair.plain, pair.plain_optimizer, BATCH))
    pair.close()
