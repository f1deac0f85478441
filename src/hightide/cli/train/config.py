"""Settings of `hightide train`: nested frozen data with defaults, read strictly from YAML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from hightide.cli.workload import Dtype
from hightide.integrations.lora import Lora
from hightide.ir.codec import to_json
from hightide.ir.foreign import KEPT, MAX_DEPTH, check_plain, quoted, read_text, shown
from hightide.ir.limits import Limits
from hightide.ir.plan import GradientDtype, Update
from hightide.planner.predict.wear import parse_rating
from hightide.shard.signs import Patience

# What the tiny model of this command may have at most: a hundred times what makes sense.
MAX_LAYERS, MAX_SIZE, MAX_TOKENS = 2048, 2**20, 2**28
MAX_TEXT_BYTES, MAX_SAMPLE, MAX_NAME = 2**40, 2**20, 100
MAX_STEPS, MAX_EPOCHS = 10**12, 10**6
MAX_TIMEOUT_S = 10**7
MAX_SETTINGS_BYTES = 64 * 1024  # real ones have a few hundred, and YAML is read slowly
LEAST_VOCABULARY = 260  # bytes, and a few marks
RENAMED = {  # what settings were called when tokens were bytes
    ("data", "sequence_bytes"): "data.length, in tokens",
    ("sample", "num_bytes"): "sample.tokens",
}


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face folder, or a name in the local cache. Without one, a tiny Llama is made, of the sizes below."""

    path: str | None = None
    dtype: Dtype | None = None  # of the parameters; None: bfloat16, and float32 for the tiny one
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    feed_forward: int = 512
    vocabulary: int = 512

    def __post_init__(self) -> None:
        _expand_home(self, "path")
        if self.dtype is Dtype.FLOAT16:
            raise ValueError("--dtype float16 needs its losses scaled, which this command does not do; use bfloat16")
        for name in ("hidden", "layers", "heads", "feed_forward", "vocabulary"):
            _at_least(1, getattr(self, name), f"model.{name}")
            _at_most(MAX_LAYERS if name == "layers" else MAX_SIZE, getattr(self, name), f"model.{name}")
        _at_least(LEAST_VOCABULARY, self.vocabulary, "model.vocabulary")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"model.hidden={self.hidden} must be an even multiple of model.heads={self.heads}; "
                f"the nearest below is {self.hidden // (2 * self.heads) * 2 * self.heads or 2 * self.heads}"
            )


@dataclass(frozen=True)
class DataConfig:
    """One step learns `sequences` rows of up to `length` tokens."""

    path: str | None = None  # None: the Python standard library's own source, for the tiny model
    text_bytes: int | None = None  # of text files at most this much is read
    column: str | None = None  # where plain text is; None: in `text`
    completions_only: bool = False  # the loss counts completions, or what the assistant says
    pack: bool | None = None  # several sequences in a row; None: where the model keeps them apart
    sequences: int = 16
    length: int | None = None  # tokens; None: 2048, or what the model takes; 128 for the tiny one
    date: str | None = None  # of chat templates that write today's, such as 2026-11-18; None: when the run began

    def __post_init__(self) -> None:
        _expand_home(self, "path")
        _at_least(1, self.sequences, "data.sequences")
        if self.length is not None:
            _at_least(2, self.length, "data.length")
        _at_most(MAX_TOKENS, self.sequences * (self.length or 2), "data.sequences * data.length")
        if self.text_bytes is not None:
            _at_least(1, self.text_bytes, "data.text_bytes")
            _at_most(MAX_TEXT_BYTES, self.text_bytes, "data.text_bytes")
        if self.date is not None:
            parse_date(self.date)


@dataclass(frozen=True)
class EvalConfig:
    """Data that are not trained on. Their loss is told every so many steps, and at the last one."""

    path: str | None = None  # a file or folder of its own
    share: float | None = None  # or so much of the training data, such as 0.05: its last sequences
    every: int | None = None  # None: ten times in the run

    def __post_init__(self) -> None:
        _expand_home(self, "path")
        if self.path is not None and self.share is not None:
            raise ValueError("eval.path and eval.share are both given; choose one of --eval-data and --eval-share")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"eval.share={self.share} must be between 0 and 1, such as 0.05")
        if self.every is not None:
            _at_least(1, self.every, "eval.every")
            if self.path is None and self.share is None:
                raise ValueError(f"eval.every={self.every}, but there is nothing to evaluate on; give --eval-data")


