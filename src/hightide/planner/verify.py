"""A plan and its schedule are checked before they run: capacity, every use after its fetch, every gradient written
back.

`verify` replays the schedule. That one action is listed after another proves nothing when lanes overlap, so each rule
is checked against `Precedence`: the order must be enforced by a dependency, a lane or a tick."""

from __future__ import annotations

from collections.abc import Callable

from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ChunkSpec
from hightide.ir.plan import Activation, Plan, Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.ir.units import format_bytes
from hightide.planner.memory import peaks
from hightide.planner.place import (
    chunks_by_block,
    grad_width,
    in_grad_slot,
    is_refreshed,
    is_used_up,
    params_on_gpu,
    widest_tick,
)
from hightide.planner.precedence import Disorder, Precedence

PLAN_VERSION = 2


class InfeasiblePlan(ValueError):
    """A plan or schedule that must not run. `moment` is the id of the action, `tier` and `num_bytes` say what is
    short."""

    def __init__(self, message: str, moment: str = "", tier: Tier | None = None, num_bytes: int = 0) -> None:
        super().__init__(message)
        self.moment = moment
        self.tier = tier
        self.num_bytes = num_bytes


def verify(profile: ModelProfile, plan: Plan, schedule: Schedule, gpu_bytes: int, host_bytes: int) -> None:
    """Raises InfeasiblePlan. The capacity of an evaluation pass is left to the stores: its batch and its outputs are
    the user's affair, and a block runs unsplit there."""
    try:
        precedence = Precedence(schedule)
    except Disorder as disorder:
        raise InfeasiblePlan(f"the schedule cannot run: {disorder}", disorder.at) from None
    _Replay(profile, plan, schedule, precedence).run()
    if schedule.mode is Mode.EVAL:
        return
    peak = peaks(schedule, precedence)
    _check_capacity(Tier.GPU, peak.gpu_peak_bytes, gpu_bytes, peak.gpu_peak_at)
    _check_capacity(Tier.HOST, peak.host_peak_bytes, host_bytes, peak.host_peak_at)


def _check_capacity(tier: Tier, peak_bytes: int, limit_bytes: int, moment: str) -> None:
    if peak_bytes > limit_bytes:
        when = f"during {moment}" if moment else "from the beginning"
        raise InfeasiblePlan(
            f"the plan needs {peak_bytes} bytes ({format_bytes(peak_bytes)}) of {tier} memory {when}, the limit is "
            f"{limit_bytes} ({format_bytes(limit_bytes)}): {peak_bytes - limit_bytes} bytes too many; use a smaller "
            f"micro_batch or batch, or raise Limits({tier}=...)",
            moment,
            tier,
            peak_bytes,
        )


class _Slots:
    """Who stands where, who let it in, and who last left each slot."""

    def __init__(self, num_slots: int) -> None:
        self.entries: list[Action | None] = [None] * num_slots
        self.exits: list[Action | None] = [None] * num_slots

    def entry(self, chunk: int | None) -> Action | None:
        return next((entry for entry in self.entries if entry is not None and entry.chunk == chunk), None)

    def leave(self, action: Action) -> None:
        for slot, entry in enumerate(self.entries):
            if entry is not None and entry.chunk == action.chunk:
                self.entries[slot] = None
                self.exits[slot] = action


