"""A block alone, under the runtime: the same code runs it as in training, without the rest of the model.

The block is a copy with random values of its own; nothing of the user's model is touched. Its parameters and gradients
are on the GPU and nobody updates them, so that nothing moves: what is left is what the compute lane does.

Users' hooks do not run: see [Note: hooks in a rehearsal]. A block that cannot run without one fails here, and its times
are estimated.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hightide.ir.activation import Activation
from hightide.ir.block import BlockSpec, CallSpec, ModelProfile, ParamSpec
from hightide.ir.plan import Plan, Update
from hightide.ir.split import Split
from hightide.planner.problem import Terms
from hightide.planner.search.by_hand import plan_by_hand
from hightide.planner.search.candidate import Candidate
from hightide.planner.solution import Solution
from hightide.profiler.fake.exchange import exchange
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import flatten, narrow, tensors, unflatten
from hightide.profiler.model.hooks import HOOKS, is_part_of_computation
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.probe_result import ProbedCall, ProbeResult
from hightide.profiler.probe.taps import Tap
from hightide.runtime.chunks.origin import FirstValues
from hightide.runtime.run import Run
from hightide.runtime.run_context import RunContext
from hightide.runtime.surgery import unwrap_modules, wrap_modules

BLOCK = "block"
STD = 0.02  # of weights: how much power a product takes, and so its speed, depends on its values
NO_LIMIT_BYTES = 1 << 60  # a tile of the loss counts its tokens as samples, each of which may be a long sequence
HOST_BYTES = 1 << 20  # nothing is there
ROOM = 4  # times what the plan needs: a rehearsal looks for the truth, it must not be refused
COMPILER_BYTES = 256 << 20  # and what torch.compile takes to try kernels: a buffer as large as the GPU's cache (60 MiB)


@dataclass(frozen=True)
class RehearsedCall:
    """One kind of call, as the profile knows it, and what it takes to run it again."""

    spec: BlockSpec
    call: CallSpec
    probed: ProbedCall
    record: CallRecord
    module: nn.Module  # the user's; only to be copied
    num_equal: int  # blocks of this class in the model
    taps: tuple[Tap, ...]

    @property
    def split(self) -> Split:
        return self.probed.split


@dataclass(frozen=True)
class LossTile:
    """Of a head with a fused loss: its samples are tokens."""

    num_tokens: int
    num_kept: int  # tokens whose logits wait for backward


class Alone(nn.Module):
    """The model of a rehearsal. Called, it is a head with its loss; other blocks are called themselves."""

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.get_submodule(BLOCK)(rows)
        return F.cross_entropy(logits.float(), target)


class Stage:
    """One part on the device, ready to run. To be closed."""

    def __init__(
        self,
        part: RehearsedCall,
        profile: ModelProfile,
        num_samples: int,
        activation: Activation,
        device: torch.device,
        compile: bool = False,
        tile: LossTile | None = None,
    ) -> None:
        """`num_samples`: the most that will run at once."""
        self.part, self.device = part, device
        root = Alone()
        root.train(part.module.training)
        root.add_module(BLOCK, _copied(part.module, device))
        alone = _profile(part, root, profile, num_samples)
        plan = _plan(alone, num_samples, activation)
        if tile is not None:
            alone = replace(alone, tokens_per_sample=1)
            plan = replace(plan, loss_tile_tokens=tile.num_tokens, loss_kept_tokens=tile.num_kept)
        probed = ProbeResult(
            num_samples,
            (FoundBlock(BLOCK, root.get_submodule(BLOCK)),),
            (replace(part.probed, block=0),),
            {0: alone.blocks[0].params},
            frozenset(),
            failure="",
            taps={0: part.taps} if part.taps else {},
        )
        values = FirstValues({spec.name: _Random() for spec in alone.params})
        self.run = Run(root, Solution.of(alone, plan), probed, RunContext(values), device, compile, learns=False)
        forward = type(root.get_submodule(BLOCK)).forward
        for _ in range(part.num_equal - 1):  # a block that is the only one of its kind is not compiled
            self.run.compiled.add(root.get_submodule(BLOCK), forward)
        wrap_modules(self.run)
        self.root = root

    def close(self) -> None:
        unwrap_modules(self.root)
        self.run.discard()

    @property
    def block(self) -> nn.Module:
        return self.root.get_submodule(BLOCK)

    @property
    def grad_bytes(self) -> int:
        return sum(chunk.grad_bytes for chunk in self.run.plan.layout.chunks)

    def arguments(self, num_samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the recorded call for so many samples: its own where they have values, random ones where not."""
        dims = iter(self.part.split.inputs or [None] * len(self.part.record.inputs))
        leaves = [
            _real(narrow(leaf.detach(), next(dims), 0, num_samples), leaf.requires_grad, self.device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in self.part.record.leaves
        ]
        self.run.adopt(tensors(leaves), "activations")
        args, kwargs = unflatten(leaves, self.part.record.tree)
        return args, kwargs

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of the block's result that a gradient can come from."""
        return [tensor for tensor in tensors(flatten(self.block(*args, **kwargs))[0]) if tensor.requires_grad]

    def end_step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """As a loop ends it: step, which updates nothing here, and no gradient stays."""
        self.run.step()
        self.run.gradients.drop(self.run.parameters)
        for tensor in tensors(flatten((args, kwargs))[0]):
            tensor.grad = None


class _Random:
    """First values of a parameter. Vectors are mostly the weights of norms."""

    def fill(self, target: Tensor) -> None:
        with torch.no_grad():
            target.normal_(1.0 if target.dim() < 2 else 0.0, STD)


def _copied(module: nn.Module, device: torch.device) -> nn.Module:
    """With parameters that have no values yet, and without the user's hooks: see [Note: hooks in a rehearsal]."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for inside in module.modules():  # what hooks refer to, perhaps all of the user's program, is not copied either
        for slot in HOOKS:
            memo[id(getattr(inside, slot))] = OrderedDict()
        if inside is not module:
            own = [(key, hook) for key, hook in inside._forward_pre_hooks.items() if is_part_of_computation(hook)]
            memo[id(inside._forward_pre_hooks)] = OrderedDict((key, copy.deepcopy(hook, memo)) for key, hook in own)
    copied = copy.deepcopy(module, memo)
    buffers = {id(buffer) for buffer in copied.buffers() if buffer.is_meta}
    exchange(list(copied.modules()), lambda tensor: _real(tensor, False, device) if id(tensor) in buffers else None)
    return copied


def _real(tensor: Tensor, requires_grad: bool, device: torch.device) -> Tensor:
    with torch.no_grad():
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            real = tensor.to(device, copy=True)
        elif tensor.is_floating_point():
            real = torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        else:
            real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return real.requires_grad_(requires_grad)


def _profile(part: RehearsedCall, root: nn.Module, profile: ModelProfile, num_samples: int) -> ModelProfile:
    params = tuple(
        ParamSpec((name,), tuple(param.shape), str(param.dtype).removeprefix("torch."), param.requires_grad, None)
        for name, param in root.named_parameters()
    )
    block = replace(part.spec, index=0, name=BLOCK, params=tuple(spec.name for spec in params), loose=False)
    return replace(
        profile,
        fingerprint="rehearsal",
        num_samples=num_samples,
        batch_bytes=0,
        buffer_bytes=sum(buffer.nbytes for buffer in root.buffers()),
        params=params,
        blocks=(block,),
        calls=(replace(part.call, block=0),),
    )


def _plan(profile: ModelProfile, num_samples: int, activation: Activation) -> Plan:
    candidate = Candidate(
        micro_batch=num_samples,
        whole=frozenset({0}),
        keep=frozenset({0} if activation is Activation.KEEP else ()),
        selective=frozenset({0} if activation is Activation.SELECTIVE else ()),
    )
    plan = plan_by_hand(profile, candidate, Terms(NO_LIMIT_BYTES, NO_LIMIT_BYTES, Update.IN_BACKWARD))
    limit_bytes = ROOM * plan.forecast.gpu_peak_bytes + COMPILER_BYTES
    return replace(plan, gpu_limit_bytes=limit_bytes, host_limit_bytes=HOST_BYTES)
