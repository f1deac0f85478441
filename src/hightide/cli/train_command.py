"""`hightide train`: an ordinary PyTorch loop around a wrapped model. Reads top to bottom."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import islice
from signal import SIGINT, Signals
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import hightide
from hightide.checkpoint.files.folder import DamagedCheckpoint
from hightide.cli.config import OptimizerConfig, TrainConfig
from hightide.cli.data import Batches, read_text
from hightide.cli.demo_model import build_model, write_sample
from hightide.cli.display import StepDisplay, StepRecord, TierPeak, device_text, show_peaks, show_plan, show_sample
from hightide.cli.readings import Readings
from hightide.cli.resume import Resumed, find_checkpoint
from hightide.cli.run_folder import RunFolder
from hightide.cli.run_state import RunState, deciding, placing
from hightide.cli.saves import SaveFailed, Saves
from hightide.cli.stop_request import stop_request
from hightide.ir.units import format_bytes

STATE_BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, two moments of AdamW


def train(config: TrainConfig, console: Console, record: bool = False) -> Signals | None:
    """Runs the whole command. `record`: what the last step did is written into the run folder. Returns the signal that
    ended it early, if one did."""
    text = read_text(config.data)
    with ExitStack() as stack:
        resumed = find_checkpoint(config, text, console)
        if resumed is not None:
            stack.callback(resumed.lock.close)
            if resumed.is_finished(config.steps):
                console.print(resumed.finished_text(config.steps), markup=False, soft_wrap=True)
                return None
        num_left = config.steps - (0 if resumed is None else resumed.step)
        if record and num_left < 2:
            what = f"steps is {config.steps}" if resumed is None else f"{num_left} of {config.steps} steps are left"
            raise ValueError(f"--record shows a step that follows another, but {what}; do at least 2")
        run = prepare(config, console, text, resumed)
        run.introduce()
        folder = RunFolder(config, None if resumed is None else resumed.folder, num_steps=len(run.losses))
        return _train_in(stack.enter_context(folder), run, record)


def _train_in(folder: RunFolder, run: TrainingRun, record: bool) -> Signals | None:
    console = run.console
    if folder.num_lost:
        what = f"metrics.jsonl lacks {folder.num_lost} of the first {len(run.losses)} steps"
        console.print(f"warning: {what}", style="yellow")
    hightide.stats(run.model).plan.save(folder.plan_path)
    try:
        stopped = run.recorded_steps(folder) if record else run.steps(folder)
        if stopped is None:
            run.conclude(folder)
    except KeyboardInterrupt:
        stopped = SIGINT
    if stopped is not None:
        console.print(f"interrupted after step {len(run.losses)} of {run.config.steps}")
        if record and not folder.timeline_path.exists():
            console.print("no recording: the run ended before there was one")
        if run.newest_saved:
            how = "the same command" if run.config.resume is not False else "the same command without --no-resume"
            console.print(f"step {run.newest_saved} is saved: {how} goes on from there")
    names = ["metrics.jsonl", "plan.json", "config.yaml"]
    names += [path.name for path in (folder.timeline_path, folder.checkpoints) if path.exists()]
    console.print(f"run folder: {folder.path}  ({', '.join(names)})", markup=False, soft_wrap=True)
    if stopped is None and run.config.save.every is not None and run.newest_saved < len(run.losses):
        raise SaveFailed(
            f"step {len(run.losses)}, the last one, is not saved; the same command does again what is lost"
        )
    return stopped


def prepare(config: TrainConfig, console: Console, text: Tensor, resumed: Resumed | None = None) -> TrainingRun:
    """The wrapped model with all that belongs to it, and its batches; at a checkpoint, if there is one."""
    (example,) = islice(Batches(text, config.data, config.seed), 1)
    model = build_model(config)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = _build_optimizer(model, config.optimizer)
    model, optimizer = _wrapped(config, console, model, optimizer, example, resumed)
    run = TrainingRun(config, console, model, optimizer, num_params, text)
    run.begin(resumed)
    return run


def _wrapped(
    config: TrainConfig,
    console: Console,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    example: dict[str, Tensor],
    resumed: Resumed | None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """With the plan of the checkpoint, if what it was made for is as it was: then values are the same to the bit."""
    limits = config.limits.resolve()
    wrap = partial(hightide.wrap, model, optimizer, example, compile=config.compile, device=config.device)
    if resumed is not None and resumed.plan is not None and resumed.state.placing == placing(config):
        try:
            return wrap(limits=hightide.Limits(disk=limits.disk), plan=resumed.plan)
        except ValueError as error:  # it has less memory, say
            console.print(f"the plan of the checkpoint cannot be used, another is made: {error}", markup=False)
    return wrap(
        limits=limits,
        micro_batch=config.micro_batch,
        update=config.update.value,
        gradients=config.gradients.value,
    )


def _limits_text(plan: hightide.Plan) -> str:
    text = f"the accelerator may hold {format_bytes(plan.gpu_limit_bytes)} in all"
    if plan.disk_limit_bytes:
        text += f", the host {format_bytes(plan.host_limit_bytes)}, the disk {format_bytes(plan.disk_limit_bytes)}"
    return text


def _build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    first, second = config.betas
    return torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay
    )


def lr_factor(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, then a cosine down to the final share."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine


@dataclass
class TrainingRun:
    config: TrainConfig
    console: Console
    model: Any
    optimizer: torch.optim.Optimizer
    num_params: int
    text: Tensor

    def begin(self, resumed: Resumed | None) -> None:
        """At the first step, or behind the last one of a checkpoint."""
        self.batches = Batches(self.text, self.config.data, self.config.seed)
        self.device: torch.device = next(self.model.parameters()).device
        self.losses: list[float] = []  # of step 1, 2, ...
        self.light_shares: list[float] = []  # of the steps for which they are known
        self.before_s, self.started = 0.0, time.perf_counter()
        self.newest_saved = 0
        if resumed is not None:
            resumed = self._load(resumed)
            self.batches.load_state_dict(resumed.state.data)
            self.losses, self.light_shares = resumed.state.losses.tolist(), resumed.state.light_shares.tolist()
            self.before_s, self.newest_saved, self.source = resumed.state.train_s, resumed.step, resumed.path
            for group in self.optimizer.param_groups:
                group["initial_lr"] = self.config.optimizer.lr
        self.num_checked = len(self.losses)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: lr_factor(step, self.config.steps, self.config.optimizer),
            last_epoch=len(self.losses) - 1,  # a function of the step alone
        )

    def _load(self, resumed: Resumed) -> Resumed:
        """Sums are checked while it is read: where it is damaged, the one before is taken."""
        try:
            hightide.load(self.model, self.optimizer, resumed.path)
        except DamagedCheckpoint as error:
            return self._load(resumed.older(error))
        return resumed

    def state(self) -> RunState:
        return RunState(
            deciding=self._deciding,
            placing=placing(self.config),
            losses=torch.tensor(self.losses, dtype=torch.float64),
            light_shares=torch.tensor(self.light_shares, dtype=torch.float64),
            train_s=self.train_s,
            data=self.batches.state_dict(),
        )

    @cached_property
    def _deciding(self) -> dict[str, Any]:
        return deciding(self.config, self.text)

    @property
    def train_s(self) -> float:
        return self.before_s + time.perf_counter() - self.started

    @property
    def states_bytes(self) -> int:
        return self.num_params * STATE_BYTES_PER_PARAMETER

    def introduce(self) -> None:
        plan = hightide.stats(self.model).plan
        if self.losses:
            where = f"goes on from step {len(self.losses)} of {self.config.steps}: {self.source}"
            self.console.print(where, markup=False, soft_wrap=True)
        show_plan(self.console, plan.explain())
        compiled = ", blocks compiled in the first step" if self.config.compile else ""
        self.console.print(
            f"device: {device_text(self.device)}{compiled}\n"
            f"{self.num_params / 1e6:.2f}M parameters; weights, gradients and moments take "
            f"{format_bytes(self.states_bytes)}\n{_limits_text(plan)}",
            markup=False,
        )

    def steps(self, folder: RunFolder) -> Signals | None:
        """Nothing in this loop waits for the accelerator, except for losses that are old (see readings.py) and at a
        save, which has the loss of its step. Returns the signal that ended it early, if one did."""
        self.model.train()
        first, last = len(self.losses) + 1, self.config.steps
        display = StepDisplay(self.console, last, self.config.log_every, first)
        saves = Saves(self.config.save, folder, self.console, self.newest_saved)

        def log(record: StepRecord) -> None:
            self.losses.append(record.loss)
            if record.light_share is not None:
                self.light_shares.append(record.light_share)
            folder.log(asdict(record))
            display.show(record)

        with stop_request() as stop_signal, display, Readings(self.device) as readings:
            try:
                for step, batch in zip(range(first, last + 1), self.batches, strict=False):
                    self.step(step, batch, readings, log)
                    self.check_losses()
                    stopped = stop_signal()
                    if saves.is_due(step, step == last or stopped is not None):
                        readings.wait()
                        self.check_losses()
                        saves.begin(self.model, self.optimizer, step, self.state())
                    saves.poll()
                    if stopped is not None:
                        break
                saves.finish()
            except KeyboardInterrupt:
                saves.abandon()
                raise
            finally:
                self.newest_saved = saves.newest
        self.check_losses()
        self.saves = saves
        return stop_signal()

    def recorded_steps(self, folder: RunFolder) -> Signals | None:
        """The same, with the last step's timeline in the run folder, unless an interrupt came before the second."""
        num_before = len(self.losses)
        with hightide.record(self.model) as recording:
            stopped = self.steps(folder)
        if stopped is None or len(self.losses) - num_before > 1:
            recording.timeline.save(folder.timeline_path)
        return stopped

    def step(self, step: int, batch: dict[str, Tensor], readings: Readings, log: Callable[[StepRecord], None]) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        loss = self.model(**batch).loss
        loss.backward()
        numbers = [loss]
        if self.config.optimizer.clip_norm:
            numbers.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        stats = hightide.stats(self.model)  # now: when the loss arrives, younger steps have been counted too

        def arrived(values: list[float], step_s: float) -> None:
            loss_value, *norm = values
            log(
                StepRecord(
                    step=step,
                    loss=loss_value,
                    lr=lr,
                    grad_norm=norm[0] if norm else None,
                    step_s=step_s,
                    tokens_per_s=self.config.tokens_per_step / step_s,
                    light_share=None if stats.light_s is None else stats.light_s / step_s,
                    peak_bytes=stats.peak_bytes,
                    moved_bytes=stats.moved_bytes,
                    stall_s=stats.stall_s,
                    evictions=stats.evictions,
                    deviations=stats.deviations,
                )
            )

        readings.add(numbers, arrived)

    def check_losses(self) -> None:
        """Of all steps whose losses are there: a younger step may have run already."""
        for step, loss in enumerate(self.losses[self.num_checked :], self.num_checked + 1):
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}; lower optimizer.lr or clip gradients")
        self.num_checked = len(self.losses)

    def conclude(self, folder: RunFolder) -> None:
        """Sample first: what it makes the accelerator hold belongs into the measured peaks."""
        train_s = self.train_s
        hightide.stats(self.model).plan.save(folder.plan_path)  # the first steps may have changed it
        sample = self.config.sample
        if sample.num_bytes:
            show_sample(self.console, sample.prompt, write_sample(self.model, sample, self.config.seed))
        peaks = self.peaks()
        show_peaks(self.console, peaks)
        stats = hightide.stats(self.model)
        wear = stats.disk_wear(self.config.limits.rated_bytes())
        if "disk" in stats.peak_bytes:
            self.console.print(stats.disk_text(self.config.limits.rated_bytes()))
        self.console.print(
            f"loss {self.losses[0]:.2f} -> {self.losses[-1]:.2f} in {len(self.losses)} steps, {train_s:.0f} s"
        )
        if saves_text := self.saves.summary():
            self.console.print(saves_text)
        light_share = median(self.light_shares) if self.light_shares else None
        if light_share is not None:
            self.console.print(f"half of the steps reached {light_share:.0%} of the speed of light, or more")
        folder.write_summary(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
                "device": device_text(self.device),
                "steps": len(self.losses),
                "train_s": round(train_s, 3),
                "first_loss": self.losses[0],
                "last_loss": self.losses[-1],
                "light_share": light_share,  # the median
                "states_bytes": self.states_bytes,
                "peaks": [vars(peak) for peak in peaks],
                "disk_written_bytes_per_step": stats.disk_written_bytes_per_step,
                "disk_terabytes_per_day": stats.disk_terabytes_per_day,  # at the pace of the last step
                "saves": self.saves.num_saved,
                "save_waited_s": round(self.saves.waited_s, 3),
                "disk_days": None if wear is None else wear.days,  # that it lasts so, if its endurance was given
            }
        )

    def peaks(self) -> list[TierPeak]:
        stats = hightide.stats(self.model)
        plan, forecast, measured = stats.plan, stats.forecast, stats.peak_bytes
        peaks = [
            TierPeak("accelerator", plan.gpu_limit_bytes, forecast.gpu_bytes, measured["gpu"]),
            TierPeak("host", plan.host_limit_bytes, forecast.host_peak_bytes, measured["host"]),
        ]
        if "disk" in measured:
            peaks.append(TierPeak("disk", plan.disk_limit_bytes, forecast.disk_peak_bytes, measured["disk"]))
        return peaks
