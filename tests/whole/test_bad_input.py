"""Bad input is refused by a message that has the numbers and a remedy. What a promise forbids is refused too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.plan import PLAN_VERSION, Plan
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from unit.runtime.steps import Twins, adamw, train_step, twins

LIMITS = hightide.Limits(gpu="1MiB", host="8MiB")


@pytest.fixture
def refused() -> Callable[..., Any]:
    """A context in which a ValueError with all the given words must be raised."""

    def check(*words: str) -> Any:
        return pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words))

    return check


def nested(*shapes: tuple[int, ...]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(shape) for shape in shapes], layout=torch.jagged)


def small() -> tuple[nn.Module, dict[str, Any]]:
    return models.hand_written(num_layers=2)


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "lots"}, ("Limits(gpu)", "'lots'", "'24GiB'")),
        ({"gpu": "24 parsecs"}, ("Limits(gpu)", "'24 parsecs'", "GiB", "such as")),
        ({"gpu": "-3GiB"}, ("Limits(gpu)", "'-3GiB'", "write a number and a unit")),
        ({"gpu": 0}, ("Limits(gpu)", "0", "more than zero")),
        ({"gpu": "0GiB"}, ("Limits(gpu)", "'0GiB'", "more than zero")),
        ({"host": -1}, ("Limits(host)", "-1", "more than zero")),
        ({"host": True}, ("Limits(host)", "True", "write bytes as an integer or text")),
        ({"host": 1.5}, ("Limits(host)", "1.5", "write bytes as an integer or text")),
        ({"disk": "200GiB"}, ("Limits(disk)", "'200GiB'", "'/path:200GiB'")),
        ({"disk": "/scratch:much"}, ("Limits(disk)", "'/scratch'", "'much'", "write a number")),
        ({"disk": ["/a:1GiB", "/a:2GiB"]}, ("Limits(disk)", "twice", "/a", "give each folder once")),
    ],
)
def test_limits_that_are_no_sizes(options: dict[str, Any], words: tuple[str, ...], refused: Any) -> None:
    with refused(*words):
        hightide.Limits(**options)


def test_limits_that_are_too_small(refused: Any) -> None:
    model, batch = small()
    with refused("4096 bytes (4.0 KiB) of GPU", "missing on the gpu", "Limits(gpu="):
        hightide.wrap(model, adamw(model), batch, limits=hightide.Limits(gpu="4KiB", host="8MiB"))
    with refused("4096 bytes (4.0 KiB) of host memory", "missing on the gpu", "or Limits(host="):
        hightide.wrap(model, adamw(model), batch, limits=hightide.Limits(gpu="120KiB", host="4KiB"))


@pytest.mark.parametrize("make", [hightide.wrap, hightide.plan])
def test_a_disk_in_a_folder_that_is_not_there(make: Any, refused: Any, tmp_path: Path) -> None:
    model, batch = small()
    with refused("nowhere", "there is no such folder", "name another"):
        make(model, adamw(model), batch, limits=hightide.Limits(gpu="1MiB", disk=f"{tmp_path}/nowhere:1GiB"))


# -- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, ("without a batch dimension", "nothing", "pass the whole batch")),
        ({"x": torch.tensor(3.0)}, ("without a batch dimension", "x: Tensor", "samples along the first dimension")),
        ({"x": 7}, ("without a batch dimension", "x: int", "pass the whole batch")),
        ({"x": torch.zeros(0, 32)}, ("0 samples", "at least 1")),
        ({"x": nested((2, 32), (3, 32))}, ("a tensor of the batch is a nested tensor", "pad")),
        (42, ("type int", "pass a mapping")),
    ],
)
def test_batches_that_are_none(batch: Any, words: tuple[str, ...], refused: Any) -> None:
    model, _ = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for function in (hightide.wrap, hightide.plan):
        with refused(*words):
            function(model, adamw(model), batch, limits=LIMITS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_batch_that_no_plan_holds(refused: Any) -> None:
    pair = twins(*small(), gpu="256KiB")
    pair.step()
    with refused("x 4000x32", "up to x 6x32", "does not fit", "of 4000 samples fit"):
        pair.model(**models.vector_batch(num_samples=4000))
    pair.assert_equal(*pair.step())  # nothing has happened
    pair.assert_equal(*pair.step(batch=models.vector_batch(num_samples=5)))  # a smaller one is welcome
    pair.close()


# -- models and optimizers -----------------------------------------------------------------------------------------


def test_an_optimizer_over_other_parameters(refused: Any) -> None:
    model, batch = small()
    other, _ = small()
    count = len(list(model.parameters()))
    with refused(f"{count} of the optimizer's {count}", f"model's {count}", "model.parameters()"):
        hightide.wrap(model, adamw(other), batch, limits=LIMITS)
    mixed = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    with refused(f"1 of the optimizer's {count + 1}", "model.parameters()"):
        hightide.wrap(model, mixed, batch, limits=LIMITS)


def test_unsupported_optimizers(refused: Any) -> None:
    model, batch = small()

    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.RMSprop(model.parameters()), torch.optim.Adagrad(model.parameters())):
        with refused(type(optimizer).__name__, "not supported", "use one of: torch.optim.AdamW"):
            hightide.wrap(model, optimizer, batch, limits=LIMITS)
    with refused("Mine", "not supported", "torch.optim.AdamW"):
        hightide.wrap(model, Mine(model.parameters()), batch, limits=LIMITS)
    with refused("amsgrad=True", "third moment", "amsgrad=False"):
        hightide.wrap(model, adamw(model, amsgrad=True), batch, limits=LIMITS)
    with refused("str", "torch.optim.Optimizer"):
        hightide.wrap(model, "adamw", batch, limits=LIMITS)
    with refused("function", "torch.nn.Module"):
        hightide.wrap(small, adamw(model), batch, limits=LIMITS)


def test_a_group_of_other_parameters_added_after_wrapping() -> None:
    pair = twins(*small())
    with pytest.raises(Refused, match=r"\(3,\) that is none of the wrapped model.*hightide\.unwrap"):
        pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    pair.assert_equal(*pair.step())
    pair.close()


def test_models_that_share_a_parameter(refused: Any) -> None:
    pair = twins(*small())
    other, batch = small()
    other.first.weight = pair.model.first.weight
    with refused("'first.weight'", "two wrapped models cannot share parameters", "one module"):
        hightide.wrap(other, adamw(other), batch, limits=LIMITS)
    pair.assert_equal(*pair.step())
    pair.close()
    hightide.unwrap(hightide.wrap(other, adamw(other), batch, limits=LIMITS)[0])


def test_a_loss_with_parameters_in_the_models_optimizer(refused: Any) -> None:
    model, batch = small()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    with refused("1 of the optimizer's", "a loss with parameters of its own", "another optimizer"):
        hightide.wrap(model, optimizer, batch, limits=LIMITS)


def test_a_model_that_is_wrapped_already(refused: Any) -> None:
    pair = twins(*small())
    for function in (hightide.wrap, hightide.plan):
        with refused("wrapped already", "hightide.unwrap(model)"):
            function(pair.model, adamw(pair.model), pair.batch, limits=LIMITS)
    outer = nn.Sequential(pair.model)  # a part of it is wrapped
    with refused("its part '0' is", "another model that is wrapped", "hightide.unwrap"):
        hightide.wrap(outer, adamw(outer), pair.batch, limits=LIMITS)
    other, batch = small()
    with refused("optimizer belongs to a wrapped model", "make a new one"):
        hightide.wrap(other, pair.optimizer, batch, limits=LIMITS)
    pair.close()
    for function in (hightide.stats, hightide.unwrap):
        with refused("HandWritten", "not wrapped", "hightide.wrap returned"):
            function(pair.model)
    model, optimizer = hightide.wrap(pair.model, adamw(pair.model), pair.batch, limits=LIMITS)  # and again
    train_step(model, optimizer, pair.batch)
    hightide.unwrap(model)


def test_a_model_that_averages_its_own_gradients(refused: Any) -> None:
    model, batch = small()
    parallel = nn.DataParallel(model)
    with refused("a DataParallel", "model.module", "torchrun"):
        hightide.wrap(parallel, adamw(parallel), batch, limits=LIMITS)


def test_a_model_that_is_compiled_as_a_whole(refused: Any) -> None:
    model, batch = small()
    with refused("torch.compile returned", "compile=True"):
        hightide.wrap(torch.compile(model), adamw(model), batch, limits=LIMITS)


def test_a_model_without_parameters(refused: Any) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with refused("0 parameters", "nothing to train"):
        hightide.wrap(nn.Tanh(), optimizer, torch.zeros(4, 2), limits=LIMITS)


class Parts(nn.Module):
    """Another kind of layer, and whether its results come one by one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class OneByOne(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            yield x


class Nested(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor([super().forward(x)[:3], x[3:]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OneByOne(nn.Linear(2, 2)), ("forward of OneByOne is a generator", "return a list")),
        (Parts(torch.jit.script(nn.Linear(2, 2))), ("'layers.0' is TorchScript", "pass the Python module")),
        (Parts(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))), ("'layers.0' is TorchScript", "compile=True")),
        (Parts(Nested(2, 2)), ("of a block is a nested tensor", "pad")),
    ],
)
def test_models_that_have_no_blocks_to_call(model: nn.Module, words: tuple[str, ...], refused: Any) -> None:
    for function in (hightide.wrap, hightide.plan):
        with refused(*words):
            function(model, adamw(model), torch.zeros(5, 2), limits=LIMITS)


