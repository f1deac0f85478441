"""A plan in words, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, takewhile

from hightide.ir.action import Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.chunk import region_bytes
from hightide.ir.passes import Passes
from hightide.ir.plan import BlockPlan, Plan, Sharing, Update
from hightide.ir.state_spec import summary
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import clipped, counted, format_bytes
from hightide.planner.chunk_place import Buffer
from hightide.planner.disk_inputs import buffer_bytes as input_buffer_bytes
from hightide.planner.disk_inputs import stored_bytes
from hightide.planner.lookup import buffer_bytes
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import Peaks
from hightide.planner.predict.save_forecast import SaveForecast
from hightide.planner.waiting import away, held_bytes

WIDTH = 80
_SIMULATED = ['  no GPU here: "gpu" is the simulated accelerator, a bounded part of host memory']
_COLUMNS = ("params", "states", "activations", "inputs")


def explain(
    profile: ModelProfile,
    placement: Placement,
    passes: Passes,
    peak: Peaks,
    save: SaveForecast | None = None,
    on_simulated: bool = False,
) -> str:
    """The plan has its forecast by now. `passes`: of a training step. `save`: None if nobody has simulated it.
    `on_simulated`: it is for a machine without a GPU."""
    plan = placement.plan
    parts = [
        _memory(placement, peak),
        _SIMULATED if on_simulated else [],
        _source(profile),
        _ranks(plan),
        _batch(profile, placement),
    ]
    parts += [_table(profile, placement)]
    parts += [_activations(profile, placement), _precision(profile, placement)]
    parts += [_timing(plan, passes.last), _traffic(profile, plan, passes)]
    parts += [] if save is None else [textwrap.wrap(save.in_words, WIDTH, subsequent_indent="    ")]
    lines = [line for part in parts for line in part]
    assert all(len(line) <= WIDTH for line in lines), max(lines, key=len)
    return "\n".join(lines)


def _memory(placement: Placement, peak: Peaks) -> list[str]:
    plan, forecast = placement.plan, placement.plan.forecast
    rows = [(tier, used, plan.limits[tier], peak.by_tier[tier][1]) for tier, used in forecast.by_tier.items()]
    rows = [row for row in rows if row[0] is not Tier.DISK or row[1] or row[2]]
    fits = all(used <= limit for _, used, limit, _ in rows)
    head = "fits the limits" if fits else "DOES NOT FIT the limits"
    lines = [head + (": everything stays on the GPU" if fits and placement.is_resident else "")]
    for tier, used, limit, moment in rows:
        margin = f"{format_bytes(abs(limit - used))} {'free' if used <= limit else 'TOO MUCH'}"
        where = f"  at {moment}" if moment else ""
        row = f"  {tier:<5} peak {format_bytes(used):>10} of {format_bytes(limit):>10}  {margin:>18}{where}"
        lines.append(clipped(row, WIDTH))
        if tier is Tier.GPU and forecast.gpu_reserved_bytes is not None:
            beside = format_bytes(forecast.gpu_reserved_bytes - forecast.gpu_peak_bytes)
            tensors = format_bytes(forecast.gpu_peak_bytes)
            lines.append(f"        of it {tensors} tensors, {beside} reserved by torch beside them")
        if tier is Tier.HOST and forecast.moving_host_bytes > used:
            moving = format_bytes(forecast.moving_host_bytes)
            lines.append(f"        {moving} while wrap moves the values in, as the model is on the CPU")
        if tier is Tier.HOST and forecast.process_bytes:
            lines.append(
                f"        beside it {format_bytes(forecast.process_bytes)} of the process: Python, torch, code"
            )
    return lines


def _source(profile: ModelProfile) -> list[str]:
    if not profile.on_values:
        return []
    return ["  activations as in one pass on values: another batch may take other bytes"]


def _ranks(plan: Plan) -> list[str]:
    if not plan.has_collectives:
        return []
    if plan.ranks == 1:
        return ["ranks: 1, which gathers and reduces as each of several does"]
    groups = f" in {plan.replicas} groups with a copy each" if plan.replicas > 1 else ""
    lines = [f"ranks: {plan.ranks}{groups}; memory and traffic are of one rank"]
    owners = {chunk.block for chunk in plan.layout.chunks}
    persistent = [plan.blocks[index].sharing for index in owners if plan.blocks[index].params is Tier.GPU]
    counts = {way: persistent.count(way) for way in _SHARED if way in persistent}
    if counts and plan.num_shards > 1:
        lines.append("  of blocks whose parameters stay on GPUs, each rank holds:")
        lines += [f"    {count:>4} {_SHARED[way]}" for way, count in counts.items()]
    return lines


_SHARED = {
    Sharing.SHARDED: "in part: parameters and states are divided among the ranks",
    Sharing.PARAMS_REPLICATED: "with all parameters; states are divided among the ranks",
    Sharing.REPLICATED: "as a whole: parameters and states",
}


def _batch(profile: ModelProfile, placement: Placement) -> list[str]:
    plan, sizes = placement.plan, placement.buffer_bytes
    num_micro = -(-plan.num_samples // plan.micro_batch)
    micro = "one micro-batch" if num_micro == 1 else f"{num_micro} micro-batches of up to {plan.micro_batch}"
    lines = [f"batch: {counted(plan.num_samples, 'sample')} in {micro}"]
    if plan.accumulate > 1:
        lines.insert(0, f"loop: {plan.accumulate} calls of {counted(plan.num_samples, 'sample')}, then step()")
    unsplit = Counter(call.note or "?" for call in profile.calls if not call.splittable)
    for note, count in unsplit.items():
        text = f"  {counted(count, 'call')} unsplit: {note}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    tiled = Counter(", ".join(call.tiled) or profile.blocks[call.block].name for call in profile.calls if call.tiled)
    for parts, count in tiled.items():
        text = f"  {counted(count, 'call')} with tiles of tokens, for the length of a sample: {parts}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    if profile.vocabulary:
        kept = f", those of {plan.loss_kept_tokens} kept" if plan.loss_kept_tokens else ""
        kept = ", its gradients made in forward" if plan.loss_in_forward else kept
        lines.append(f"loss: over slices of {plan.loss_tile_tokens} tokens x {profile.vocabulary} logits{kept}")
    slots = _slots(plan.num_slots, sizes[Buffer.SLOT])
    grad_slots = _slots(plan.num_grad_slots, sizes[Buffer.GRAD_SLOT])
    has_any = plan.num_slots or plan.num_grad_slots
    lines.append(f"slots: {slots}, {grad_slots} for gradients" if has_any else "slots: none")
    for index, block in enumerate(plan.blocks):
        if block.compute is Tier.HOST:
            rows, _ = buffer_bytes(profile, plan, index)
            text = f"{block.name}: looked up on the host, {format_bytes(rows)} of rows cross the link"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    stored = [place for place in placement.chunks if place.grad is Tier.DISK and not place.stays]
    summed = {
        "stay on the GPU from call to call": [place for place in placement.chunks if place.stays],
        "come from the disk in each call": stored if plan.accumulate > 1 else [],
    }
    for text, places in summed.items():
        if places:
            owners = len({place.chunk.block for place in places})
            total = format_bytes(sum(place.chunk.grad_bytes for place in places))
            lines.append(f"sums of gradients: {total} of {counted(owners, 'block')} {text}")
    rounded = [place for place in placement.chunks if place.is_rounded_home]
    if rounded:
        which = f"those of {counted(len({place.chunk.block for place in rounded}), 'block')}"
        waiting = format_bytes(sum(place.grad_bytes for place in rounded))
        lines.append(f"rounded gradients: {which} wait for step() on the GPU, {waiting}")
    rings = [
        f"{count} of {format_bytes(sizes[ring])} {_RINGS[ring]}"
        for ring, count in placement.num_buffers.items()
        if count
    ]
    if plan.num_input_buffers:
        rings.append(f"{plan.num_input_buffers} of {format_bytes(input_buffer_bytes(profile, plan))} for block inputs")
    if rings:
        lines += textwrap.wrap(f"buffers on the host: {', '.join(rings)}", WIDTH, subsequent_indent="    ")
    parked = sum(region_bytes(place.grad_bytes) for place in placement.chunks if place.parks)
    if parked:
        late = sum(block.late for block in plan.blocks)
        order = f"; {late} {'block is' if late == 1 else 'blocks are'} updated late" if late else ""
        text = f"gradients park on the host until their update: {format_bytes(parked)} at most{order}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return lines


_RINGS = {Buffer.READ: "from disk to the GPU", Buffer.WRITTEN: "for gradients", Buffer.UPDATED: "for updates from disk"}


def _slots(count: int, num_bytes: int) -> str:
    return f"{count} of {format_bytes(num_bytes)}" if count else "none"


def _table(profile: ModelProfile, placement: Placement) -> list[str]:
    """One row per run of consecutive blocks with equal decisions."""
    called = {call.block for call in profile.calls}
    blocks, homes = placement.blocks_in_effect, placement.owners
    prefix = _shared_prefix([block.name for block in blocks if block.name])
    rows = []
    for key, run in groupby(range(len(blocks)), lambda i: _decisions(blocks[i], homes[i] is not None, i in called)):
        names = [blocks[index].name.removeprefix(prefix) or "(loose parameters)" for index in run]
        rows.append((_range_of(names), *key))
    widths = [10, 6, 6, 11, 6]
    name_width = WIDTH - sum(widths[1:]) - 2 * 4
    head = clipped(f"block in {prefix.removesuffix('.')}" if prefix else "block", name_width)
    lines = [f"{head:<{name_width}}" + "".join(f"  {n:<{w}}" for n, w in zip(_COLUMNS, widths[1:], strict=True))]
    for name, *cells in rows:
        cell_text = "".join(f"  {cell:<{w}}" for cell, w in zip(cells, widths[1:], strict=True))
        lines.append(f"{clipped(name, name_width):<{name_width}}{cell_text}".rstrip())
    return lines


def _shared_prefix(names: list[str]) -> str:
    """Containers around all of the model: "base_model.model." of one with adapters."""
    first, last = (name.split(".")[:-1] for name in (min(names, default=""), max(names, default="")))
    shared = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]
    return ".".join([*shared, ""]) if shared else ""


def _decisions(block: BlockPlan, has_params: bool, is_called: bool) -> tuple[str, str, str, str]:
    """One that is never called, loose, or looked up on the host, has no activations of its own."""
    params, states = (str(block.params), str(block.states)) if has_params else ("-", "-")
    has_activations = is_called and block.compute is Tier.GPU
    activation, inputs = (_level(block), str(block.inputs)) if has_activations else ("-", "-")
    return params, states, activation, inputs


def _level(block: BlockPlan) -> str:
    """In one word or two."""
    return _LEVELS[block.activation, block.held is Tier.GPU or block.activation is Activation.RECOMPUTE]


_LEVELS = {
    (Activation.RECOMPUTE, True): "recompute",
    (Activation.SELECTIVE, True): "in part",
    (Activation.SELECTIVE, False): "swap",
    (Activation.KEEP, False): "swap all",
    (Activation.KEEP, True): "keep",
}
_MEANINGS = {  # of the bytes that wait
    "recompute": "backward computes them again",
    "in part": "{} of products and attention wait on the GPU",
    "swap": "{} of products and attention wait on the host",
    "swap all": "{} wait on the host, nothing is computed again",
    "keep": "{} wait on the GPU, nothing is computed again",
}


def _activations(profile: ModelProfile, placement: Placement) -> list[str]:
    """What blocks compute in forward and need again in backward, by level. A head with a fused loss has logits, which
    are told with the loss."""
    plan = placement.plan
    blocks: dict[str, set[int]] = {level: set() for level in _MEANINGS}
    held: Counter[str] = Counter()
    for call in profile.calls:
        is_here = not profile.blocks[call.block].lazy_head and plan.blocks[call.block].compute is Tier.GPU
        if call.needs_backward and is_here:
            level = _level(plan.blocks[call.block])
            blocks[level].add(call.block)
            held[level] += held_bytes(plan, call)
    used = {level: len(found) for level, found in blocks.items() if found}
    if not used:
        return []
    rest = "" if not {"in part", "swap"} & used.keys() else " (of a part, the rest is computed again)"
    lines = [f"activations, from forward to backward{rest}:"]
    for level, count in used.items():
        number = f"{counted(count, 'block')}:"
        lines.append(f"  {level:<10} {number:<11} {_MEANINGS[level].format(format_bytes(held[level]))}")
    return lines


def _range_of(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def precisions(profile: ModelProfile, placement: Placement) -> dict[str, str]:
    """Of every state, in words."""
    chunks = [place.chunk for place in placement.chunks]
    optimised = [chunk for chunk in chunks if chunk.optimised_numel]
    masters = _names(chunk.dtype for chunk in optimised if chunk.has_master)
    trained = [place for place in placement.chunks if place.chunk.trainable_numel]
    at_rest = _names(place.rounds_to or place.grad_dtype for place in trained)
    overflows = any(place.rounds_to == "float16" for place in trained)
    rounded = any(place.rounds_to is not None for place in trained)
    after = "each backward" if placement.plan.accumulate == 1 else "the last backward of a step"
    in_parts = "; 16 bits beside each" if any(chunk.has_remainder for chunk in optimised) else ""
    return {
        "parameters": _names(chunk.dtype for chunk in chunks) + ", and compute unless under autocast",
        "gradient sums": "float32; norms are " + ("of what is kept" if overflows else "of the sums"),
        "gradients": at_rest + (f": the sum, rounded after {after}" if rounded else ""),
        "master copies": f"float32, of {masters} parameters{in_parts}" if masters else "none: all trained is float32",
        "moments": summary(optimised[0].rule_states if optimised else ()),
        "loss": "float32, fused with the head" if profile.vocabulary else "as the model computes it",
    }


def _precision(profile: ModelProfile, placement: Placement) -> list[str]:
    rows = precisions(profile, placement)
    return ["precision:", *(clipped(f"  {name:<14} {text}", WIDTH) for name, text in rows.items())]


def _names(dtypes: Iterable[str]) -> str:
    return ", ".join(sorted(set(dtypes)))


def _timing(plan: Plan, schedule: Schedule) -> list[str]:
    on_host = any(action.op is Op.UPDATE for action in schedule.lane(Lane.CPU))
    text = {
        (Update.DEFERRED, True): "begins at step(), runs beside the next forward",
        (Update.DEFERRED, False): "on the GPU, at step()",
        (Update.IN_BACKWARD, True): "as soon as a gradient is final",
        (Update.IN_BACKWARD, False): "on the GPU, as soon as a gradient is final",
    }
    settles = any(action.op is Op.SETTLE for action in schedule.lane(Lane.CPU))
    later = ["  on the host parameters are written first, and moments while nobody waits"] if settles else []
    return [f"update: {plan.update}, {text[plan.update, on_host]}", *later]


def _traffic(profile: ModelProfile, plan: Plan, passes: Passes) -> list[str]:
    moved = {lane: format_bytes(passes.moved_bytes(lane)) for lane in Lane}
    lines = [f"traffic per step: {moved[Lane.H2D]} to the GPU, {moved[Lane.D2H]} from it"]
    swapped = plan.accumulate * sum(away(plan, call).held_bytes for call in profile.calls)
    if swapped:
        lines.append(f"  of each {format_bytes(swapped)} swapped activations")
    if plan.ranks > 1:
        lines.append(f"between GPUs per step: {moved[Lane.GATHER]} of parameters, {moved[Lane.REDUCE]} of gradients")
    if passes.last.lane(Lane.DISK_READ) or passes.last.lane(Lane.DISK_WRITE):
        lines.append(f"disk per step: {moved[Lane.DISK_READ]} read, {moved[Lane.DISK_WRITE]} written")
        stored = stored_bytes(profile, plan)
        inputs = plan.accumulate * sum(away(plan, profile.calls[index]).input_bytes for index in stored)
        if inputs:
            lines.append(f"  of each {format_bytes(inputs)} block inputs")
    return lines
