"""The profile of a deep model from that of a shallow one: equal layers need to be probed once, not a hundred times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hightide.ir.block import BlockSpec, CallSpec, ModelProfile, ParamSpec
from hightide.profiler.model.model_profile import fingerprint

FEW_LAYERS = 4  # the first and the last may be unlike the others; two between them show that those are alike
_TWINS = (1, 2)
_NUMBERED = re.compile(r"(.*)\.(\d+)")

T = TypeVar("T")


def stack_of(profile: ModelProfile) -> str:
    """The name of the list of layers: the longest."""
    matches = [_NUMBERED.fullmatch(block.name) for block in profile.blocks]
    return Counter(match[1] for match in matches if match).most_common(1)[0][0]


def with_layers(profile: ModelProfile, num_layers: int, layer_buffer_bytes: int) -> ModelProfile:
    """With so many layers instead of FEW_LAYERS. Those in the middle must be alike: ValueError, if they are not."""
    stack = _Stack(profile, stack_of(profile), num_layers)
    stack.check()
    params = tuple(stack.repeated(profile.params, lambda spec: stack.layer(spec.name), stack.param))
    blocks = tuple(stack.repeated(profile.blocks, stack.layer_of_block, stack.block))
    places = {block.name: index for index, block in enumerate(blocks)}
    blocks = tuple(replace(block, index=index) for index, block in enumerate(blocks))

    def call(spec: CallSpec, layer: int | None) -> CallSpec:
        name = stack.block(profile.blocks[spec.block], layer).name
        return replace(spec, block=places[name])

    calls = stack.repeated(profile.calls, lambda spec: stack.layer_of_block(profile.blocks[spec.block]), call)
    return replace(
        profile,
        fingerprint=fingerprint(params, blocks),
        buffer_bytes=profile.buffer_bytes + (num_layers - FEW_LAYERS) * layer_buffer_bytes,
        params=params,
        blocks=blocks,
        calls=tuple(calls),
    )


@dataclass(frozen=True)
class _Stack:
    profile: ModelProfile
    name: str
    num_layers: int

    def layer(self, name: str) -> int | None:
        """Whose this is; None: no layer's."""
        match = re.match(rf"{re.escape(self.name)}\.(\d+)(\.|$)", name)
        return int(match[1]) if match else None

    def layer_of_block(self, block: BlockSpec) -> int | None:
        return self.layer(block.name)

    def repeated(
        self, items: Sequence[T], layer_of: Callable[[T], int | None], moved: Callable[[T, int | None], T]
    ) -> Iterator[T]:
        """Each once, those of a twin also for every layer that is missing; the last layer's become the last one's."""
        twin = [item for item in items if layer_of(item) == _TWINS[1]]
        for item in items:
            layer = layer_of(item)
            yield moved(item, self.num_layers - 1 if layer == FEW_LAYERS - 1 else layer)
            if twin and item is twin[-1]:
                for number in range(_TWINS[1] + 1, self.num_layers - 1):
                    yield from (moved(one, number) for one in twin)

    def param(self, spec: ParamSpec, layer: int | None) -> ParamSpec:
        return replace(spec, names=tuple(self._renamed(name, layer) for name in spec.names))

    def block(self, block: BlockSpec, layer: int | None) -> BlockSpec:
        params = tuple(self._renamed(name, layer) for name in block.params)
        return replace(block, name=self._renamed(block.name, layer), params=params)

    def _renamed(self, name: str, layer: int | None) -> str:
        number = self.layer(name)
        if number is None or layer is None:
            return name
        prefix = f"{self.name}.{number}"
        return f"{self.name}.{layer}{name.removeprefix(prefix)}"

    def check(self) -> None:
        layers = {self.layer_of_block(block) for block in self.profile.blocks} - {None}
        if layers != set(range(FEW_LAYERS)) or self._facts(_TWINS[0]) != self._facts(_TWINS[1]):
            raise ValueError(
                f"{self.name} has {len(layers)} layers, of which {_TWINS} are not alike: such a model is profiled whole"
            )

    def _facts(self, layer: int) -> tuple[object, ...]:
        """All that is known of a layer, as if it were layer 0."""
        blocks = [block for block in self.profile.blocks if self.layer_of_block(block) == layer]
        indices = {block.index: at for at, block in enumerate(blocks)}
        params = [self.param(spec, 0) for spec in self.profile.params if self.layer(spec.name) == layer]
        calls = [replace(call, block=indices[call.block]) for call in self.profile.calls if call.block in indices]
        return params, [replace(self.block(block, 0), index=indices[block.index]) for block in blocks], calls
