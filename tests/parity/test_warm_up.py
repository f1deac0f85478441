"""Models that ask for values of what they compute, so that they do not run on tensors without values: `wrap` runs them
once, block by block, on values, and keeps what it has promised after that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HOST, Trained, assert_parity, make_optimizer, train, wrap
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import hightide
import models
from hightide.planner.infeasible import InfeasiblePlan
from hightide.stores.store import OutOfMemory

NUM_SAMPLES = 7
TIMINGS: dict[str, dict[str, Any]] = {"deferred": {"clip": "torch"}, "in_backward": {}}


class Branching(nn.Module):
    """Takes the way that its values tell: `.item()` inside a block, and a wider one for some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.up, self.down = nn.Linear(models.HIDDEN, 96), nn.Linear(96, models.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if y.detach().sum().item() > 0:
            y = torch.sin(y) * torch.tanh(y) + torch.cos(y)
        return x + self.down(y)


class Gathering(nn.Module):
    """Computes with the rows that are large: `nonzero`, whose result has a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(models.HIDDEN, 1), nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = (self.gate(x).squeeze(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, torch.tanh(self.inner(x[rows])))


class Asking(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(models.HIDDEN, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x), labels)}


class Ordered(Asking):
    """The order of its blocks, and which of them it calls, depend on what the first one makes."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for index in x.detach().mean(0)[: len(self.layers)].argsort().tolist():
            if index or bool(x.detach().sum() > 0):
                x = self.layers[index](x)
        return {"loss": F.mse_loss(self.head(x), labels)}


def asking(model: type[Asking], layer: type[nn.Module], **batch: Any) -> models.Pair:
    torch.manual_seed(0)
    return model(layer).train(), models.vector_batch(**batch)


Build = Callable[..., models.Pair]
SUBJECTS: dict[str, tuple[Build, Callable[..., Any]]] = {
    "autoformer": (partial(models.autoformer, num_layers=2), models.series_batch),
    "switch_transformers": (partial(models.switch_transformers, num_layers=2), models.translation_batch),
    "nllb_moe": (partial(models.nllb_moe, num_layers=2), models.translation_batch),
    "branching": (partial(asking, Asking, Branching), models.vector_batch),
    "gathering": (partial(asking, Asking, Gathering), models.vector_batch),
}
pytestmark = pytest.mark.filterwarnings("ignore:the model could not be probed without values")


def trained(name: str, wrap: dict[str, Any] | None, num_steps: int = 3, **loop: Any) -> Trained:
    build, batch = SUBJECTS[name]
    batches = [batch(seed=10 + step, num_samples=NUM_SAMPLES) for step in range(num_steps)]
    return train(build(num_samples=NUM_SAMPLES), batches, wrap=wrap, **loop)


def within_limits(run: Trained) -> None:
    assert run.stats is not None
    assert run.stats.peak_bytes["gpu"] <= run.stats.plan.gpu_limit_bytes
    assert run.stats.peak_bytes["host"] <= run.stats.plan.host_limit_bytes


LONG = pytest.mark.long
TIGHT = [  # each timing, a model of transformers and one of those above
    ("switch_transformers", "in_backward"),
    ("branching", "deferred"),
]
MORE = [(name, update) for name in SUBJECTS for update in TIMINGS if (name, update) not in TIGHT]


@pytest.mark.parametrize(("name", "update"), [*TIGHT, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_the_tightest_limit_that_is_accepted_is_kept(name: str, update: str) -> None:
    plain = trained(name, None, **TIMINGS[update])
    wrapped = trained(name, {"update": update, "room": 1.0}, **TIMINGS[update])
    assert_parity(plain, wrapped)
    within_limits(wrapped)
    assert wrapped.stats is not None and wrapped.stats.evictions > 0 and wrapped.stats.deviations == 0


@pytest.mark.parametrize(
    "name",
    [
        "autoformer",
        "gathering",
        *(pytest.param(name, marks=LONG) for name in ("nllb_moe", "switch_transformers", "branching")),
    ],
)
def test_the_forecast_is_what_is_needed(name: str) -> None:
    """With the batch that it was made for; another may take other ways."""
    build, batch = SUBJECTS[name]
    run = train(build(num_samples=NUM_SAMPLES), [batch(num_samples=NUM_SAMPLES)] * 3, wrap={"room": 1.0})
    assert run.stats is not None
    peak_bytes = run.stats.peak_bytes["gpu"]
    assert peak_bytes <= run.stats.forecast.gpu_peak_bytes <= 1.1 * peak_bytes
    assert "as in one pass on values" in run.stats.plan.explain()


@pytest.mark.parametrize(
    "name", ["nllb_moe", *(pytest.param(name, marks=LONG) for name in ("autoformer", "switch_transformers"))]
)
def test_dropout_draws_as_without_hightide(name: str) -> None:
    build, batch = SUBJECTS[name]

    def run(wrap: dict[str, Any] | None) -> Trained:
        batches = [batch(seed=10 + step, num_samples=NUM_SAMPLES) for step in range(3)]
        pair = build(num_samples=NUM_SAMPLES, dropout=0.2)
        torch.manual_seed(5)  # what `wrap` draws must not be missing afterwards
        return train(pair, batches, wrap=wrap)

    assert_parity(run(None), run({}))


def test_an_order_of_blocks_that_depends_on_values_is_followed_within_the_limit() -> None:
    build = partial(asking, Ordered, Branching, num_samples=NUM_SAMPLES)
    batches = [models.vector_batch(seed=10 + step, num_samples=NUM_SAMPLES) for step in range(8)]
    plain = train(build(), batches)
    with pytest.warns(UserWarning, match="in an order that the plan did not foresee"):
        wrapped = train(build(), batches, wrap={"room": 1.0})
    assert_parity(plain, wrapped)
    within_limits(wrapped)
    assert wrapped.stats is not None and wrapped.stats.deviations > 0


class Widening(Branching):
    """Takes the wide way on some batches only."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().max().item() > 50:
            x = x.repeat(1, 40).sin().view(len(x), 40, -1).mean(1)
        return super().forward(x)


def test_a_batch_that_takes_more_than_the_example_did_is_refused_with_the_numbers() -> None:
    """Nobody can know it before: it is no silent overrun, and the loop may go on."""
    model, example = asking(Asking, Widening, num_samples=NUM_SAMPLES)
    model, optimizer = wrap(model, make_optimizer(model), example, room=1.0)
    wide = {**example, "x": 1000 * example["x"]}
    with pytest.raises((OutOfMemory, InfeasiblePlan), match=r"\d+ bytes"):
        model(**wide)["loss"].backward()
    optimizer.zero_grad()
    model(**example)["loss"].backward()
    optimizer.step()
    run = hightide.stats(model)
    assert run.peak_bytes["gpu"] <= run.plan.gpu_limit_bytes


@pytest.mark.parametrize(
    "name", ["gathering", *(pytest.param(name, marks=LONG) for name in ("autoformer", "nllb_moe"))]
)
def test_a_limit_below_the_leanest_is_refused_and_the_model_is_as_before(name: str) -> None:
    model, example = SUBJECTS[name][0](num_samples=NUM_SAMPLES)
    optimizer = make_optimizer(model)
    with pytest.raises(InfeasiblePlan) as found:
        hightide.plan(model, optimizer, example, limits=hightide.Limits(gpu=1000, host=HOST))
    least = found.value.num_bytes
    before = {key: value.clone() for key, value in model.state_dict().items()}
    objects = [id(param) for param in model.parameters()]
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"bytes.* are missing on the gpu.*give it Limits\(gpu={least}\)"):
        hightide.wrap(model, optimizer, example, limits=hightide.Limits(gpu=least - 4096, host=HOST))
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], value) for key, value in before.items())
    assert [id(param) for param in model.parameters()] == objects
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(models.loss_of(model, example).item(), float), "plain"
    hightide.wrap(model, optimizer, example, limits=hightide.Limits(gpu=least, host=HOST))


def test_router_losses_are_taken_out_of_blocks() -> None:
    def build() -> models.Pair:
        model, batch = models.nllb_moe(num_layers=2, num_samples=NUM_SAMPLES)
        return model, {**batch, "output_router_logits": True}

    batches = [
        {**models.translation_batch(seed=10 + step, num_samples=NUM_SAMPLES), "output_router_logits": True}
        for step in range(3)
    ]
    plain, wrapped = train(build(), batches), train(build(), batches, wrap={})
    assert_parity(plain, wrapped)
    within_limits(wrapped)


SEEN: list[Tensor] = []  # global: what a hook remembers itself is put back after a pass on values


def look(module: nn.Module, _args: Any) -> None:
    if not isinstance(module.weight, FakeTensor):
        SEEN.append(module.weight.detach().clone())


def test_a_model_whose_values_are_in_files_is_run_on_them(tmp_path: Path) -> None:
    """Not on random ones."""
    model, example = models.nllb_moe(num_layers=2, num_samples=NUM_SAMPLES)
    model.save_pretrained(tmp_path)
    unloaded = hightide.from_pretrained(tmp_path).train()
    name = "model.encoder.layers.0.ffn.fc1"
    SEEN.clear()
    handle = unloaded.get_submodule(name).register_forward_pre_hook(look)
    hightide.plan(unloaded, make_optimizer(unloaded), example, limits=hightide.Limits(gpu="64MiB", host=HOST))
    handle.remove()
    assert SEEN and all(torch.equal(weight, model.get_submodule(name).weight) for weight in SEEN)
    batches = [models.translation_batch(seed=10 + step, num_samples=NUM_SAMPLES) for step in range(3)]
    assert_parity(train((model, example), batches), train((unloaded, example), batches, wrap={}))
