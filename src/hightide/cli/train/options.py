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
        Path | None,
        typer.Argument(metavar="CONFIG.yaml", help="A settings file; every setting has a default.", show_default=False),
    ] = None
    config_option: Annotated[Path | None, typer.Option("--config", help="The settings file, as an option.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A Hugging Face folder, or a name in the local cache. Default: a tiny model.",
        ),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(metavar="RANK[:TARGETS]", help="Train LoRA adapters only, e.g. 16 or 16:q_proj,v_proj."),
    ] = None
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of parameters; default bfloat16, with float32 master copies.")
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A txt, jsonl, json, csv or parquet file, or a folder of `datasets`. Rows have `text`, `prompt` and "
            "`completion`, or `messages`.",
            rich_help_panel=DATA,
        ),
    ] = None
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column with plain text; default text.", rich_help_panel=DATA)
    ] = None
    completions_only: Annotated[
        bool | None,
        typer.Option(
            "--completions-only/--whole-rows",
            help="Compute the loss on completions and assistant turns only, or on whole rows (default).",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="Put several sequences into one row, masked from each other. Default: where the model supports it.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None
    length: Annotated[
        int | None, typer.Option(help="Tokens per row; default 2048, or the model's maximum.", rich_help_panel=DATA)
    ] = None
    sequences: Annotated[int | None, typer.Option(help="Rows per step; default 16.", rich_help_panel=DATA)] = None
    eval_data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Data to evaluate on.", rich_help_panel=DATA)
    ] = None
    eval_share: Annotated[
        float | None, typer.Option(help="Or hold out this share of the data, e.g. 0.05.", rich_help_panel=DATA)
    ] = None
    eval_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="Evaluate every N steps; default: ten times in the run.", rich_help_panel=DATA),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.", rich_help_panel=LEARNING)] = None
    epochs: Annotated[
        float | None, typer.Option(help="Or number of passes through the data; default 1.", rich_help_panel=LEARNING)
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate; default 1e-5, with LoRA 1e-4.", rich_help_panel=LEARNING)
    ] = None
    schedule: Annotated[
        LrSchedule | None, typer.Option(help="How the learning rate decays; default cosine.", rich_help_panel=LEARNING)
    ] = None
    warmup_steps: Annotated[
        int | None,
        typer.Option(help="Warm-up steps; default a tenth of all steps, at most 100.", rich_help_panel=LEARNING),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(help="Clip gradients to this norm; default 1, 0 turns it off.", rich_help_panel=LEARNING),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed for adapters, data order and the sample.", rich_help_panel=LEARNING)
    ] = None
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run folder.", rich_help_panel=RUN)] = (
        None
    )
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Parent folder of run folders; default runs.", rich_help_panel=RUN),
    ] = None
    save_every: Annotated[
        int | None, typer.Option(metavar="N", help="Save a checkpoint every N steps.", rich_help_panel=RUN)
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep the newest N checkpoints; default 2, 0 keeps all.", rich_help_panel=RUN),
    ] = None
    keep_every: Annotated[
        int | None, typer.Option(metavar="M", help="Also keep the checkpoint of every Mth step.", rich_help_panel=RUN)
    ] = None
    on_save_error: Annotated[
        OnSaveError | None, typer.Option(help="When a save fails: go on training, or stop.", rich_help_panel=RUN)
    ] = None
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Resume from the last checkpoint, or start over. Default: resume if --save-every finds one.",
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
            metavar="cuda|cpu",
            help="cuda, or cpu (the simulated accelerator). Default: cuda if there is a GPU.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="How much GPU memory to use, e.g. 24GiB. Default: what is free.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="How much host memory to use, e.g. 96GiB. Default: what is free.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    disk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER:SIZE",
            help="A local disk for what the host cannot hold. Repeat for several.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    endurance: Annotated[
        str | None,
        typer.Option(
            metavar="TBW",
            help="What the disk is rated for, e.g. 600TBW: shows how many days it will last.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    update: Annotated[
        Update | None,
        typer.Option(
            metavar="WHEN",
            help="When updates run: deferred (default), beside the next forward; or in_backward, which is faster "
            "and needs --clip-norm 0.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    gradients: Annotated[
        GradientDtype | None,
        typer.Option(
            help="Precision of finished gradients: float32, or param, the parameter's dtype (less traffic).",
            rich_help_panel=MACHINE,
        ),
    ] = None
    calls: Annotated[
        int | None,
        typer.Option(help="Forward/backward calls per step; default: the plan decides.", rich_help_panel=MACHINE),
    ] = None
    micro_batch: Annotated[
        int | None, typer.Option(help="Rows per micro-batch; default: the plan decides.", rich_help_panel=MACHINE)
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile blocks with torch.compile.", rich_help_panel=MACHINE),
    ] = None
    timeout_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long ranks wait for one that is alive and busy; default 1800.",
            rich_help_panel=MACHINE,
        ),
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
    **{name: ("", name) for name in ("calls", "micro_batch", "update", "gradients", "compile", "device", "timeout_s")},
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
