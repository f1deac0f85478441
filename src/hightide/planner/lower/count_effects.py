"""Pass 8: what each action takes and gives on each tier.

The flow of block inputs is simplified to a chain: what a call returns is what the next call receives. Tensors that do
not follow the chain (masks, rotary tables, an encoder's output read by every decoder layer) are counted from the call
that saw them first to the last moment at which a reader may hold them. Where the truth is not known the larger number
is taken: the limit of a tier is hard.

The model's own code between blocks is measured with every block's inputs away (ir.block.Glue), and what the chain says
of it then is subtracted: the rest is counted at the tick that it surrounds, whatever the plan."""

from __future__ import annotations

from collections import defaultdict

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, CallSpec, Glue, ModelProfile
from hightide.ir.chunk import GRAD_BYTES, REGION_BYTES, UPDATE_TILE_NUMEL, region_bytes
from hightide.ir.tier import Lane, Tier
from hightide.planner import disk_inputs, lookup
from hightide.planner import loss_tiles as loss
from hightide.planner.lower.draft import Draft
from hightide.planner.placement import Placement
from hightide.planner.waiting import away, held_by, held_bytes, lasting_bytes, left_bytes, micro_batch_of, num_away

Effect = defaultdict[str, int]  # by fields of an action; and "least_transient" of a tick, until it is known
Effects = defaultdict[ActionKey, Effect]


def base_bytes(profile: ModelProfile, placement: Placement) -> dict[Tier, int]:
    """What is on each tier during the whole pass."""
    found, rows = placement.base_bytes(), lookup.standing_bytes(profile, placement.plan)
    found[Tier.GPU] += profile.batch_bytes + profile.buffer_bytes + left_bytes(profile, placement.plan.micro_batch)
    inputs = disk_inputs.standing_bytes(profile, placement.plan)
    return {tier: num_bytes + rows[tier] + inputs[tier] for tier, num_bytes in found.items()}


def count_calls(draft: Draft) -> Effects:
    """Of ticks and of what waits between them: the same in all passes of a step."""
    effects: Effects = defaultdict(lambda: defaultdict(int))
    _count_inputs_and_outputs(draft, effects)
    for index, call in enumerate(draft.profile.calls):
        _count_inside(draft, index, call, effects)
    if draft.mode.trains:
        _count_output_gradients(draft, effects)
        for tick in draft.ticks:
            effect = effects[tick.id]
            effect["gpu_transient"] = max(effect["gpu_transient"], effect.pop("least_transient", 0))
        _count_coming_back(draft, effects)
    return effects


def add_effects(draft: Draft, actions: list[Action], of_calls: Effects) -> list[Action]:
    effects: Effects = defaultdict(lambda: defaultdict(int), of_calls)
    if draft.mode.trains:
        _count_updates(draft, effects)
        _count_parked(draft, effects)
    return [action.changed(**effects[action.id]) if action.id in effects else action for action in actions]


def _add(effect: Effect, **num_bytes: int) -> None:
    for name, value in num_bytes.items():
        effect[name] += value


def _count_inputs_and_outputs(draft: Draft, effects: Effects) -> None:
    arriving = 0  # what the previous call returned
    glue = 0  # inputs made outside of blocks that later calls without backward may still read
    waiting = 0  # what the chain holds for backwards to come, wherever inputs wait
    for index, call in enumerate(draft.profile.calls):
        forward = effects[ActionKey(Op.FORWARD, index)]
        new = _at(draft, call.new_inputs)
        forward["gpu_takes"] += new + _output_bytes(draft, call)
        forward["gpu_transient"] += _at(draft, call.tapped)  # beside that of the pass before, which is always there
        if draft.mode.trains:
            counted = max(arriving + new, _at(draft, call.saved_inputs)) + _output_bytes(draft, call)
            _count_glue(draft, forward, call.glue, waiting, counted)
            waiting += _excess_bytes(draft, call, arriving) + _at(draft, call.tapped)
        if draft.mode.trains and call.needs_backward:
            _count_saved(draft, index, call, arriving + new, effects)
        else:
            forward["gpu_gives"] += arriving + min(new, glue)
            glue = max(glue, new)
        arriving = _output_bytes(draft, call)
    if draft.mode.trains:
        effects[ActionKey(Op.STEP)]["gpu_gives"] += arriving + glue


