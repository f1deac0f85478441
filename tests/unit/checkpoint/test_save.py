"""The life of a save: who waits for whom, what becomes of failures, and what is refused."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.checkpoint import save as save_module
from hightide.checkpoint import writing
from hightide.checkpoint.files import filesystem
from hightide.checkpoint.saving import Abandoned
from hightide.checkpoint.training import read_plan, read_training
from hightide.runtime.surgery import run_of

LIMITS = hightide.Limits(gpu="1MiB", host="16MiB")


class Net(nn.Module):
    """A part of it is told apart by a buffer, another by a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.note = "first"

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def pair(wrapped: bool = True, seed: int = 0, sgd: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if sgd
        else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    return hightide.wrap(model, optimizer, batch(), limits=LIMITS, **options) if wrapped else (model, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves stand still in front of their files until it is set."""
    event, write = threading.Event(), writing.CheckpointContent._write

    def waiting(self: Any, saving: hightide.Saving) -> None:
        assert event.wait(60)
        write(self, saving)

    monkeypatch.setattr(writing.CheckpointContent, "_write", waiting)
    yield event
    event.set()


def test_training_goes_on_beside_it(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1, 2)
    expected = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    saving = hightide.save(model, optimizer, tmp_path, extra=[1.5])
    assert not saving.done and "being written" in repr(saving)
    train(model, optimizer, 3)
    gate.set()
    assert saving.wait() == tmp_path / "step-2" == hightide.latest(tmp_path) and saving.done
    other, its = pair(seed=1)
    loaded = hightide.load(other, its, tmp_path)
    assert (loaded.step, loaded.extra) == (2, [1.5])
    for name, value in expected.items():
        assert torch.equal(other.state_dict()[name], value), name


def test_buffers_and_states_of_modules_are_those_of_the_call(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    model.seen += 5
    saving = hightide.save(model, optimizer, tmp_path)
    model.seen += 5
    model.note = "later"
    gate.set()
    saving.wait()
    for is_wrapped in (True, False):
        other, its = pair(is_wrapped, seed=1)
        other.note, other.passing[0] = "other", 7.0
        hightide.load(other, its, tmp_path)
        assert other.seen.tolist() == [5, 5, 5] and other.note == "first"
        assert other.passing.tolist() == [7.0, 0.0], "it is in no state dict"


def test_one_at_a_time(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    first = hightide.save(model, optimizer, tmp_path)
    with pytest.raises(hightide.Refused, match=r"step-1 is still being written; save later"):
        hightide.save(model, optimizer, tmp_path, step=5, busy="refuse")
    threading.Timer(0.3, gate.set).start()
    second = hightide.save(model, optimizer, tmp_path, step=6)
    assert first.done and second.wait() == tmp_path / "step-6"


def fill_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes fail, once the event is set that is returned. It is."""
    may_fail = threading.Event()
    may_fail.set()

    def refuse(*_: object) -> None:
        may_fail.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem, "write_all", refuse)
    return may_fail


def test_a_full_disk_is_warned_of_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    hightide.save(model, optimizer, tmp_path, wait=True)
    with monkeypatch.context() as context, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fill_up(context)
        train(model, optimizer, 2)
        saving = hightide.save(model, optimizer, tmp_path, wait=True)
        train(model, optimizer, 3)
    assert [str(one.message) for one in seen if "step-2 was not saved" in str(one.message)] and len(seen) == 1
    assert saving.done and isinstance(saving.error, ValueError) and "No space left" in str(saving.error)
    with pytest.raises(ValueError, match="No space left"):
        saving.wait()
    assert hightide.latest(tmp_path) == tmp_path / "step-1" and [one.name for one in tmp_path.iterdir()] == ["step-1"]
    assert hightide.save(model, optimizer, tmp_path).wait() == tmp_path / "step-3"


def test_or_it_is_raised_at_the_end_of_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    with monkeypatch.context() as context, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was not saved")
        may_fail = fill_up(context)
        may_fail.clear()  # else save() may find out, and raise it itself
        saving = hightide.save(model, optimizer, tmp_path, on_error="raise")
        may_fail.set()
        saving.join()
        with pytest.raises(ValueError, match="No space left"):
            train(model, optimizer, 2)
        train(model, optimizer, 3)  # once
        may_fail.clear()
        saving = hightide.save(model, optimizer, tmp_path, on_error="raise")
        may_fail.set()
        saving.join()
        with pytest.raises(ValueError, match="No space left"):
            hightide.save(model, optimizer, tmp_path)
        with pytest.raises(ValueError, match="No space left"):
            hightide.save(model, optimizer, tmp_path, on_error="raise", wait=True)
        held = hightide.save(model, optimizer, tmp_path, on_error="hold")
        held.join()
        train(model, optimizer, 4)
    with pytest.raises(ValueError, match="No space left"):
        held.wait()
    hightide.save(model, optimizer, tmp_path, wait=True)


def test_a_plain_pair_is_saved_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(wrapped=False)
    train(model, optimizer, 1)
    assert hightide.save(model, optimizer, tmp_path).done and hightide.latest(tmp_path) is not None
    fill_up(monkeypatch)
    with pytest.warns(UserWarning, match="was not saved"):
        hightide.save(model, optimizer, tmp_path, step=2)
    with pytest.raises(ValueError, match="No space left"):
        hightide.save(model, optimizer, tmp_path, step=2, on_error="raise")


def test_it_can_be_given_up(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    saving = hightide.save(model, optimizer, tmp_path)
    with pytest.raises(TimeoutError, match="still being written"):
        saving.wait(0.01)
    saving.abandon()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.set()
        saving.join()
    with pytest.raises(Abandoned):
        saving.wait()
    assert list(tmp_path.iterdir()) == []
    train(model, optimizer, 2)


def test_unwrap_finishes_it_first(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    saving = hightide.save(model, optimizer, tmp_path)
    threading.Timer(0.3, gate.set).start()
    hightide.unwrap(model)
    assert saving.wait() == hightide.latest(tmp_path)


def test_a_load_does_not_reach_into_a_save(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    gate.set()
    hightide.save(model, optimizer, tmp_path / "early", wait=True)
    gate.clear()
    train(model, optimizer, 2)
    expected = model.layers[1].state_dict()["weight"].clone()
    saving = hightide.save(model, optimizer, tmp_path / "late")
    threading.Timer(0.3, gate.set).start()
    hightide.load(model, optimizer, tmp_path / "early")
    saving.wait()
    hightide.load(model, optimizer, tmp_path / "late")
    assert torch.equal(model.layers[1].state_dict()["weight"], expected)


def test_the_last_ones_stay_and_every_so_many(tmp_path: Path) -> None:
    model, optimizer = pair()
    for step in range(1, 8):
        train(model, optimizer, step)
        hightide.save(model, optimizer, tmp_path, keep=2, keep_every=3)
    hightide.save(model, optimizer, tmp_path, keep=2, keep_every=3, wait=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-3", "step-6", "step-7"]


def test_a_later_step_of_another_run_is_told_once(tmp_path: Path) -> None:
    """Who loads would go on with that."""
    model, optimizer = pair(wrapped=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (7, 900, 900):
            hightide.save(model, optimizer, tmp_path, step=step)
    with pytest.warns(UserWarning, match=r"step-10 is saved, but who loads from its folder gets step-900") as told:
        hightide.save(model, optimizer, tmp_path, step=10)
        hightide.save(model, optimizer, tmp_path, step=20)
    assert len(told) == 1


def test_the_step_is_the_count_of_updates(tmp_path: Path) -> None:
    model, optimizer = pair(sgd=True)
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"does not count its updates, .*: step="):
        hightide.save(model, optimizer, tmp_path)
    with pytest.raises(ValueError, match="does not count"):
        hightide.save(model, None, tmp_path)
    assert hightide.save(model, optimizer, tmp_path, step=0).wait().name == "step-0"


@pytest.mark.parametrize("bad", [-1, 1.0, True, "3"])
def test_steps_are_numbers(bad: Any, tmp_path: Path) -> None:
    model, optimizer = pair(wrapped=False)
    with pytest.raises(ValueError, match="step="):
        hightide.save(model, optimizer, tmp_path, step=bad)


def test_bad_arguments(tmp_path: Path) -> None:
    model, optimizer = pair()
    plain, its = pair(wrapped=False)
    for bad in ({"busy": "no"}, {"on_error": "no"}, {"keep": 0}, {"keep_every": 2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            hightide.save(model, optimizer, tmp_path, step=1, **bad)
    with pytest.raises(ValueError, match=r"extra\['fn'\] is"):
        hightide.save(model, optimizer, tmp_path, step=1, extra={"fn": print})
    for mixed in ((model, its), (plain, optimizer)):
        with pytest.raises(ValueError, match="do not belong together"):
            hightide.save(*mixed, tmp_path, step=1)
    with pytest.raises(ValueError, match="a part of a wrapped model"):
        hightide.save(model.layers[0], None, tmp_path, step=1)
    with pytest.raises(ValueError, match="none of the model"):
        hightide.save(plain.layers[0], its, tmp_path, step=1)
    assert not list(tmp_path.iterdir())
    assert hightide.save(model, optimizer, tmp_path, step=1, wait=True).error is None, "nothing was left open"


def test_between_backward_and_step(tmp_path: Path) -> None:
    """Of updates in backward it is refused; else the values are those of before, and gradients are no part of it."""
    model, optimizer = pair(update="in_backward")
    train(model, optimizer, 1)
    model(batch(2)).backward()
    with pytest.raises(hightide.Refused, match=r"a checkpoint is saved between backward and step\(\)"):
        hightide.save(model, optimizer, tmp_path)
    optimizer.step()
    assert hightide.save(model, optimizer, tmp_path).wait().name == "step-2"
    model, optimizer = pair()
    train(model, optimizer, 1)
    expected = model.layers[0].state_dict()["weight"].clone()
    model(batch(2)).backward()
    saving = hightide.save(model, optimizer, tmp_path / "deferred")
    optimizer.step()
    assert not torch.equal(model.layers[0].state_dict()["weight"], expected)
    hightide.load(model, optimizer, saving.wait())
    assert torch.equal(model.layers[0].state_dict()["weight"], expected)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_step_of_another_thread_in_between_is_noticed(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and values would be of two steps."""
    model, optimizer = pair(update=update)
    train(model, optimizer, 1)
    real = save_module.to_files

    def meanwhile(training: Any) -> Any:
        thread = threading.Thread(target=train, args=(model, optimizer, 2))
        thread.start()
        thread.join()
        return real(training)

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "to_files", meanwhile)
        with pytest.raises(hightide.Refused, match="another thread makes a step"):
            hightide.save(model, optimizer, tmp_path)
    train(model, optimizer, 3)
    assert hightide.save(model, optimizer, tmp_path).wait() == tmp_path / "step-3"


def test_what_is_read_without_a_model(tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    path = hightide.save(model, optimizer, tmp_path, extra={"loss": 0.5, "position": (3, 4)}).wait()
    training, run = read_training(path), run_of(model)
    assert training.step == 1 and training.extra == {"loss": 0.5, "position": (3, 4)}
    assert run is not None and read_plan(path) == run.plan == hightide.Plan.load(path / "plan.json")
    plain, its = pair(wrapped=False)
    assert read_plan(hightide.save(plain, its, tmp_path, step=3).path) is None


def test_a_model_that_is_dropped_is_saved_first(gate: threading.Event, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    expected = model.layers[1].state_dict()["weight"].clone()
    saving, gone = hightide.save(model, optimizer, tmp_path), weakref.ref(model)
    del model, optimizer
    gc.collect()
    gate.set()
    other, its = pair(seed=1)
    hightide.load(other, its, saving.wait())
    assert torch.equal(other.layers[1].state_dict()["weight"], expected)
    for _ in range(50):  # the thread ends a moment after the save is done
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.02)
    assert gone() is None, "nobody keeps it any longer"


def test_so_is_a_full_disk_for_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs are written elsewhere first."""
    model, optimizer = pair()
    train(model, optimizer, 1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(save_module, "model_files", refuse)
        with pytest.warns(UserWarning, match=r"step-1 was not saved: .*No space left"):
            saving = hightide.save(model, optimizer, tmp_path)
        assert saving.done
        with pytest.raises(OSError, match="No space left"):
            hightide.save(model, optimizer, tmp_path, on_error="raise")
    train(model, optimizer, 2)
    hightide.save(model, optimizer, tmp_path, wait=True, on_error="raise")
