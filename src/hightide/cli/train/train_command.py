"""`hightide train`: from settings to a trained model. Reads top to bottom."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

import torch
from rich.console import Console

import hightide
from hightide.api import wrap_again
from hightide.asked import check_disks
from hightide.cli.train.company import Company
from hightide.cli.train.config import OptimizerConfig, TrainConfig
from hightide.cli.train.model_source import ModelSource, find_model, make_tiny
from hightide.cli.train.resume import Resumed, beside_first, find_checkpoint
from hightide.cli.train.run_folder import RunFolder, check_place
from hightide.cli.train.run_state import deciding, placing
from hightide.cli.train.saves import SaveFailed
from hightide.cli.train.training_data import TrainingData, read_data
from hightide.cli.train.training_run import TrainingRun
from hightide.integrations.foreign_folder import import_transformers
from hightide.integrations.model_files import errors_only
from hightide.ir.tier import Tier
from hightide.planner.advice.helpful import limit_option, size_option
from hightide.planner.infeasible import InfeasiblePlan
from hightide.shard.agreement import FailedElsewhere


def train(config: TrainConfig, console: Console, record: bool = False) -> Signals | None:
    """Runs the whole command. `record`: what the last step did is written into the run folder. Returns the signal that
    ended it early, if one did."""
    with ExitStack() as stack:
        import_transformers()  # it sets the level itself
        stack.enter_context(errors_only("transformers"))
        company = Company.find(config.device, config.timeout_s)
        stack.callback(company.close)
        if not company.is_first:
            console = Console(file=io.StringIO())
        if company.world > 1 and config.device == "cuda":  # each has its own
            config = replace(config, device=None)
        _check_company(config, company, record)
        resumed = _found_by_first(config, console, company)
        if resumed is not None and resumed.lock is not None:
            stack.callback(resumed.lock.close)
        config = _dated(config, company, resumed)
        if config.is_tiny:  # the others find it, but where they do not see the first one's files
            company.from_first("the tiny model", lambda: str(make_tiny(config)))
        source, data, config = company.all_or_none("reading model and data", partial(_read, config, console))
        decides = deciding(config, {"model": source.checksum, "data": data.checksum})
        assert config.steps is not None
        if resumed is not None:
            resumed.check(decides)
            if resumed.is_finished(config.steps):
                console.print(resumed.finished_text(config.steps), markup=False, soft_wrap=True)
                return None
        num_left = config.steps - (0 if resumed is None else resumed.step)
        if record and num_left < 2:
            what = f"steps is {config.steps}" if resumed is None else f"{num_left} of {config.steps} steps are left"
            raise ValueError(f"--record shows a step that follows another, but {what}; do at least 2")
        run = prepare(config, console, source, data, company, decides, resumed)
        run.introduce()
        made: list[RunFolder] = []

        def make() -> str:
            made.append(RunFolder(config, None if resumed is None else resumed.folder, num_steps=len(run.losses)))
            return str(made[0].checkpoints)

        run.checkpoints = Path(company.from_first("the run folder", make))
        return _train_in(stack.enter_context(made[0]), run, record) if company.is_first else _train_beside(run)


def _found_by_first(config: TrainConfig, console: Console, company: Company) -> Resumed | None:
    """The first rank looks, and has the lock; all go on from what it finds."""
    found: list[Resumed | None] = []

    def find() -> str:
        found.append(find_checkpoint(config, console))
        if found[0] is None:
            check_place(Path(config.out))
        return "" if found[0] is None else found[0].to_text()

    text = company.from_first("a checkpoint", find)
    return found[0] if company.is_first else beside_first(text, console)


def _read(config: TrainConfig, console: Console) -> tuple[ModelSource, TrainingData, TrainConfig]:
    """With all settings that follow from the two."""
    check_disks(config.limits.resolve().disks)
    source = find_model(config, console)
    config = source.settled(config)
    data = read_data(config, source, console)
    return source, data, data.settled(config)


def _dated(config: TrainConfig, company: Company, resumed: Resumed | None) -> TrainConfig:
    """A run keeps the date on which it began, for chat templates that write it: all ranks see the first one's."""
    if config.data.date is not None:
        return config
    began = None if resumed is None else resumed.state.date
    date = began or company.from_first("the date", lambda: datetime.now().date().isoformat())
    return replace(config, data=replace(config.data, date=date))