def _excess_bytes(draft: Draft, call: CallSpec, arriving: int) -> int:
    """Of what it receives, what stays for its backward even if its inputs wait on the host."""
    received = arriving + _at(draft, call.new_inputs)
    return max(0, received - _at(draft, call.saved_inputs)) if call.needs_backward else 0


def _count_glue(draft: Draft, tick: Effect, glue: Glue, waiting: int, counted: int) -> None:
    """`waiting`: what the chain holds meanwhile for others; `counted`: what it has for this tick."""
    held = max(0, _at(draft, glue.held) - waiting)
    _add(tick, gpu_takes=held, gpu_gives=held)
    tick["least_transient"] = max(0, _at(draft, glue.peak) - waiting - counted - held)


def _count_saved(draft: Draft, index: int, call: CallSpec, received: int, effects: Effects) -> None:
    """All inputs of a call wait for its backward on the GPU, except what is stashed."""
    saved = _at(draft, call.saved_inputs)
    effects[ActionKey(Op.FORWARD, index)]["gpu_takes"] += max(
        0, saved - received
    )  # shared ones that the chain has let go
    effects[ActionKey(Op.BACKWARD, index)]["gpu_gives"] += max(saved, received)
    gone = away(draft.plan, call)
    if gone.num_bytes:
        # Each tensor is rounded up.
        region = region_bytes(gone.num_bytes) + max(0, num_away(draft.plan, call) - 1) * REGION_BYTES
        if disk_inputs.goes_to_disk(draft.plan, call):  # its buffers are always there
            region = 0
        held = gone.held_bytes
        _add(effects[ActionKey(Op.STASH, index)], gpu_gives=gone.num_bytes, gpu_kept=held, host_takes=region)
        _add(effects[ActionKey(Op.UNSTASH, index)], gpu_takes=gone.num_bytes, gpu_kept=held, host_gives=region)


def _count_inside(draft: Draft, index: int, call: CallSpec, effects: Effects) -> None:
    if lookup.is_looked_up(draft.plan, call):  # the GPU computes nothing
        return
    forward, backward = effects[ActionKey(Op.FORWARD, index)], effects[ActionKey(Op.BACKWARD, index)]
    backwards = draft.mode.trains and call.needs_backward
    if draft.profile.blocks[call.block].lazy_head:
        forward["gpu_transient"] += loss.forward_transient_bytes(draft.profile, draft.plan, call)
        if backwards:
            _keep(forward, backward, loss.saved_bytes(draft.profile, draft.plan, call))
            backward["gpu_transient"] += loss.backward_transient_bytes(draft.profile, draft.plan, call)
        return
    micro = micro_batch_of(draft.plan, call, draft.mode)
    forward["gpu_transient"] += call.forward_peak.at(micro)
    if micro < draft.plan.num_samples:  # its output exists beside that of the whole batch until it is copied there
        forward["gpu_transient"] += call.outputs.at(micro) + call.tapped.at(micro)
    if not backwards:
        return
    backward["gpu_transient"] += call.backward_peak.at(micro)
    backward["gpu_holes"] = call.holes.at(micro)
    if micro == draft.plan.num_samples:  # its inputs' gradients are the batch's, which are counted for themselves
        backward["gpu_transient"] = max(0, backward["gpu_transient"] - call.input_grads.at(micro))
    _keep(forward, backward, held_bytes(draft.plan, call))
    there = held_by(draft.plan, call).at(micro)
    if lasting := lasting_bytes(draft.plan, call):
        _add(forward, gpu_takes=lasting)
        _add(backward, gpu_gives=lasting)
        forward["gpu_transient"] -= call.lasting.at(micro)
        if draft.plan.blocks[call.block].activation is Activation.KEEP:  # else it is made once more
            there += call.lasting.at(micro)
    backward["gpu_transient"] = max(0, backward["gpu_transient"] - there)


def _keep(forward: Effect, backward: Effect, num_bytes: int) -> None:
    _add(forward, gpu_takes=num_bytes, gpu_kept=num_bytes)
    _add(backward, gpu_gives=num_bytes, gpu_kept=num_bytes)


