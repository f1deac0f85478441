"""A Trainer that has nothing to train on: its model is wrapped frozen, and streams through the GPU all the same.

It stays wrapped from one evaluation to the next. If there is something to train on later, it is unwrapped, and trains
what trained before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hightide import api
from hightide.trainer.first_batches import first_call, kept_generators, looked_at


def wrap_frozen(trainer: Any, loader: Any, options: Mapping[str, Any]) -> list[nn.Parameter]:
    """For the batches of a loader; of the `options` of a Trainer with those that are not of training. Returns the
    parameters that were frozen for it."""
    if options["plan"] is not None:
        raise ValueError("plan= is of training, and there is no train_dataset to train on; leave it out")
    model, args = trainer.model, trainer.args
    device = "cpu" if args.device.type == "cpu" else args.device  # Accelerate numbers CPUs
    example = _example(trainer, loader)
    frozen, was_training = [param for param in model.parameters() if param.requires_grad], model.training
    model.eval().requires_grad_(False)
    try:
        own = {name: options[name] for name in ("limits", "blocks")}
        api.wrap_frozen(model, example, device=device, timeout_s=args.ddp_timeout, **own)
    except BaseException:
        thaw(frozen)
        model.train(was_training)
        raise
    return frozen


def thaw(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.requires_grad_(True)


def _example(trainer: Any, loader: Any) -> dict[str, Any]:
    """The first batch, as the model is called with it."""
    with kept_generators():
        batches = looked_at(loader, 1)
    if not batches:
        raise ValueError("the evaluation dataset gives no batch: there is no example to plan from")
    (batch,), names = batches, trainer.label_names
    if all(batch.get(name) is not None for name in names) if names else trainer.can_return_loss:
        return first_call(trainer, batch)
    return dict(trainer._prepare_inputs(dict(batch)))
