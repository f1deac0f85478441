"""Settings of `hightide train`: nested frozen data with defaults, read strictly from YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hightide.ir.codec import build, to_json
from hightide.ir.foreign import KEPT, MAX_DEPTH, check_plain, quoted, read_text, shown
from hightide.ir.limits import Limits
from hightide.ir.plan import GradientDtype, Update
from hightide.planner.predict.wear import parse_rating

# What the small model of this command may have at most: a hundred times what makes sense.
MAX_LAYERS, MAX_SIZE, MAX_TOKENS = 2048, 2**20, 2**28
MAX_TEXT_BYTES, MAX_SAMPLE_BYTES, MAX_NAME = 2**32, 2**20, 100
MAX_SETTINGS_BYTES = 64 * 1024  # real ones have a few hundred, and YAML is read slowly


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped model over bytes."""

    hidden: int = 192
    layers: int = 6
    heads: int = 6
    feed_forward: int = 512

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "feed_forward"):
            _at_least(1, getattr(self, name), f"model.{name}")
            _at_most(MAX_LAYERS if name == "layers" else MAX_SIZE, getattr(self, name), f"model.{name}")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"model.hidden={self.hidden} must be an even multiple of model.heads={self.heads}; "
                f"the nearest below is {self.hidden // (2 * self.heads) * 2 * self.heads or 2 * self.heads}"
            )


@dataclass(frozen=True)
class DataConfig:
    """One step's batch is `sequences` windows of `sequence_bytes` bytes (one byte is one token)."""

    path: str | None = None  # a file, or a folder of .py files; None: the Python standard library's own source
    text_bytes: int = 4_000_000  # at most this much text is read
    sequences: int = 16
    sequence_bytes: int = 128

    def __post_init__(self) -> None:
        _at_least(1, self.sequences, "data.sequences")
        _at_least(2, self.sequence_bytes, "data.sequence_bytes")
        _at_most(MAX_TOKENS, self.sequences * self.sequence_bytes, "data.sequences * data.sequence_bytes")
        _at_most(MAX_TEXT_BYTES, self.text_bytes, "data.text_bytes")
        _at_least(self.sequence_bytes + 1, self.text_bytes, "data.text_bytes")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the learning rate warms up linearly, then falls along a cosine to `final_lr_fraction` of its peak."""

    lr: float = 2e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # 0: no clipping
    warmup_steps: int = 30
    final_lr_fraction: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas has {len(self.betas)} values; AdamW takes two, such as [0.9, 0.95]")
        for name in ("lr", "eps", "weight_decay", "clip_norm", "final_lr_fraction"):
            _at_least(0, getattr(self, name), f"optimizer.{name}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)} must be from 0 to below 1, such as [0.9, 0.95]")
        _at_least(0, self.warmup_steps, "optimizer.warmup_steps")


@dataclass(frozen=True)
class LimitsConfig:
    """Bytes as an integer or as text such as 24MiB. None: what the machine has."""

    gpu: int | str | None = None
    host: int | str | None = None
    disk: str | tuple[str, ...] | None = None  # a folder and its size, such as /scratch:200GiB, or a list of such
    endurance: str | None = None  # bytes that may be written to the disk in its life, by its maker, such as 600TBW

    def __post_init__(self) -> None:
        self.resolve()
        self.rated_bytes()

    def rated_bytes(self) -> int | None:
        return None if self.endurance is None else parse_rating(self.endurance, "limits.endurance")

    def resolve(self) -> Limits:
        return Limits(gpu=self.gpu, host=self.host, disk=self.disk)


@dataclass(frozen=True)
class SampleConfig:
    """The text that the trained model writes at the end; `num_bytes: 0` leaves it out."""

    prompt: str = "def "
    num_bytes: int = 160
    temperature: float = 0.7

    def __post_init__(self) -> None:
        _at_least(0, self.num_bytes, "sample.num_bytes")
        _at_most(MAX_SAMPLE_BYTES, self.num_bytes, "sample.num_bytes")
        _at_most(MAX_SAMPLE_BYTES, len(self.prompt), "the length of sample.prompt")
        if not self.prompt:
            raise ValueError("sample.prompt is empty; the model needs at least one byte to go on from")
        if self.temperature <= 0:
            raise ValueError(f"sample.temperature={self.temperature} must be more than 0")


class OnSaveError(StrEnum):
    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints in the run folder: every so many steps, at the last one, and when a signal ends the run."""

    every: int | None = None  # None: no checkpoints
    keep: int = 2  # the newest so many stay; 0: all of them
    keep_every: int | None = None  # and those of every so many steps
    on_error: OnSaveError = OnSaveError.WARN  # a save that fails, as on a full disk: go on training, or stop

    def __post_init__(self) -> None:
        if self.every is not None:
            _at_least(1, self.every, "save.every")
        _at_least(0, self.keep, "save.keep")
        if self.keep_every is not None:
            _at_least(1, self.keep_every, "save.keep_every")
            if self.every is None:
                raise ValueError(f"save.keep_every={self.keep_every}, but nothing is saved; set save.every too")
            if self.keep_every % self.every:
                raise ValueError(
                    f"save.keep_every={self.keep_every} must be a multiple of save.every={self.every}: "
                    f"no other steps are saved; {self.every * max(1, round(self.keep_every / self.every))} is"
                )


