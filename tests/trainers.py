"""Trainers with a small model and batches of several lengths, plain and of hightide, and what both log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import hightide
import models

LIMITS = hightide.Limits(gpu="300KiB", host="64MiB")  # of a model whose states take more
LENGTHS = (10, 6, 3, 8)
LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate")
Row = dict[str, Tensor]


def rows(number: int, seed: int, lengths: Sequence[int] = (10,)) -> list[Row]:
    """With a column that no model knows."""
    found = []
    for index in range(number):
        row = models.token_batch(seed + index, num_samples=1)
        length = lengths[index % len(lengths)]
        found.append({name: row[name][0][:length] for name in ("input_ids", "labels")} | {"length": torch.tensor(9)})
    return found


def collate(samples: Sequence[Row]) -> Row:
    """Padded to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def stacked(name: str, fill: int) -> Tensor:
        return torch.stack([F.pad(one[name], (0, longest - len(one[name])), value=fill) for one in samples])

    seen = [{"mask": torch.ones_like(sample["input_ids"])} for sample in samples]
    mask = torch.stack([F.pad(one["mask"], (0, longest - len(one["mask"]))) for one in seen])
    return {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", -100), "attention_mask": mask}


def full() -> nn.Module:
    return models.llama(num_layers=2)[0]


def lora() -> nn.Module:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(full(), config)  # type: ignore[arg-type,return-value]


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    chosen = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-4,
    }
    return transformers.TrainingArguments(**{**chosen, **options})


def plain_trainer(
    folder: Path,
    build: Callable[[], Any] = full,
    lengths: Sequence[int] = (10,),
    kind: type[Any] = transformers.Trainer,
    **options: Any,
) -> Any:
    return kind(build(), arguments(folder, **options), **data(lengths))


def trainer(
    folder: Path,
    build: Callable[[], Any] = full,
    lengths: Sequence[int] = (10,),
    kind: type[Any] = hightide.Trainer,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`given`: to the constructor."""
    settings = {"limits": LIMITS, **data(lengths), **(given or {})}
    return kind(build(), arguments(folder, **options), **settings)


def data(lengths: Sequence[int] = (10,)) -> dict[str, Any]:
    return {"train_dataset": rows(24, 1, lengths), "eval_dataset": rows(6, 100, lengths), "data_collator": collate}


def logs(of: transformers.Trainer) -> list[tuple[str, float]]:
    return [(name, entry[name]) for entry in of.state.log_history for name in LOGGED if name in entry]


def assert_same_logs(found: list[tuple[str, float]], expected: list[tuple[str, float]], error: float = 1e-5) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for index, ((name, value), (_, other)) in enumerate(zip(found, expected, strict=True)):
        assert abs(value - other) <= error * abs(other), (index, name, value, other)


def shown_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """That TensorBoard shows of a run: steps and values, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(file))
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def assert_same_scalars(found: dict[str, Any], expected: dict[str, Any], error: float = 1e-5) -> None:
    """All tags at the same steps, and of those that follow from the training the values."""
    assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
        tag: [step for step, _ in values] for tag, values in expected.items()
    }
    for tag in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        for (step, value), (_, other) in zip(found[tag], expected[tag], strict=True):
            assert abs(value - other) <= error * abs(other), (tag, step, value, other)


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """It keeps the first Accelerator's settings for all that follow."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
