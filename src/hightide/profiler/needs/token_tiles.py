"""Parts of a block that treat each token by itself run tile by tile, where a sample has very many tokens.

[Note: token tiles] A micro-batch has one sample at least. Where that is a long sequence, what a layer's feed-forward
part makes in between is several times the sequence itself, and sets how long a sequence may be. But such a part treats
each token by itself: it may take them TILE at a time, in forward and in backward, where each tile is computed again and
differentiated at once. Nothing is computed more often for it where the block is recomputed: recomputation ends with the
last tensor that the graph saves (see [Note: recomputation]), which is the part's input. Its gradients of parameters are
summed in fp32 over the tiles. Between tiled and untiled runs bits may differ, as between micro-batches of two sizes;
whether a call is tiled follows from its shapes alone and not from the plan.

Which parts these are nobody reads off their names: they are tried on values, as splits into samples are (see [Note:
trying a block alone]), with the tokens in the place of the samples. Tried are the block and the modules inside, the
outermost first, that are called with one tensor, return one of as many tokens, and hold more than their input in
between. A trial of three tokens does not show what looks further (a dilated convolution, a prefix of tokens, an expert
that takes so many and no more): the part is cut into tiles in a trial of more tokens, too, which are first random and
then all the same. A part that draws random numbers, keeps something, has hooks inside, or a `forward` that is not its
class's stays whole, and so does one that gets such hooks or a forward later; one that draws later is refused. A tiled
call runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hightide.ir.refusal import Refused
from hightide.ir.split import BatchDim, Split, micro_batches
from hightide.process.interrupts import is_interrupt
from hightide.profiler.fake.fake import Originals
from hightide.profiler.model.call_tree import flatten, flatten_call, mode_of, signature_of, unflatten, way_of
from hightide.profiler.model.hooks import num_hooks, users_hooks_aside
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.trial.alone import alone
from hightide.profiler.trial.independence import LOW_PRECISION, SAME, examine
from hightide.profiler.trial.repeated_call import TriedCall
from hightide.profiler.trial.state import GlobalRandom

LONG = 16384  # tokens of one sample: more of them are tiled
TILE = 8192
TOKENS = -2  # the dimension; the last one has their features
LEAST = 256  # tokens in the longer trial, and more where they have little work:
MOST_WORK, MOST_NUMBERS = 2**31, 2**22  # tokens times parameters; numbers of the input
BLOCK = ""  # the name of the block itself, as of one that is only a norm

Forward = Callable[..., Any]


# -- running ----------------------------------------------------------------------------------------------------------


def tiling(block: nn.Module, parts: Sequence[str]) -> AbstractContextManager[None]:
    """Runs the body with these modules of the block tiled."""
    return _tiling([block.get_submodule(name) for name in parts]) if parts else nullcontext()


@contextmanager
def _tiling(parts: Sequence[nn.Module]) -> Iterator[None]:
    tiled: list[nn.Module] = []
    try:
        for part in parts:
            if not has_own_forward([part]):
                part.__dict__["forward"] = by_tiles(part, type(part).forward)
                tiled.append(part)
        yield
    finally:
        for part in tiled:
            part.__dict__.pop("forward", None)


def by_tiles(part: nn.Module, whole: Forward) -> Forward:
    inside = list(part.modules())[1:]

    def forward(tokens: Tensor) -> Any:
        if tokens.shape[TOKENS] <= TILE or num_hooks(inside) or has_own_forward(inside):
            return whole(part, tokens)
        if not torch.is_grad_enabled():
            return _by_tile(part, whole, tokens)
        saved = _Saved() if tokens.requires_grad else None  # else autograd has no node for it
        kept = tokens if saved is None else _Kept.apply(saved, tokens)
        return _ByTile.apply(part, whole, saved, kept, *part.parameters())

    return forward


def has_own_forward(modules: Sequence[nn.Module]) -> bool:
    """Set on the module itself, as patches of kernels do: not what was tried, perhaps."""
    return any("forward" in module.__dict__ for module in modules)


def _tiles(tokens: Tensor) -> list[tuple[int, int]]:
    return micro_batches(tokens.shape[TOKENS], TILE)


def _tile(tokens: Tensor, start: int, count: int) -> Tensor:
    """Packed as the whole is: code that views a tensor in another shape asks for that."""
    tile = tokens.narrow(TOKENS, start, count)
    return tile.contiguous() if tokens.is_contiguous() else tile


def _by_tile(part: nn.Module, whole: Forward, tokens: Tensor) -> Tensor:
    result: Tensor | None = None
    random = None if isinstance(tokens, FakeTensor) else GlobalRandom(tokens.device)
    for start, count in _tiles(tokens):
        made = whole(part, _tile(tokens, start, count))
        if result is None:
            result = made.new_empty((*tokens.shape[:-1], made.shape[-1]))
        result.narrow(TOKENS, start, count).copy_(made)
        del made
    if random is not None and random.drawn() & {"CUDA" if tokens.is_cuda else "torch"}:
        raise Refused(
            f"a {type(part).__name__} that runs in tiles of {TILE} of {tokens.shape[TOKENS]} tokens draws random "
            "numbers, which it did not when it was planned: its backward would draw others. Set dropout before "
            "hightide.wrap"
        )
    assert result is not None
    return result


class _Saved:
    """Where the input of one call is found in backward."""

    context: Any


class _Kept(torch.autograd.Function):
    """Saves the part's input, ahead of the part: the last tensor that the graph saves is not behind the computation."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        saved.context = ctx
        ctx.set_materialize_grads(False)  # none stays none
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        return None, grad


