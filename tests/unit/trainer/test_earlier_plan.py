"""A Trainer that resumes goes on with the plan of its checkpoint, where it may."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import hightide
from hightide import wrapping
from hightide.checkpoint.training import read_plan
from hightide.ir.plan import Forecast
from hightide.trainer import checkpoint_mixin, earlier_plan
from trainers import LIMITS, fresh_accelerate, logs, rows, trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "max_steps": 4}
OPTIONS: dict[str, Any] = {**SAVING, "gradient_accumulation_steps": 2}


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with fresh_accelerate():
        yield


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each search of `wrap`."""
    made: list[str] = []
    search = wrapping._searched

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append("search")
        return search(*args, **kwargs)

    monkeypatch.setattr(wrapping, "_searched", counted)
    return made


def begun(folder: Path, **options: Any) -> Any:
    """Trains to the end, with a checkpoint in the middle."""
    first = trainer(folder / "first", **{**OPTIONS, **options})
    first.train()
    return first


def resumed(first: Any, folder: Path, **options: Any) -> Any:
    """From the middle."""
    shutil.copytree(Path(first.args.output_dir) / "checkpoint-2", folder / "second" / "checkpoint-2")
    second = trainer(folder / "second", **{**OPTIONS, **options})
    second.train(resume_from_checkpoint=True)
    return second


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run that has ended, without options of its own."""
    with fresh_accelerate():
        yield begun(tmp_path_factory.mktemp("plain"))


def plan_of(one: Any) -> hightide.Plan:
    return hightide.stats(one.model).plan


def test_it_is_used_again(plain: Any, searches: list[str], tmp_path: Path) -> None:
    """Nothing is searched, and values are the same to the bit; so from a checkpoint of a run that was resumed."""
    first = plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = resumed(first, tmp_path)
    assert not searches and plan_of(second) == plan_of(first) and second._calls == first._calls
    assert logs(second) == logs(first)
    weights = first.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.model.state_dict().items())
    third = trainer(tmp_path / "second", **{**OPTIONS, "max_steps": 6})
    third.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-4"))
    assert not searches and plan_of(third) == plan_of(first)


def disk_limits(folder: Path) -> hightide.Limits:
    return hightide.Limits(gpu="300KiB", host="150KiB", disk=f"{folder}:64MiB")


def test_it_uses_the_disk_again(searches: list[str], tmp_path: Path) -> None:
    given = {"limits": disk_limits(tmp_path)}
    first = begun(tmp_path, given=given)
    assert plan_of(first).uses_disk
    searches.clear()
    second = resumed(first, tmp_path, given=given)
    assert not searches and plan_of(second) == plan_of(first) and logs(second) == logs(first)


@pytest.mark.parametrize(
    "options",
    [
        {"given": {"limits": hightide.Limits(gpu="310KiB", host="64MiB")}},
        {"given": {"gradients": "param"}},
        {"given": {"lengths": [12]}},
        {"given": {"blocks": "model.layers.*"}},
        {"per_device_train_batch_size": 4},
    ],
    ids=["limits", "gradients", "length", "blocks", "samples"],
)
def test_another_is_made_where_something_else_is_asked(
    options: dict[str, Any], plain: Any, searches: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hightide"), warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(plain, tmp_path, **options)
    assert len(searches) == 1
    (line,) = [one for one in caplog.messages if one.startswith("another plan than that of")]
    assert " was " in line and "\n" not in line


def test_a_plan_that_was_given_is_not_gone_on_with(plain: Any, searches: list[str], tmp_path: Path) -> None:
    """Nobody knows what it was made for."""
    first = begun(tmp_path, given={"plan": plan_of(plain), "limits": None})
    searches.clear()
    second = resumed(first, tmp_path)
    assert len(searches) == 1 and logs(second) == logs(first)


def test_a_checkpoint_that_does_not_say_what_its_plan_was_made_for(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an older version."""
    monkeypatch.setattr(checkpoint_mixin, "extra_of", lambda *_: None)
    first = begun(tmp_path)
    searches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(first, tmp_path)
    assert len(searches) == 1