def _check_company(config: TrainConfig, company: Company, record: bool) -> None:
    if company.world == 1:
        return
    if config.data.sequences % company.world:
        raise ValueError(
            f"{config.data.sequences} rows per step cannot be divided among {company.world} ranks; give --sequences "
            f"{-(-config.data.sequences // company.world) * company.world}"
        )
    if record:
        raise ValueError(f"--record shows the steps of one rank, and there are {company.world}; leave it out")


def _train_beside(run: TrainingRun) -> Signals | None:
    """On every rank but the first, which alone has a run folder."""
    stopped = run.steps(None)
    if stopped is None:
        run.conclude(None)
    return stopped


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
        console.print(f"interrupted after step {len(run.losses)} of {run.num_steps}")
        if record and not folder.timeline_path.exists():
            console.print("no recording: the run ended before there was one")
        if run.newest_saved:
            how = "the same command" if run.config.resume is not False else "the same command without --no-resume"
            console.print(f"step {run.newest_saved} is saved: {how} resumes from there")
    names = ["metrics.jsonl", "plan.json", "config.yaml"]
    names += [path.name for path in (folder.model_path, folder.timeline_path, folder.checkpoints) if path.exists()]
    console.print(f"run folder: {folder.path}  ({', '.join(names)})", markup=False, soft_wrap=True)
    if stopped is None and run.config.save.every is not None and run.newest_saved < len(run.losses):
        raise SaveFailed(
            f"step {len(run.losses)}, the last one, is not saved; the same command does again what is lost"
        )
    return stopped


def prepare(
    config: TrainConfig,
    console: Console,
    source: ModelSource,
    data: TrainingData,
    company: Company | None = None,
    decides: dict[str, Any] | None = None,
    resumed: Resumed | None = None,
) -> TrainingRun:
    """The wrapped model with all that belongs to it; at a checkpoint, if there is one."""
    company = company or Company()
    decides = decides or deciding(config, {"model": source.checksum, "data": data.checksum})
    model = company.all_or_none("building the model", partial(source.build, config))
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = _build_optimizer(model, config.optimizer)
    model, optimizer = _wrapped(config, data, company, model, optimizer, resumed)
    calls = hightide.stats(model).plan.accumulate
    run = TrainingRun(config, console, source, data, company, decides, model, optimizer, num_params, calls)
    run.begin(resumed)
    return run


def _wrapped(
    config: TrainConfig,
    data: TrainingData,
    company: Company,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    resumed: Resumed | None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """With the plan of the checkpoint, if what it was made for is as it was: then values are the same to the bit."""
    limits, num_rows = config.limits.resolve(), config.data.sequences // company.world
    calls = _calls(config, num_rows)
    is_as_it_was = resumed is not None and resumed.state.placing == placing(config, company.world)
    before = resumed.plan if resumed is not None and is_as_it_was else None
    wrap = hightide.wrap if before is None else partial(wrap_again, before=before)
    try:
        return wrap(
            model,
            optimizer,
            data.train.example(num_rows // (calls or 1)),
            limits=limits,
            micro_batch=config.micro_batch,
            update=config.update.value,
            gradients=config.gradients.value,
            compile=config.compile,
            device=config.device,
            accumulate=calls or "auto",
            timeout_s=config.timeout_s,
        )
    except InfeasiblePlan as error:
        if isinstance(error, FailedElsewhere) or not error.enough:  # another rank tells it
            raise
        raise ValueError(f"{error}; as options: {', or '.join(map(_as_options, error.enough))}") from error


def _as_options(sizes: Mapping[Tier, int]) -> str:
    return " ".join(limit_option(tier, size_option(size)) for tier, size in sizes.items())


def _calls(config: TrainConfig, num_rows: int) -> int | None:
    """Per step, as the settings have it; with a micro-batch that is given, one. None: the planner chooses."""
    if config.calls is None:
        return 1 if config.micro_batch is not None or num_rows == 1 else None
    if num_rows % config.calls:
        raise ValueError(f"--calls {config.calls} does not divide the {num_rows} rows of a rank")
    return config.calls


def _build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, **config.options)
