"""A few training steps of a model, plain or wrapped, and everything that can be seen of them.

Whatever is seen is handed to a `Note` at once, with a key that is the same in both kinds of run, in the order in which
it is computed. Weights and states are read after the last step only: to read them in between would wait for updates
that in real training run beside the next forward.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hightide.ir.foreign import kind_of
from hightide.ir.plan import Update
from hightide.profiler.model.call_tree import Arguments
from hightide.profiler.trial.state import INTERNAL, GlobalRandom
from hightide.runtime.blocks.batch import map_tensors
from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.surgery import run_of
from hightide.verification.copies import seed_all

AFTER = 0  # the number of what is seen after the last step
OF_GRADIENT = ("gradient", "gradient norm")
ROUNDING = 4  # times the last bit of a weight, whatever its update is
LOST = 1e-9  # of the norm of all gradients: smaller ones are nothing but rounding
LossOf = Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Key:
    what: str
    where: str = ""
    step: int = AFTER


# What was seen, None for what exists in hightide only when somebody uses it, and a difference that means nothing.
Note = Callable[[Key, Tensor | None, float], None]


@dataclasses.dataclass(frozen=True)
class Loop:
    """What both kinds of run do."""

    batches: tuple[Arguments, ...]  # one for each step
    loss: LossOf
    blocks: tuple[str, ...]  # names, in the order of their first call
    params: tuple[str, ...]  # names, in the order in which backward is through with them


class ObservedTraining:
    """A model that is trained and looked at: a plain one, or one that `hightide.wrap` has returned."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, begin: Mapping[str, Tensor] | None = None
    ) -> None:
        """`begin`: values of the parameters before the first step; by default those that they have now."""
        self.model, self.optimizer = model, optimizer
        self.begin = values_of(model) if begin is None else begin
        self.numbers = numbers_of(model)
        self.run = run_of(model)  # None: it is plain
        self.device = next(model.parameters()).device if self.run is None else self.run.gpu.device
        # With updates in backward they are used up by then.
        self.shows_gradients = self.run is None or self.run.plan.update is Update.DEFERRED

    def placed(self, batch: Arguments) -> Arguments:
        """A copy of the batch, where a user's loop would have it."""
        if self.run is not None:
            return changed_batch(batch, torch.clone)
        return changed_batch(batch, lambda tensor: tensor.to(self.device, copy=True))

    def value_of(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach() if self.run is None else self.run.value_of(name)

    def states(self) -> dict[str, dict[str, Any]]:
        """Of the optimizer, by parameter."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        saved = self.optimizer.state_dict()
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, params, strict=True))
        return {names[id(by_number[number])]: state for number, state in saved["state"].items()}

    def looking(self) -> AbstractContextManager[None]:
        """Inside, copies of tensors do not count as the model's."""
        return nullcontext() if self.run is None else self.run.gpu.unmetered()

    @property
    def is_probing(self) -> bool:
        return self.run is not None and self.run.splits.is_probing


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().to("cpu", copy=True) for name, param in model.named_parameters()}


def train(subject: ObservedTraining, loop: Loop, note: Note) -> None:
    """Trains as a user's loop does, then evaluates; tells `note` what is to be seen."""
    seed_all(subject.device)
    with _watched(subject, loop.blocks, note) as begin:
        for step, batch in enumerate(loop.batches, 1):
            begin(step)
            _step(subject, loop, step, subject.placed(batch), note)
        random = GlobalRandom(subject.device)
        _look_at_weights(subject, loop, note)
        _look_at_modules(subject, note)
        for name, state in random.states.items():
            content = pickle.dumps(state.numpy() if isinstance(state, Tensor) else state)
            note(Key("random state", name), torch.tensor(float(zlib.crc32(content)), dtype=torch.float64), 0.0)
        begin(AFTER)
        subject.model.eval()
        with torch.no_grad():
            result = call(subject.model, subject.placed(loop.batches[0]))
        for name, tensor in named_tensors(result):
            note(Key("result", name), tensor, 0.0)


def _step(subject: ObservedTraining, loop: Loop, step: int, batch: Arguments, note: Note) -> None:
    result = call(subject.model, batch)
    loss = loop.loss(result)
    note(Key("loss", "", step), loss, 0.0)
    for name, tensor in named_tensors(result):
        if tensor is not loss:
            note(Key("result", name, step), tensor, 0.0)
    del result
    loss.backward()
    if subject.shows_gradients:
        _look_at_gradients(subject, loop, step, note)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def call(model: nn.Module, batch: Arguments) -> Any:
    return model(*batch.args, **batch.kwargs)


