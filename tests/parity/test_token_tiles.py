"""Long sequences: parts of a block that treat each token by itself run by tiles, with the results of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import (
    SUBJECTS,
    Loop,
    assert_same_bits,
    assert_streamed,
    compare,
    make_optimizer,
    no_warnings,
    streamed,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.profiler.model.model_profile import profile_model
from hightide.profiler.needs import token_tiles

NUM_STEPS = 3
LAYER = ("input_layernorm", "post_attention_layernorm", "mlp")
LLAMA = SUBJECTS["llama"]
PART = {"part", token_tiles.BLOCK}  # alone, or with all that is around it
NO_LIMIT = hightide.Limits(gpu="1GiB", host="1GiB")


@pytest.fixture(autouse=True)
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten tokens: tiles of four, four and two."""
    monkeypatch.setattr(token_tiles, "LONG", 6)
    monkeypatch.setattr(token_tiles, "TILE", 4)


def tiled_in(model: nn.Module, batch: Any) -> dict[str, tuple[str, ...]]:
    profile, _ = profile_model(model, make_optimizer(model), batch)
    return {profile.blocks[call.block].name: call.tiled for call in profile.calls if call.tiled}


@pytest.mark.parametrize(("name", "clip"), [("llama_tied", "torch"), ("gpt2", None)])
def test_parity(name: str, clip: str | None) -> None:
    subject = SUBJECTS[name]
    batches = subject.batches(NUM_STEPS, padded=True)
    build = partial(subject.build, num_samples=7, padded=True)
    _, wrapped = compare(build, lambda: batches, wrap={"micro_batch": 3}, clip=clip, groups=2)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_what_is_tiled() -> None:
    tiled = tiled_in(*models.llama(num_layers=3))
    expected = {f"model.layers.{number}": set(LAYER) for number in range(3)}
    assert {name: set(parts) for name, parts in tiled.items()} == {**expected, "model.norm": {token_tiles.BLOCK}}
    assert not tiled_in(*models.hand_written()), "it has no tokens"


def test_a_short_example_tiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "LONG", models.NUM_TOKENS)
    assert not tiled_in(*models.llama(num_layers=2))


@pytest.mark.parametrize("activation", list(Activation))
def test_levels_and_placements_have_the_same_bits(activation: Activation) -> None:
    """In fp32 and eagerly, whatever is held, and wherever it is."""
    model, batch = LLAMA.build(num_samples=7)
    optimizer = make_optimizer(model)
    plan = hightide.plan(model, optimizer, batch, limits=NO_LIMIT, micro_batch=3)
    runs = []
    for chosen in (plan, streamed(plan, activation, Tier.HOST)):
        blocks = tuple(replace(block, activation=activation) if block.name else block for block in chosen.blocks)
        given = {"plan": replace(chosen, blocks=blocks)}
        runs.append(train(LLAMA.build(num_samples=7), LLAMA.batches(NUM_STEPS), wrap=given))
    assert_same_bits(*runs)


def test_lora_gradients_of_frozen_parts() -> None:
    """Only some parameters of a part are trained, and of the first layers not even the input needs a gradient."""

    def build() -> models.Pair:
        model, batch = LLAMA.build(num_samples=7)
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1.mlp.up_proj" in name or "layers.2.self_attn" in name)
        return model, batch

    with no_warnings():
        compare(build, lambda: LLAMA.batches(NUM_STEPS), wrap={"micro_batch": 3, "room": 1.3})


def test_a_forward_on_the_instance_is_the_users() -> None:
    """It runs as it is, whole, and stays where it is; also one that is put there after wrapping."""

    def patch(model: nn.Module, number: int) -> None:
        mlp = model.model.layers[number].mlp
        vars(mlp)["forward"] = lambda tokens: 2 * type(mlp).forward(mlp, tokens)

    def build() -> models.Pair:
        model, batch = LLAMA.build(num_samples=7)
        patch(model, 1)
        return model, batch

    tiled = tiled_in(*build())
    assert "mlp" not in tiled["model.layers.1"] and "mlp" in tiled["model.layers.2"]
    compare(build, lambda: LLAMA.batches(NUM_STEPS), wrap={"micro_batch": 3})
    block = build()[0].model.layers[1]
    with token_tiles.tiling(block, ["mlp"]):
        assert block.mlp.forward.__name__ == "<lambda>"
    assert "forward" in vars(block.mlp)


