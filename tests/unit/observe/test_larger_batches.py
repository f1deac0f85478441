"""Batches of other sizes than the example: held, planned anew or refused; results are those of plain PyTorch."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hightide
import models
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores.store import OutOfMemory
from unit.runtime.steps import adamw, assert_equal_weights, train_step

AGAIN = "Planned again"
HELD = "the plan holds it"


def tokens(num_samples: int, length: int, mask: bool = False, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCABULARY, (num_samples, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return batch | {"attention_mask": torch.ones_like(ids)} if mask else batch


def translation(num_samples: int, length: int, target: int) -> dict[str, Any]:
    return {"input_ids": tokens(num_samples, length)["input_ids"], "labels": tokens(num_samples, target)["labels"]}


class Pictures(nn.Module):
    """Takes pictures of any size, by position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(3, 8), (8, 8), (8, 8)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in sizes)
        self.head = nn.Linear(8, 1)

    def forward(self, pictures: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pictures = layer(pictures)
        return (self.head(pictures.mean((2, 3))) * scale[:, None]).pow(2).mean()


def pictures(num_samples: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_samples, 3, 12, width), torch.randn(num_samples)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        return train_step(model, optimizer, batch)
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hightide")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@dataclass
class Pair:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    plain: nn.Module
    plain_optimizer: torch.optim.Optimizer

    @property
    def run(self) -> Run:
        run = run_of(self.model)
        assert run is not None
        return run

    def step(self, batch: Any) -> list[str]:
        """Of both, compared; what was said about larger batches."""
        with warnings.catch_warnings(record=True) as caught, logged() as lines:
            warnings.simplefilter("always")
            loss = step_of(self.model, self.optimizer, batch)
        expected = step_of(self.plain, self.plain_optimizer, batch)
        assert abs(loss.item() - expected.item()) <= 1e-5 * abs(expected.item())
        assert self.run.gpu.peak_bytes <= self.run.plan.gpu_limit_bytes
        return [line for line in (*map(str, (one.message for one in caught)), *lines) if "where batches had" in line]

    def close(self) -> None:
        assert_equal_weights(self.model, self.plain)
        hightide.unwrap(self.model)


def needed(model: nn.Module, batch: Any) -> int:
    """The least that holds a batch."""
    with pytest.raises(InfeasiblePlan) as short:
        hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu=4096, host="64MiB"))
    return next(limits[Tier.GPU] for limits in short.value.enough if set(limits) == {Tier.GPU})


def wrapped(model: nn.Module, batch: Any, gpu: int, **options: Any) -> Pair:
    plain = copy.deepcopy(model)
    limits = {} if "plan" in options else {"limits": hightide.Limits(gpu=gpu, host="64MiB")}
    model, optimizer = hightide.wrap(model, adamw(model), batch, **limits, **options)
    return Pair(model, optimizer, plain, adamw(plain))


@contextmanager
def all_let_in(run: Run) -> Iterator[None]:
    """As if nobody looked at sizes."""
    admission, run.admission = run.admission, None
    yield
    run.admission = admission


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "longer": (lambda: models.llama()[0], [tokens(4, 8), tokens(4, 24), tokens(4, 16), tokens(2, 5), tokens(4, 30)]),
    "more samples": (lambda: models.gpt2(num_layers=2)[0], [tokens(3, 8), tokens(9, 8), tokens(12, 10)]),
    "two lengths": (
        lambda: models.t5()[0],
        [translation(4, 8, 6), translation(4, 8, 20), translation(4, 24, 6), translation(2, 24, 20)],
    ),
    "pictures": (Pictures, [pictures(3, 8), pictures(3, 40), pictures(5, 16)]),
}