class LrSchedule(StrEnum):
    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the learning rate warms up linearly, then falls to `final_lr_fraction` of its peak."""

    lr: float | None = None  # None: 1e-5, with LoRA 1e-4, for the tiny model 2e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # 0: no clipping
    schedule: LrSchedule = LrSchedule.COSINE
    warmup_steps: int | None = None  # None: a tenth of the steps, at most 100
    final_lr_fraction: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas has {len(self.betas)} values; AdamW takes two, such as [0.9, 0.95]")
        for name in ("lr", "eps", "weight_decay", "clip_norm", "final_lr_fraction"):
            if getattr(self, name) is not None:
                _at_least(0, getattr(self, name), f"optimizer.{name}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)} must be from 0 to below 1, such as [0.9, 0.95]")
        if self.warmup_steps is not None:
            _at_least(0, self.warmup_steps, "optimizer.warmup_steps")

    @property
    def options(self) -> dict[str, Any]:
        """Of AdamW."""
        return {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps, "weight_decay": self.weight_decay}


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
    """The text that the trained model writes at the end."""

    prompt: str = "def "
    tokens: int | None = None  # None: 60 by the tiny model, none by others
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.tokens is not None:
            _at_least(0, self.tokens, "sample.tokens")
            _at_most(MAX_SAMPLE, self.tokens, "sample.tokens")
        _at_most(MAX_SAMPLE, len(self.prompt), "the length of sample.prompt")
        if not self.prompt:
            raise ValueError("sample.prompt is empty; the model needs something to go on from")
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
                raise ValueError(
                    f"save.keep_every={self.keep_every}, but nothing is saved; set save.every too (--save-every)"
                )
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
    steps: int | None = None  # None: as many as `epochs` take; 100 for the tiny model
    epochs: float | None = None  # how often each row is learned; None: once
    log_every: int = 10  # a line is printed every so many steps; metrics are written at every step
    calls: int | None = None  # of forward and backward per step; None: the planner chooses
    micro_batch: int | None = None  # None: the planner chooses
    update: Update = Update.DEFERRED
    gradients: GradientDtype = GradientDtype.FLOAT32
    compile: bool = False  # torch.compile for blocks, equal ones once
    device: str | None = None  # None: CUDA where there is one, else cpu, the simulated accelerator
    timeout_s: float = Patience.timeout_s  # a rank that waits for another one, which lives, gives up after it
    lora: str | None = None  # RANK or RANK:TARGETS; None: all weights are trained
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    # Go on from the newest checkpoint of this name: true, it must be there; false, never; None, where there is one and
    # this run saves too.
    resume: bool | None = None

    def __post_init__(self) -> None:
        _expand_home(self, "out")
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise ValueError(f"name={quoted(self.name)} names a folder; use letters, digits, '-', '_' and '.'")
        _at_most(MAX_NAME, len(self.name), "the length of name")
        _at_least(0, self.seed, "seed")
        for name in ("steps", "log_every", "calls", "micro_batch"):
            if getattr(self, name) is not None:
                _at_least(1, getattr(self, name), name)
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs={self.epochs} must be more than 0")
        _at_most(MAX_EPOCHS, self.epochs or 0.0, "epochs")
        _at_most(MAX_STEPS, self.steps or 0, "steps")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g} are both given; choose one")
        if self.calls is not None and self.data.sequences % self.calls:
            raise ValueError(
                f"calls={self.calls} does not divide data.sequences={self.data.sequences}; choose a divisor of it"
            )
        if self.micro_batch is not None and self.micro_batch > self.data.sequences:
            raise ValueError(
                f"micro_batch={self.micro_batch} is more than data.sequences={self.data.sequences}, the rows of a "
                "step; choose fewer, or leave it out"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s:g} must be more than 0")
        _at_most(MAX_TIMEOUT_S, self.timeout_s, "timeout_s")
        if self.lora is not None:
            Lora.parse(self.lora)
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={quoted(self.device)} is not supported; use 'cuda', 'cpu', or leave it out")
        if self.update is Update.IN_BACKWARD and self.optimizer.clip_norm:
            raise ValueError(
                f"update=in_backward cannot clip: the global norm is known only after backward, and "
                f"optimizer.clip_norm={self.optimizer.clip_norm}. Set it to 0 (--clip-norm 0), or use update=deferred"
            )
        if self.model.path is not None and self.data.path is None:
            raise ValueError("a model without data: name a file or folder to learn from with --data (data.path)")

    @property
    def is_tiny(self) -> bool:
        """The model is made on the spot."""
        return self.model.path is None

    def to_yaml(self) -> str:
        return yaml.safe_dump(json.loads(to_json(self)), sort_keys=False)


def parse_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"data.date={quoted(text)} is no date; write it as year-month-day, such as 2026-11-18"
        ) from None


def _expand_home(config: object, name: str) -> None:
    """A shell does not in `--out=~/runs`, and nobody does in a file of settings."""
    path = getattr(config, name)
    if path is not None:
        object.__setattr__(config, name, os.path.expanduser(path))


def _at_least(least: float, value: float, name: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _at_most(most: float, value: float, name: str) -> None:
    if value > most:
        raise ValueError(f"{name}={value} must be at most {most}")


class _BadSettings(ValueError):
    pass


class _StrictLoader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number, 2026-11-18 is text, a key given twice is an error, and so is an
    alias, which can stand for much more than it says."""

    yaml_implicit_resolvers = {  # noqa: RUF012 -- as PyYAML has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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


def read_settings(path: Path) -> dict[str, Any]:
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
