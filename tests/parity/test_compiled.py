"""compile=True: equal to plain PyTorch, one compilation for all equal blocks, and no more recomputed than needed.

The compiler behind torch.compile's tracing is its eager one here: what is tested is what hightide asks for. With the
real one the same runs under the marks `long` and `gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from harness import SUBJECTS, assert_parity, compare, make_optimizer, streamed, train
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.runtime.blocks import compiled

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Graphs:
    """What was compiled: matrix multiplications in each graph, forward and backward."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.operations: set[str] = set()
        self.backend = aot_autograd(
            fw_compiler=partial(self._note, self.forward),
            bw_compiler=partial(self._note, self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _note(self, counts: list[int], graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.operations |= {str(node.target) for node in graph.graph.nodes}
        counts.append(sum(node.target in MATMULS for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    torch._dynamo.reset()
    made = Graphs()
    compile = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda fn, **options: compile(fn, backend=made.backend, **options))
    yield made
    torch._dynamo.reset()


def check(name: str, wrap: dict[str, Any], num_steps: int = 4, **options: Any) -> hightide.Stats:
    subject = SUBJECTS[name]
    build = partial(subject.build, num_samples=7)
    _, wrapped = compare(build, lambda: subject.batches(num_steps), wrap={"compile": True, **wrap}, **options)
    assert wrapped.stats is not None
    return wrapped.stats


@pytest.mark.parametrize(
    ("name", "update", "activation", "inputs"),
    [
        ("llama_tied", "deferred", Activation.RECOMPUTE, Tier.HOST),
        pytest.param("llama_tied", "in_backward", Activation.RECOMPUTE, Tier.GPU, marks=pytest.mark.long),
        pytest.param("gpt2", "in_backward", Activation.RECOMPUTE, Tier.HOST, marks=pytest.mark.long),
        ("plain_tied", "in_backward", Activation.KEEP, Tier.GPU),
        ("llama_tied", "deferred", Activation.SELECTIVE, Tier.HOST),
    ],
)
def test_steps_equal_plain_pytorch_with_one_compilation(
    graphs: Graphs, name: str, update: str, activation: Activation, inputs: Tier
) -> None:
    model, batch = SUBJECTS[name].build(num_samples=7)
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    optimizer = make_optimizer(model, 2)
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=3, update=update)
    plan = streamed(plan, activation, inputs)
    num_steps = 20 if name == "gpt2" else 4
    stats = check(name, {"plan": plan}, num_steps, clip="torch" if update == "deferred" else None, groups=2)
    assert stats.evictions > 0
    assert len(graphs.forward) == 1, "equal blocks, slots and the smaller last micro-batch share one compilation"


def test_dropout_is_recomputed_as_it_was(graphs: Graphs) -> None:
    """Recomputed and kept give the same bits, though both draw random numbers in compiled code."""

    def run(room: float) -> list[float]:
        pair = models.gpt2(num_layers=3, num_samples=6, dropout=0.3)
        torch.manual_seed(5)
        batches = SUBJECTS["gpt2"].batches(5, num_samples=6)
        trained = train(pair, batches, wrap={"micro_batch": 2, "compile": True, "room": room})
        assert trained.stats is not None
        kept = {block.activation for block in trained.stats.plan.blocks if block.name.startswith("transformer.h")}
        assert len(kept) == 1
        return trained.losses

    assert run(1.02) == pytest.approx(run(50.0), rel=1e-5)


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.after, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout).tanh())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_without_dropout_is_repeated_without_regard_to_random_numbers(graphs: Graphs, dropout: float) -> None:
    """See [Note: attention draws nothing] in blocks/compiled.py. What draws is repeated with the numbers of its
    forward."""
    forwards = compiled.CompiledForwards(enabled=True)
    block = Attends(dropout)
    for _ in range(2):
        forwards.add(block, Attends.forward)
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    forward = forwards.forward_of(Attends.forward, Activation.RECOMPUTE, (x.shape,))
    assert forward is not None
    loss = forward(block, x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert any("scaled_dot_product" in name for name in graphs.operations) or dropout
    assert any("rng_state" in name for name in graphs.operations) == (dropout > 0)
    if not dropout:
        (plain,) = torch.autograd.grad(block(x).square().sum(), x)
        torch.testing.assert_close(gradient, plain)


class Breaks(nn.Module):
    """torch.compile cannot trace through this."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.linear(x).tanh()


def test_what_cannot_be_compiled_runs_eagerly_and_says_so(graphs: Graphs) -> None:
    def build() -> models.Pair:
        torch.manual_seed(0)
        return nn.Sequential(*(Breaks() for _ in range(3))), torch.randn(6, 32)

    def step(loop: Any, batch: Tensor) -> Tensor:
        loss = loop.model(batch).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    batches = [torch.randn(6, 32) for _ in range(5)]
    plain = train(build(), batches, step=step)
    with pytest.warns(UserWarning, match=r"Breaks\.forward cannot be compiled and runs eagerly") as caught:
        wrapped = train(build(), batches, step=step, wrap={"micro_batch": 2, "compile": True})
    assert len([one for one in caught if "cannot be compiled" in str(one.message)]) == 1
    assert wrapped.losses == pytest.approx(plain.losses, rel=1e-6)
    assert not graphs.forward


class Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in MATMULS
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """Three projections, of which backward needs the outputs of two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.three(self.two(self.one(x).tanh()).tanh())


@pytest.mark.parametrize("inputs", [Tier.GPU, Tier.HOST])
def test_recomputation_skips_the_last_projection(inputs: Tier) -> None:
    counts = {}
    for recompute in (False, True):
        model, batch = nn.Sequential(*(Mlp() for _ in range(4))), torch.randn(6, 32)
        optimizer = torch.optim.AdamW(model.parameters())
        limits = hightide.Limits(gpu="1MiB" if recompute else "64MiB", host="64MiB")
        plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=6)
        model, optimizer = hightide.wrap(model, optimizer, batch, plan=with_activations(plan, recompute, inputs))
        with Matmuls() as seen:
            model(batch).sum().backward()
        counts[recompute] = seen.count
    assert counts[True] - counts[False] == 4 * 2, counts


def test_a_compiled_backward_skips_the_last_projection(graphs: Graphs) -> None:
    model, batch = nn.Sequential(*(Mlp() for _ in range(4))), torch.randn(6, 32, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch.detach(), limits=hightide.Limits(gpu="64MiB"), micro_batch=6)
    plan = with_activations(plan, True, Tier.GPU)
    model, optimizer = hightide.wrap(model, optimizer, batch.detach(), plan=plan, compile=True)
    model(batch).sum().backward()
    assert graphs.forward == [3]
    assert graphs.backward == [2 + 2 * 3]  # recomputed, and two for each projection's backward


def with_activations(plan: hightide.Plan, recompute: bool, inputs: Tier) -> hightide.Plan:
    activation = Activation.RECOMPUTE if recompute else Activation.KEEP
    blocks = tuple(replace(b, activation=activation, inputs=inputs if recompute else Tier.GPU) for b in plan.blocks)
    return replace(plan, blocks=blocks)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("room", [1.02, 50.0])
def test_with_the_real_compiler(name: str, room: float) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be compiled.*")
        check(name, {"room": room, "micro_batch": 3})


def test_more_than_a_few_lengths_run_eagerly_and_it_says_so(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_SHAPES", 4)  # each takes a second or two
    lengths = [5, 6, 7, 8, 9, 10, 5]

    def batches() -> list[dict[str, Tensor]]:
        made = [models.token_batch(seed=at, num_samples=4, mask=False) for at in range(len(lengths))]
        return [
            {key: value[:, :length] for key, value in batch.items()}
            for batch, length in zip(made, lengths, strict=True)
        ]

    def build() -> models.Pair:
        return SUBJECTS["llama"].build(num_samples=4)[0], models.token_batch(num_samples=4, mask=False)

    plain = train(build(), batches())
    model, batch = build()
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    plan = hightide.plan(model, make_optimizer(model, 1), batch, limits=limits, micro_batch=2)
    plan = streamed(plan, Activation.RECOMPUTE, Tier.GPU)  # kept, the harness's own hook would be compiled
    with pytest.warns(UserWarning, match="4 shapes of its inputs; others run eagerly") as caught:
        wrapped = train(build(), batches(), wrap={"plan": plan, "compile": True})
    assert len([one for one in caught if "others run eagerly" in str(one.message)]) == 1
    assert wrapped.losses == pytest.approx(plain.losses, rel=1e-6)
    assert len(graphs.forward) <= 2 * compiled.MAX_SHAPES


def test_every_run_has_compilations_of_its_own(graphs: Graphs) -> None:
    """torch gives up at eight compilations of one code object: several models in one process must not share one."""
    for size in range(1, 11):
        forwards = compiled.CompiledForwards(enabled=True)
        blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
        for block in blocks:
            forwards.add(block, nn.Sequential.forward)
        inputs = torch.zeros(size, 4)
        forward = forwards.forward_of(nn.Sequential.forward, False, (inputs.shape,))
        assert forward is not None
        forward(blocks[0], inputs)
    assert len(graphs.forward) == 10


def test_a_model_that_the_user_compiles_leaves_hightide_out() -> None:
    """Traced with the model, it may end in an error of the compiler."""
    torch._dynamo.reset()
    traced: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        traced.append(graph)
        return graph.forward

    subject = SUBJECTS["llama_tied"]
    plain = train(subject.build(num_samples=7), subject.batches(1))
    model, example = subject.build(num_samples=7)
    model.compile(backend=backend)
    wrapped = train((model, example), subject.batches(1), wrap={})
    assert_parity(plain, wrapped)
    assert not traced