def test_sums_over_tiles_are_rounded_once() -> None:
    """In bf16: the gradient of a part's parameter is the fp32 sum of what its tiles give."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    tokens = torch.randn(2, 1000, 32, dtype=torch.bfloat16, requires_grad=True)
    seed = torch.randn(2, 1000, 32, dtype=torch.bfloat16)
    block = nn.Sequential(part)
    with token_tiles.tiling(block, ["0"]):
        block(tokens).backward(seed)
    of_tiles = [torch.zeros_like(param, dtype=torch.float32) for param in part.parameters()]
    for start in range(0, 1000, token_tiles.TILE):
        tile, grad = (whole[:, start : start + token_tiles.TILE].detach().contiguous() for whole in (tokens, seed))
        grads = torch.autograd.grad(part(tile), list(part.parameters()), grad)
        for total, grad in zip(of_tiles, grads, strict=True):
            total += grad
    for param, total in zip(part.parameters(), of_tiles, strict=True):
        assert param.grad is not None and torch.equal(param.grad, total.bfloat16())


def test_autocast_is_that_of_the_forward() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = loop.model(**batch).loss
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    plain, wrapped = (
        train(LLAMA.build(num_samples=7), LLAMA.batches(3), wrap=wrap, step=step)
        for wrap in (None, {"limits": NO_LIMIT, "micro_batch": 7})
    )
    assert plain.losses == pytest.approx(wrapped.losses, rel=2e-3)
    dtypes = {param.dtype for param in wrapped.model.parameters()}
    assert dtypes == {torch.float32}


class Mixing(nn.Module):
    """Looks like a feed-forward part."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.HIDDEN, 128), nn.Linear(128, models.HIDDEN)
        self.drop = nn.Dropout(0.5 if how == "draws" else 0.0)
        self.register_buffer("seen", torch.zeros(()))
        self.extra = nn.Linear(4, 4) if how == "unused" else None
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x.detach() if self.how == "detached" else x))
        if self.how == "mean":
            hidden = hidden - hidden.mean(1, keepdim=True)
        elif self.how == "largest":
            hidden = hidden / hidden.abs().amax((1, 2), keepdim=True)
        elif self.how == "position":
            hidden = hidden * torch.linspace(0.5, 2.0, x.shape[1])[:, None]
        elif self.how == "dilated":
            hidden = hidden + F.pad(hidden, (0, 0, 4, 0))[:, : x.shape[1]]
        elif self.how == "prefix":
            hidden = hidden * torch.where(torch.arange(x.shape[1]) < 4, 3.0, 1.0)[:, None]
        elif self.how == "capacity":
            chosen = (hidden[..., :1] > hidden[..., 1:2]).int()
            hidden = hidden * torch.where(chosen > 0, chosen, 1 - chosen).cumsum(1).le(4)
        elif self.how == "counts":
            self.seen += 1
        return self.drop(self.down(F.silu(hidden)))


class Mixer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.stack = nn.ModuleList(
            nn.ModuleDict({"part": Mixing(how), "norm": nn.LayerNorm(models.HIDDEN)}) for _ in range(3)
        )
        self.layers = nn.ModuleList(_Layer(entry["part"], entry["norm"]) for entry in self.stack)
        del self.stack
        self.head = nn.Linear(models.HIDDEN, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x.mean(1)), labels)