LONG = {"more samples", "two lengths"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in CASES])
def test_larger_batches_are_planned_anew(name: str) -> None:
    build, batches = CASES[name]
    model = build()
    gpu = max(needed(model, batch) for batch in batches) * 5 // 4
    pair = wrapped(model, batches[0], gpu)
    assert not pair.step(batches[0])
    said = [pair.step(batch) for batch in batches[1:]]
    assert all(len(lines) <= 1 for lines in said) and any(AGAIN in line for lines in said for line in lines)
    assert not any(pair.step(batch) for batch in batches)  # by now all of them are known
    pair.close()


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    mask = batch["attention_mask"].clone()
    mask[1, mask.shape[1] // 2 :] = 0
    return batch | {"attention_mask": mask}


def test_a_mask_that_leaves_something_out_is_planned_for() -> None:
    """Its sizes are those of one of ones, with which the example computes without a mask."""
    full = tokens(8, 64, mask=True)
    model = models.llama()[0]
    least, most = needed(model, full), needed(model, padded(full))
    assert least < most
    pair = wrapped(model, full, most)
    assert not pair.step(full)
    (said,) = pair.step(padded(full))
    assert AGAIN in said and "attention_mask 8x64, " in said and "attention_mask 8x64 of ones" in said
    assert not pair.step(full) and not pair.step(padded(full))
    pair.close()


def test_what_a_larger_batch_takes_is_not_held_against_the_forecast_of_the_example() -> None:
    """It was let in because the plan has room for it."""
    full = tokens(8, 64, mask=True)
    model = models.llama()[0]
    pair = wrapped(model, full, 64 * 2**20)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*forecast")
        for _ in range(2):
            step_of(pair.model, pair.optimizer, padded(full))
    assert pair.run.gpu.peak_bytes > pair.run.plan.forecast.gpu_peak_bytes
    hightide.unwrap(pair.model)


def test_a_mask_that_does_not_fit_is_refused_before_memory_runs_out() -> None:
    full = tokens(8, 64, mask=True)
    model = models.llama()[0]
    pair = wrapped(model, full, needed(model, full))
    pair.step(full)
    with pytest.raises(Refused, match=r"of ones.*it does not fit.*samples fit"):
        pair.step(padded(full))
    hightide.unwrap(pair.model)


class TwoWays(nn.Module):
    """Of two blocks each batch calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("left", "right")})
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, way: str) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.ways[way](x)).pow(2).mean()}


@pytest.mark.parametrize(
    ("update", "gpu_bytes"), [("deferred", 8000), ("deferred", 11_200), ("in_backward", 8000), ("in_backward", 9300)]
)
def test_a_block_that_the_example_does_not_call(update: str, gpu_bytes: int) -> None:
    """What the example calls fits, so that there is no slot: neither for the block of the other way, for which there is
    no room beside, nor later for the first. With more memory the plan without slots leaves some free, but not enough
    for them."""
    x = torch.randn(4, 8)
    pair = wrapped(TwoWays(), {"x": x, "way": "left"}, gpu_bytes, update=update)
    assert pair.run.plan.num_slots == 0
    assert not pair.step({"x": x, "way": "left"})
    (said,) = pair.step({"x": x, "way": "right"})
    assert AGAIN in said and "way='right', where batches had up to x 4x8, way='left'" in said
    for way in ("left", "right", "left"):
        assert not pair.step({"x": x, "way": way})
    pair.close()


def test_without_it_memory_runs_out() -> None:
    """What the case above is about."""
    _, (batch, longer, *_) = CASES["longer"]
    model = models.llama()[0]
    pair = wrapped(model, batch, needed(model, longer) * 5 // 4)
    pair.run.observer = None
    with all_let_in(pair.run), pytest.raises(OutOfMemory):
        models.loss_of(pair.model, tokens(4, 64)).backward()
    hightide.unwrap(pair.model)


def test_what_fits_is_let_in_and_said_once() -> None:
    pair = wrapped(models.llama()[0], tokens(4, 10), 64 * 2**20)
    plan = pair.run.plan
    (line,) = pair.step(tokens(2, 20))
    assert HELD in line and "input_ids 2x20" in line and "up to input_ids 4x10" in line and pair.run.plan is plan
    for batch in (tokens(2, 20), tokens(2, 15), tokens(4, 20), tokens(1, 3)):
        assert not pair.step(batch)
    pair.close()


def test_a_mask_that_the_example_did_not_have() -> None:
    pair = wrapped(models.llama()[0], tokens(4, 10), 64 * 2**20)
    (line,) = pair.step(tokens(4, 10, mask=True))
    assert "attention_mask 4x10" in line and HELD in line
    assert not pair.step(tokens(3, 9, mask=True)) and not pair.step(tokens(4, 10))
    pair.close()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"update": "in_backward"}], ids=str)
def test_in_other_steps(options: dict[str, Any]) -> None:
    model = models.llama(num_layers=2)[0]
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 30)) * 3 // 2, **options)
    for length in (8, 30, 12):
        for _ in range(options.get("accumulate", 1)):
            losses = [models.loss_of(one, tokens(4, length)) for one in (pair.model, pair.plain)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    pair.close()


def test_between_two_backwards_of_a_step_gradients_stay() -> None:
    model = models.llama(num_layers=2)[0]
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 30)) * 3 // 2)
    before = pair.run.plan
    for length in (8, 30, 8):
        for one in (pair.model, pair.plain):
            models.loss_of(one, tokens(4, length)).backward()
    assert pair.run.plan is not before
    for one, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        optimizer.step()
    pair.close()


def test_what_does_not_fit_is_refused_before_anything_happens() -> None:
    model = models.llama(num_layers=2)[0]
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 8)) * 9 // 8)
    pair.step(tokens(4, 8))
    with pytest.raises(
        Refused, match=r"input_ids 9x12.* had up to input_ids 4x8.*planned again, it does not fit"
    ) as no:
        pair.model(**tokens(9, 12))
    assert isinstance(no.value, ValueError) and "bytes" in str(no.value) and "samples fit" in str(no.value)
    pair.step(tokens(4, 8))
    pair.close()


@pytest.mark.long
def test_a_number_of_samples_that_was_promised_to_fit_does() -> None:
    model = models.llama()[0]
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 8)) * 9 // 8)
    with pytest.raises(Refused) as refused:
        pair.model(**tokens(32, 12))
    count = int(str(refused.value).split("Of batches like this one, ")[1].split(" of 32")[0])
    assert count >= 1
    pair.step(tokens(count, 12))
    with pytest.raises(Refused, match="Not one sample of it fits; cut it to the sizes of before, input_ids 4x8"):
        pair.model(**tokens(4, 2000))
    pair.close()


def test_a_plan_that_was_given_stays() -> None:
    model = models.llama()[0]
    plan = hightide.plan(
        model, adamw(model), tokens(4, 8), limits=hightide.Limits(gpu=needed(model, tokens(4, 8)), host="64MiB")
    )
    pair = wrapped(model, tokens(4, 8), 0, plan=plan)
    with pytest.raises(Refused, match=r"given by plan=.*wrap the model with the largest batch"):
        pair.model(**tokens(4, 30))
    pair.step(tokens(4, 8))
    assert pair.run.plan is plan
    pair.close()


def test_a_forward_that_waits_for_its_backward_is_not_lost() -> None:
    model = models.llama(num_layers=2)[0]
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 30)) * 3 // 2)
    first = models.loss_of(pair.model, tokens(4, 8))
    with pytest.raises(Refused, match="still waits for its backward"):
        pair.model(**tokens(4, 30))
    first.backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    train_step(pair.plain, pair.plain_optimizer, tokens(4, 8))
    models.loss_of(pair.model, tokens(4, 8))  # nobody keeps it
    pair.step(tokens(4, 30))
    pair.close()


def test_an_evaluation_that_is_larger() -> None:
    """It finds room that training had taken for itself; afterwards training goes on, also with its own larger ones."""
    model = models.llama(num_layers=6)[0]
    model.config.use_cache = False
    pair = wrapped(model, tokens(4, 10), 1400 * 1024)
    pair.step(tokens(4, 10))
    before = pair.run.plan
    larger = tokens(40, 16, mask=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="an evaluation of .*40x16.*moved to the new plan"):
        loss = models.loss_of(pair.model, larger)
    assert pair.run.plan is not before
    with torch.no_grad():
        torch.testing.assert_close(loss, models.loss_of(pair.plain, larger), rtol=1e-5, atol=0)
        found = pair.model.generate(larger["input_ids"][:2], max_new_tokens=3, do_sample=False, use_cache=True)
        assert found.equal(pair.plain.generate(larger["input_ids"][:2], max_new_tokens=3, do_sample=False))
    with torch.no_grad(), pytest.raises(OutOfMemory) as error:
        models.loss_of(pair.model, tokens(999, 30))
    assert any("Pass smaller batches: fewer than" in note for note in error.value.__notes__)
    pair.step(tokens(4, 10))
    pair.step(tokens(4, 14))
    pair.close()


def test_an_evaluation_that_is_too_large_beside_a_graph_leaves_the_plan_and_the_graph() -> None:
    """As of a reference that is the model without its adapters: the graph of the forward before it is still to be used.
    It runs out of memory in a block, which gives up the evaluation, and must not give up the other forward."""
    pair = wrapped(models.llama(num_layers=6)[0], tokens(4, 10), 1400 * 1024)
    pair.step(tokens(4, 10))
    before = pair.run.plan
    loss = models.loss_of(pair.model, tokens(4, 10))
    with torch.no_grad(), pytest.raises(OutOfMemory) as error:
        models.loss_of(pair.model, tokens(40, 16, mask=True))
    assert any("the plan cannot be exchanged now. Pass smaller batches" in note for note in error.value.__notes__)
    assert pair.run.plan is before
    loss.backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    train_step(pair.plain, pair.plain_optimizer, tokens(4, 10))
    del loss
    pair.step(tokens(4, 10))
    pair.close()


def test_larger_batches_of_a_model_with_a_forward_of_its_own() -> None:
    """As TRL sets one on the module itself."""
    model = models.llama(num_layers=6)[0]
    own = transformers.LlamaForCausalLM.forward
    model.forward = MethodType(lambda self, **batch: own(self, **batch), model)
    pair = wrapped(model, tokens(4, 8), needed(model, tokens(4, 30)) * 5 // 4)
    pair.step(tokens(4, 8))
    (said,) = pair.step(tokens(4, 30))
    assert AGAIN in said
    with torch.no_grad(), pytest.raises(OutOfMemory) as error:
        models.loss_of(pair.model, tokens(99, 30))
    assert any("Pass smaller batches: fewer than" in note for note in error.value.__notes__)
    pair.step(tokens(4, 10))
    pair.close()
