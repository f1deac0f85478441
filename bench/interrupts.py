"""Ctrl-C at random moments: is it caught, does everything go on, and with the values of plain PyTorch?

    python bench/interrupts.py [--where backward wrap ...] [--count 100] [--seed 0] [--update deferred]

Trials run in child processes, many in one; a child that dies or says nothing for HUNG_S is replaced by another. A trial
does one thing with a small model whose every chunk moves, and sends itself SIGINT at a moment that is equally likely
anywhere in it. The loop catches it, as a notebook does, and goes on; then the model must train as its plain twin does.
What counts is the number of interrupts that were caught. Ends with status 1 unless all were held.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hightide
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.solution import Solution
from hightide.runtime.surgery import run_of

HUNG_S = 60.0
OUTCOMES = ("held", "aborted", "hung", "wrong values", "swallowed", "error")
SAMPLES, WIDTH, BLOCKS = 4, 24, 4


class Block(nn.Module):
    """With something that it keeps, which a probe or a trial must not leave changed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(x))) + self.offset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale - 1.0).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def moving(plan: Plan) -> Plan:
    """Every lane has work."""
    streamed = {"params": Tier.HOST, "states": Tier.HOST, "inputs": Tier.HOST, "activation": Activation.RECOMPUTE}
    blocks = tuple(replace(block, **streamed) if block.name else block for block in plan.blocks)
    slots = 1 + max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=slots, num_grad_slots=slots, gpu_limit_bytes=2**22)


class Wrong(Exception):
    """Other values than those of plain PyTorch, or something of the user's that is not as it was."""


class Swallowed(Exception):
    """The interrupt came, and was not raised."""