# -- plans ---------------------------------------------------------------------------------------------------------


def plan_of(model: nn.Module, batch: Any, **options: Any) -> Plan:
    return hightide.plan(model, adamw(model), batch, **{"limits": LIMITS, **options})


@pytest.fixture
def planned() -> Iterator[tuple[nn.Module, Any, Plan]]:
    model, batch = small()
    yield model, batch, plan_of(model, batch)
    assert hightide.runtime.surgery.run_of(model) is None  # a refusal leaves the model as it was
    train_step(model, adamw(model), batch)


def test_a_plan_for_another_model(planned: Any, refused: Any, tmp_path: Path) -> None:
    model, batch, plan = planned
    other, _ = models.hand_written(num_layers=3)
    other_plan = plan_of(other, batch)
    other_plan.save(tmp_path / "plan.json")
    with refused("another model", other_plan.fingerprint, plan.fingerprint, "hightide.plan(model, optimizer, batch)"):
        hightide.wrap(model, adamw(model), batch, plan=Plan.load(tmp_path / "plan.json"))


def test_plans_that_were_edited_into_nonsense(planned: Any, refused: Any) -> None:
    model, batch, plan = planned
    peak = plan.forecast.gpu_peak_bytes
    first = plan.blocks[0]

    def first_block(**changes: Any) -> Plan:
        return replace(plan, blocks=(replace(first, **changes), *plan.blocks[1:]))

    chunk = plan.layout.chunks[0]

    def first_chunk(**changes: Any) -> Plan:
        chunks = (replace(chunk, **changes), *plan.layout.chunks[1:])
        return replace(plan, layout=replace(plan.layout, chunks=chunks))

    cases: list[tuple[Plan, tuple[str, ...]]] = [
        (
            replace(plan, gpu_limit_bytes=peak - 1),
            (f"{peak} bytes", f"limit is {peak - 1}", "raise the plan's gpu_limit_bytes"),
        ),
        (replace(plan, micro_batch=0), ("micro_batch is 0", "from 1 to num_samples=6")),
        (replace(plan, micro_batch=7), ("micro_batch is 7", "from 1 to num_samples=6")),
        (replace(plan, num_samples=5), ("up to 5 samples", "has 6", "make a new plan")),
        (replace(plan, version=99), ("version 99", "make a new plan")),
        (replace(plan, loss_tile_tokens=0), ("loss_tile_tokens is 0", "at least 1")),
        (replace(plan, blocks=plan.blocks[1:]), (f"{len(plan.blocks) - 1} blocks", f"has {len(plan.blocks)}")),
        (first_block(params=Tier.HOST, states=Tier.GPU), (repr(first.name), "put params there too")),
        (replace(plan, gpu_limit_bytes=-5), ("gpu_limit_bytes is -5", "0 (nothing) or more")),
        (replace(plan, host_limit_bytes=-1), ("host_limit_bytes is -1", "0 (nothing) or more")),
        (first_chunk(numel=7), ("chunk 0", "has numel=7", f"is {chunk.numel}", "make a new plan")),
        (first_chunk(trainable_numel=0), ("has trainable_numel=0", f"is {chunk.numel}")),
        (first_chunk(dtype="bfloat16"), ("has dtype='bfloat16'", "is 'float32'")),
        (first_chunk(block=99), ("has block=99", f"is {chunk.block}")),
        (first_chunk(params=(replace(chunk.params[0], offset_numel=5), *chunk.params[1:])), ("offset_numel=5",)),
        (first_block(params=Tier.GPU, states=Tier.DISK), ("num_read_buffers is 0", "must be at least 1")),
    ]
    streamed = [replace(b, params=Tier.HOST, states=Tier.HOST) if b.name else b for b in plan.blocks]
    no_slots = replace(plan, num_slots=0, num_grad_slots=0, blocks=tuple(streamed))
    cases.append((no_slots, ("0 slots and 0 grad slots", "needs")))
    lean = plan_of(model, batch, limits=hightide.Limits(gpu="90KiB", host="8MiB"))
    poor = replace(lean, host_limit_bytes=4096)
    cases.append(
        (poor, (f"{lean.forecast.host_peak_bytes} bytes", "limit is 4096", "raise the plan's host_limit_bytes"))
    )
    for edited, words in cases:
        with refused(*words):
            hightide.wrap(model, adamw(model), batch, plan=edited)


