"""Parameters, bound to where their values are while their block runs.

[Note: absent parameters] A parameter that is not in use is a NaN scalar expanded to its shape: shapes stay true, and
reads and writes raise, see [Note: reading absent parameters]. (What goes round that reads NaN, and writes raise: one
to a single element, which torch lets pass, when its block is next used.) While its block is held, `param.data` is a
view of the slot. Persistent parameters that are updated on host raise too: they may be older than their last update.
Nothing is stored on the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hightide.ir.chunk import ParamRange
from hightide.ir.refusal import Refused
from hightide.runtime.chunks.absent import UPDATED, Disabled, Nans, absent_class, noted_class

if TYPE_CHECKING:
    from hightide.runtime.chunks.chunks import Chunks

WRITTEN_WHILE_ABSENT = (
    "the parameter {name!r} was written to while its values were elsewhere; the write is lost. Use "
    "model.load_state_dict(), "
    "or change values before hightide.wrap or after hightide.unwrap"
)
WRITTEN_BESIDE_MASTER = (
    "the parameter {name!r} was written to, but the next update is added to its fp32 master, of which it is the "
    "rounded copy: the write is lost. Write values with model.load_state_dict(), or change them before hightide.wrap "
    "or after hightide.unwrap"
)
OTHER_DATA = (
    "the parameter {name!r} was given other memory (`p.data = ...`, vector_to_parameters, swap_tensors), which "
    "hightide would not follow: its values live in chunks. Write values with model.load_state_dict(), or call "
    "hightide.unwrap(model) first"
)


class _Bound(NamedTuple):
    """A parameter at one of the places where its block finds it."""

    key: str
    param: nn.Parameter
    shown: type
    view: Tensor
    addresses: set[int]  # where its data may be before it is bound: there, or absent


class _Views(NamedTuple):
    """The parameters of a chunk, at one of its places."""

    bound: list[_Bound]
    # Those that are something else afterwards: with their class, what takes the place of their values (None: they
    # stay), and the class that it has outside of its block (None: the same).
    leaving: list[tuple[nn.Parameter, type, Tensor | None, type | None]]


class Binding:
    def __init__(self, chunks: Chunks, loose: set[int]) -> None:
        """`loose`: blocks whose parameters nobody binds, because they are always there."""
        self._chunks, self._parameters = chunks, chunks.parameters
        specs, parameters = chunks.specs, chunks.parameters
        dtypes = [{entry.param: parameters[entry.param].dtype for entry in spec.params} for spec in specs]
        self._nans = Nans(dtypes, chunks.gpu.device)
        self._absent = {name: nan.expand(parameters[name].shape) for name, nan in self._nans.everyone().items()}
        self._told = {entry.param: self._told_of_writes(entry.param) for spec in specs for entry in spec.params}
        self._versions: dict[str, int] = {}  # of parameters when they were last seen
        self.ignored_versions: set[str] = set()  # the code of their blocks makes them grow without a write
        self._made: dict[tuple[int, int | None, int | None], _Views] = {}
        self._classes: dict[str, type] = {name: type(param) for name, param in parameters.items()}
        self._loose = [spec.index for spec in specs if spec.block in loose]
        names = {id(param): name for name, param in parameters.items()}
        absent = {kind: absent_class(kind, names) for kind in set(self._classes.values())}
        noted = {kind: noted_class(kind) for kind in absent}
        self._outside: dict[str, type] = {}  # what a parameter is outside of its block, if something else than in it
        self._hidden: set[str] = set()  # whose values are not always on the GPU, or not always the newest there
        for spec in specs:
            keys = {entry.param for entry in spec.params}
            if chunks.lives_elsewhere(spec.index) and spec.block not in loose:
                self._outside |= {key: absent[self._classes[key]] for key in keys}
                self._hidden |= keys
            else:
                self._outside |= {key: noted[self._classes[key]] for key in keys if self._told[key]}
        updated = {kind: absent_class(kind, names, UPDATED) for kind in absent}
        # The others that train, and what they are between an update in backward and step().
        self._updated = {
            key: updated[kind]
            for key, kind in self._classes.items()
            if key not in self._hidden and parameters[key].requires_grad
        }
        self._is_updated = False

    def _told_of_writes(self, key: str) -> str:
        """Parameters that stay can be written in place, which is right only where nobody keeps another copy ("")."""
        if self._chunks.lives_elsewhere(self._chunks.places[key][0]):
            return WRITTEN_WHILE_ABSENT
        return WRITTEN_BESIDE_MASTER if self._chunks.has_own_master(key) else ""

    def bind(self, chunk: int, block: int | None = None) -> None:
        if (written := self._nans.written(chunk)) is not None:
            raise Refused(WRITTEN_WHILE_ABSENT.format(name=written))
        versions = self._versions
        for key, param, shown, view, addresses in self._views(chunk, block).bound:
            param.__class__ = shown
            if key not in versions or versions[key] != param._version:
                self._check_written(key, param)
            if param.data_ptr() not in addresses:
                self._refuse_other_data(key, view)
            param.data = view

    def _check_written(self, key: str, param: nn.Parameter) -> None:
        version, told = param._version, self._told[key]
        if self._versions.setdefault(key, version) != version and told and key not in self.ignored_versions:
            self._versions[key] = version
            raise Refused(told.format(name=key))

    def unbind(self, chunk: int, block: int | None = None) -> None:
        for param, shown, absent, outside in self._views(chunk, block).leaving:
            if absent is not None:
                param.__class__ = shown  # after an exception in `bind` it may not have been bound at all
                param.data = absent
            if outside is not None:
                param.__class__ = outside

    def _views(self, chunk: int, block: int | None) -> _Views:
        """The parameters of a chunk where it is now. A slot is always at the same place, so they are made once."""
        place = (chunk, block, self._chunks.param_slots.first(chunk))
        made = self._made.get(place)
        if made is None:
            with torch.inference_mode(False):  # they outlive it
                made = self._made[place] = self._make_views(chunk, self._chunks.placements(chunk, block))
        return made

    def _make_views(self, chunk: int, entries: Sequence[ParamRange]) -> _Views:
        chunks, made = self._chunks, _Views([], [])
        flat, is_streamed = chunks.param_on_gpu(chunk), chunks.placed[chunk].is_streamed
        for entry in entries:
            key, param, view = entry.param, self._parameters[entry.param], chunks.view_of(flat, entry)
            addresses = {view.data_ptr(), self._absent[key].data_ptr()}
            made.bound.append(_Bound(key, param, self._classes[key], view, addresses))
            if is_streamed or key in self._outside:
                absent = self._absent[key] if is_streamed else None
                made.leaving.append((param, self._classes[key], absent, self._outside.get(key)))
        return made

    def _refuse_other_data(self, key: str, view: Tensor) -> None:
        """Somebody gave the parameter other memory (`p.data = ...`), unless it is still in another slot of ours."""
        with Disabled():
            if self._chunks.slot_offset(self._parameters[key].data) is not None:
                return
            self._parameters[key].data = view
        raise Refused(OTHER_DATA.format(name=key))

    def check_loose(self) -> None:
        self._check(self._loose)

    def check(self, chunks: Iterable[int]) -> None:
        """Those of these that are on the GPU: before their values are taken from there."""
        self._check(chunk for chunk in chunks if not self._chunks.placed[chunk].is_streamed)

    def _check(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            for bound in self._views(chunk, None).bound:
                with Disabled():
                    is_elsewhere = bound.param.data_ptr() not in bound.addresses
                if is_elsewhere:
                    self._refuse_other_data(bound.key, bound.view)
                self._check_written(bound.key, bound.param)

    def loose_params(self) -> list[Tensor]:
        return [self._chunks.param_on_gpu(chunk) for chunk in self._loose]

    def show(self, key: str) -> None:
        """From now on the parameter is what it was before wrapping: somebody has bound it, or will."""
        self._parameters[key].__class__ = self._classes[key]

    def _hide(self, key: str) -> None:
        if key in self._outside:
            self._parameters[key].__class__ = self._outside[key]

    def hide_updated(self) -> None:
        """Updates in backward have run: until step() nobody may see the next values, or write to them."""
        self._is_updated = True
        for key, kind in self._updated.items():
            self._parameters[key].__class__ = kind

    def show_updated(self) -> None:
        if self._is_updated:
            self._is_updated = False
            for key in self._updated:
                self._parameters[key].__class__ = self._outside.get(key, self._classes[key])

    def is_hidden(self, key: str) -> bool:
        """Whether the parameter refuses to be used outside of its block."""
        return key in self._hidden

    def make_absent(self, key: str) -> None:
        """A meta parameter refuses other data. Its contents are swapped, so that it stays the object that the optimizer
        knows."""
        param = self._parameters[key]
        if param.is_meta:
            torch.utils.swap_tensors(param, nn.Parameter(self._absent[key], requires_grad=param.requires_grad))
        else:
            param.data = self._absent[key]

    def show_new_value(self, key: str) -> None:
        """Somebody has written it to its home."""
        (chunk, entry), param, chunks = self._chunks.places[key], self._parameters[key], self._chunks
        self.show(key)
        is_streamed = chunks.placed[chunk].is_streamed
        param.data = self._absent[key] if is_streamed else chunks.view_of(chunks.param_on_gpu(chunk), entry)
        self._versions[key] = param._version
        self._hide(key)

    def let_go(self) -> None:
        """Of the parameters: from now on somebody else binds them."""
        for key in self._parameters:
            self.show(key)
            self.make_absent(key)

    def take_hold(self) -> None:
        """Of the parameters, once the values are in their places."""
        self.forget_views()
        for spec in self._chunks.specs:
            if not self._chunks.placed[spec.index].is_streamed:
                self.bind(spec.index)
        for key in self._parameters:
            self._hide(key)

    def forget_views(self) -> None:
        self._made.clear()