class Interrupted:
    """Does something, and is interrupted at a random moment of it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._took_s: dict[str, float] = {}
        self._sent = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, self._send)

    def _send(self, *_: object) -> None:
        self._sent = True
        signal.raise_signal(signal.SIGINT)

    def __call__(self, name: str, work: Callable[[], Any]) -> bool:
        """Whether it was interrupted. How long it takes is learned from when it was not."""
        self._sent = False
        began_s = time.perf_counter()
        try:
            delay_s = self._random.uniform(0.0, self._took_s.get(name, 0.0))
            if name in self._took_s:
                signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))
            work()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for _ in range(10):  # Python looks for signals now and then
                pass
        except KeyboardInterrupt:
            return True
        if self._sent:
            raise Swallowed(f"{name}: after {delay_s * 1e3:.2f} ms")
        took_s = time.perf_counter() - began_s
        self._took_s[name] = took_s if name not in self._took_s else 0.9 * self._took_s[name] + 0.1 * took_s
        return False


class Subject:
    """A wrapped model beside its plain twin."""

    def __init__(self, update: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Model()
        self.plain = copy.deepcopy(self.model)
        self.plain_optimizer, self.optimizer = adamw(self.plain), adamw(self.model)
        self.x = torch.randn(SAMPLES, WIDTH)
        self._update = update
        self._wrap()

    def _wrap(self) -> None:
        limits = hightide.Limits(gpu="4MiB", host="64MiB")
        options: dict[str, Any] = {"limits": limits, "micro_batch": 2, "update": self._update, "device": "cpu"}
        plan = moving(hightide.plan(self.model, self.optimizer, self.x, **options))
        self.model, self.optimizer = hightide.wrap(self.model, self.optimizer, self.x, plan=plan, device="cpu")

    def check(self) -> None:
        """Two steps of both, which then go on from the same values: rounding must not add up over many trials."""
        for _ in range(2):
            self.x = torch.randn(SAMPLES, WIDTH)
            compare_losses(train(self.model, self.optimizer, self.x), train(self.plain, self.plain_optimizer, self.x))
        compare_values(self.model, self.plain)
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(self.optimizer.state_dict())

    def rewrap(self) -> None:
        """The optimizer goes on from its states."""
        saved = self.optimizer.state_dict() if run_of(self.model) is not None else None
        if saved is not None:
            hightide.unwrap(self.model)
        self.optimizer = adamw(self.model)
        if saved is not None:
            self.optimizer.load_state_dict(saved)
        self._wrap()


def compare_losses(ours: float, theirs: float) -> None:
    if not abs(ours - theirs) <= 1e-5 * abs(theirs):
        raise Wrong(f"a loss of {ours}, plain {theirs}")


def compare_values(model: nn.Module, plain: nn.Module) -> None:
    ours = model.state_dict()
    for name, expected in plain.state_dict().items():
        error = (ours[name] - expected).abs().max().item()
        if not error <= 1e-5 * expected.abs().max().item() + 1e-6:
            raise Wrong(f"{name} is off by {error}")


# -- what is interrupted ----------------------------------------------------------------------------------------------


def in_forward(subject: Subject, interrupted: Interrupted) -> bool:
    caught = interrupted("forward", lambda: subject.model(subject.x))
    subject.optimizer.zero_grad()
    return caught


def in_backward(subject: Subject, interrupted: Interrupted) -> bool:
    loss = subject.model(subject.x)
    caught = interrupted("backward", loss.backward)
    finish_in_backward(subject)
    subject.optimizer.zero_grad()
    return caught


def finish_in_backward(subject: Subject) -> None:
    """With updates in backward: the step has happened, whatever came, and has to be told."""
    run = run_of(subject.model)
    assert run is not None
    if run.executor.promises.owes_step:
        subject.optimizer.step()
        train(subject.plain, subject.plain_optimizer, subject.x)


def in_step(subject: Subject, interrupted: Interrupted) -> bool:
    """Done or not done: the number of updates tells, and the values must say the same."""
    subject.model(subject.x).backward()
    before = hightide.stats(subject.model).num_steps
    caught = interrupted("step", subject.optimizer.step)
    if hightide.stats(subject.model).num_steps > before:
        train(subject.plain, subject.plain_optimizer, subject.x)
    finish_in_backward(subject)
    subject.optimizer.zero_grad()
    return caught


def in_zero_grad(subject: Subject, interrupted: Interrupted) -> bool:
    subject.model(subject.x).backward()
    caught = interrupted("zero_grad", subject.optimizer.zero_grad)
    subject.optimizer.zero_grad()
    return caught


def in_clip(subject: Subject, interrupted: Interrupted) -> bool:
    subject.model(subject.x).backward()
    params = list(subject.model.parameters())
    caught = interrupted("clip", lambda: nn.utils.clip_grad_norm_(params, 1e-3))
    subject.optimizer.zero_grad()
    return caught


def in_evaluation(subject: Subject, interrupted: Interrupted) -> bool:
    """Between a forward and its backward, which go on."""
    loss, plain_loss = subject.model(subject.x), subject.plain(subject.x)

    def evaluate() -> None:
        with torch.no_grad():
            subject.model(subject.x)

    caught = interrupted("evaluation", evaluate)
    for one, optimizer in ((loss, subject.optimizer), (plain_loss, subject.plain_optimizer)):
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
    return caught


def in_state_dict(subject: Subject, interrupted: Interrupted) -> bool:
    return interrupted("state_dict", lambda: (subject.model.state_dict(), subject.optimizer.state_dict()))


def in_load(subject: Subject, interrupted: Interrupted) -> bool:
    """The same values once more: half of them are as good as all."""
    saved, states = subject.model.state_dict(), subject.optimizer.state_dict()

    def load() -> None:
        subject.model.load_state_dict(saved)
        subject.optimizer.load_state_dict(states)

    return interrupted("load", load)


def in_unwrap(subject: Subject, interrupted: Interrupted) -> bool:
    states = subject.optimizer.state_dict()
    caught = interrupted("unwrap", lambda: hightide.unwrap(subject.model))
    if run_of(subject.model) is None:
        compare_values(subject.model, subject.plain)
        subject.optimizer = adamw(subject.model)
        subject.optimizer.load_state_dict(states)
        subject._wrap()
    return caught


def in_move(subject: Subject, interrupted: Interrupted) -> bool:
    run = run_of(subject.model)
    assert run is not None
    slots = 5 if run.plan.num_slots == 2 else 2
    plan = replace(run.plan, num_slots=slots)
    return interrupted("move", lambda: run.move_to(Solution.of(run.profile, plan)))


class Fresh:
    """A plain model that is about to be wrapped, with states in its optimizer."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.model, self.x = Model(), torch.randn(SAMPLES, WIDTH)
        self.model.blocks[1].register_forward_hook(lambda *_: None)
        self.optimizer = adamw(self.model)
        train(self.model, self.optimizer, self.x)
        self.plain, self.plain_optimizer = copy.deepcopy((self.model, self.optimizer))
        self._before = self._traits()

    def _traits(self) -> Any:
        """What must be as it was, beside values."""
        modules = [
            (type(module), module.training, sorted(module.__dict__), len(module._forward_hooks))
            for module in self.model.modules()
        ]
        return modules, torch.get_rng_state().tolist(), random.getstate(), [type(p) for p in self.model.parameters()]

    def check(self, options: dict[str, Any], again: bool) -> None:
        if run_of(self.model) is not None:
            raise Wrong("the model is still wrapped")
        if self._traits() != self._before:
            raise Wrong("the model or the random numbers are not as before")
        compare_losses(train(self.model, self.optimizer, self.x), train(self.plain, self.plain_optimizer, self.x))
        compare_values(self.model, self.plain)
        if again:
            model, optimizer = hightide.wrap(self.model, self.optimizer, self.x, **options)
            for _ in range(2):
                compare_losses(train(model, optimizer, self.x), train(self.plain, self.plain_optimizer, self.x))
            compare_values(model, self.plain)
            hightide.unwrap(model)


