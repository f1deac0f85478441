"""State of a run beside model, optimizer and random numbers: a checkpoint's `extra`. By it a run is recognised: what
decides about the values must be as it was; where things live may change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hightide.cli.train.config import TrainConfig
from hightide.ir.codec import to_json
from hightide.ir.foreign import quoted, shown

# The number of steps is not among them: the learning rate then goes on along the curve of the run's new length.
_DECIDING = ("seed", "model", "data", "optimizer", "lora")
# Of these, what a run may go on with otherwise, which is told.
_CHANGEABLE = "optimizer."
# Where model and data come from. They are compared by what they are (checksums); these say why one differs.
_SOURCES = {"model": ("path",), "data": ("path", "text_bytes", "column", "date")}
_OTHER = {"model": "another model", "data": "other data"}
_SHARE = "eval.share"  # which is taken out of the data
_DATE = "data.date"
_SUM = "checksum of the "
# The same plan can be used again if all these are as they were.
_PLACING = ("device", "limits", "calls", "micro_batch", "update", "gradients", "compile")


@dataclass(frozen=True)
class RunState:
    deciding: dict[str, Any]
    placing: dict[str, Any]
    losses: Tensor  # of steps 1, 2, ...; float64
    light_shares: Tensor  # of the steps for which they are known; float64
    train_s: float  # since the first step, over all processes
    data: dict[str, int]  # where the batches stand

    def to_extra(self) -> dict[str, Any]:
        """`loss` is what `hightide checkpoints` shows."""
        return {"loss": float(self.losses[-1]), "train": dict(vars(self))}

    @classmethod
    def from_extra(cls, extra: object, step: int) -> RunState:
        """Of whatever a checkpoint holds, which may be a stranger's."""
        found = extra.get("train") if isinstance(extra, dict) else None
        if not isinstance(found, dict) or set(found) != set(cls.__dataclass_fields__):
            raise ValueError("it was not saved by `hightide train`")
        state = cls(**found)
        for name in ("losses", "light_shares"):
            numbers = getattr(state, name)
            if not isinstance(numbers, Tensor) or numbers.dtype != torch.float64 or numbers.dim() != 1:
                raise ValueError(f"its {name} are {quoted(numbers)}")
        if len(state.losses) != step:
            raise ValueError(f"it is of step {step} and has {len(state.losses)} losses")
        if not isinstance(state.train_s, float) or not math.isfinite(state.train_s):
            raise ValueError(f"its train_s is {quoted(state.train_s)}")
        return state

    @property
    def date(self) -> str | None:
        """On which the run began; None: older checkpoints do not have it."""
        found = self.deciding.get(_DATE) if isinstance(self.deciding, dict) else None
        return found if isinstance(found, str) else None


def deciding(config: TrainConfig, checksums: Mapping[str, int]) -> dict[str, Any]:
    """Settings that decide about the values of a run, by name. `checksums`: of the model and the data."""
    settings = dict(_settings(config, _DECIDING))
    settings |= {_SHARE: config.eval.share}
    for name in ("model.path", "data.path"):
        if settings[name] is not None and Path(settings[name]).exists():  # and no name of a hub
            settings[name] = str(Path(settings[name]).absolute())
    return settings | {_SUM + name: value for name, value in checksums.items()}


def placing(config: TrainConfig, world: int = 1) -> dict[str, Any]:
    """Settings that decide about the plan."""
    return {**dict(_settings(config, _PLACING)), "ranks": world}


def difference(before: object, now: dict[str, Any]) -> str | None:
    """That makes it another run, in words, with the names of the settings; None where there is none."""
    if not isinstance(before, dict):
        return f"its settings are {quoted(before)}"
    sources = {_SHARE, *(f"{of}.{key}" for of, keys in _SOURCES.items() for key in keys)}
    names = [name for name in _differing(before, now) if name not in sources and not name.startswith(_CHANGEABLE)]
    if not names:
        return None
    name, *others = names
    more = f" (and {len(others)} more: {', '.join(quoted(other) for other in others[:3])})" if others else ""
    if name in (_SUM + of for of in _SOURCES):
        return _other_source(before, now, name.removeprefix(_SUM)) + more
    return f"{name} was {_value(before, name)} and is {_value(now, name)}{more}"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Of settings that a run may go on with otherwise, in words."""
    names = [name for name in _differing(before, now) if name.startswith(_CHANGEABLE)]
    return [f"{name} was {_value(before, name)} and is {_value(now, name)}" for name in names]


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys((*now, *before)) if before.get(name, _ABSENT) != now.get(name, _ABSENT)]


def _other_source(before: dict[str, Any], now: dict[str, Any], of: str) -> str:
    """Why the checksum of the model or the data is another one: its settings differ, or else what is there."""
    names = [f"{of}.{key}" for key in _SOURCES[of]] + ([_SHARE] if of == "data" else [])
    changed = [name for name in names if name in before and before[name] != now[name]]
    if changed:
        texts = [f"{name} was {_value(before, name)} and is {_value(now, name)}" for name in changed]
        return f"{_OTHER[of]}: {', '.join(texts)}"
    path = now[f"{of}.path"]
    where = "" if path is None else f" in {shown(path)}"
    tokenizer = " (or the model's tokenizer)" if of == "data" else ""
    return f"the {of}{where}{tokenizer} changed since it was saved"


_ABSENT = object()


def _value(settings: dict[str, Any], name: str) -> str:
    return quoted(settings[name]) if name in settings else "absent"


def _settings(config: TrainConfig, sections: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    plain = json.loads(to_json(config))
    for section in sections:
        value = plain[section]
        if isinstance(value, dict):
            for key, entry in value.items():
                yield f"{section}.{key}", entry
        else:
            yield section, value
