"""A model made on the meta device gets its values from its own initialisers, as if it had been made in RAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hightide
import models
from hightide.loading import initial
from hightide.runtime.surgery import run_of

LIMITS = hightide.Limits(gpu="4MiB", host="64MiB")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch() -> Tensor:
    return models.token_batch(num_samples=6)["input_ids"]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def wrap(model: nn.Module, example: Any, gpu: str = "4MiB", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return hightide.wrap(model, optimizer, example, limits=hightide.Limits(gpu=gpu, host="64MiB"), **options)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    values = found.state_dict()
    assert list(values) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(values[name], value), name
    buffers = dict(found.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_plain_model_gets_the_values_that_its_constructor_would_have_drawn() -> None:
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.BatchNorm1d(48), nn.Linear(48, 32), nn.LayerNorm(32))
    model = on_meta(
        lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.BatchNorm1d(48), nn.Linear(48, 32), nn.LayerNorm(32))
    )
    example = torch.randn(6, 32)
    torch.manual_seed(5)
    model, _ = wrap(model, example)
    assert_same(model, expected)


def test_a_parent_that_initialises_its_children_has_the_last_word() -> None:
    """nn.MultiheadAttention sets the bias of its output projection to zero, after that has drawn one."""
    torch.manual_seed(5)
    expected = Stack()
    model = on_meta(Stack)
    torch.manual_seed(5)
    model, optimizer = wrap(model, batch())
    values, wanted = model.state_dict(), expected.state_dict()
    for name, value in wanted.items():
        if "attention" in name and "bias" in name:
            assert torch.equal(values[name], torch.zeros_like(value)), name
        assert values[name].std() == pytest.approx(float(value.std()), rel=0.2, abs=1e-6), name
    assert torch.equal(values["embed.weight"], wanted["embed.weight"]), "of the first owner, and with its padding row"
    assert values["head.weight"].data_ptr() == values["embed.weight"].data_ptr(), "still tied"
    before = float(model(batch()).detach())
    model(batch()).backward()
    optimizer.step()
    assert float(model(batch()).detach()) < before


@pytest.mark.parametrize(
    "name", ["llama_tied", "gpt2", "t5", *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "vit"))]
)
def test_a_transformers_model_gets_what_its_init_weights_gives(name: str) -> None:
    expected, example = models.ZOO[name]()
    kind, config = type(expected), expected.config
    model = on_meta(lambda: kind(config))
    for module in expected.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(5)
    expected.init_weights()  # type: ignore[operator]
    torch.manual_seed(5)
    model, _ = wrap(model, example)
    assert_same(model, expected)


def test_values_do_not_depend_on_the_plan_nor_on_how_much_is_real_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.gpt2()[0].config
    found = []
    for gpu, real_bytes in (("8MiB", 2**26), ("600KiB", 2**26), ("600KiB", 1)):
        monkeypatch.setattr(initial, "REAL_BYTES", real_bytes)
        model = on_meta(lambda: transformers.GPT2LMHeadModel(config))
        torch.manual_seed(5)
        found.append(wrap(model, models.token_batch(), gpu, micro_batch=1)[0])
    assert hightide.stats(found[0]).plan != hightide.stats(found[1]).plan
    for other in found[1:]:
        assert_same(other, found[0])


def test_16_bit_parameters_and_their_masters_agree() -> None:
    config = models.llama()[0].config
    model = on_meta(lambda: transformers.LlamaForCausalLM(config)).to(torch.bfloat16)
    model, optimizer = wrap(model, models.token_batch())
    values = model.state_dict()
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    assert optimizer.state_dict()["hightide_masters"] == {}, "they are the parameters"
    chunks = run_of(model).chunks  # type: ignore[union-attr]
    for name in dict(model.named_parameters()):
        assert torch.equal(chunks.master_of(name), values[name].float()), name


def test_values_that_are_there_stay() -> None:
    model = on_meta(Stack)
    kept = nn.Linear(32, 48)
    model.blocks[1].up = kept
    weight = kept.weight.detach().clone()
    model, _ = wrap(model, batch())
    assert torch.equal(model.state_dict()["blocks.1.up.weight"], weight)
    llama = on_meta(lambda: transformers.LlamaForCausalLM(models.llama()[0].config))
    llama.model.norm.weight = nn.Parameter(torch.full((32,), 3.0))
    llama, _ = wrap(llama, models.token_batch())
    assert bool((llama.state_dict()["model.norm.weight"] == 3.0).all())
    assert not hasattr(llama.model.norm.weight, "_is_hf_initialized")


def test_the_optimizer_keeps_its_parameters() -> None:
    model = on_meta(Stack)
    params = list(model.parameters())
    _, optimizer = wrap(model, batch())
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in params]
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    assert not any(param.is_meta for param in params)
    plain = hightide.unwrap(model)
    assert {param.device.type for param in plain.parameters()} == {"cpu"}
    assert plain.head.weight is plain.embed.weight
    plain(batch()).backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def test_a_parameter_without_initialiser_is_refused_by_name_and_nothing_is_touched() -> None:
    model = on_meta(lambda: nn.Sequential(Scaled(), Scaled()))
    with pytest.raises(ValueError, match=r"2 of 6 parameters .*0\.scale, 1\.scale.*reset_parameters"):
        wrap(model, torch.randn(6, 32))
    assert all(param.is_meta for param in model.parameters())
    assert type(model) is nn.Sequential


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_what_an_initialiser_leaves_out_is_refused_by_name() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(32, 32), Forgetful(32, 32)))
    with pytest.raises(ValueError, match=r"1 parameters and buffers .*\(1\.bias\)"):
        wrap(model, torch.randn(6, 32))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.arange(32.0), persistent=False)
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.offset)


def test_a_buffer_without_values_is_refused_and_a_real_one_is_used() -> None:
    model = on_meta(lambda: nn.Sequential(WithBuffer(), nn.Linear(32, 8)))
    with pytest.raises(ValueError, match=r"0\.offset"):
        wrap(model, torch.randn(6, 32))
    model = on_meta(lambda: nn.Sequential(WithBuffer(), nn.Linear(32, 8)))
    model[0].offset = torch.arange(32.0)
    model, _ = wrap(model, torch.randn(6, 32))
    assert bool(model(torch.zeros(6, 32)).isfinite().all())


def test_a_plan_can_be_made_without_values() -> None:
    model = on_meta(Stack)
    plan = hightide.plan(model, torch.optim.AdamW(model.parameters()), batch(), limits=LIMITS)
    assert all(param.is_meta for param in model.parameters())
    model, _ = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch(), plan=plan)
    assert bool(model(batch()).isfinite())