def test_a_plan_with_options_that_it_fixes(planned: Any, refused: Any) -> None:
    model, batch, plan = planned
    for options in ({"limits": LIMITS}, {"micro_batch": 2}):
        with refused("plan= already fixes", "not both"):
            hightide.wrap(model, adamw(model), batch, plan=plan, **options)


def test_a_plan_by_its_path_and_limits_by_a_mapping(planned: Any, refused: Any) -> None:
    model, batch, _ = planned
    with refused("plan is a str", "Plan.load('plan.json')"):
        hightide.wrap(model, adamw(model), batch, plan="plan.json")  # type: ignore[arg-type]
    for make in (hightide.wrap, hightide.plan):
        with refused("limits is a dict", "Limits(gpu='24GiB'"):
            make(model, adamw(model), batch, limits={"gpu": "1GiB"})  # type: ignore[operator]


def test_a_plan_with_another_timing_than_asked_for(planned: Any, refused: Any) -> None:
    """The default of update= says nothing; a timing that is asked for must not be dropped silently."""
    model, batch, plan = planned
    with refused("in_backward", "deferred", "plan"):
        hightide.wrap(model, adamw(model), batch, plan=plan, update="in_backward")


def test_a_plan_file_that_is_damaged(tmp_path: Path, planned: Any, refused: Any) -> None:
    path = tmp_path / "plan.json"
    planned[2].save(path)
    text = path.read_text()
    for broken, words in (
        (text[:-20], ("not JSON", str(path))),
        (text.replace('"micro_batch"', '"micro_bach"'), ("'micro_bach'", "did you mean 'micro_batch'")),
        (text.replace('"update": "deferred"', '"update": "later"'), ("update", "'later'", "deferred, in_backward")),
    ):
        path.write_text(broken)
        with refused(*words):
            Plan.load(path)


