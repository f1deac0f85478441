"""Finds the blocks of a model: the units of compute whose parameters come and go together.

Walking from the root:
- a stack is an nn.ModuleList or nn.Sequential with at least two children that hold parameters: these are blocks;
- elsewhere, a module with parameters of its own and no stack below it is a block as a whole (a head, a norm);
- a module with parameters of its own and a stack below it is descended into, and its own parameters are loose: the
  model's code uses them between blocks, so they stay where plain autograd sees them;
- a module without parameters of its own is descended into;
- a module with a pre-hook that computes what its forward uses (old weight_norm and spectral_norm, pruning) is no block:
  that runs before the block's forward, on parameters that would not be there. All of its parameters are loose. Inside
  of a block such modules are as others.

A user may name blocks instead, by patterns of module names or by classes: these are blocks wherever they are, and the
walk divides the rest of the model as above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from hightide.ir.foreign import kind_of
from hightide.profiler.model.hooks import is_part_of_computation

MAX_LISTED = 12
# Patterns of module names (fnmatch), or classes.
BlockChoice = str | type[nn.Module] | Collection[str | type[nn.Module]]


@dataclass(frozen=True)
class FoundBlock:
    name: str  # the module's first name in the model; "" if the root itself is the block
    module: nn.Module


@dataclass(frozen=True)
class FoundBlocks:
    """Blocks in the order of definition, and the names of loose parameters (first name of each, see `first_names`)."""

    blocks: tuple[FoundBlock, ...]
    loose: tuple[str, ...]

    def without(self, model: nn.Module, names: Collection[str]) -> FoundBlocks:
        """The same with more parameters loose. A block that is left without parameters is none any more."""
        loose = tuple(name for name, _ in model.named_parameters() if name in names or name in self.loose)
        objects = {id(param) for name, param in model.named_parameters() if name in loose}
        blocks = tuple(b for b in self.blocks if any(id(param) not in objects for param in b.module.parameters()))
        return FoundBlocks(blocks, loose)


def find_blocks(model: nn.Module, chosen: BlockChoice | None = None) -> FoundBlocks:
    blocks: list[FoundBlock] = []
    loose: list[nn.Parameter] = []
    _walk("", model, blocks, loose, set(), _chosen(model, chosen) if chosen is not None else frozenset())
    names = first_names(model)
    in_order = {names[id(param)]: None for param in loose}
    return FoundBlocks(tuple(blocks), ()).without(model, in_order)


def first_names(model: nn.Module) -> dict[int, str]:
    """The key of each parameter object: its first name. Later names of a tied parameter are aliases."""
    return {id(param): name for name, param in model.named_parameters()}


def _chosen(model: nn.Module, chosen: BlockChoice) -> frozenset[nn.Module]:
    """The modules that the user's patterns and classes mean, each checked: it exists, computes, and is in no other."""
    entries = [chosen] if isinstance(chosen, str | type) or not isinstance(chosen, Collection) else list(chosen)
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, name)
    found: dict[nn.Module, str | type[nn.Module]] = {}
    for entry in entries:
        matches = [module for module in names if _matches(entry, names[module], module)]
        if not matches:
            raise ValueError(f"blocks={entry!r} matches no module; {_what_there_is(names)}")
        for module in _outermost(matches) if isinstance(entry, str) else matches:
            if not _has_params(module):
                raise ValueError(f"blocks={entry!r} matches {names[module]!r}, which has 0 parameters: nothing to move")
            if _is_uncallable(module):
                raise ValueError(
                    f"blocks={entry!r} matches {names[module]!r}, {kind_of(module)}, which is never called "
                    f"itself; name what is in it: {names[module] + '.*'!r}"
                )
            found.setdefault(module, entry)
    for module, entry in found.items():
        for inside in module.modules():
            if inside is not module and inside in found:
                raise ValueError(
                    f"blocks are nested: {names[inside]!r} (by {found[inside]!r}) is inside of {names[module]!r} (by "
                    f"{entry!r}); name one of the two"
                )
    return frozenset(found)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """A * matches dots too, so `layers.*` also means everything inside of each layer."""
    inside = {below for module in modules for below in module.modules() if below is not module}
    return [module for module in modules if module not in inside]


def _matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        return name != "" and fnmatchcase(name, entry)
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return isinstance(module, entry)
    raise ValueError(
        f"blocks={entry!r} ({type(entry).__name__}) is neither a pattern of module names nor a class of modules"
    )


def _what_there_is(names: dict[nn.Module, str]) -> str:
    """Some modules with parameters, the outer ones first, and their classes."""
    there = [(name, module) for module, name in names.items() if name and _has_params(module)]
    there.sort(key=lambda entry: entry[0].count("."))
    listing = ", ".join(f"{name} ({type(module).__name__})" for name, module in there[:MAX_LISTED])
    return f"there is {listing}" + (f" and {len(there) - MAX_LISTED} more" if len(there) > MAX_LISTED else "")


def _walk(
    name: str,
    module: nn.Module,
    blocks: list[FoundBlock],
    loose: list[nn.Parameter],
    seen: set[nn.Module],
    chosen: frozenset[nn.Module],
) -> None:
    if module in seen or not _has_params(module):
        return
    seen.add(module)
    if module in chosen:
        blocks.append(FoundBlock(name, module))
        return
    if any(below in chosen for below in module.modules()):
        loose.extend(_own_params(module))
        for child_name, child in _children(name, module):
            _walk(child_name, child, blocks, loose, seen, chosen)
        return
    if _is_stack(module):
        for child_name, child in _children(name, module):
            if _is_uncallable(child):  # a list of lists of layers: its items are called, the inner list is not
                _walk(child_name, child, blocks, loose, seen, chosen)
            elif _has_params(child) and child not in seen:
                seen.add(child)
                _divide(child_name, child, blocks, loose)
        return
    own = _own_params(module)
    if own and not any(_is_stack(below) for below in module.modules()):
        _divide(name, module, blocks, loose)
        return
    loose.extend(own)
    for child_name, child in _children(name, module):
        _walk(child_name, child, blocks, loose, seen, chosen)


def _divide(name: str, module: nn.Module, blocks: list[FoundBlock], loose: list[nn.Parameter]) -> None:
    if _is_computed_before(module):
        loose.extend(module.parameters())
    else:
        blocks.append(FoundBlock(name, module))


def _is_computed_before(module: nn.Module) -> bool:
    is_there = any(isinstance(value, torch.Tensor) for value in vars(module).values())  # no parameter, and no buffer
    return is_there and any(map(is_part_of_computation, module._forward_pre_hooks.values()))


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield f"{name}.{child_name}" if name else child_name, child


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return sum(_has_params(child) for child in module.children()) >= 2


def _is_uncallable(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that only this module can use. One that a child also holds (BERT's output bias) is the child's."""
    below: set[torch.Tensor] = {param for child in module.children() for param in child.parameters()}
    return [param for param in module.parameters(recurse=False) if param not in below]
