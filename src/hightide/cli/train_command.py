"""`hightide train`: an ordinary PyTorch loop around a wrapped model. Reads top to bottom."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import hightide
from hightide.cli.config import OptimizerConfig, TrainConfig
from hightide.cli.data import batches, read_text
from hightide.cli.demo_model import build_model, write_sample
from hightide.cli.display import StepDisplay, StepRecord, TierPeak, device_text, show_peaks, show_plan, show_sample
from hightide.cli.readings import Readings
from hightide.cli.run_folder import RunFolder
from hightide.cli.stop_request import stop_request
from hightide.ir.units import format_bytes

STATE_BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, two moments of AdamW


def train(config: TrainConfig, console: Console, record: bool = False) -> bool:
    """Runs the whole command. `record`: what the last step did is written into the run folder. False: the user
    interrupted it."""
    if record and config.steps < 2:
        raise ValueError(f"--record shows a step that follows another, but steps is {config.steps}; do at least 2")
    run, stream = prepare(config, console)
    run.introduce()
    with RunFolder(config) as folder:
        hightide.stats(run.model).plan.save(folder.plan_path)
        try:
            finished = run.recorded_steps(stream, folder) if record else run.steps(stream, folder)
            if finished:
                run.conclude(folder)
        except KeyboardInterrupt:
            finished = False
        if not finished:
            console.print(f"interrupted after step {len(run.losses)} of {config.steps}")
            if record and not folder.timeline_path.exists():
                console.print("no recording: the run ended before there was one")
        names = f"metrics.jsonl, plan.json, config.yaml{', timeline.json' if folder.timeline_path.exists() else ''}"
        console.print(f"run folder: {folder.path}  ({names})", soft_wrap=True)
    return finished


def prepare(config: TrainConfig, console: Console) -> tuple[TrainingRun, Iterator[dict[str, Tensor]]]:
    """The wrapped model with all that belongs to it, and its batches."""
    text = read_text(config.data)
    stream = batches(text, config.data, config.seed)
    example = next(stream)
    model = build_model(config)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = _build_optimizer(model, config.optimizer)
    model, optimizer = hightide.wrap(
        model,
        optimizer,
        example,
        limits=config.limits.resolve(),
        micro_batch=config.micro_batch,
        update=config.update.value,
        gradients=config.gradients.value,
        compile=config.compile,
        device=config.device,
    )
    return TrainingRun(config, console, model, optimizer, num_params), itertools.chain([example], stream)


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

    def __post_init__(self) -> None:
        self.device: torch.device = next(self.model.parameters()).device
        self.losses: list[float] = []  # of step 1, 2, ...
        self.light_shares: list[float] = []  # of the steps for which they are known
        self.num_checked = 0
        self.started = time.perf_counter()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, self.config.steps, self.config.optimizer)
        )

    @property
    def states_bytes(self) -> int:
        return self.num_params * STATE_BYTES_PER_PARAMETER

    def introduce(self) -> None:
        plan = hightide.stats(self.model).plan
        show_plan(self.console, plan.explain())
        compiled = ", blocks compiled in the first step" if self.config.compile else ""
        self.console.print(
            f"device: {device_text(self.device)}{compiled}\n"
            f"{self.num_params / 1e6:.2f}M parameters; weights, gradients and moments take "
            f"{format_bytes(self.states_bytes)}\n{_limits_text(plan)}",
            markup=False,
        )

    def steps(self, stream: Iterator[dict[str, Tensor]], folder: RunFolder) -> bool:
        """Nothing in this loop waits for the accelerator, except for losses that are old: see readings.py."""
        self.model.train()
        display = StepDisplay(self.console, self.config.steps, self.config.log_every)

        def log(record: StepRecord) -> None:
            self.losses.append(record.loss)
            if record.light_share is not None:
                self.light_shares.append(record.light_share)
            folder.log(asdict(record))
            display.show(record)

        with stop_request() as is_stopped, display, Readings(self.device) as readings:
            for step, batch in zip(range(1, self.config.steps + 1), stream, strict=False):
                self.step(step, batch, readings, log)
                self.check_losses()
                if is_stopped():
                    break
        self.check_losses()
        return not is_stopped()

    def recorded_steps(self, stream: Iterator[dict[str, Tensor]], folder: RunFolder) -> bool:
        """The same, with the last step's timeline in the run folder, unless an interrupt came before the second."""
        with hightide.record(self.model) as recording:
            finished = self.steps(stream, folder)
        if finished or len(self.losses) > 1:
            recording.timeline.save(folder.timeline_path)
        return finished

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
        train_s = time.perf_counter() - self.started
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