class _Replay:
    def __init__(self, profile: ModelProfile, plan: Plan, schedule: Schedule, precedence: Precedence) -> None:
        self.profile, self.plan, self.schedule, self.precedence = profile, plan, schedule, precedence
        self.chunks_of = chunks_by_block(plan.layout, len(profile.blocks))
        self.slots = _Slots(plan.num_slots)
        self.grad_slots = _Slots(plan.num_grad_slots)
        self.refreshed: dict[int, Action] = {}  # persistent chunk -> the fetch of its new values
        self.cleared: set[int] = set()  # gradients that live on the GPU
        self.dirty: dict[int, Action] = {}  # gradient in a grad slot that is not at home -> the tick that added last
        self.summed: set[int] = set()  # chunks with a gradient from this pass
        self.write_backs: dict[int, list[Action]] = {}
        self.updated: set[int] = set()
        self.stashed: dict[tuple[Op, int | None], Action] = {}

    def run(self) -> None:
        self._check_ticks()
        verbs: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.FETCH: self._fetch,
            Op.EVICT: self._evict,
            Op.CLEAR: self._clear,
            Op.WRITE_BACK: self._write_back,
            Op.STASH: self._stash,
            Op.UNSTASH: self._stash,
            Op.UPDATE: self._update,
            Op.STEP: lambda _: None,
        }
        for action in self.schedule.actions:
            for name in action.after:
                if not self.precedence.listed_before(name, action.id):
                    self._fail(action, f"is listed before {name}, for which it waits")
            verbs[action.op](action)
        self._check_end()

    def _fail(self, action: Action, message: str) -> None:
        raise InfeasiblePlan(f"the schedule is wrong: {action.id} {message}", action.id)

    def _after(self, action: Action, earlier: Action | None, message: str) -> None:
        if earlier is None or not self.precedence.before(earlier.id, action.id):
            self._fail(action, message + ("" if earlier is None else f" ({earlier.id} may still be running)"))

    def _chunk(self, action: Action) -> ChunkSpec:
        if action.chunk is None or not 0 <= action.chunk < len(self.plan.layout.chunks):
            self._fail(action, f"names the chunk {action.chunk}; the plan has {len(self.plan.layout.chunks)}")
        assert action.chunk is not None
        return self.plan.layout.chunks[action.chunk]

    def _check_ticks(self) -> None:
        calls = self.profile.calls
        expected = [(Op.FORWARD, index) for index in range(len(calls))]
        if self.schedule.mode is not Mode.EVAL:
            expected += [(Op.BACKWARD, index) for index in reversed(range(len(calls))) if calls[index].needs_backward]
        found = [(tick.op, tick.call) for tick in self.schedule.ticks if tick.op is not Op.STEP]
        if found != expected:
            raise InfeasiblePlan(f"the schedule's ticks do not follow the model's {len(calls)} calls")
        for place, tick in enumerate(self.schedule.ticks):
            if tick.tick != place or (tick.call is not None and calls[tick.call].block != tick.block):
                self._fail(tick, f"is tick {place} but says tick={tick.tick} block={tick.block}")

    def _forward(self, tick: Action) -> None:
        assert tick.block is not None
        for chunk in self.chunks_of[tick.block]:
            if not params_on_gpu(self.plan, chunk):
                entry = self.slots.entry(chunk.index)
                self._after(tick, entry, f"uses chunk {chunk.index}, which is not in a slot then")
            elif is_refreshed(self.plan, chunk):
                fetch = self.refreshed.get(chunk.index)
                self._after(tick, fetch, f"uses chunk {chunk.index} before its new values are fetched")

    def _backward(self, tick: Action) -> None:
        self._forward(tick)
        assert tick.block is not None and tick.call is not None
        for chunk in self.chunks_of[tick.block]:
            if chunk.trainable_numel:
                self._sum(tick, chunk)
        call = self.profile.calls[tick.call]
        if self.plan.blocks[call.block].inputs is Tier.HOST:
            self._after(
                tick, self.stashed.get((Op.UNSTASH, tick.call)), "runs before its inputs are back from the host"
            )

    def _sum(self, tick: Action, chunk: ChunkSpec) -> None:
        if chunk.index in self.updated:
            self._fail(tick, f"adds to the gradient of chunk {chunk.index} after its update")
        self.summed.add(chunk.index)
        if in_grad_slot(self.plan, chunk):
            entry = self.grad_slots.entry(chunk.index)
            self._after(tick, entry, f"adds to the gradient of chunk {chunk.index}, which is not in a grad slot then")
            self.dirty[chunk.index] = tick
            return
        loose = self.profile.blocks[chunk.block].loose  # the runtime clears these itself
        if self.schedule.mode is Mode.TRAIN and chunk.index not in self.cleared and not loose:
            self._fail(tick, f"adds to the gradient of chunk {chunk.index}, which was not cleared")

    def _fetch(self, action: Action) -> None:
        chunk = self._chunk(action)
        if action.kind is ChunkKind.GRAD:
            if self.schedule.mode is not Mode.ACCUMULATE and chunk.index not in self.write_backs:
                self._fail(action, f"fetches a gradient of chunk {chunk.index} that no earlier action has made")
            for write_back in self.write_backs.get(chunk.index, []):
                self._after(action, write_back, "fetches a gradient before it is at home")
            self._enter(self.grad_slots, action, grad_width(self.plan.layout, chunk))
            return
        if chunk.index in self.updated:
            self._fail(action, f"fetches chunk {chunk.index} in the pass that has updated it")
        if chunk.optimised_numel and f"update.{chunk.index}" not in action.after_prev:
            self._fail(action, f"does not wait for the previous update of chunk {chunk.index}")
        if params_on_gpu(self.plan, chunk):
            self.refreshed[chunk.index] = action
        else:
            self._enter(self.slots, action, self.plan.layout.num_slots(chunk))

    def _enter(self, slots: _Slots, action: Action, width: int) -> None:
        start = None if action.target is None else action.target.slot
        if start is None or start < 0 or start + width > len(slots.entries):
            self._fail(action, f"goes to {action.target}, {width} slots wide; there are {len(slots.entries)} slots")
        assert start is not None
        if slots.entry(action.chunk) is not None:
            self._fail(action, f"brings in chunk {action.chunk}, which is in a slot already")
        for slot in range(start, start + width):
            entry, last_exit = slots.entries[slot], slots.exits[slot]
            if entry is not None:
                self._fail(action, f"goes to slot {slot}, which chunk {entry.chunk} occupies")
            if last_exit is not None:
                self._after(action, last_exit, f"goes to slot {slot} before chunk {last_exit.chunk} has left it")
            slots.entries[slot] = action

    def _evict(self, action: Action) -> None:
        chunk = self._chunk(action)
        self._after(action, self.slots.entry(chunk.index), f"drops chunk {chunk.index}, which is not in a slot then")
        self.slots.leave(action)

    def _clear(self, action: Action) -> None:
        chunk = self._chunk(action)
        if self.schedule.mode is Mode.ACCUMULATE or chunk.index in self.summed:
            self._fail(action, f"clears the gradient of chunk {chunk.index}, which holds sums")
        if not in_grad_slot(self.plan, chunk):
            self.cleared.add(chunk.index)
        else:
            self._enter(self.grad_slots, action, grad_width(self.plan.layout, chunk))

    def _write_back(self, action: Action) -> None:
        chunk = self._chunk(action)
        if chunk.index not in self.dirty:
            self._fail(action, f"writes back the gradient of chunk {chunk.index}, which has nothing new in a grad slot")
        last_sum = self.dirty.pop(chunk.index)
        self._after(action, last_sum, f"writes back the gradient of chunk {chunk.index} before it is summed")
        self.grad_slots.leave(action)
        self.write_backs.setdefault(chunk.index, []).append(action)

    def _stash(self, action: Action) -> None:
        tick = next((tick for tick in self.schedule.ticks if tick.op is Op.FORWARD and tick.call == action.call), None)
        earlier = tick if action.op is Op.STASH else self.stashed.get((Op.STASH, action.call))
        self._after(action, earlier, f"moves the inputs of call {action.call} before they are there")
        self.stashed[action.op, action.call] = action

    def _update(self, action: Action) -> None:
        chunk = self._chunk(action)
        if is_used_up(self.plan, chunk):
            last_sum = self.dirty.pop(chunk.index, None)
            self._after(action, last_sum, f"uses up the gradient of chunk {chunk.index} before it is summed")
            self.grad_slots.leave(action)
        if chunk.index in self.dirty:
            self._fail(action, f"reads the gradient of chunk {chunk.index}, which is not written back")
        for write_back in self.write_backs.get(chunk.index, []):
            self._after(action, write_back, f"reads the gradient of chunk {chunk.index} before it is at home")
        if action.lane is Lane.CPU and self.plan.update is Update.DEFERRED:
            step = next((tick for tick in self.schedule.ticks if tick.op is Op.STEP), None)
            self._after(action, step, "runs before step() was called")
        self.updated.add(chunk.index)

    def _check_end(self) -> None:
        if self.dirty:
            raise InfeasiblePlan(f"the gradients of chunks {sorted(self.dirty)} are never written back")
        if self.schedule.mode is Mode.EVAL:
            return
        due = {index for index in self.summed if self.plan.layout.chunks[index].optimised_numel}
        if due - self.updated:
            raise InfeasiblePlan(f"the chunks {sorted(due - self.updated)} have a gradient and are never updated")