def _count_output_gradients(draft: Draft, effects: Effects) -> None:
    """The gradient of a call's inputs lives until the backward of the call before has read it."""
    calls = draft.profile.calls
    backwards = [index for index in reversed(range(len(calls))) if calls[index].needs_backward]
    pending = aside = 0  # `aside`: gradients of inputs that did not come from the call before
    before = [0, *(_output_bytes(draft, call) for call in calls)]
    excess = [_excess_bytes(draft, call, arriving) for call, arriving in zip(calls, before, strict=False)]
    tapped_bytes = sum(_at(draft, call.tapped) for call in calls)
    waiting = before[-1] + tapped_bytes + sum(excess)  # as in forward, and what the last call returned
    for index in backwards:  # those of what was tapped come from the loss, and wait
        tapped = _at(draft, calls[index].tapped)
        effects[ActionKey(Op.BACKWARD, backwards[0])]["gpu_takes"] += tapped
        effects[ActionKey(Op.BACKWARD, index)]["gpu_gives"] += tapped
    for index in backwards:
        backward = effects[ActionKey(Op.BACKWARD, index)]
        # The loss makes the first; later ones may grow in the glue: the gradient of a slice is that of the whole again.
        grown = max(0, _output_bytes(draft, calls[index]) - pending)
        backward["gpu_takes"] += grown
        pending += grown
        made = _at(draft, calls[index].input_grads)
        other = max(0, made - (_output_bytes(draft, calls[index - 1]) if index else 0))
        backward["gpu_takes"] += made
        backward["gpu_gives"] += pending + min(other, aside)
        _count_glue(draft, backward, calls[index].glue_backward, waiting + aside, pending + made)
        waiting -= excess[index]
        pending, aside = made - other, max(aside, other)
    end = _at(draft, draft.profile.glue_end) - before[-1] - tapped_bytes - pending - aside
    effects[ActionKey(Op.STEP)]["least_transient"] = max(0, end)
    effects[ActionKey(Op.STEP)]["gpu_gives"] += pending + aside


def _count_updates(draft: Draft, effects: Effects) -> None:
    for action in draft.actions:
        if action.op is Op.UPDATE and action.lane is Lane.COMPUTE:
            chunk = draft.place_of(action).shard
            narrow = sum(state.dtype != "float32" for state in chunk.rule_states)
            arrays = 1 + chunk.has_remainder + narrow  # fp32: the gradient scaled or widened, the master, and states
            effects[action.id]["gpu_transient"] += GRAD_BYTES * (
                arrays * min(chunk.optimised_numel, UPDATE_TILE_NUMEL) + 1  # and the number of the step
            )
            if action.runs_when_open:  # at the end of a backward that still holds its inputs and their gradients
                backward = effects[draft.ticks[action.opens].id]
                effects[action.id]["gpu_transient"] += max(0, backward["gpu_gives"] - backward["gpu_kept"])


def _count_coming_back(draft: Draft, effects: Effects) -> None:
    """What comes back takes its place at the end of a tick that still holds what it was given."""
    for action in draft.actions:
        if action.op is Op.UNSTASH and action.opens >= 0:
            tick = draft.ticks[action.opens]
            opener = effects[tick.id]
            gone = 0 if tick.call is None else away(draft.plan, draft.profile.calls[tick.call]).input_bytes
            effects[action.id]["gpu_transient"] += max(0, opener["gpu_gives"] - opener["gpu_kept"] - gone)


def _count_parked(draft: Draft, effects: Effects) -> None:
    """Each takes its place when it is sent, and gives it back with its update."""
    for action in draft.actions:
        if action.op in (Op.WRITE_BACK, Op.UPDATE) and (place := draft.place_of(action)).parks:
            verb = "host_takes" if action.op is Op.WRITE_BACK else "host_gives"
            effects[action.id][verb] += region_bytes(place.grad_bytes)


def _at(draft: Draft, size: Affine) -> int:
    return size.at(draft.plan.num_samples)


def _output_bytes(draft: Draft, call: CallSpec) -> int:
    """The logits of a lazy head never exist as a whole."""
    return 0 if draft.profile.blocks[call.block].lazy_head else _at(draft, call.outputs)