@pytest.mark.parametrize(
    ("reason", "changes", "limits"),
    [
        ("this is a plan for another model", {"fingerprint": "another"}, LIMITS),
        ("it is for 2 ranks, and there are 1", {"ranks": 2}, LIMITS),
        (
            "it holds steps of 2 samples, and a step has 4",
            {"num_samples": 1, "micro_batch": 1, "accumulate": 2},
            LIMITS,
        ),
        ("needs", {"gpu_limit_bytes": 1000}, LIMITS),
        ("it takes 1.0 TiB of the host", {"host_limit_bytes": 2**40}, LIMITS),
        ("it takes 1.0 TiB of the host", {"forecast": Forecast(0, 2**40)}, hightide.Limits(gpu="300KiB")),
    ],
    ids=["model", "ranks", "samples", "GPU", "more of the host", "the host is full"],
)
def test_one_that_cannot_be_used(
    reason: str,
    changes: dict[str, Any],
    limits: hightide.Limits,
    plain: Any,
    searches: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line tells why, and another is made."""
    first = plain if limits is LIMITS else begun(tmp_path, given={"limits": limits})
    searches.clear()
    monkeypatch.setattr(earlier_plan, "read_plan", lambda path: replace(cast(Any, read_plan(path)), **changes))
    with pytest.warns(
        UserWarning, match=f"the plan that the run had cannot be used, another is made: .*{reason}"
    ) as all:
        second = resumed(first, tmp_path, given={"limits": limits})
    assert len(all) == 1 and "\n" not in str(all[0].message)
    assert len(searches) == 1 and logs(second) == logs(first)


def test_one_that_cannot_be_read(
    plain: Any, searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("the plan was made by version 7")

    first = plain
    monkeypatch.setattr(earlier_plan, "read_plan", refuse)
    with pytest.warns(UserWarning, match="cannot be read, another is made: the plan was made by version 7") as all:
        second = resumed(first, tmp_path)
    assert len(all) == 1 and len(searches) == 1 and logs(second) == logs(first)


@pytest.mark.parametrize("gone", ["manifest.json", "rng_state.pth"])
def test_one_of_a_damaged_checkpoint_is_not_asked_for(
    gone: str, plain: Any, searches: list[str], tmp_path: Path
) -> None:
    """It is refused before anybody plans. Without its manifest the plain Trainer would take its weights alone."""
    kept = Path(plain.args.output_dir) / "checkpoint-2"
    shutil.copytree(kept, tmp_path / "second" / "checkpoint-1")
    shutil.copytree(kept, tmp_path / "second" / "checkpoint-2")
    (tmp_path / "second" / "checkpoint-2" / gone).unlink()
    second = trainer(tmp_path / "second", **OPTIONS)
    with pytest.raises(ValueError, match=rf"checkpoint-2 is damaged: .*{gone}.*; "):
        second.train(resume_from_checkpoint=True)
    assert not searches and second.state.global_step == 0


def test_a_checkpoint_that_is_still_being_written_is_waited_for(plain: Any, tmp_path: Path) -> None:
    """As after Ctrl-C in a notebook."""
    second, folder = trainer(tmp_path / "second", **OPTIONS), tmp_path / "second"

    class Saving:
        def wait(self) -> None:
            shutil.copytree(Path(plain.args.output_dir) / "checkpoint-2", folder / "checkpoint-2")

    second._saving = Saving(), str(folder)
    second.train(resume_from_checkpoint=True)
    assert logs(second) == logs(plain)


@pytest.mark.parametrize("longest_at", [2, 3], ids=["before the checkpoint", "after it"])
def test_a_batch_that_is_longer_than_the_example(longest_at: int, searches: list[str], tmp_path: Path) -> None:
    """A plan that it has led to is gone on with; and one that is gone on with gives way to it as any other."""
    data = [one for step in range(1, 5) for one in rows(16, step, [10 if step == longest_at else 4])]
    options: dict[str, Any] = {"given": {"train_dataset": data, "limits": {"gpu": "230KiB", "host": "64MiB"}}}
    options |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8, "max_steps": 6}
    with pytest.warns(UserWarning, match="Planned again"):
        first = begun(tmp_path, **options)
    searches.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        second = resumed(first, tmp_path, **options)
    planned_again = [one for one in told if "Planned again" in str(one.message)]
    assert len(planned_again) == (longest_at > 2) and not searches
    assert plan_of(second).digest == plan_of(first).digest and logs(second) == logs(first)


def test_a_model_that_is_wrapped_already(searches: list[str], tmp_path: Path) -> None:
    """It keeps its plan; and so does one into which the best values are loaded at the end."""
    first = begun(tmp_path)
    plan = plan_of(first)
    searches.clear()
    first.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert plan_of(first) == plan and first._resumes_from is None and not searches
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    second = resumed(first, tmp_path, **best)
    assert plan_of(second).digest == plan.digest and not searches
    assert second.state.best_model_checkpoint is not None
