"""Any model with any loop trains as in plain PyTorch when everything streams: every pair of features in some case.

A feature is a line of FEATURES. By default the covering set runs; the `long` mark is the full product, which takes
hours: `make test-long SHARD=3/40` is a part of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import EPS, Trained, assert_parity, assert_same_bits, streamed, train
from torch import Tensor, nn

import architectures
import hightide
import models
from architectures import ARCHITECTURES, TRAINED
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from pairwise import Case, covering, pairs_of, product

LIMITS = hightide.Limits(gpu="8MiB", host="64MiB")
MICRO_BATCH, NUM_STEPS = 3, 3
F64 = torch.float64


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "eps": EPS}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "eps": EPS}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
FEATURES: dict[str, tuple[Any, ...]] = {
    "model": tuple(ARCHITECTURES),
    "tied": (False, True),
    "trained": TRAINED,
    "update": ("deferred", "in_backward"),
    "clip": (None, "torch", "optimizer"),
    "backwards": (1, 2),  # per step
    "groups": (1, 2),
    "optimizer": tuple(OPTIMIZERS),
    "odd": (False, True),  # the last micro-batch is smaller, and so is the last batch
    "padded": (False, True),  # every second batch
    "activation": tuple(Activation),
}


def allowed(*, model: str, tied: bool, update: str, clip: str | None, backwards: int, padded: bool, **_: Any) -> bool:
    architecture = ARCHITECTURES[model]
    if update == "in_backward" and (clip is not None or backwards > 1):  # what the user promised
        return False
    return (architecture.can_tie or not tied) and (architecture.can_pad or not padded)


FULL = product(FEATURES, allowed)
# Blocks and heads of these are Llama's or GPT-2's, of the same calls of torch: each is in some cases, not in all pairs.
ALIKE = ("qwen3", "mistral", "gemma3", "opt", "bert")
UNLIKE = [case for case in FULL if case[0] not in ALIKE]
COVERING = covering(FEATURES, UNLIKE)
COVERING += [random.Random(name).choice([case for case in FULL if case[0] == name]) for name in ALIKE]


def named(case: Case) -> dict[str, Any]:
    return dict(zip(FEATURES, case, strict=True))


def name_of(case: Case) -> str:
    return " ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in named(case).items())


# -- one case ---------------------------------------------------------------------------------------------------------


def build(model: str, trained: str = "all", odd: bool = True, padded: bool = False, **options: Any) -> models.Pair:
    batch = {"num_samples": 7 if odd else 6} | ({"padded": padded} if ARCHITECTURES[model].can_pad else {})
    return architectures.build(model, trained, **options, **batch)


def batches(model: str, odd: bool, padded: bool = False, seed: int = 10) -> list[dict[str, Any]]:
    architecture = ARCHITECTURES[model]
    sizes = [7, 7, 5] if odd else [6] * NUM_STEPS
    padding = [{"padded": padded and step % 2 == 0} if architecture.can_pad else {} for step in range(NUM_STEPS)]
    return [architecture.batch(seed=seed + step, num_samples=sizes[step], **padding[step]) for step in range(NUM_STEPS)]


def make_optimizer(model: nn.Module, optimizer: str = "adamw", groups: int = 1) -> torch.optim.Optimizer:
    """Two groups take the trained parameters by turns: each block has ranges of both."""
    kind, options = OPTIMIZERS[optimizer]
    params = [param for param in model.parameters() if param.requires_grad]
    if groups == 1:
        return kind(params, **options)
    slow = {"params": params[1::2], "lr": options["lr"] / 3, "weight_decay": 0.0}
    return kind([{"params": params[::2], "weight_decay": 0.1}, slow], **options)


def norm_of(pair: models.Pair) -> float:
    model, batch = pair
    models.loss_of(model, batch).backward()
    return float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))


def streamed_plan(
    pair: models.Pair, optimizer: torch.optim.Optimizer, activation: Activation, **options: Any
) -> hightide.Plan:
    options = {"limits": LIMITS, "micro_batch": MICRO_BATCH} | options
    return streamed(hightide.plan(pair[0], optimizer, pair[1], **options), activation, Tier.HOST)


def check(case: Case) -> None:
    features = named(case)
    model, odd, padded, update, clip, backwards = (
        features[name] for name in ("model", "odd", "padded", "update", "clip", "backwards")
    )
    tied = {"tied": features["tied"]} if ARCHITECTURES[model].can_tie else {}
    make = partial(build, model, features["trained"], odd, padded, **tied)
    stream: list[Any] = batches(model, odd, padded)
    if backwards == 2:
        stream = list(zip(stream, batches(model, odd, padded, seed=50), strict=True))
    max_norm = norm_of(make()) / 10 if clip else 0.0  # other batches have a fifth of its norm

    def run(wrapped: bool, stream: list[Any] = stream, dtype: torch.dtype = torch.float32) -> Trained:
        pair = make()
        pair[0].to(dtype)
        if dtype is F64 and hasattr(pair[0], "set_experts_implementation"):
            pair[0].set_experts_implementation("eager")  # torch's grouped product does not know it
        optimizer = make_optimizer(pair[0], features["optimizer"], features["groups"])
        loop = {"clip": clip, "accumulate": backwards, "max_norm": max_norm}
        if not wrapped:
            return train(pair, stream, optimizer=optimizer, **loop)
        plan = streamed_plan(pair, optimizer, features["activation"], update=update)
        return train(pair, stream, wrap={"plan": plan, "update": update}, optimizer=optimizer, **loop)

    plain, wrapped = run(False), run(True)
    assert list(plain.weights) == list(wrapped.weights) and len(plain.norms) == len(wrapped.norms)
    try:
        assert_parity(plain, wrapped)
    except AssertionError:
        exact = run(False, changed(stream, lambda value: value.double() if value.is_floating_point() else value), F64)
        reordered = run(False, changed(stream, lambda value: value.roll(MICRO_BATCH, 0)))
        assert_as_near(exact, wrapped, [plain, reordered])
    assert len(plain.norms) == (NUM_STEPS if clip else 0)
    assert not clip or max(plain.norms) > max_norm, "clipping is idle"
    assert_everything_streams(wrapped)
    assert wrapped.samples_seen[:3] == ([3, 3, 1] if odd else [3, 3, 3])


def changed(stream: list[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """Each tensor of each batch."""

    def change_one(batch: Any) -> Any:
        if isinstance(batch, tuple):
            return tuple(map(change_one, batch))
        return {name: change(value) for name, value in batch.items()}

    return list(map(change_one, stream))


def assert_as_near(exact: Trained, wrapped: Trained, plain: list[Trained]) -> None:
    """Where fp32 itself strays from fp64 by about the tolerance (an activation at the kink of a ReLU, a gradient near
    the optimizer's eps), hightide may be off by twice what plain PyTorch is, for the same samples in two orders."""
    noise = max(distance(exact, one) for one in plain)
    assert distance(exact, wrapped) <= max(1.0, 2 * noise), f"plain PyTorch is off by {noise:.2f} tolerances"


def distance(exact: Trained, other: Trained) -> float:
    """In tolerances of `assert_parity`."""
    losses = [abs(a - b) / abs(1e-6 * a) for a, b in zip(exact.losses, other.losses, strict=True)]
    norms = [abs(a - b) / (1e-5 * a) for a, b in zip(exact.norms, other.norms, strict=True)]
    weights = [
        float((other.weights[name] - value).abs().max()) / (1e-5 * float(value.abs().max()) + 1e-6)
        for name, value in exact.weights.items()
    ]
    assert all(map(math.isfinite, losses + norms + weights))
    return max(losses + norms + weights)


def assert_everything_streams(trained: Trained) -> None:
    stats = trained.stats
    assert stats is not None and stats.deviations == 0
    streamed_bytes = sum(value.numel() * 4 for value in trained.weights.values()) // 2  # tied ones are one
    assert stats.moved_bytes["h2d"] >= stats.num_steps * streamed_bytes
    assert stats.peak_bytes["gpu"] <= stats.plan.gpu_limit_bytes


@pytest.mark.parametrize("case", COVERING, ids=name_of)
def test_every_pair_of_features(case: Case) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("odd", FEATURES["odd"], ids=("even", "odd"))
@pytest.mark.parametrize("groups", FEATURES["groups"], ids=("one_group", "two_groups"))
@pytest.mark.parametrize("activation", FEATURES["activation"])
@pytest.mark.parametrize("optimizer", FEATURES["optimizer"])
@pytest.mark.parametrize("trained", FEATURES["trained"])
@pytest.mark.parametrize("model", FEATURES["model"])
def test_every_combination_of_features(
    model: str, trained: str, optimizer: str, activation: Activation, groups: int, odd: bool
) -> None:
    """All cases with these values in one test: thousands of tests would make every run of pytest wait for their
    collection."""
    features = dict(model=model, trained=trained, optimizer=optimizer, activation=activation, groups=groups, odd=odd)
    failures: dict[str, Exception] = {}
    for case in FULL:
        if features.items() <= named(case).items():
            try:
                check(case)
            except Exception as error:
                failures[name_of(case)] = error
    assert not failures, "\n".join(f"{name}: {error!r}" for name, error in failures.items())


def test_what_is_further_from_fp64_than_plain_pytorch_is_not_near_it() -> None:
    pair = build("llama")
    plain = train(pair, batches("llama", odd=True), optimizer=make_optimizer(pair[0]), clip="torch")

    def off_by(tolerances: float) -> Trained:
        name, value = next(iter(plain.weights.items()))
        error = tolerances * (1e-5 * float(value.abs().max()) + 1e-6)
        return replace(plain, weights=plain.weights | {name: value + error})

    assert_as_near(plain, off_by(0.9), [plain])
    assert_as_near(plain, off_by(3.9), [plain, off_by(2)])
    with pytest.raises(AssertionError, match=r"off by 2\.0"):
        assert_as_near(plain, off_by(4.5), [plain, off_by(2)])
    for wrong in (
        replace(plain, losses=[math.nan] * NUM_STEPS),
        replace(plain, norms=[2 * one for one in plain.norms]),
    ):
        with pytest.raises(AssertionError):
            assert_as_near(plain, wrong, [plain])


# -- the covering set itself ------------------------------------------------------------------------------------------


def test_the_covering_set_has_every_allowed_pair_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = set().union(*map(pairs_of, UNLIKE))
    assert set().union(*map(pairs_of, COVERING)) >= pairs
    assert {value for case in COVERING for value in zip(FEATURES, case, strict=True)} == {
        (name, value) for name, values in FEATURES.items() for value in values
    }
    with capsys.disabled():
        print(f"\n{len(COVERING)} cases cover {len(pairs)} pairs of values; the full product has {len(FULL)} cases")
    assert len(COVERING) < 36 and set(COVERING) <= set(FULL)


def test_a_covering_set_of_few_features() -> None:
    features = {"a": (1, 2, 3), "b": "xy", "c": (None, True)}
    cases = product(features, lambda a, b, c: not (a == 3 and b == "y"))
    assert len(cases) == 10 and (3, "y", None) not in cases
    chosen = covering(features, cases)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) <= 6 and chosen == covering(features, cases)
    for number in range(len(chosen)):  # and none of them for nothing, in a case as small as this
        rest = chosen[:number] + chosen[number + 1 :]
        assert set().union(*map(pairs_of, rest)) != set().union(*map(pairs_of, cases))


