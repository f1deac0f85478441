"""The steps of `hightide train`: an ordinary PyTorch loop around a wrapped model."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals
from statistics import median
from typing import Any

import torch
from rich.console import Console

import hightide
from hightide.checkpoint.files.folder import DamagedCheckpoint
from hightide.cli.train.company import Company
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.display import (
    StepDisplay,
    StepRecord,
    TierPeak,
    device_text,
    show_peaks,
    show_plan,
    show_sample,
)
from hightide.cli.train.learning_rate import lr_factor
from hightide.cli.train.model_source import ModelSource, describe
from hightide.cli.train.readings import Readings
from hightide.cli.train.resume import Resumed
from hightide.cli.train.run_folder import ADAPTER, MODEL, RunFolder
from hightide.cli.train.run_state import RunState, placing
from hightide.cli.train.saves import Saves
from hightide.cli.train.stop_request import stop_request
from hightide.cli.train.trained_model import save_trained, write_sample
from hightide.cli.train.training_data import TrainingData
from hightide.data.batches import Call, RankPart, Steps, all_rows
from hightide.ir.units import counted, format_bytes, format_count

STATE_BYTES, MASTER_BYTES = 12, 4  # of each parameter that trains, in fp32
ECHO_S = 5.0  # in which torchrun hands on a Ctrl-C that its ranks have


@dataclass
class TrainingRun:
    """A wrapped model and its optimizer, the data, and all that has happened to them."""

    config: TrainConfig
    console: Console
    source: ModelSource
    data: TrainingData
    company: Company
    deciding: dict[str, Any]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    num_params: int
    calls: int = 1
    checkpoints: Path = Path()  # in the run folder, which the first rank makes

    def begin(self, resumed: Resumed | None) -> None:
        """At the first step, or behind the last one of a checkpoint."""
        assert self.config.steps is not None
        self.num_steps = self.config.steps
        self.rank_part = RankPart(self.company.rank, self.company.world, self.calls)
        self.batches = Steps(self.data.train, self.config.data.sequences, self.config.seed, self.rank_part)
        self.device: torch.device = next(self.model.parameters()).device
        self.losses: list[float] = []  # of step 1, 2, ...
        self.light_shares: list[float] = []  # of the steps for which they are known
        self.before_s, self.started = 0.0, time.perf_counter()
        self.newest_saved = 0
        if resumed is not None:
            resumed = self._load(resumed)
            self.batches.load_state_dict(resumed.state.data)
            self.losses, self.light_shares = resumed.state.losses.tolist(), resumed.state.light_shares.tolist()
            self.before_s, self.newest_saved, self.source_path = resumed.state.train_s, resumed.step, resumed.path
            for group in self.optimizer.param_groups:  # they may have changed since
                group |= self.config.optimizer.options | {"initial_lr": self.config.optimizer.lr}
        self.num_checked = len(self.losses)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: lr_factor(step, self.num_steps, self.config.optimizer),
            last_epoch=len(self.losses) - 1,  # a function of the step alone
        )

    def _load(self, resumed: Resumed) -> Resumed:
        """Sums are checked while it is read: where it is damaged, the one before is taken."""
        try:
            hightide.load(self.model, self.optimizer, resumed.path)
        except DamagedCheckpoint as error:
            older = resumed.older(error)
            older.check(self.deciding)
            return self._load(older)
        return resumed

    def state(self) -> RunState:
        return RunState(
            deciding=self.deciding,
            placing=placing(self.config, self.company.world),
            losses=torch.tensor(self.losses, dtype=torch.float64),
            light_shares=torch.tensor(self.light_shares, dtype=torch.float64),
            train_s=self.train_s,
            data=self.batches.state_dict(),
        )

    @property
    def train_s(self) -> float:
        return self.before_s + time.perf_counter() - self.started

    @property
    def states_bytes(self) -> int:
        """Weights; and of what trains the gradient and AdamW's two moments, with a master copy where it has 16 bits."""
        return sum(
            param.nbytes
            + param.requires_grad * param.numel() * (STATE_BYTES + MASTER_BYTES * (param.element_size() < 4))
            for param in self.model.parameters()
        )

    def introduce(self) -> None:
        plan = hightide.stats(self.model).plan
        if self.losses:
            where = f"resuming from step {len(self.losses)} of {self.num_steps}: {self.source_path}"
            self.console.print(where, markup=False, soft_wrap=True)
        self.console.print(self.data.text, markup=False)
        self.console.print(describe(self.source, self.config), markup=False)
        cut = f" in {self.calls} calls" if self.calls > 1 else ""
        of_ranks = f" on {self.company.world} ranks" if self.company.world > 1 else ""
        rows = counted(self.config.data.sequences, "row")
        self.console.print(f"{counted(self.num_steps, 'step')} of {rows}{of_ranks}{cut}")
        show_plan(self.console, plan.explain())
        compiled = ", blocks compiled in the first step" if self.config.compile else ""
        trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        train_text = "" if trained == self.num_params else f", of which {format_count(trained)} train"
        self.console.print(
            f"device: {device_text(self.device)}{compiled}\n"
            f"{format_count(self.num_params)} parameters{train_text}: {format_bytes(self.states_bytes)} with gradients "
            f"and moments\n{_limits_text(plan)}",
            markup=False,
        )

    def steps(self, folder: RunFolder | None) -> Signals | None:
        """Nothing in this loop waits for the accelerator, except for losses that are old (see readings.py), at an
        evaluation, and at a save, which has the loss of its step. Returns the signal that ended it early, if one did.
        `folder`: of the first rank; the others have none."""
        self.model.train()
        first, last = len(self.losses) + 1, self.num_steps
        display = StepDisplay(self.console, last, self.config.log_every, first)
        saves = Saves(self.config.save, self.checkpoints, folder, self.company, self.console, self.newest_saved)
        saves.prepare(self.model)

        def log(record: StepRecord) -> None:
            self.losses.append(record.loss)
            if record.light_share is not None:
                self.light_shares.append(record.light_share)
            if folder is not None:
                folder.log(asdict(record))
            display.show(record)

        several = self.company.world > 1
        with (
            stop_request(ECHO_S if several else 0.0) as stop_signal,
            display,
            Readings(self.device, is_steady=several) as readings,
        ):
            stopped: Signals | None = None
            try:
                for step, calls in zip(range(first, last + 1), self.batches, strict=False):
                    self.step(step, calls, readings, log)
                    self.check_losses()
                    if self._evaluates_at(step):
                        readings.wait()
                        self._evaluate(step, folder)
                        readings.restart()
                    stopped = self.company.first_signal(stop_signal())
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
        return stopped or (None if several else stop_signal())

    def recorded_steps(self, folder: RunFolder) -> Signals | None:
        """The same, with the last step's timeline in the run folder, unless an interrupt came before the second."""
        num_before = len(self.losses)
        with hightide.record(self.model) as recording:
            stopped = self.steps(folder)
        if stopped is None or len(self.losses) - num_before > 1:
            recording.timeline.save(folder.timeline_path)
        return stopped

    def step(self, step: int, calls: list[Call], readings: Readings, log: Callable[[StepRecord], None]) -> None:
        """See [Note: the loss of a step] in data/batches.py."""
        lr = self.optimizer.param_groups[0]["lr"]
        num_tokens = self.batches.num_tokens
        parts = []
        for call in calls:
            loss = self.model(**call.batch).loss * call.share
            loss.backward()
            parts.append(loss.detach())
        numbers = [torch.stack(parts).sum()]
        if self.config.optimizer.clip_norm:
            numbers.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        stats = hightide.stats(self.model)  # now: when the loss arrives, younger steps have been counted too

        def arrived(values: list[float], step_s: float) -> None:
            loss_value, *norm = values
            (total,) = self.company.sums("losses", loss_value)
            log(
                StepRecord(
                    step=step,
                    loss=total / self.company.world,
                    lr=lr,
                    grad_norm=norm[0] if norm else None,
                    step_s=step_s,
                    tokens_per_s=num_tokens / step_s,
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
                raise ValueError(f"the loss is {loss} at step {step}; lower the learning rate (--lr) or clip gradients")
        self.num_checked = len(self.losses)

    # -- evaluation

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.eval.every
        return self.data.eval is not None and every is not None and (step % every == 0 or step == self.num_steps)

    def _evaluate(self, step: int, folder: RunFolder | None) -> None:
        loss = self.evaluation_loss()
        self.console.print(f"step {step}: evaluation loss {loss:.4f}")
        if folder is not None:
            folder.log_evaluation({"step": step, "loss": loss})

    def evaluation_loss(self) -> float:
        """The mean over all tokens that are learned in the data for it."""
        assert self.data.eval is not None
        num_rows = self.rank_part.rows_per_call(self.config.data.sequences)
        total = count = 0.0
        self.model.eval()
        try:
            with torch.no_grad():
                for batch, num_learned in all_rows(self.data.eval, num_rows, self.rank_part):
                    loss = float(self.model(**batch).loss)
                    if num_learned:
                        total, count = total + loss * num_learned, count + num_learned
        finally:
            self.model.train()
        total, count = self.company.sums("evaluation", total, count)
        return total / count

    # -- the end

    def conclude(self, folder: RunFolder | None) -> None:
        """Sample first: what it makes the accelerator hold belongs into the measured peaks."""
        train_s, sample = self.train_s, self.config.sample
        if sample.tokens:
            text = write_sample(self.model, self.source.tokenizer, sample, self.config.seed)
            show_sample(self.console, sample.prompt, text)
        peaks = self.peaks()
        show_peaks(self.console, peaks)
        stats = hightide.stats(self.model)
        wear = stats.disk_wear(self.config.limits.rated_bytes())
        if "disk" in stats.peak_bytes:
            self.console.print(stats.disk_text(self.config.limits.rated_bytes()))
        steps = counted(len(self.losses), "step")
        self.console.print(f"loss {self.losses[0]:.2f} -> {self.losses[-1]:.2f} in {steps}, {train_s:.0f} s")
        if saves_text := self.saves.summary():
            self.console.print(saves_text)
        light_share = median(self.light_shares) if self.light_shares else None
        if light_share is not None:
            self.console.print(f"half of the steps reached {light_share:.0%} of the speed of light, or more")
        kind = MODEL if self.config.lora is None else ADAPTER
        save_trained(self.model, self.source.tokenizer, self.checkpoints.parent / kind, self.company)
        if folder is None:
            return
        self.console.print(f"trained: {folder.model_path}", markup=False, soft_wrap=True)
        stats.plan.save(folder.plan_path)  # the first steps may have changed it
        folder.write_summary(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
                "device": device_text(self.device),
                "warnings": list(self.data.warnings),  # of the data
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
        for_saves = (stats.save_told_bytes or 0) if stats.save_peak_bytes else 0  # in what was measured too
        peaks = [
            TierPeak("accelerator", plan.gpu_limit_bytes, forecast.gpu_bytes, measured["gpu"]),
            TierPeak("host", plan.host_limit_bytes, forecast.host_peak_bytes + for_saves, measured["host"]),
        ]
        if "disk" in measured:
            peaks.append(TierPeak("disk", plan.disk_limit_bytes, forecast.disk_peak_bytes, measured["disk"]))
        return peaks


def _limits_text(plan: hightide.Plan) -> str:
    text = f"limits: accelerator {format_bytes(plan.gpu_limit_bytes)}"
    if plan.disk_limit_bytes:
        text += f", host {format_bytes(plan.host_limit_bytes)}, disk {format_bytes(plan.disk_limit_bytes)}"
    return text