def check_plan(profile: ModelProfile, plan: Plan) -> None:
    """Whether a plan, perhaps edited by hand, is one for this model, and makes sense."""
    if plan.version != PLAN_VERSION:
        raise InfeasiblePlan(f"the plan has version {plan.version}, this is version {PLAN_VERSION}; make a new plan")
    if plan.fingerprint != profile.fingerprint:
        raise InfeasiblePlan(
            f"this is a plan for another model: it has the fingerprint {plan.fingerprint}, the model has "
            f"{profile.fingerprint}; make a new plan with hightide.plan(model, optimizer, batch)"
        )
    names, planned = [block.name for block in profile.blocks], [block.name for block in plan.blocks]
    if names != planned:
        wrong = next((pair for pair in zip(names, planned, strict=False) if pair[0] != pair[1]), None)
        raise InfeasiblePlan(
            f"the plan lists {len(planned)} blocks, the model has {len(names)}"
            + (f"; where the model has {wrong[0]!r} the plan has {wrong[1]!r}" if wrong else "")
        )
    _check_layout(profile, plan)
    _check_blocks(profile, plan)
    _check_numbers(profile, plan)


def check_moments(plan: Plan, num_moments: int) -> None:
    """Whether a plan was made for an optimizer with as many states."""
    for chunk in plan.layout.chunks:
        planned = chunk.num_states - chunk.has_master
        if chunk.optimised_numel and planned != num_moments:
            raise InfeasiblePlan(
                f"the plan keeps {planned} moments of each element, this optimizer has {num_moments}; make a new plan "
                "with hightide.plan(model, optimizer, batch)"
            )


