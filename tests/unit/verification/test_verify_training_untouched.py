"""Whatever verify finds or raises, it leaves nothing behind."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.runtime.surgery import WrappedBlock
from hightide.verification import side_by_side as verifying
from waiting import OwnThreads


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "classes": [type(module) for module in model.modules()],
        "attributes": [
            {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
            for module in model.modules()
        ],
        "hooks": [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()],
        "values": {name: (id(value), value.tolist()) for name, value in model.state_dict(keep_vars=True).items()},
        "versions": [param._version for param in model.parameters()],
        "gradients": [
            None if param.grad is None else (id(param.grad), param.grad.tolist()) for param in model.parameters()
        ],
        "groups": [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups],
        "states": [(id(param), sorted(state), state["step"].item()) for param, state in optimizer.state.items()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())),
        "grad mode": torch.is_grad_enabled(),
    }


def fail(*args: Any, **kwargs: Any) -> Any:
    raise IndexError("lost in a slot")


@pytest.mark.parametrize("how", ["equal", "raised", "interrupted", "refused", "without gradients"])
def test_model_optimizer_and_random_states_stay_as_they_are(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written(num_layers=2, num_samples=6, dropout=0.2)
    model.layers[0].register_forward_hook(lambda module, args, output: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    models.loss_of(model, batch).backward()
    optimizer.step()
    options: dict[str, Any] = {}
    if how == "raised":
        monkeypatch.setattr(WrappedBlock, "forward", fail)
    elif how == "interrupted":
        monkeypatch.setattr(verifying, "nudge", lambda model: (_ for _ in ()).throw(KeyboardInterrupt))
    elif how == "refused":
        options["blocks"] = "no.such.module"
    tensors = {name: value.clone() for name, value in batch.items()}
    before, threads = snapshot(model, optimizer), OwnThreads(prefix="")
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            hightide.verify(model, optimizer, batch)
    elif how == "without gradients":
        with torch.no_grad():
            assert hightide.verify(model, optimizer, batch).equal
    else:
        verdict = hightide.verify(model, optimizer, batch, **options)
        assert verdict.equal == (how == "equal"), verdict
    assert snapshot(model, optimizer) == before
    assert not threads.alive()
    assert all(torch.equal(batch[name], value) for name, value in tensors.items())


def test_copies_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written(num_layers=2, num_samples=6)
    made: list[weakref.ref[Tensor]] = []
    copied_model = verifying.copied_model

    def watched(original: nn.Module) -> nn.Module:
        copy = copied_model(original)
        made.extend(weakref.ref(param) for param in copy.parameters())
        return copy

    monkeypatch.setattr(verifying, "copied_model", watched)
    verdict = hightide.verify(model, torch.optim.AdamW(model.parameters()), batch)
    gc.collect()
    assert verdict.equal and made and not [one for one in made if one() is not None]


def test_nothing_is_printed_and_no_warning_escapes(capfd: pytest.CaptureFixture[str], recwarn: Any) -> None:
    model = Asking()
    verdict = hightide.verify(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(6, 4))
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert any("could not be probed" in text for text in verdict.warnings)
    assert "could not be probed" in str(verdict)


class Asking(nn.Module):
    """Looks at a value that depends on its parameters, so it does not run without values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if float(x.detach().mean()) > 1e6:
                x = x / 2
        return x.square().mean()


def test_what_cannot_be_copied_says_so() -> None:
    class Locked(nn.Linear):
        lock = None

    model = Locked(4, 4)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"this Locked cannot be copied .*pickle.*verify trains copies only"):
        hightide.verify(model, torch.optim.SGD(model.parameters()), torch.rand(3, 4), loss=lambda y: y.sum())


def test_tensors_of_an_earlier_forward_and_generators_are_copied_too() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.layers[1](self.layers[0](x))
            return self.last.square().mean()

    model = Remembering()
    model(torch.rand(6, 4))
    state = model.generator.get_state()
    verdict = hightide.verify(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(6, 4))
    assert verdict.equal, verdict
    assert torch.equal(model.generator.get_state(), state)
