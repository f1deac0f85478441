"""Tensors that need a gradient and that a block uses without having been given them: by an attribute, a global, a
closure.

[Note: gradients by another way] Autograd learns of a block what it is called with and what it returns. Any other tensor
that needs a gradient is in the inner graph only. A block that trains runs its backward through all of that, and so on
through what made the tensor, which is right as long as nobody else does: another block, or another micro-batch, would
do it a second time, which torch refuses. The backward of a frozen block goes to its inputs and no further, and a block
none of whose inputs needs a gradient has no backward: there the gradient would be lost without a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hightide.ir.refusal import Refused

_SECOND_TIME = re.compile("backward through (the graph|a block) a second time")
_USES = (
    "the block {name!r} uses a tensor that needs a gradient and that it is not called with (an attribute that was set "
    "from outside, a global, what a closure has), {why}. Pass the tensor to the block's forward as an argument, or "
    "detach() it if its gradient is not wanted"
)
LOST = "so its gradient would be lost: hightide follows gradients through a block's arguments and results"
TWICE = "and backward came to what made it a second time, after another block or another part of the batch"


def refuse_unseen(name: str, outputs: Sequence[Tensor]) -> None:
    """After a block that nobody takes to have a backward."""
    if any(output.requires_grad for output in outputs):
        raise Refused(_USES.format(name=name, why=LOST))


def refuse_leading_outside(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """After a frozen block, whose inner graph must end at its inputs."""
    known = {id(tensor) for tensor in inputs}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
            raise Refused(_USES.format(name=name, why=LOST))
        following = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(following)
        nodes += following


def refuse_second_time(name: str, error: RuntimeError) -> None:
    """Inside of a block's backward."""
    if _SECOND_TIME.search(str(error)):
        raise Refused(_USES.format(name=name, why=TWICE)) from error