def changed_batch(batch: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    return Arguments(*map_tensors((batch.args, dict(batch.kwargs)), change))


@contextmanager
def _watched(subject: ObservedTraining, blocks: tuple[str, ...], note: Note) -> Iterator[Callable[[int], None]]:
    """Sees what blocks return, as a forward hook on them does. Call what it yields before each step."""
    now = AFTER
    calls: Counter[str] = Counter()

    def begin(step: int) -> None:
        nonlocal now
        now = step
        calls.clear()

    def see(block: str, output: Any) -> None:
        if subject.is_probing:
            return
        calls[block] += 1
        again = f" (call {calls[block]})" if calls[block] > 1 else ""
        for name, tensor in named_tensors(output):
            part = f" {name}" if name else ""
            with subject.looking():
                note(Key("output", f"{block or 'the model'}{part}{again}", now), tensor, 0.0)

    with ExitStack() as hooks:
        for block in blocks:
            module = subject.model.get_submodule(block)
            hooks.enter_context(module.register_forward_hook(lambda _, __, output, block=block: see(block, output)))
        yield begin


def _look_at_gradients(subject: ObservedTraining, loop: Loop, step: int, note: Note) -> None:
    gradients = {name: subject.model.get_parameter(name).grad for name in loop.params}
    present = [dense(gradient) for gradient in gradients.values() if gradient is not None]
    norm = torch.nn.utils.get_total_norm(present)
    for name, gradient in gradients.items():
        if gradient is not None:
            values = dense(gradient.clone())  # hightide shows a placeholder there
            note(Key("gradient", name, step), values, LOST * float(norm))
    note(Key("gradient norm", "", step), norm, 0.0)


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _look_at_weights(subject: ObservedTraining, loop: Loop, note: Note) -> None:
    last = len(loop.batches)
    optimised = {id(param) for group in subject.optimizer.param_groups for param in group["params"]}
    for name in loop.params:
        begin = subject.begin[name]
        update = subject.value_of(name).to(begin.device) - begin
        is_trained = id(subject.model.get_parameter(name)) in optimised and begin.numel() > 0
        last_bit = torch.finfo(begin.dtype).eps * float(begin.abs().max()) if is_trained else 0.0
        note(Key("update", name, last), update, ROUNDING * last_bit)
    states = subject.states()
    for name in loop.params:
        for state, value in states.get(name, {}).items():
            if value is not None:
                note(Key(state, name, last), torch.as_tensor(value), 0.0)


def _look_at_modules(subject: ObservedTraining, note: Note) -> None:
    """Buffers, and attributes that are numbers and have changed: counters."""
    for name, buffer in subject.model.named_buffers():
        note(Key("buffer", name), buffer, 0.0)
    for name, value in numbers_of(subject.model).items():
        if value != subject.numbers.get(name):
            note(Key("attribute", name), torch.tensor(value, dtype=torch.float64), 0.0)


def numbers_of(model: nn.Module) -> dict[str, float]:
    """Attributes of modules that are numbers."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in INTERNAL and isinstance(value, int | float) and not isinstance(value, bool)
    }


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Inside mappings, lists, tuples and dataclasses. None: logits that do not exist until somebody uses them."""
    if isinstance(value, LazyLogits):
        yield name, None
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):  # before dataclasses: transformers' outputs are both
        for key, entry in value.items():
            yield from named_tensors(entry, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            yield from named_tensors(entry, f"{name}[{at}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}".removeprefix("."))


def usual_loss(result: Any) -> Tensor:
    """Where the loss is in what models return."""
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif getattr(result, "loss", None) is not None:
        found = result.loss
    elif isinstance(result, list | tuple):
        found = next((entry for entry in result if isinstance(entry, Tensor) and entry.ndim == 0), None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    raise ValueError(
        f"the model returned {kind_of(result)} in which there is no loss; pass loss=, a function of what the "
        "model returns, such as loss=lambda result: result.square().mean()"
    )


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """What was warned of inside, each once; nothing is printed."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts.extend(dict.fromkeys(str(one.message) for one in said))