def test_a_plan_file_of_an_older_version(tmp_path: Path, planned: Any, refused: Any) -> None:
    path = tmp_path / "plan.json"
    planned[2].save(path)
    data = json.loads(path.read_text())
    data["version"] = 3
    for chunk in data["layout"]["chunks"]:
        chunk["num_states"] = len(chunk.pop("states"))  # as it was in files of before
    path.write_text(json.dumps(data))
    with refused(str(path), f"made by version 3, this is version {PLAN_VERSION}", "make a new plan"):
        Plan.load(path)


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": 0}, ("micro_batch=0", "6 samples", "from 1 to 6")),
        ({"micro_batch": -1}, ("micro_batch=-1", "6 samples", "from 1 to 6")),
        ({"micro_batch": 7}, ("micro_batch=7", "6 samples", "from 1 to 6")),
        ({"update": "later"}, ("update='later'", "'deferred' or 'in_backward'")),
        pytest.param(
            {"device": "cuda"},
            ("device='cuda'", "0 usable CUDA devices", "leave device out"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
        ({"device": "meta"}, ("device='meta'", "not supported", "use 'cuda', 'cpu'")),
        ({"device": "cpu:3"}, ("device='cpu:3'", "one simulated accelerator", "use 'cpu'")),
        ({"device": "tpu"}, ("device='tpu'", "no device of torch", "use 'cuda', 'cpu'")),
        ({"device": "cuda:one"}, ("device='cuda:one'", "no device of torch", "use 'cuda', 'cpu'")),
        ({"device": ["cpu"]}, ("device=['cpu']", "no device of torch", "use 'cuda', 'cpu'")),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], words: tuple[str, ...], refused: Any) -> None:
    model, batch = small()
    with refused(*words):
        hightide.wrap(model, adamw(model), batch, limits=LIMITS, **options)


