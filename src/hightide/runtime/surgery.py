"""Swapping classes: how a user's model comes to run through hightide without anything being stored on it.

Each block, the root and the modules between them get a subclass of their own class; the subclass, not the instance,
knows the run. Equal modules share one, as they did before: torch.compile tells modules apart by their class, and keeps
the classes it has met for ever, so those of blocks know their run weakly. `unwrap` puts the old classes back.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hightide.ir.block import ModelProfile
from hightide.ir.refusal import Refused, RefusedArgument
from hightide.process.interrupts import deferred, uninterrupted
from hightide.profiler.probe.compare_runs import MUTATES_INPUT
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.runtime.blocks.block_runner import BlockRunner
from hightide.runtime.chunks.absent import Disabled
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.unchanged import HOOKED, Unchanged
from hightide.runtime.head.head import HeadCall
from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.run import Run
from hightide.stores.left_alone import leave_alone

COMPILED = "a wrapped model compiles its blocks by itself: hightide.wrap(..., compile=True)"

_runs: weakref.WeakSet[Run] = weakref.WeakSet()  # with the modules of a user's model


class Wrapped:
    """Mixed into the class of every module that hightide has swapped."""

    hightide_ref: Callable[[], Run | None]

    @property
    def hightide_run(self) -> Run:
        run = self.hightide_ref()
        if run is None:
            raise Refused("the wrapped model that this block was a part of is gone, and its parameters with it")
        run.birthplace.check()
        return run

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Full values, each in storage of its own, whatever tier they live on. Of several ranks all must call it, and
        the first gets them; the others get an empty one."""
        assert isinstance(self, nn.Module)
        run = self.hightide_run
        is_inside = kwargs.get("destination") is not None
        if not is_inside:
            run.check_values()
            run.executor.promises.check_weights("weights are read")
            keys = [run.keys[id(param)] for param in self.parameters() if id(param) in run.keys]
            run.chunks.binding.check({run.chunks.places[key][0] for key in keys})
        with deferred:
            with Disabled():  # it detaches parameters that are absent
                values = super().state_dict(*args, **kwargs)  # type: ignore[misc]
            if run.between is not None and is_inside:  # each value is asked for once, by all ranks
                return values
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            fill_values(run, self, values, prefix)
        if not run.gets_whole:
            values.clear()
        return values

    def share_memory(self) -> NoReturn:
        """It would take the memory of chunks away from those who know its address."""
        raise Refused(
            "share_memory() would move the parameters of a wrapped model to other memory than hightide's, for other "
            "processes; give these model.state_dict(), or call share_memory() before hightide.wrap or after "
            "hightide.unwrap"
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """As plain PyTorch loads: into real values, which then go to wherever the parameters live."""
        assert isinstance(self, nn.Module)
        if local_metadata.get("assign_to_params_buffers", False):
            raise RefusedArgument(
                "load_state_dict(assign=True) would replace parameters that live in hightide's chunks; leave assign "
                "out: values are copied to where they live, one module at a time"
            )
        self.hightide_run.executor.promises.check_weights("weights are loaded")
        keys = self.hightide_run.keys
        mine = {
            keys[id(param)]: param for param in self._parameters.values() if param is not None and id(param) in keys
        }
        with uninterrupted:
            for key, param in mine.items():
                self.hightide_run.secure(key)
                self.hightide_run.chunks.binding.show(key)
                param.data = self.hightide_run.value_of(key)
            try:
                super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]
            finally:
                for key, param in mine.items():
                    self.hightide_run.store(key, param.data)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """What `to`, `half`, `cuda` and the like are made of. Nothing to do is no problem."""
        assert isinstance(self, nn.Module)
        kinds = {(param.dtype, param.device, param.ndim) for param in self.parameters()}
        for dtype, device, ndim in kinds:
            example = torch.empty((2,) * ndim, dtype=dtype, device=device)
            if fn(example) is not example:
                raise Refused(
                    f"the {dtype} parameters of a wrapped model, which live in hightide's chunks, cannot be converted, "
                    "moved or emptied; call hightide.unwrap(model), convert it, and wrap it again"
                )
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Refused(
            "a wrapped model cannot be deep-copied: its parameters live in hightide's chunks. Copy the values with "
            "model.state_dict(), or copy the model before hightide.wrap."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Refused(
            "a wrapped model cannot be pickled: its parameters live in hightide's chunks. Save model.state_dict(), "
            "or use model.save_pretrained(folder)."
        )


class SavesInPlace:
    """Mixed into the class of a module that can write itself to a folder, as those of transformers and PEFT."""

    hightide_run: Run

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Files are written from where the values lie: a copy of a model that hardly fits would not fit. Of several
        ranks all call it."""
        assert isinstance(self, nn.Module)
        together = self.hightide_run.save_pretrained
        if together is not None and kwargs.get("state_dict") is None:
            with deferred:
                return together(self.hightide_run, self, *args, **kwargs)
        run = self.hightide_run
        is_writer = run.between is None or run.between.is_first  # the others have nothing in state_dict=
        with run.borrowed(), run.caches.as_the_user_has_them(), run.written_here(self) if is_writer else nullcontext():
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


class RecomputesByPlan:
    """Mixed into the class of a module that can checkpoint its layers, as those of transformers."""

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a layer that recomputes itself would do so once more inside of a block that is recomputed."""
        warnings.warn(
            "gradient checkpointing of a wrapped model stays off: hightide's plan decides which blocks are recomputed "
            "(plan.explain() shows it); leave it out",
            stacklevel=2,
        )


class WrappedRoot(Wrapped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hightide_run.passes.forward(super().forward, args, kwargs)  # type: ignore[misc]


class PatchedRoot(WrappedRoot):
    """One whose forward was set on the module itself before it was wrapped, as TRL does: it is called, and that of the
    class is not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hightide_run.passes.forward(super().__call__, args, kwargs)  # type: ignore[misc]


class WrappedInner(Wrapped):
    """A module between the root and its blocks. Called alone, as `model.model(...)`, it trains on the root's terms: a
    cache, filled once more by each recomputation, would give wrong gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.hightide_run.caches.call(self, super().forward, *args, **kwargs)  # type: ignore[misc,arg-type]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class WrappedBlock(Wrapped):
    @property
    def hightide_runner(self) -> BlockRunner:
        return self.hightide_run.runners[id(self)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner = self.hightide_runner
        runner.check_forward(super().forward)  # type: ignore[misc]
        return runner(self, args, kwargs)  # type: ignore[arg-type]


class WrappedHead(WrappedBlock):
    """The output projection of a language model: in grad mode it returns logits that are computed when they are
    used."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lazy = torch.is_grad_enabled() and not self.hightide_run.splits.is_probing
        if lazy and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return LazyLogits(HeadCall(self.hightide_runner, self), args[0], identity=self.hightide_runner)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs)


def check_modules(model: nn.Module, profile: ModelProfile, probed: ProbeResult, replaced: Collection[str] = ()) -> None:
    """What blocks cannot do. Asked before anything is moved: a refusal leaves the model as it was. `replaced`: names of
    parameters that others stand for while a block runs, as PEFT does with those of experts."""
    for index, reason in sorted(probed.refusals.items()):
        raise ValueError(
            f"the block {profile.blocks[index].name!r} {reason}. Such a block cannot be recomputed or split; keep what "
            "it remembers in buffers or attributes of its modules, and draw random numbers from generators that are"
        )
    for name in sorted(probed.written.difference(replaced)):
        raise ValueError(
            f"a forward gives the parameter {name!r} other values (by .data, or under no_grad), which would be lost: "
            "its values are brought in for each use. Change it between steps with load_state_dict(), compute what is "
            "used from it (torch.nn.utils.parametrize), or, if only the first forward does this, run one batch "
            "through the model before hightide.wrap"
        )
    for name in sorted(probed.captured):
        raise ValueError(
            f"a tensor is taken out of the middle of the block {name!r} in a way that hightide cannot follow (added to "
            "a list, or stored by code outside): its gradient would be lost. Return it from the block's forward "
            "instead, or assign it to an attribute of a module inside the block"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(HOOKED.format(key=name))
    for call in profile.calls:
        if call.note == MUTATES_INPUT:
            raise ValueError(
                f"the block {profile.blocks[call.block].name!r} changes an input in place, which cannot be recomputed; "
                "write that operation out of place (x = x + y instead of x += y, ReLU(inplace=False))"
            )
    for block in profile.blocks:
        if not block.loose and "forward" in vars(modules[block.name]):
            raise ValueError(
                f"the block {block.name!r} has a forward of its own on the instance, which hightide would bypass; undo "
                "that patch (or put it into a subclass) before hightide.wrap"
            )


def wrap_modules(run: Run) -> None:
    _runs.add(run)
    classes: dict[tuple[type, type], type] = {}
    modules = dict(run.model.named_modules(remove_duplicate=False))
    for name in _ancestors(block.name for block in run.profile.blocks if not block.loose):
        if name:
            _swap(modules[name], WrappedInner if run.caches.concern(modules[name]) else Wrapped, run, {})
    for block in run.profile.blocks:
        if not block.loose:
            module = modules[block.name]
            run.runners[id(module)] = run.make_runner(block.index, type(module).forward)
            run.unchanged[block.index] = Unchanged(module, run.keys)
            run.inner_hooks[block.index] = InnerHooks(module)
            run.compiled.add(module, type(module).forward)
            for inside in module.modules():  # for the sake of their state dicts
                if inside is not module and next(inside.parameters(), None) is not None:
                    _swap_shared(inside, Wrapped, run, classes)
            _swap_shared(module, WrappedHead if block.lazy_head else WrappedBlock, run, classes)
    _swap(run.model, PatchedRoot if "forward" in vars(run.model) else WrappedRoot, run, {})
    if run.compiled.enabled and run.probed.taps:
        warnings.warn(
            f"{len(run.probed.taps)} blocks run eagerly in spite of compile=True: hooks or attributes take tensors out "
            "of them, which a compiled block does not have; slower, but right",
            stacklevel=2,
        )


def unwrap_modules(model: nn.Module) -> None:
    for module in model.modules():
        while isinstance(module, Wrapped):
            module.__class__ = type(module).__bases__[-1]


def run_of(model: nn.Module) -> Run | None:
    return model.hightide_run if isinstance(model, Wrapped) else None


def wrapped_part(model: nn.Module) -> str:
    """What of a model belongs to another one that is wrapped, in words; "": nothing."""
    for name, module in model.named_modules():
        if run_of(module) is not None:
            return f"its part {name!r} is, or is a part of, another model that is wrapped"
    taken = {key for run in list(_runs) if isinstance(run.model, Wrapped) for key in run.keys}
    for name, param in model.named_parameters():
        if id(param) in taken:
            return f"another model that is wrapped has its parameter {name!r} too"
    return ""


def fill_values(run: Run, module: nn.Module, values: dict[str, Any], prefix: str) -> None:
    """Replaces absent parameters in a state dict by copies of their values. Tied ones share one copy, as in plain
    PyTorch."""
    copies: dict[str, Tensor] = {}
    for name, param in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        key = run.keys.get(id(param))
        if key is None or name not in values:
            continue
        if key not in copies:
            copies[key] = run.value_of(key, borrow=run.lends)
        values[name] = copies[key]
        if not run.gets_whole:
            copies[key] = values[name] = values[name].new_empty(0)


def _ancestors(names: Iterable[str]) -> list[str]:
    """Every module between the root and a block, without the blocks themselves."""
    names = list(names)
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])] = None
    return [name for name in found if name not in names]


def _swap_shared(module: nn.Module, mixin: type, run: Run, classes: dict[tuple[type, type], type]) -> None:
    if isinstance(module, Wrapped):  # tied modules are met twice
        return
    key = (type(module), mixin)
    if key not in classes:
        classes[key] = _subclass(type(module), mixin, {"hightide_ref": weakref.ref(run)})
    module.__class__ = classes[key]


def _swap(module: nn.Module, mixin: type, run: Run, attributes: dict[str, Any]) -> None:
    found = {"hightide_ref": staticmethod(lambda: run)}
    module.__class__ = _subclass(type(module), mixin, found | attributes)


def _subclass(original: type, mixin: type, attributes: dict[str, Any]) -> type:
    """It keeps the class's name: transformers writes it into a saved config."""
    body: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    if hasattr(mixin, "forward"):
        body["forward"] = _like_its_own(original, mixin)
    able = {"save_pretrained": SavesInPlace, "gradient_checkpointing_enable": RecomputesByPlan}
    mixins = [mixin_of for method, mixin_of in able.items() if hasattr(original, method)]
    return type(original.__name__, (*mixins, mixin, original), {**body, **attributes})


def _like_its_own(original: Any, mixin: Any) -> Callable[..., Any]:
    """The mixin's forward with the signature of the original's: transformers' Trainer keeps only those columns of a
    dataset that it finds there, and takes the names of labels from it."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Wrapped):  # unwrapped, by way of a forward that somebody has made of this one
            return original.forward(self, *args, **kwargs)
        return mixin.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    forward.__doc__ = original.forward.__doc__
    # Compiled from outside, as the whole model, hightide would be compiled with it.
    leave_alone(forward)
    vars(forward).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=COMPILED)
    return forward