class _Layer(nn.Module):
    def __init__(self, part: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.part, self.norm = part, norm

    def forward(self, x: Tensor) -> Tensor:
        around = x.mean(1, keepdim=True) if self.part.how == "patched later" else 0.0  # then only the part is tiled
        return x + torch.tanh(self.part(self.norm(x))) + around


def mixer(how: str) -> models.Pair:
    torch.manual_seed(3)
    batch = {"x": torch.randn(5, models.NUM_TOKENS, models.HIDDEN), "labels": torch.randn(5, 8)}
    return Mixer(how).train(), batch


@pytest.mark.parametrize(
    "how", ["mean", "largest", "position", "dilated", "prefix", "capacity", "draws", "counts", "patched"]
)
def test_parts_that_are_not_by_token_stay_whole(how: str) -> None:
    model, batch = mixer(how)
    if how == "patched":
        patch(model)
    assert all(not PART & set(parts) for parts in tiled_in(model, batch).values())


def patch(model: Mixer) -> None:
    """As libraries of kernels do."""
    for layer in model.layers:
        part = layer.get_submodule("part")
        part.forward = lambda x, part=part: 0.5 * part.down(part.up(x))


def test_blocks_that_look_alike_are_each_tried() -> None:
    """One has a flag in an attribute."""
    model, batch = mixer("")
    model.layers[2].get_submodule("part").how = "mean"
    tiled = tiled_in(model, batch)
    assert PART & set(tiled["layers.1"]) and not PART & set(tiled.get("layers.2", ()))


@pytest.mark.parametrize("how", ["", "unused", "detached", "patched later"])
def test_a_part_of_ones_own_is_tiled_and_equal(how: str) -> None:
    """ "unused", "detached": what has no gradient in plain PyTorch is not shrunk by weight decay."""
    assert all(PART & set(parts) for parts in tiled_in(*mixer(how)).values()), "else the others show nothing"

    def step(loop: Loop, batch: Any) -> Tensor:
        if how == "patched later":
            patch(loop.model)
        loss: Tensor = loop.model(**batch)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    batches = [mixer(how)[1] for _ in range(NUM_STEPS)]
    model, batch = mixer(how)
    plan = hightide.plan(model, make_optimizer(model), batch, limits=NO_LIMIT, micro_batch=2)
    given = {"plan": streamed(plan, Activation.RECOMPUTE, Tier.HOST)}
    compare(partial(mixer, how), lambda: batches, wrap=given, step=step)


def test_a_part_that_draws_later_is_refused() -> None:
    model, batch = mixer("")
    model, _ = hightide.wrap(model, make_optimizer(model), batch, limits=NO_LIMIT, device="cpu")
    for layer in model.layers:
        layer.part.drop.p = 0.5
    with pytest.raises(hightide.Refused, match="Set dropout before"):
        model(**batch)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_inside_a_part_see_whole_micro_batches(when: str) -> None:
    seen: list[int] = []

    def hooked(model: nn.Module) -> None:
        inside = model.get_submodule("model.layers.1.mlp.act_fn")
        inside.register_forward_hook(lambda _module, args, _result: seen.append(args[0].shape[1]))

    model, batch = LLAMA.build(num_samples=7)
    if when == "before":
        hooked(model)
        assert "mlp" not in tiled_in(model, batch)["model.layers.1"]
    wrapped, _ = hightide.wrap(model, make_optimizer(model), batch, limits=NO_LIMIT, micro_batch=3)
    if when == "after":
        hooked(wrapped)
    seen.clear()
    wrapped(**batch).loss.backward()
    assert seen and set(seen) == {models.NUM_TOKENS}


def test_a_longer_sequence_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the accelerator, whose capacity is hard: what is refused as a whole runs in tiles, as told."""

    def build() -> models.Pair:
        model, _ = models.llama(num_layers=2)
        ids = torch.randint(3, models.VOCABULARY, (1, 512), generator=torch.Generator().manual_seed(0))
        model.config.max_position_embeddings = 512
        return model, {"input_ids": ids, "labels": ids}

    def needed() -> int:
        model, batch = build()
        with pytest.raises(InfeasiblePlan) as refused:
            hightide.wrap(model, make_optimizer(model), batch, limits=hightide.Limits(gpu=1, host="64MiB"))
        return int(refused.value.num_bytes)

    monkeypatch.setattr(token_tiles, "LONG", 1024)
    whole_bytes = needed()
    monkeypatch.setattr(token_tiles, "LONG", 256)
    monkeypatch.setattr(token_tiles, "TILE", 64)
    tiled_bytes = needed()
    assert tiled_bytes < 0.75 * whole_bytes
    plain = train(build(), [build()[1]] * 3)
    limits = hightide.Limits(gpu=int(1.02 * tiled_bytes), host="64MiB")
    wrapped = train(build(), [build()[1]] * 3, wrap={"limits": limits})
    assert wrapped.losses == pytest.approx(plain.losses, rel=1e-5)
    stats = wrapped.stats
    assert stats is not None and stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes <= limits_bytes(limits)


def test_a_long_batch_after_a_short_example() -> None:
    """It is profiled anew, on a model that is wrapped already."""
    batches = LLAMA.batches(4)

    def build() -> models.Pair:
        model, batch = LLAMA.build(num_samples=7)
        return model, {name: value[:, :5] for name, value in batch.items()}

    with pytest.warns(UserWarning, match="Planned again"):
        _, wrapped = compare(build, lambda: batches, wrap={"micro_batch": 3, "room": 1.7})
    run = wrapped.model.hightide_run
    assert sum(bool(call.tiled) for call in run.profile.calls) == 4


def limits_bytes(limits: hightide.Limits) -> int:
    assert isinstance(limits.gpu, int)
    return limits.gpu


def test_explained() -> None:
    model, batch = LLAMA.build(num_samples=7)
    text = hightide.plan(model, make_optimizer(model), batch, limits=NO_LIMIT).explain()
    assert "3 calls with tiles of tokens" in text and "mlp" in text
