"""How the fused loss cuts its rows, and the bytes that this takes (see [Note: fused loss] in
runtime/head/fused_loss.py).

How large tiles are depends on the model and its batch only, not on placement, so results do not either; but where
nothing fits with large tiles, smaller ones may."""

from __future__ import annotations

from hightide.ir.block import DTYPE_BYTES, BlockSpec, CallSpec, ModelProfile
from hightide.ir.plan import Plan

LOSS_TILE_BYTES = 1024**3  # logits of one projection: large, because each tile passes over the weight's gradient
LOSS_SCRATCH_BYTES = 128 * 1024**2  # two arrays in which softmax runs in fp32: a hundred rows nearly fill a GPU
LOSS_SLICE_BYTES = 64 * 1024**2  # of a weight's gradient, where it cannot be summed inside the matrix multiplication
TILE_ALIGN_TOKENS = 128  # what a matrix multiplication does at once
TILE_SHRINKS = 4  # times, from one size to the next smaller
NUM_SMALLER_TILES = 2
ROW_BYTES = 64  # numbers per token beside the logits, while the loss runs
SAVED_ROW_BYTES = 20  # and of those, what waits for backward
SUM_BYTES = 4  # softmax runs in fp32 at least
EARLY_DTYPES = frozenset({"bfloat16", "float32"})


def loss_tile_tokens(profile: ModelProfile) -> int:
    """Rows that are projected at once; tiles of nearly equal size."""
    rows = num_rows(profile)
    if profile.vocabulary == 0:
        return rows
    fitting = LOSS_TILE_BYTES // (logit_bytes(profile) * profile.vocabulary)
    largest = max(TILE_ALIGN_TOKENS, fitting // TILE_ALIGN_TOKENS * TILE_ALIGN_TOKENS)
    equal = _divided_up(rows, _divided_up(rows, largest))
    return min(rows, _divided_up(equal, TILE_ALIGN_TOKENS) * TILE_ALIGN_TOKENS)


def smaller_tiles(profile: ModelProfile) -> tuple[int, ...]:
    """Of a quarter of that, and so on: descending. None where no loss is fused."""
    if not any(block.lazy_head for block in profile.blocks):
        return ()
    tile = loss_tile_tokens(profile)
    found: list[int] = []
    while tile > TILE_ALIGN_TOKENS and len(found) < NUM_SMALLER_TILES:
        tile = max(TILE_ALIGN_TOKENS, tile // TILE_SHRINKS // TILE_ALIGN_TOKENS * TILE_ALIGN_TOKENS)
        found.append(tile)
    return tuple(found)


def loss_scratch_bytes(profile: ModelProfile, tile_tokens: int) -> int:
    return min(LOSS_SCRATCH_BYTES, 2 * tile_tokens * profile.vocabulary * max(SUM_BYTES, logit_bytes(profile)))


def num_rows(profile: ModelProfile, num_samples: int | None = None) -> int:
    return max(1, (profile.num_samples if num_samples is None else num_samples) * profile.tokens_per_sample)


def logit_bytes(profile: ModelProfile) -> int:
    """As wide as the head's parameters; under autocast they are narrower."""
    heads = [block for block in profile.blocks if block.lazy_head]
    return max((DTYPE_BYTES[profile.param(key).dtype] for head in heads for key in head.params), default=SUM_BYTES)


def kept_logits_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Logits that wait for backward instead of being projected again."""
    kept = min(plan.loss_kept_tokens, num_rows(profile, plan.num_samples))
    return kept * profile.vocabulary * logit_bytes(profile)


def early_gradient_bytes(profile: ModelProfile, call: CallSpec, num_samples: int) -> int:
    """Gradients of the head's weights and of its rows, where they are made in forward. Sums are fp32."""
    params = [profile.param(key) for key in _head(profile, call).params]
    return sum(SUM_BYTES * spec.numel for spec in params if spec.trainable) + call.input_grads.at(num_samples)


def may_run_in_forward(profile: ModelProfile, call: CallSpec) -> bool:
    """A head that is one product, in a dtype whose range holds gradients before they are scaled: fp16's does not."""
    head = _head(profile, call)
    dtypes = {profile.param(key).dtype for key in head.params}
    return head.lazy_head and head.plain_linear and call.needs_backward and dtypes <= EARLY_DTYPES


def saved_bytes(profile: ModelProfile, plan: Plan, call: CallSpec) -> int:
    """What waits from the head's forward to its backward."""
    early = early_gradient_bytes(profile, call, plan.num_samples) if plan.loss_in_forward else 0
    return num_rows(profile, plan.num_samples) * SAVED_ROW_BYTES + kept_logits_bytes(profile, plan) + early


def forward_transient_bytes(profile: ModelProfile, plan: Plan, call: CallSpec) -> int:
    tile = 0 if _keeps_all(profile, plan) else _tile_bytes(profile, plan)
    head = _head(profile, call)
    inside = 0 if head.plain_linear else call.forward_peak.at_fraction(*_fraction(profile, plan))
    product = _product_bytes(profile, head) if plan.loss_in_forward else 0
    return tile + inside + product + _beside_logits_bytes(profile, plan)


def backward_transient_bytes(profile: ModelProfile, plan: Plan, call: CallSpec) -> int:
    head, tile = _head(profile, call), _tile_bytes(profile, plan)
    if head.plain_linear:
        # Kept tiles come first and are overwritten in place: a projection is made when they are gone.
        inside = max(0, tile - kept_logits_bytes(profile, plan)) + _product_bytes(profile, head)
        if plan.loss_in_forward:  # a loss that cannot do it is walked through here, and has made nothing before
            inside = max(0, inside - early_gradient_bytes(profile, call, plan.num_samples))
        return inside + _beside_logits_bytes(profile, plan)
    # Its graph as it was measured, which holds the logits; their gradient may need a tile of its own.
    graph = call.backward_peak.at_fraction(*_fraction(profile, plan))
    return graph + tile + _beside_logits_bytes(profile, plan)


def _keeps_all(profile: ModelProfile, plan: Plan) -> bool:
    return plan.loss_kept_tokens >= num_rows(profile, plan.num_samples)


def _tile_bytes(profile: ModelProfile, plan: Plan) -> int:
    tokens = min(plan.loss_tile_tokens, num_rows(profile, plan.num_samples))
    return tokens * profile.vocabulary * logit_bytes(profile)


def _beside_logits_bytes(profile: ModelProfile, plan: Plan) -> int:
    return loss_scratch_bytes(profile, plan.loss_tile_tokens) + num_rows(profile, plan.num_samples) * ROW_BYTES


def _product_bytes(profile: ModelProfile, head: BlockSpec) -> int:
    """One slice of the weight's gradient, before it is added to the sum. Sums are fp32, and add fp32 products
    directly."""
    params = [profile.param(key) for key in head.params]
    added = [spec for spec in params if spec.trainable and spec.dtype != "float32"]
    return min(LOSS_SLICE_BYTES, sum(spec.numel * DTYPE_BYTES[spec.dtype] for spec in added))


def _head(profile: ModelProfile, call: CallSpec) -> BlockSpec:
    return profile.blocks[call.block]


def _fraction(profile: ModelProfile, plan: Plan) -> tuple[int, int]:
    """A tile, in samples: as a numerator and a denominator."""
    return min(plan.loss_tile_tokens, num_rows(profile, plan.num_samples)), max(1, profile.tokens_per_sample)


def _divided_up(number: int, by: int) -> int:
    return -(-number // by)
