"""What makes architectures differ: how tensors get into blocks and out of them. Each is in test_covering.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_parity, assert_streamed, compare, make_optimizer, no_warnings, streamed, train
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import ModelOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of

NUM_SAMPLES = 7
ROOMY = hightide.Limits(gpu="8MiB", host="64MiB")
TIMINGS = {"deferred": {"clip": "torch"}, "in_backward": {"clip": None}}


def tokens(num_steps: int) -> list[Any]:
    """Padded and full by turns; the last batch is smaller."""
    sizes = [NUM_SAMPLES] * (num_steps - 1) + [NUM_SAMPLES - 2]
    return [models.token_batch(10 + step, size, padded=step % 2 == 0) for step, size in enumerate(sizes)]


def vectors(num_steps: int = 4) -> list[Any]:
    sizes = [NUM_SAMPLES] * (num_steps - 1) + [NUM_SAMPLES - 2]
    return [models.vector_batch(10 + step, size) for step, size in enumerate(sizes)]


def test_the_router_loss_is_not_idle() -> None:
    """The parity above would also hold if nobody computed the auxiliary loss."""
    with_loss, batch = models.qwen3_moe(router_loss=True)
    without_loss, _ = models.qwen3_moe(router_loss=False)
    one, other = models.loss_of(with_loss, batch), models.loss_of(without_loss, batch)
    assert one - other > 0.2
    one.backward()
    other.backward()
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(with_loss.get_parameter(name).grad, without_loss.get_parameter(name).grad, rtol=0.1)


def test_experts_of_a_loop_are_split_and_their_memory_is_known() -> None:
    """What depends on the data (which experts are hit) is the same when a block is recomputed, and no obstacle."""
    build = partial(models.qwen3_moe, experts="eager", num_samples=NUM_SAMPLES)
    with no_warnings():
        _, wrapped = compare(build, lambda: tokens(2), wrap={"micro_batch": 3}, clip="torch")
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_router_logits_are_those_of_the_whole_batch() -> None:
    plain, batch = models.qwen3_moe()
    expected = plain(**batch).router_logits
    for limits, micro_batch in ((ROOMY, 2), (ROOMY, None)):
        model, _ = models.qwen3_moe()
        model, _ = hightide.wrap(model, make_optimizer(model), batch, limits=limits, micro_batch=micro_batch)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                logits = model(**batch).router_logits
            assert [entry.shape for entry in logits] == [entry.shape for entry in expected] and len(logits) == 2
            assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(logits, expected, strict=True))
            assert all(entry.requires_grad is enabled for entry in logits)


def test_router_logits_that_were_not_asked_for_when_wrapping_are_refused() -> None:
    model, batch = models.qwen3_moe(router_loss=False)
    model, _ = hightide.wrap(model, make_optimizer(model), batch, limits=ROOMY)
    with pytest.raises(ValueError, match=r"output_router_logits=True in training.*Wrap with it"):
        model(**batch, output_router_logits=True)


def test_the_router_loss_of_frozen_layers() -> None:
    """What a frozen layer's router gives carries no gradient, and is a part of the loss all the same."""

    def build() -> models.Pair:
        model, batch = models.qwen3_moe(num_samples=NUM_SAMPLES)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model, batch

    compare(build, lambda: tokens(3), wrap={"micro_batch": 3}, clip="torch")


# -- tensors that leave a block by another way than its result --------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return torch.tanh(y), y


class Leaky(nn.Module):
    """A layer out of whose middle a tensor can be taken."""

    def __init__(self, attribute: str = "") -> None:
        super().__init__()
        self.part = Part()
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.attribute = attribute
        self.stored: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, inner = self.part(x)
        if self.attribute == "batch":
            self.stored = inner
        if self.attribute == "scalar":
            self.stored = inner.square().mean()
        if self.attribute == "nested":
            self.stored = {"inner": inner, "number": 3}
        if self.attribute == "list":
            self.stored.append(inner)
        return self.norm(x + y)


