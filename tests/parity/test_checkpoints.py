"""Checkpoints: from any plan, or plain PyTorch, to any other, with equal bits; and a resumed run goes on as if nothing
had happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_from_disk import Words, adamw, batch_of, lora, wrapped
from torch import Tensor, nn

import hightide
from disk_plans import HOMES
from pairwise import covering, product

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = ("fp32", "tied", "bf16", "fp16", "autocast", "LoRA")
PLACES = ("plain", "gpu", "host", "all on disk", "every tier")
SCALED = ("fp16", "autocast")
DROPOUT = 0.1


def build(kind: str) -> nn.Module:
    model: nn.Module = lora(DROPOUT) if kind == "LoRA" else Words(tied=kind == "tied", dropout=DROPOUT)
    return model.to({"bf16": BF16, "fp16": FP16}.get(kind, torch.float32))


@dataclass
class Pair:
    """A model, plain or in hightide, with all that its loop needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler | None
    kind: str
    accumulate: int = 1
    num_steps: int = 0

    @classmethod
    def make(
        cls, kind: str, place: str, folder: Path, accumulate: int = 1, offset: float = 0.0, **options: Any
    ) -> Pair:
        """`offset`: added to all that trains."""
        model = build(kind)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(offset * param.requires_grad)
        make = partial(adamw, groups=2)
        if place == "plain":
            optimizer = make(model)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            options |= {"accumulate": 1 if is_on_disk(place) else accumulate}
            model, optimizer, _ = wrapped(model, place, folder, make, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if kind in SCALED else None
        return cls(model, optimizer, scheduler, scaler, kind, accumulate)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            for part in range(self.accumulate):
                with torch.autocast("cpu", FP16, enabled=self.kind == "autocast"):
                    loss = self.model(**batch_of(100 * self.num_steps + part))["loss"] / self.accumulate
                (self.scaler.scale(loss) if self.scales else loss).backward()
                losses.append(loss.item())
            if self.scales:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.num_steps += 1
        return losses

    @property
    def scales(self) -> bool:
        """Plain PyTorch refuses to scale gradients that are fp16 themselves."""
        is_plain = not any("hightide" in kind.__module__ for kind in type(self.optimizer).__mro__)
        return self.scaler is not None and not (is_plain and self.kind == "fp16")

    def save(self, folder: Path, **options: Any) -> hightide.Saving:
        extra = {"position": self.num_steps, "scheduler": self.scheduler.state_dict()}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        return hightide.save(self.model, self.optimizer, folder, extra=extra, **options)

    def load(self, folder: Path) -> hightide.Loaded:
        loaded = hightide.load(self.model, self.optimizer, folder)
        self.num_steps = loaded.extra["position"]
        self.scheduler.load_state_dict(loaded.extra["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(loaded.extra["scaler"])
        return loaded

    def values(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
        """Weights, states by the names of parameters (masters among them), options of groups: copies."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = self.optimizer.state_dict()
        names = {id(param): name for name, param in self.model.named_parameters()}
        order = [names[id(param)] for group in self.optimizer.param_groups for param in group["params"]]
        states = {
            order[index]: {key: torch.as_tensor(v).clone() for key, v in its.items()}
            for index, its in found["state"].items()
        }
        for index, master in found.get("hightide_masters", {}).items():
            states[order[index]]["master"] = master.clone()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]]
        return weights, states, groups


def assert_restored(found: Pair, expected: Any, kind: str, source: str, target: str) -> None:
    weights, states, groups = found.values()
    assert weights.keys() == expected[0].keys() and states.keys() == expected[1].keys() and groups == expected[2]
    for name, value in expected[0].items():
        assert torch.equal(weights[name], value), name
    for name, its in expected[1].items():
        its, ours = dict(its), dict(states[name])
        if kind in ("bf16", "fp16"):
            master = its.pop("master", expected[0][name].float())  # plain PyTorch: the parameter is its own
            assert (target != "plain") == ("master" in ours)
            assert target == "plain" or torch.equal(ours.pop("master"), master), name
        assert ours.keys() == its.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in its.items():
            rounded = value.to(ours[key].dtype) if target == "plain" else value.float()
            assert torch.equal(ours[key], rounded), (name, key)


FEATURES = {
    "kind": KINDS,
    "source": PLACES,
    "target": PLACES,
    "update": ("deferred", "in_backward"),
    "accumulate": (1, 2),
}
ALL_FEATURES = {**FEATURES, "source": ("plain", *HOMES), "target": ("plain", *HOMES)}


def is_possible(kind: str, source: str, target: str, update: str, accumulate: int) -> bool:
    """A scaler looks at all gradients before step(); steps of several passes are not planned from a disk."""
    has_disk = is_on_disk(source) or is_on_disk(target)
    return update == "deferred" or not (kind in SCALED or (has_disk and accumulate > 1))


def is_on_disk(place: str) -> bool:
    return place not in ("plain", "gpu", "host")


def cases() -> Iterator[Any]:
    quick = covering(FEATURES, product(FEATURES, is_possible))
    yield from (pytest.param(*case, id=" ".join(map(str, case))) for case in quick)
    for case in covering(ALL_FEATURES, product(ALL_FEATURES, is_possible)):
        if case not in quick:
            yield pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.long)


@pytest.mark.parametrize(("kind", "source", "target", "update", "accumulate"), [*cases()])
def test_round_trip(kind: str, source: str, target: str, update: str, accumulate: int, tmp_path: Path) -> None:
    """Into a run that has trained already, with other values. Between two runs of hightide, or two plain ones, training
    goes on with the bits of the one that was saved, dropout included."""
    torch.manual_seed(5)
    first = Pair.make(kind, source, tmp_path / "first", accumulate, update=update)
    first.train(3)
    expected = first.values()
    saving = first.save(tmp_path / "saved")
    after = first.train(2)
    saving.wait()
    torch.manual_seed(6)
    other = Pair.make(kind, target, tmp_path / "other", accumulate, offset=0.25, update=update)
    other.train(1)
    other.model(**batch_of(7))  # without a backward: values are in slots and buffers too
    loaded = other.load(tmp_path / "saved")
    assert (loaded.step, loaded.path) == (3, saving.path)
    assert_restored(other, expected, kind, source, target)
    if (source == "plain") == (target == "plain"):
        assert other.train(2) == after


def test_values_loaded_between_two_backwards_of_a_step_are_used_at_once(tmp_path: Path) -> None:
    """What the first one left in slots is not what the second one finds there."""
    first = Pair.make("fp32", "host", tmp_path, accumulate=2)
    first.train(1)
    first.save(tmp_path / "saved", wait=True)
    expected = first.model(**batch_of(5))["loss"].item()
    torch.manual_seed(8)
    other = Pair.make("fp32", "host", tmp_path, accumulate=2, offset=0.25)
    other.model(**batch_of(4))["loss"].backward()
    other.load(tmp_path / "saved")
    assert other.model(**batch_of(5))["loss"].item() == expected