@dataclass(frozen=True)
class TrainConfig:
    name: str = "train"  # the run folder is <out>/<name>-001, -002, ...
    out: str = "runs"
    seed: int = 0
    steps: int = 100
    log_every: int = 10  # a line is printed every so many steps; metrics are written at every step
    micro_batch: int | None = None  # None: the planner chooses
    update: Update = Update.DEFERRED
    gradients: GradientDtype = GradientDtype.FLOAT32
    compile: bool = False  # torch.compile for blocks, equal ones once
    device: str | None = None  # None: CUDA where there is one, else cpu, the simulated accelerator
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    # Go on from the newest checkpoint of this name: true, it must be there; false, never; None, where there is one and
    # this run saves too.
    resume: bool | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise ValueError(f"name={quoted(self.name)} names a folder; use letters, digits, '-', '_' and '.'")
        _at_most(MAX_NAME, len(self.name), "the length of name")
        _at_least(0, self.seed, "seed")
        _at_least(1, self.steps, "steps")
        _at_least(1, self.log_every, "log_every")
        if self.micro_batch is not None:
            _at_least(1, self.micro_batch, "micro_batch")
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={quoted(self.device)} is not supported; use 'cuda', 'cpu', or leave it out")
        if self.update is Update.IN_BACKWARD and self.optimizer.clip_norm:
            raise ValueError(
                f"update=in_backward cannot clip: the global norm is known only after backward, and "
                f"optimizer.clip_norm={self.optimizer.clip_norm}. Set it to 0 (--clip-norm 0), or use update=deferred"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.data.sequences * self.data.sequence_bytes

    def to_yaml(self) -> str:
        return yaml.safe_dump(json.loads(to_json(self)), sort_keys=False)


@dataclass(frozen=True)
class TrainOptions:
    """What the command line says; None: as in the file."""

    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; all have defaults.", show_default=False)
    ] = None
    config_option: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None
    device: Annotated[str | None, typer.Option(help="cuda, or cpu: the simulated accelerator.")] = None
    gpu: Annotated[str | None, typer.Option(help="Limit of accelerator memory, such as 24MiB.")] = None
    host: Annotated[str | None, typer.Option(help="Limit of host memory, such as 2GiB.")] = None
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER:SIZE", help="For what the host cannot hold. May be repeated."),
    ] = None
    endurance: Annotated[
        str | None, typer.Option(metavar="TBW", help="What the disk is rated for, such as 600TBW: days are told.")
    ] = None
    update: Annotated[Update | None, typer.Option(help="When the optimizer's updates run.")] = None
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch.")] = None
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm; 0: do not.")] = None
    name: Annotated[str | None, typer.Option(help="Name of the run folder.")] = None
    out: Annotated[str | None, typer.Option(help="Folder that run folders are made in.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data and sample.")] = None
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Save a checkpoint every N steps.")] = None
    keep: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N (default 2); 0: all.")] = None
    keep_every: Annotated[int | None, typer.Option(metavar="M", help="Keep those of every Mth step too.")] = None
    on_save_error: Annotated[OnSaveError | None, typer.Option(help="When a save fails: train on, or stop.")] = None
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the last checkpoint, or begin anew. Default: go on where --save-every finds one.",
            show_default=False,
        ),
    ] = None
    record: Annotated[bool, typer.Option("--record", help="Record the last step, for `hightide simulate`.")] = False


def load_config(path: Path | None, options: TrainOptions) -> TrainConfig:
    """Reads a settings file, if any, and puts the command line's settings on top. Checked as a whole, once."""
    data = {} if path is None else _read_yaml(path)
    where = "settings" if path is None else str(path)
    for key in ("name", "out", "seed", "steps", "micro_batch", "update", "device", "resume"):
        _override(data, where, "", key, getattr(options, key))
    _override(data, where, "limits", "gpu", options.gpu)
    _override(data, where, "limits", "host", options.host)
    _override(data, where, "limits", "disk", options.disk or None)
    _override(data, where, "limits", "endurance", options.endurance)
    _override(data, where, "optimizer", "clip_norm", options.clip_norm)
    _override(data, where, "save", "every", options.save_every)
    _override(data, where, "save", "keep", options.keep)
    _override(data, where, "save", "keep_every", options.keep_every)
    _override(data, where, "save", "on_error", options.on_save_error)
    config: TrainConfig = build(TrainConfig, data, where)
    return config


def _override(data: dict[str, Any], where: str, section: str, key: str, value: object) -> None:
    if value is None:
        return
    if section:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ValueError(f"{where}: {section} must be a mapping, not {quoted(data)}")
    data[key] = value


def _at_least(least: float, value: float, name: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _at_most(most: float, value: float, name: str) -> None:
    if value > most:
        raise ValueError(f"{name}={value} must be at most {most}")


class _BadSettings(ValueError):
    pass


class _StrictLoader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number, a key given twice is an error, and so is an alias, which can stand
    for much more than it says."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise _BadSettings(f"{self.name}, line {line}: an alias (*); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise _BadSettings(f"{self.name}, line {line}: the key {quoted(key)} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(  # YAML 1.1, which PyYAML follows, reads 1e-3 as text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    text = read_text(path, "settings file", MAX_SETTINGS_BYTES)
    try:
        loader = _StrictLoader(text)
        loader.name = shown(path)
        data = loader.get_single_data()
    except _BadSettings:
        raise
    except yaml.YAMLError as error:
        raise ValueError(f"{shown(path)} is not YAML: {shown(error, KEPT)}") from error
    except RecursionError:
        raise ValueError(f"{shown(path)} is nested deeper than {MAX_DEPTH} levels; it holds no settings") from None
    except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError) as error:  # of numbers, dates and tags
        raise ValueError(f"{shown(path)} is not YAML that holds settings: {shown(error, KEPT)}") from error
    check_plain(data, shown(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{shown(path)} must hold settings as 'key: value' lines, not {quoted(data)}")
    return data