class _ByTile(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: nn.Module, whole: Forward, saved: _Saved | None, tokens: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.part, ctx.whole, ctx.saved, ctx.params = part, whole, saved, params
        if saved is None:
            ctx.save_for_backward(tokens)
        kind = tokens.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return _by_tile(part, whole, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = (ctx if ctx.saved is None else ctx.saved.context).saved_tensors
        kind, dtype, enabled = ctx.autocast
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        params = [ctx.params[number] for number in wanted]
        sums: list[Tensor | None] = [None] * len(params)  # of what no tile uses there is none, as in plain PyTorch
        result: Tensor | None = None
        wants_input = ctx.needs_input_grad[3]
        for start, count in _tiles(tokens):
            tile = _tile(tokens, start, count).detach().requires_grad_(wants_input)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
                made = ctx.whole(ctx.part, tile)
            leaves = [*([tile] if wants_input else ()), *params]
            grads: list[Tensor | None] = list(
                torch.autograd.grad(made, leaves, _tile(grad, start, count), allow_unused=True)
            )
            del made
            if wants_input and (of_tile := grads.pop(0)) is not None:
                result = torch.zeros_like(tokens) if result is None else result
                result.narrow(TOKENS, start, count).copy_(of_tile)
                del of_tile
            for number, of_param in enumerate(grads):
                if of_param is not None:
                    sums[number] = _added(sums[number], of_param)
            del tile, grads
        found: list[Tensor | None] = [None] * len(ctx.params)
        for number in wanted:
            if (total := sums.pop(0)) is not None:
                found[number] = total.to(ctx.params[number].dtype)
                del total
        return None, None, None, result, *found


def _added(total: Tensor | None, grad: Tensor) -> Tensor:
    if total is None:
        total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)


# -- finding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenParts:
    """Of blocks with fake parameters. `device`: where parts are tried."""

    originals: Originals
    device: torch.device
    weigh: Callable[[nn.Module, CallRecord], int]  # bytes that the graph of a call holds beyond its inputs

    def of(self, block: nn.Module, record: CallRecord, num_samples: int) -> tuple[str, ...]:
        """Names of the modules inside that are to be tiled, or BLOCK."""
        if not is_long(record, num_samples):
            return ()
        try:
            calls = _calls_inside(block, record)
        except Exception as error:  # it asks for values, which is told when it is metered
            if is_interrupt(error):
                raise
            return ()
        found: list[str] = []
        for name, inside in block.named_modules():
            if BLOCK in found:
                break
            if name in calls and not any(name.startswith(f"{outer}.") for outer in found):
                records = calls[name]
                if records and all(one is not None and self._is_by_token(inside, one) for one in records):
                    found.append(name)
        return tuple(found)

    def _is_by_token(self, part: nn.Module, record: CallRecord) -> bool:
        (tokens,) = record.inputs
        if self.weigh(part, record) <= tokens.nbytes:
            return False
        dim = BatchDim(tokens.ndim + TOKENS)
        split = Split(record.signature, (dim,), (dim,))
        finding = examine(TriedCall(part, record, tokens.shape[TOKENS], split), self.originals, self.device)
        if finding.note or finding.keeps or finding.refusal or finding.draws or finding.replays_whole:
            return False
        return is_same_in_tiles(part, tokens, self.originals, self.device)


def is_same_in_tiles(part: nn.Module, tokens: Tensor, originals: Originals, device: torch.device) -> bool:
    """Tried on as many tokens as take little. What does not run is not tiled."""
    numel = sum(param.numel() for param in part.parameters())
    most = min(MOST_WORK // max(1, numel), MOST_NUMBERS // tokens.shape[-1])
    length = min(tokens.shape[TOKENS], max(LEAST, most))
    shape = (*(1 for _ in tokens.shape[:TOKENS]), length, tokens.shape[-1])
    bounds = micro_batches(length, 2 * length // 5 + 1)
    with originals.as_trained():
        for dtype, tolerance in ((torch.float32, SAME), (None, SAME * LOW_PRECISION)):
            try:
                with alone(part, originals, device, dtype), torch.autocast(device.type, enabled=False):
                    noise = _noise(shape, device, dtype or tokens.dtype)
                    same = noise.narrow(TOKENS, 0, 1).expand(shape).contiguous()
                    return all(_is_cut(part, each, noise, bounds, tolerance) for each in (noise, same))
            except Exception as error:  # whatever a part raises on numbers that are not the user's
                if is_interrupt(error):
                    raise
    return False


def _noise(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _is_cut(part: nn.Module, tokens: Tensor, seed: Tensor, bounds: Sequence[tuple[int, int]], tolerance: float) -> bool:
    """Whether results and gradients of tiles are those of the whole. `seed`: of gradients."""

    def run(start: int, count: int) -> list[Tensor]:
        tile = tokens.narrow(TOKENS, start, count).detach().clone().requires_grad_()
        with torch.enable_grad():
            made = part.forward(tile)
            of_made = seed.narrow(TOKENS, start, count)[..., :1].expand_as(made)
            (grad,) = torch.autograd.grad(made, tile, of_made, allow_unused=True)
        return [made.detach(), torch.zeros_like(tile) if grad is None else grad]

    whole = run(0, tokens.shape[TOKENS])
    allowed = [tolerance * float(one.abs().max()) for one in whole]
    for start, count in bounds:
        for one, two, most in zip(whole, run(start, count), allowed, strict=True):
            expected = one.narrow(TOKENS, start, count)
            if expected.shape != two.shape or not torch.allclose(expected, two, rtol=0.0, atol=most):
                return False
    return True


def is_long(record: CallRecord, num_samples: int) -> bool:
    return any(one.ndim > 2 and one[..., 0].numel() > LONG * num_samples for one in record.inputs)


def _calls_inside(block: nn.Module, record: CallRecord) -> dict[str, list[CallRecord | None]]:
    """What the modules inside are called with. None: with something that cannot be tiled."""
    calls: dict[str, list[CallRecord | None]] = {}
    whole = staying_whole(block)
    args, kwargs = unflatten([one.detach() if isinstance(one, Tensor) else one for one in record.leaves], record.tree)
    with users_hooks_aside(block), ExitStack() as hooks, torch.no_grad():
        for name, inside in block.named_modules():
            if inside is not block and name not in whole:

                def note(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                    calls.setdefault(name, []).append(_record(module, args, kwargs, result))

                hooks.enter_context(inside.register_forward_hook(note, with_kwargs=True))
        result = block.forward(*args, **kwargs)
    if BLOCK not in whole:
        calls[BLOCK] = [_record(block, args, kwargs, result)]
    return calls


def staying_whole(block: nn.Module) -> frozenset[str]:
    """Modules whose calls have something of the user's inside."""
    parts = ((name, list(part.modules())) for name, part in block.named_modules())
    return frozenset(name for name, inside in parts if num_hooks(inside[1:]) > 0 or has_own_forward(inside))


def _record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> CallRecord | None:
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
        return None
    tokens = args[0]
    if not (tokens.is_floating_point() and result.is_floating_point()) or tokens.ndim < 2:
        return None
    if tokens.shape[TOKENS] <= LONG or tokens.shape[:-1] != result.shape[:-1]:
        return None
    leaves, tree = flatten_call((tokens.detach().requires_grad_(),), {})
    mode = mode_of(list(module.modules()))
    results, result_tree = flatten(result)
    signature = signature_of(leaves, tree, mode)
    return CallRecord(0, leaves, tree, way_of(leaves, tree), signature, [], results, result_tree, needs_backward=True)