# -- the promise of update="in_backward" ---------------------------------------------------------------------------


@pytest.fixture
def promised() -> Iterator[Twins]:
    pair = twins(*small(), update="in_backward", gpu="120KiB")
    pair.assert_equal(*pair.step())
    yield pair
    pair.close()


def broken_promise(*words: str) -> Any:
    needed = ("update='in_backward'", "update='deferred'", *words)
    return pytest.raises(RuntimeError, match="".join(f"(?=.*{re.escape(word)})" for word in needed))


def test_clipping_breaks_the_promise(promised: Twins) -> None:
    models.loss_of(promised.model, promised.batch).backward()
    with broken_promise("clip"):
        torch.nn.utils.clip_grad_norm_(promised.model.parameters(), 1.0)
    with broken_promise("clip"):
        promised.optimizer.clip_grad_norm_(1.0)


def test_a_second_backward_breaks_the_promise(promised: Twins) -> None:
    models.loss_of(promised.model, promised.batch).backward()
    with broken_promise("step()", "accumulate"):
        models.loss_of(promised.model, promised.batch).backward()


def test_a_skipped_step_breaks_the_promise(promised: Twins) -> None:
    models.loss_of(promised.model, promised.batch).backward()
    promised.optimizer.zero_grad()
    with broken_promise("optimizer.step()", "skip steps"):
        models.loss_of(promised.model, promised.batch).backward()


def test_a_second_step_breaks_the_promise(promised: Twins) -> None:
    models.loss_of(promised.model, promised.batch).backward()
    promised.optimizer.step()
    with broken_promise("one step per backward"):
        promised.optimizer.step()


@pytest.mark.parametrize("trains", [False, True])
def test_a_forward_before_step_breaks_the_promise(promised: Twins, trains: bool) -> None:
    """Its result would be that of weights which plain PyTorch does not have yet."""
    losses = [models.loss_of(model, promised.batch) for model in (promised.model, promised.plain)]
    losses[0].backward()
    with torch.set_grad_enabled(trains), broken_promise("optimizer.step() first", "evaluate"):
        promised.model(**promised.batch)
    promised.optimizer.step()
    losses[1].backward()
    promised.plain_optimizer.step()
    with torch.no_grad():
        promised.assert_equal(*(models.loss_of(model, promised.batch) for model in (promised.model, promised.plain)))


def test_a_changed_learning_rate_breaks_the_promise(promised: Twins) -> None:
    models.loss_of(promised.model, promised.batch).backward()
    promised.optimizer.param_groups[0]["lr"] = 0.5
    with broken_promise("lr=0.01", "lr=0.5", "after step()"):
        promised.optimizer.step()


def test_a_scheduler_after_step_keeps_the_promise(promised: Twins) -> None:
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for optimizer in (promised.optimizer, promised.plain_optimizer)
    ]
    for _ in range(3):
        promised.assert_equal(*promised.step())
        for scheduler in schedulers:
            scheduler.step()