class LeakyModel(nn.Module):
    def __init__(self, attribute: str = "", loss_inside: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.layers = nn.ModuleList(Leaky(attribute) for _ in range(3))
        self.head = nn.Linear(models.HIDDEN, 8)
        self.collected: list[Tensor] = []
        self.loss_inside = loss_inside
        if attribute == "list":
            for layer in self.layers:
                layer.stored = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.collected = []
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(self.head(x), labels)
        return {"loss": loss + self.auxiliary() if self.loss_inside else loss}

    def auxiliary(self) -> Tensor:
        stored = [layer.stored for layer in self.layers if layer.stored is not None]
        stored = [entry[-1] if isinstance(entry, list) else entry for entry in stored]
        values = [entry["inner"] if isinstance(entry, dict) else entry for entry in stored]
        return 0.3 * sum(((value**2).mean() for value in [*self.collected, *values]), torch.zeros(()))


def leaky(attribute: str = "", hook: Callable[..., Any] | None = None, loss_inside: bool = True) -> models.Pair:
    torch.manual_seed(0)
    model = LeakyModel(attribute, loss_inside)
    if hook is not None:
        for layer in model.layers:
            layer.part.register_forward_hook(partial(hook, model))
    return model, models.vector_batch(num_samples=NUM_SAMPLES)


def store(model: LeakyModel, _part: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    model.collected.append(output[1])


def store_derived(model: LeakyModel, _part: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    model.collected.append(output[1].exp())


@pytest.mark.parametrize(
    ("options", "activation"),
    each_value(
        (
            {"hook": store},
            {"hook": store_derived},
            {"attribute": "batch"},
            {"attribute": "scalar"},
            {"attribute": "nested"},
        ),
        list(Activation),
    ),
)
def test_an_auxiliary_loss_of_what_is_inside_of_blocks(options: dict[str, Any], activation: Activation) -> None:
    build = partial(leaky, **options)
    model, example = build()
    plan = hightide.plan(model, make_optimizer(model), example, limits=ROOMY, micro_batch=3)
    _, wrapped = compare(build, vectors, wrap={"plan": streamed(plan, activation)}, clip="torch")
    whole = options.get("attribute") == "scalar"  # a mean of micro-batches is none of the batch
    assert wrapped.samples_seen[:1] == [NUM_SAMPLES if whole else 3]


@pytest.mark.parametrize("options", [{"hook": store}, {"attribute": "batch"}], ids=["hook", "attribute"])
def test_an_auxiliary_loss_in_the_users_loop(options: dict[str, Any]) -> None:
    """The model's own result does not depend on what was stored: only somebody outside uses it."""

    def step(loop: Any, batch: Any) -> Tensor:
        loss = loop.model(**batch)["loss"] + loop.model.auxiliary()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    compare(partial(leaky, **options, loss_inside=False), vectors, wrap={"micro_batch": 3}, step=step)


def test_hooks_are_called_once_with_the_whole_batch() -> None:
    seen: list[torch.Size] = []

    def note(model: LeakyModel, part: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        store(model, part, inputs, output)
        seen.append(output[1].shape)

    model, batch = leaky(hook=note)
    model, _ = hightide.wrap(model, make_optimizer(model), batch, limits=ROOMY, micro_batch=3)
    seen.clear()
    model(**batch)["loss"].backward()
    assert seen == [torch.Size([NUM_SAMPLES, models.HIDDEN])] * 3
    assert all(len(part._forward_hooks) == 1 for part in model.modules() if isinstance(part, Part))


@pytest.mark.parametrize("kind", ["reads inputs", "replaces the output", "adds to a list"])
def test_what_cannot_be_taken_out_of_a_block_is_refused(kind: str) -> None:
    def hook(model: LeakyModel, part: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
        store(model, part, inputs, output)
        if kind == "reads inputs":
            model.collected.append(inputs[0])
        return (output[0] * 2, output[1]) if kind == "replaces the output" else None

    model, batch = leaky("list") if kind == "adds to a list" else leaky(hook=hook)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"block's forward|from the block's forward"):
        hightide.wrap(model, make_optimizer(model), batch, limits=ROOMY, micro_batch=3)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert run_of(model) is None


# -- arguments and results --------------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    mask: Tensor
    bias: Tensor  # without batch dimension, with gradient
    name: str = "state"


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None
    extra: tuple[Tensor, ...] | None = None


class StateLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.register_buffer("gain", torch.tensor(1.25))

    def forward(self, state: State, *, scales: list[Tensor]) -> Output:
        scale = self.gain * scales[0].float()
        hidden = torch.tanh(self.linear(state.hidden) + state.bias) * state.mask * scale
        return Output(hidden=self.norm(hidden), extra=(hidden.mean(-1), hidden))


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    labels: Tensor
    weights: Tensor | None = None  # no samples
    comment: str = ""


class StateModel(nn.Module):
    """Takes a dataclass; passes dataclasses, lists and keywords to its layers; gets model outputs from them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StateLayer() for _ in range(3))
        self.bias = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.head = nn.Linear(models.HIDDEN, 8)
        self.register_buffer("weights", torch.linspace(-1, 1, models.HIDDEN))

    def forward(self, inputs: Inputs, scale: Tensor | None = None) -> dict[str, Tensor]:
        mask = (inputs.x[:, :1] > -1).float()
        bias = self.bias(
            self.weights if inputs.weights is None else inputs.weights
        )  # a block without batch, whose result every layer reads
        hidden, extra = inputs.x, torch.zeros((), device=inputs.x.device)
        for layer in self.layers:
            output = layer(State(hidden, mask, bias), scales=[mask if scale is None else scale])
            hidden = output.hidden
            extra = extra + output["extra"][0].square().mean()
        return {"loss": F.mse_loss(self.head(hidden), inputs.labels) + 0.1 * extra}


def state_inputs(seed: int = 1, num_samples: int = NUM_SAMPLES, weights: Tensor | None = None) -> Inputs:
    batch = models.vector_batch(seed, num_samples)
    return Inputs(batch["x"], batch["labels"], weights)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_dataclasses_model_outputs_and_keywords(by_keyword: bool) -> None:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return StateModel(), make(1, NUM_SAMPLES)

    def make(seed: int, num_samples: int) -> Any:
        if not by_keyword:
            return (state_inputs(seed, num_samples),)
        weights = torch.linspace(0, 1, models.HIDDEN)  # the size of the others tells that these are no samples
        return {"inputs": state_inputs(seed, num_samples, weights), "scale": torch.full((num_samples, 1), 0.9)}

    def step(loop: Any, batch: Any) -> Tensor:
        loss = (loop.model(**batch) if by_keyword else loop.model(*batch))["loss"]
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    batches = [make(10 + index, NUM_SAMPLES - 2 * (index == 5)) for index in range(6)]
    model, example = build()
    with no_warnings():
        plan = hightide.plan(model, make_optimizer(model), example, limits=ROOMY, micro_batch=3)
        edited = streamed(plan, Activation.RECOMPUTE, Tier.HOST)
        _, wrapped = compare(build, lambda: batches, wrap={"plan": edited}, step=step)
    assert wrapped.samples_seen[:3] == [3, 3, 1]


def test_a_dataclass_is_a_batch() -> None:
    torch.manual_seed(0)
    model = StateModel()
    expected = model(state_inputs())["loss"]
    model, _ = hightide.wrap(model, make_optimizer(model), state_inputs(), limits=ROOMY, micro_batch=3)
    assert torch.allclose(model(state_inputs())["loss"], expected)
    assert model(state_inputs(num_samples=8))["loss"].isfinite()  # the plan holds it
    with pytest.raises(ValueError, match=r"differs between tensors .*argument 0.weights: 32"):
        model(state_inputs(weights=torch.ones(models.HIDDEN)))


def test_a_way_of_calling_that_comes_later_is_learned_by_position_and_keyword() -> None:
    """The new probe gets both kinds of arguments with one more sample."""
    torch.manual_seed(0)
    model = StateModel()
    scale = torch.rand(NUM_SAMPLES, 1, dtype=torch.float64)  # another dtype is another way of calling
    expected = [model(state_inputs())["loss"], model(state_inputs(), scale=scale)["loss"]]
    model, _ = hightide.wrap(model, make_optimizer(model), (state_inputs(),), limits=ROOMY, micro_batch=3)
    with no_warnings():
        assert torch.allclose(model(state_inputs())["loss"], expected[0])
        assert torch.allclose(model(state_inputs(), scale=scale)["loss"], expected[1])
    splits = run_of(model).splits.known.values()
    assert sum("float64" in split.signature and split.splittable for split in splits) == 3


# -- blocks by name ---------------------------------------------------------------------------------------------------


def names_of(plan: hightide.Plan) -> list[str]:
    return [block.name for block in plan.blocks]


@pytest.mark.parametrize(
    ("blocks", "some", "count"),
    [
        ("model.layers.*", "model.layers.1", 6),
        pytest.param(["model.layers.?", "model.norm"], "model.layers.1", 6, marks=pytest.mark.long),
        (LlamaDecoderLayer, "model.layers.1", 6),
        pytest.param([LlamaAttention, LlamaMLP], "model.layers.1.mlp", 15, marks=pytest.mark.long),
        (["*.mlp", LlamaAttention], "model.layers.2.self_attn", 15),
    ],
)
def test_blocks_that_the_user_names(blocks: Any, some: str, count: int) -> None:
    build = partial(models.llama, num_layers=3, num_samples=NUM_SAMPLES)
    model, example = build()
    plan = hightide.plan(model, make_optimizer(model), example, limits=ROOMY, micro_batch=3, blocks=blocks)
    assert some in names_of(plan) and len(plan.blocks) == count
    edited = streamed(plan, Activation.RECOMPUTE)
    batches = tokens(3)
    compare(build, lambda: batches, wrap={"plan": edited, "blocks": blocks})


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("decoder.*", r"'decoder.*' matches no module; there is model \(LlamaModel\), lm_head \(Linear\)"),
        (nn.Conv2d, "matches no module"),
        ([LlamaDecoderLayer, LlamaMLP], "nested: 'model.layers.0.mlp'.* is inside of 'model.layers.0'"),
        (["model", "model.layers.1"], "nested: 'model.layers.1'"),
        ("model.layers", "'model.layers', a ModuleList, which is never called"),
        (["*.act_fn"], "has 0 parameters"),
        (3, "neither a pattern of module names nor a class"),
        ([torch.Tensor], "neither a pattern of module names nor a class"),
    ],
)
def test_blocks_that_are_none(blocks: Any, words: str) -> None:
    model, example = models.llama(num_layers=2)
    with pytest.raises(ValueError, match=words):
        hightide.plan(model, make_optimizer(model), example, limits=ROOMY, blocks=blocks)


# -- models that the probe cannot run ---------------------------------------------------------------------------------


class Asking(nn.Module):
    """Asks for a value, which the probe does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.norm = nn.LayerNorm(models.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        return x + torch.tanh(y) if float(y.detach().sum()) > 0 else x + torch.sin(y)


class AskingModel(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.embed = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.layers = nn.ModuleList(Asking() for _ in range(4))
        self.head = nn.Linear(models.HIDDEN, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.first:
            assert float(self.embed.weight.detach().sum()) != 1e9  # nothing is learned before this
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x), labels)}


@pytest.mark.parametrize("update", TIMINGS)
def test_a_model_that_cannot_be_probed_streams_unsplit_and_says_so_once(update: str) -> None:
    def build() -> models.Pair:
        torch.manual_seed(0)
        return AskingModel(first=False), models.vector_batch(num_samples=NUM_SAMPLES)

    model, example = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"limits": ROOMY, "micro_batch": 3, "update": update}
        plan = hightide.plan(model, make_optimizer(model), example, **options)
    assert len(caught) == 1 and "could not be probed" in str(caught[0].message)
    assert f"all {NUM_SAMPLES} samples at once" in str(caught[0].message)
    edited = streamed(plan, Activation.RECOMPUTE, Tier.HOST)
    plain = train(build(), vectors(), **TIMINGS[update])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = train(build(), vectors(), wrap={"plan": edited, "update": update}, **TIMINGS[update])
    assert len(caught) == 1 and "could not be probed" in str(caught[0].message)
    assert_parity(plain, wrapped)
    assert wrapped.stats is not None and wrapped.stats.evictions > 0 and wrapped.stats.deviations == 0
    assert wrapped.samples_seen[:2] == [NUM_SAMPLES] * 2


def test_a_language_model_whose_layers_cannot_be_probed() -> None:
    def build() -> models.Pair:
        model, batch = models.llama(num_layers=3, num_samples=NUM_SAMPLES)
        ask = lambda module, args: None if float(args[0].detach().sum()) < 1e9 else 1 / 0  # noqa: E731
        model.model.layers[1].mlp.register_forward_pre_hook(ask)
        return model, batch

    plain = train(build(), tokens(3), clip="torch")
    with pytest.warns(UserWarning, match="could not be probed"):
        wrapped = train(build(), tokens(3), wrap={"limits": ROOMY}, clip="torch")
    assert_parity(plain, wrapped)


def test_tapped_blocks_are_not_compiled_and_say_so() -> None:
    model, batch = leaky(hook=store)
    with pytest.warns(UserWarning, match=r"3 blocks run eagerly in spite of compile=True"):
        hightide.wrap(model, make_optimizer(model), batch, limits=ROOMY, micro_batch=3, compile=True)