# -- dropout ----------------------------------------------------------------------------------------------------------

# Blocks that drop by different calls of torch: attention's own, nn.Dropout inside and between blocks, of two stacks.
DROPPING = ("llama", "gpt2", "t5", "hand_written")
WITH_DROPOUT = [name if name in DROPPING else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES]


def train_with_dropout(
    model: str, activation: Activation | None, micro_batch: int = MICRO_BATCH, dropout: float = 0.2
) -> Trained:
    """Plain without an activation policy."""
    pair = build(model, dropout=dropout)
    optimizer = make_optimizer(pair[0])
    plan = None if activation is None else streamed_plan(pair, optimizer, activation, micro_batch=micro_batch)
    torch.manual_seed(7)
    return train(pair, batches(model, odd=True), wrap=plan and {"plan": plan}, optimizer=optimizer)


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_with_one_micro_batch_equals_plain_pytorch(model: str) -> None:
    """Then blocks draw from the global generator, in plain PyTorch's order."""
    plain = train_with_dropout(model, None)
    wrapped = train_with_dropout(model, Activation.RECOMPUTE, micro_batch=7)
    assert_parity(plain, wrapped)
    assert_everything_streams(wrapped)
    assert train_with_dropout(model, None, dropout=0.0).losses[0] != plain.losses[0], "nothing is dropped"


@pytest.mark.parametrize(
    "model", [model if model != "t5" else pytest.param(model, marks=pytest.mark.long) for model in WITH_DROPOUT]
)
def test_dropout_with_several_micro_batches_does_not_depend_on_the_plan(model: str) -> None:
    recomputed, selective, kept = (train_with_dropout(model, activation) for activation in Activation)
    assert_everything_streams(recomputed)
    assert_same_bits(kept, recomputed)
    assert_same_bits(kept, selective)
