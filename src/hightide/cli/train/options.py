"""Options of `hightide train`, and how they go on top of a settings file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hightide.cli.train.config import RENAMED, LrSchedule, OnSaveError, TrainConfig, read_settings
from hightide.cli.workload import Dtype
from hightide.data.readers import ROW_FILES, TEXT_FILES
from hightide.ir.codec import build
from hightide.ir.foreign import quoted, shown
from hightide.ir.plan import GradientDtype, Update

DATA, LEARNING, RUN, MACHINE = "Data", "Learning", "Run folder, checkpoints", "Memory and speed"


@dataclass(frozen=True)
class TrainOptions:
    """None: as in the file."""

    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; all have defaults.", show_default=False)
    ] = None
    config_option: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="A Hugging Face folder, or a name in the local cache. Default: a tiny one is made."
        ),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(metavar="RANK[:TARGETS]", help="Train LoRA adapters only, such as 16 or 16:q_proj,v_proj."),
    ] = None
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the parameters; default bfloat16, with float32 master copies.")
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="txt, jsonl, json, csv, parquet, or a folder of `datasets`. Rows have text, prompt and completion, or "
            "messages.",
            rich_help_panel=DATA,
        ),
    ] = None
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column with plain text.", rich_help_panel=DATA)
    ] = None
    completions_only: Annotated[
        bool | None,
        typer.Option(
            "--completions-only/--whole-rows",
            help="The loss counts completions and the assistant's turns only, or everything (default).",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="Several sequences in a row, which do not see each other. Default: where the model can.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None
    length: Annotated[
        int | None, typer.Option(help="Tokens per row; default 2048, or what the model takes.", rich_help_panel=DATA)
    ] = None
    sequences: Annotated[int | None, typer.Option(help="Rows per step; default 16.", rich_help_panel=DATA)] = None
    eval_data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Data to evaluate on.", rich_help_panel=DATA)
    ] = None
    eval_share: Annotated[
        float | None, typer.Option(help="Or this share of the data, such as 0.05.", rich_help_panel=DATA)
    ] = None
    eval_every: Annotated[
        int | None, typer.Option(metavar="N", help="Evaluate every N steps; default: ten times.", rich_help_panel=DATA)
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.", rich_help_panel=LEARNING)] = None
    epochs: Annotated[
        float | None, typer.Option(help="Or passes through the data; default 1.", rich_help_panel=LEARNING)
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate; default 1e-5, LoRA 1e-4.", rich_help_panel=LEARNING)
    ] = None
    schedule: Annotated[
        LrSchedule | None, typer.Option(help="How it falls; default cosine.", rich_help_panel=LEARNING)
    ] = None
    warmup_steps: Annotated[
        int | None, typer.Option(help="Until it peaks; default a tenth, at most 100.", rich_help_panel=LEARNING)
    ] = None
    clip_norm: Annotated[
        float | None, typer.Option(help="Clip gradients to this norm (default 1); 0: do not.", rich_help_panel=LEARNING)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of adapters, data and sample.", rich_help_panel=LEARNING)] = (
        None
    )
    name: Annotated[str | None, typer.Option(help="Name of the run folder.", rich_help_panel=RUN)] = None
    out: Annotated[str | None, typer.Option(help="Folder that run folders are made in.", rich_help_panel=RUN)] = None
    save_every: Annotated[
        int | None, typer.Option(metavar="N", help="Save a checkpoint every N steps.", rich_help_panel=RUN)
    ] = None
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the newest N (default 2); 0: all.", rich_help_panel=RUN)
    ] = None
    keep_every: Annotated[
        int | None, typer.Option(metavar="M", help="Keep those of every Mth step too.", rich_help_panel=RUN)
    ] = None
    on_save_error: Annotated[
        OnSaveError | None, typer.Option(help="When a save fails: train on, or stop.", rich_help_panel=RUN)
    ] = None
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the last checkpoint, or begin anew. Default: go on where --save-every finds one.",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None
    record: Annotated[
        bool, typer.Option("--record", help="Record the last step, for `hightide simulate`.", rich_help_panel=RUN)
    ] = False
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, or cpu: the simulated accelerator. Default: cuda where there is one.", rich_help_panel=MACHINE
        ),
    ] = None
    gpu: Annotated[
        str | None, typer.Option(help="Limit of accelerator memory, such as 24GiB.", rich_help_panel=MACHINE)
    ] = None
    host: Annotated[str | None, typer.Option(help="Limit of host memory, such as 96GiB.", rich_help_panel=MACHINE)] = (
        None
    )
    disk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER:SIZE", help="For what the host cannot hold. May be repeated.", rich_help_panel=MACHINE
        ),
    ] = None
    endurance: Annotated[
        str | None,
        typer.Option(
            metavar="TBW", help="What the disk is rated for, such as 600TBW: days are told.", rich_help_panel=MACHINE
        ),
    ] = None
    update: Annotated[
        Update | None, typer.Option(help="When the optimizer's updates run.", rich_help_panel=MACHINE)
    ] = None
    gradients: Annotated[
        GradientDtype | None, typer.Option(help="What finished gradients are rounded to.", rich_help_panel=MACHINE)
    ] = None
    calls: Annotated[
        int | None, typer.Option(help="Calls per step; else the plan decides.", rich_help_panel=MACHINE)
    ] = None
    micro_batch: Annotated[
        int | None, typer.Option(help="Rows per micro-batch; else the plan decides.", rich_help_panel=MACHINE)
    ] = None
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Blocks by torch.compile.", rich_help_panel=MACHINE)
    ] = None


# Where an option goes: the section and the key, by its name.
_PLACES = {
    "model": ("model", "path"),
    "dtype": ("model", "dtype"),
    "data": ("data", "path"),
    **{name: ("data", name) for name in ("column", "completions_only", "pack", "length", "sequences")},
    "eval_data": ("eval", "path"),
    "eval_share": ("eval", "share"),
    "eval_every": ("eval", "every"),
    **{name: ("optimizer", name) for name in ("lr", "schedule", "warmup_steps", "clip_norm")},
    **{name: ("limits", name) for name in ("gpu", "host", "endurance")},
    "save_every": ("save", "every"),
    "keep": ("save", "keep"),
    "keep_every": ("save", "keep_every"),
    "on_save_error": ("save", "on_error"),
    **{name: ("", name) for name in ("name", "out", "seed", "steps", "epochs", "resume", "lora")},
    **{name: ("", name) for name in ("calls", "micro_batch", "update", "gradients", "compile", "device")},
}


def load_config(path: Path | None, options: TrainOptions) -> TrainConfig:
    """Reads a settings file, if any, and puts the command line's settings on top. Checked as a whole, once."""
    if path is not None and (path.is_dir() or path.suffix.lower() in (*ROW_FILES, *TEXT_FILES)):
        raise ValueError(f"{shown(path)} is no settings file; name a model with --model, and data with --data")
    data = {} if path is None else read_settings(path)
    where = "settings" if path is None else str(path)
    for (section, old), new in RENAMED.items():
        if isinstance(data.get(section), dict) and old in data[section]:
            raise ValueError(f"{where}: {section}.{old} is now {new}; rename it")
    for section in ("model", "data"):
        if isinstance(data.get(section), str):
            data[section] = {"path": data[section]}
    if type(data.get("lora")) is int:  # a rank alone
        data["lora"] = str(data["lora"])
    for name, (section, key) in _PLACES.items():
        _override(data, where, section, key, getattr(options, name))
    _override(data, where, "limits", "disk", options.disk or None)
    if options.steps is not None and options.epochs is None:
        data.pop("epochs", None)  # what the line says is meant
    if options.epochs is not None and options.steps is None:
        data.pop("steps", None)
    try:
        config: TrainConfig = build(TrainConfig, data, where)
    except ValueError as error:
        raise ValueError(_as_given(str(error), where, options)) from error
    return config


def _as_given(message: str, where: str, options: TrainOptions) -> str:
    """With the names of settings as the line has them, where it has given them."""
    for name, (section, key) in {**_PLACES, "disk": ("limits", "disk")}.items():
        if getattr(options, name) is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if not section:
            message = message.replace(f"{where}: {key} is ", f"{option} is ")
            message = re.sub(rf"(?<![\w.-]){key}=", f"{option}=", message)
            continue
        for written in (f"{where}: {section}: {key} is ", f"{section}.{key}", f"Limits({key})"):
            message = message.replace(written, f"{option} is " if written.endswith(" is ") else option)
    return message


def _override(data: dict[str, Any], where: str, section: str, key: str, value: object) -> None:
    if value is None:
        return
    if section:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ValueError(f"{where}: {section} must be a mapping, not {quoted(data)}")
    data[key] = value