def _check_layout(profile: ModelProfile, plan: Plan) -> None:
    placed = [(place.param, place.numel) for chunk in plan.layout.chunks for place in chunk.params]
    if sorted(placed) != sorted((spec.name, spec.numel) for spec in profile.params):
        raise InfeasiblePlan("the plan's layout does not hold each parameter of the model once; make a new plan")
    if [chunk.index for chunk in plan.layout.chunks] != list(range(len(plan.layout.chunks))):
        raise InfeasiblePlan("the chunks of the plan's layout are not numbered 0, 1, 2, ...; make a new plan")


def _check_blocks(profile: ModelProfile, plan: Plan) -> None:
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        where = f"the plan of block {block.name!r}"
        if Tier.DISK in (block.params, block.states, block.inputs):
            raise InfeasiblePlan(f"{where} uses the disk, which is not supported yet; use gpu or host")
        frozen = any(c.block == spec.index and not c.trainable_numel for c in plan.layout.chunks)
        if block.states is Tier.GPU and block.params is not Tier.GPU and not frozen:
            raise InfeasiblePlan(
                f"{where} has states on the gpu but params on the {block.params}, and no frozen chunk that could "
                "stream; put params there too"
            )
        if block.activation is Activation.KEEP and block.inputs is Tier.HOST:
            raise InfeasiblePlan(f"{where} keeps activations, whose graph holds the inputs on the gpu; use inputs=gpu")
        if spec.loose and (block.params, block.states) != (Tier.GPU, Tier.GPU):
            raise InfeasiblePlan(f"{where} (parameters used outside of blocks) must have params and states on the gpu")


def _check_numbers(profile: ModelProfile, plan: Plan) -> None:
    if plan.num_samples < profile.num_samples:
        raise InfeasiblePlan(
            f"the plan holds batches of up to {plan.num_samples} samples, this batch has {profile.num_samples}; "
            f"make a new plan with it"
        )
    if not 1 <= plan.micro_batch <= plan.num_samples:
        raise InfeasiblePlan(f"micro_batch is {plan.micro_batch}; it must be from 1 to num_samples={plan.num_samples}")
    if plan.loss_tile_tokens < 1 or plan.layout.slot_numel < 1:
        raise InfeasiblePlan(
            f"loss_tile_tokens is {plan.loss_tile_tokens} and slot_numel {plan.layout.slot_numel}; both must be at "
            f"least 1"
        )
    if plan.loss_kept_tokens < 0:
        raise InfeasiblePlan(f"loss_kept_tokens is {plan.loss_kept_tokens}; it must be 0 (none) or more")
    heads = [block for block in profile.blocks if block.lazy_head]
    if plan.loss_kept_tokens and not all(block.plain_linear for block in heads):
        raise InfeasiblePlan(
            f"loss_kept_tokens is {plan.loss_kept_tokens}, but the head ({', '.join(b.kind for b in heads)}) is more "
            "than an nn.Linear, whose logits are made again with a graph in backward; use loss_kept_tokens=0"
        )
    slots, grad_slots = widest_tick(plan, {call.block for call in profile.calls})
    if plan.num_slots < slots or plan.num_grad_slots < grad_slots:
        raise InfeasiblePlan(
            f"the plan has {plan.num_slots} slots and {plan.num_grad_slots} grad slots; its widest block needs "
            f"{slots} and {grad_slots} at once"
        )