def in_wrap(number: int, interrupted: Interrupted, call: str) -> bool:
    fresh = Fresh(number)
    options: dict[str, Any] = {"limits": hightide.Limits(gpu="100KiB", host="64MiB"), "micro_batch": 2}
    function = getattr(hightide, call)
    caught = interrupted(call, lambda: function(fresh.model, fresh.optimizer, fresh.x, **options))
    if caught:
        fresh.check(options, again=number % 4 == 0)
    elif call == "wrap":
        hightide.unwrap(fresh.model)
    return caught


TRAINED: dict[str, Callable[[Subject, Interrupted], bool]] = {
    "backward": in_backward,
    "forward": in_forward,
    "step": in_step,
    "zero_grad": in_zero_grad,
    "clip": in_clip,
    "evaluation": in_evaluation,
    "state_dict": in_state_dict,
    "load": in_load,
    "unwrap": in_unwrap,
    "move": in_move,
}
PLACES = (*TRAINED, "wrap", "plan")


# -- children ---------------------------------------------------------------------------------------------------------


def child(where: str, seed: int, update: str) -> None:
    """Trials without end, a line for each. After anything but 'held' the model may be of no use: it ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    interrupted = Interrupted(seed)
    subject = Subject(update) if where in TRAINED else None
    for number in range(sys.maxsize):
        outcome, detail, caught = "held", "", False
        try:
            if subject is None:
                caught = in_wrap(seed + number, interrupted, where)
            else:
                caught = TRAINED[where](subject, interrupted)
                subject.check()
        except Wrong as error:
            outcome, detail = "wrong values", str(error)
        except Swallowed as error:
            outcome, detail = "swallowed", str(error)
        except BaseException:
            outcome, detail = "error", traceback.format_exc()
        print(json.dumps([outcome, detail, caught]), flush=True)
        if outcome != "held":
            return


class Children:
    """One after the other; what each has said, line by line."""

    def __init__(self, where: str, seed: int, update: str) -> None:
        self._where, self._update, self._seeds = where, update, random.Random(seed)
        self._process: subprocess.Popen[str] | None = None

    def next(self) -> tuple[str, str, bool]:
        """Outcome, detail, and whether an interrupt was caught in it."""
        if self._process is None:
            seed = self._seeds.randrange(2**31)
            command = [sys.executable, __file__, "--child", str(seed), "--where", self._where, "--update", self._update]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            self._lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            line = self._lines.get(timeout=HUNG_S)
        except queue.Empty:
            self.close()
            return "hung", f"nothing was heard for {HUNG_S:g} s", True
        if not line:
            return "aborted", self._end(), True
        outcome, detail, caught = json.loads(line)
        if outcome != "held":
            self._end()
        return outcome, detail, caught

    def _read(self, process: subprocess.Popen[str]) -> None:
        lines = self._lines
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def _end(self) -> str:
        process, self._process = self._process, None
        assert process is not None and process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HUNG_S)
        return f"status {process.poll()}: {process.stderr.read()[-2000:]}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def trials(where: str, count: int, seed: int, update: str) -> Counter[str]:
    """Until so many interrupts were caught, or went wrong."""
    found: Counter[str] = Counter()
    children = Children(where, seed, update)
    try:
        while sum(found[outcome] for outcome in OUTCOMES) < count:
            outcome, detail, caught = children.next()
            found["trials"] += 1
            if outcome != "held" or caught:
                found[outcome] += 1
            if outcome != "held":
                print(f"{where}: {outcome}\n{detail}", file=sys.stderr)
    finally:
        children.close()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--count", type=int, default=100, help="interrupts that are caught, in each place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--update", choices=("deferred", "in_backward"), default="deferred")
    parser.add_argument("--child", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(options.where[0], options.child, options.update)
        return 0
    print(f"{'where':<12}{'trials':>8}{'caught':>8}" + "".join(f"{outcome:>14}" for outcome in OUTCOMES), flush=True)
    is_well = True
    for where in options.where:
        found = trials(where, options.count, options.seed, options.update)
        caught = sum(found[outcome] for outcome in OUTCOMES)
        row = "".join(f"{found[outcome]:>14}" for outcome in OUTCOMES)
        print(f"{where:<12}{found['trials']:>8}{caught:>8}{row}", flush=True)
        is_well = is_well and caught == found["held"]
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
