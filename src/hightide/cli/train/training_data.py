"""The data of a run: read, tokenized with a bar, packed or padded, and told in a line or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hightide.cli.train.config import TrainConfig, parse_date
from hightide.cli.train.model_source import ModelSource
from hightide.cli.train.tiny_model import STANDARD_BYTES, STANDARD_LIBRARY
from hightide.data.batches import Batches
from hightide.data.packing import one_each, pack
from hightide.data.readers import read_rows
from hightide.data.tokens import RowKind, Sequences, tokenize
from hightide.integrations.shapes import same_rotary_length
from hightide.ir.units import counted

EVALUATIONS = 10  # in a run at most, unless it says how often


@dataclass(frozen=True)
class TrainingData:
    train: Batches
    eval: Batches | None
    checksum: int
    text: str  # what is said of it
    warnings: tuple[str, ...] = ()  # which that has too

    def settled(self, config: TrainConfig) -> TrainConfig:
        """With the number of steps, where that follows from the data."""
        steps = config.steps or math.ceil(len(self.train) * (config.epochs or 1.0) / config.data.sequences)
        every = config.eval.every
        if self.eval is not None and every is None:
            every = -(-steps // EVALUATIONS)
        return replace(config, steps=steps, epochs=None, eval=replace(config.eval, every=every))


def read_data(config: TrainConfig, source: ModelSource, console: Console) -> TrainingData:
    path = STANDARD_LIBRARY if config.data.path is None else Path(config.data.path)
    sequences = _read(path, config, source, console)
    texts, warnings = [_told(sequences)], [*_warnings(sequences)]
    held: Sequences | None = None
    if config.eval.path is not None:
        held = _read(Path(config.eval.path), config, source, console)
        texts.append(f"evaluation {_told(held)}")
        warnings += [f"evaluation: {text}" for text in _warnings(held)]
    elif config.eval.share is not None:
        num_held = max(1, round(len(sequences) * config.eval.share))
        if num_held >= len(sequences):
            raise ValueError(
                f"--eval-share {config.eval.share:g} of {counted(len(sequences), 'sequence')} leaves none to learn; "
                "give more data, or --eval-data of its own"
            )
        sequences, held = sequences.split(num_held)
        texts.append(f"evaluation: the last {counted(num_held, 'sequence')} of these")
    train = _batches(sequences, config, source)
    if len(train) < len(sequences):
        texts.append(
            f"packed into {counted(len(train), 'row')} of {config.data.length} tokens, each sequence by itself"
        )
    elif source.follows_length(config.data.length or 0):
        texts.append(
            f"every row is padded to {config.data.length} tokens: rotary embeddings of this model change where a call "
            f"has more than {same_rotary_length(source.config)}, and so all rows have the same; with --length "
            f"{same_rotary_length(source.config)} less is padded"
        )
    elif len(train.lengths) > 1:
        texts.append(f"padded to {', '.join(map(str, train.lengths))} tokens")
    if len(train) < config.data.sequences:
        warnings.append(
            f"a step of {config.data.sequences} rows is more than the data, {counted(len(train), 'row')}, so each step "
            f"learns them {config.data.sequences / len(train):.3g} times; give more data, or fewer --sequences"
        )
        texts.append(f"warning: {warnings[-1]}")
    batches = None if held is None else _batches(held, config, source)
    return TrainingData(train, batches, sequences.checksum, "\n".join(texts), tuple(warnings))


def _read(path: Path, config: TrainConfig, source: ModelSource, console: Console) -> Sequences:
    most = config.data.text_bytes
    if config.data.path is None and most is None:
        most = STANDARD_BYTES
    assert config.data.length is not None
    with _bar(console, "reading data") as progress:
        return tokenize(
            read_rows(path, progress, most),
            source.tokenizer,
            config.data.length,
            completions_only=config.data.completions_only,
            column=config.data.column,
            source=str(path),
            date=None if config.data.date is None else parse_date(config.data.date),
        )


def _batches(sequences: Sequences, config: TrainConfig, source: ModelSource) -> Batches:
    """Plain text fills its rows by itself, so all have one shape even where sequences are not packed."""
    assert config.data.length is not None
    rows = pack(sequences, config.data.length) if config.data.pack else one_each(sequences)
    one_shape = bool(config.data.pack) or bool((sequences.lengths == config.data.length).all())
    one_shape |= source.follows_length(config.data.length)
    return Batches(sequences, rows, config.data.length, source.pad_id, one_shape=one_shape)


def _told(sequences: Sequences) -> str:
    num_learned = int(sequences.is_learned.sum())
    what = "document" if sequences.kind is RowKind.TEXT else "row"
    text = (
        f"data: {counted(sequences.num_rows, what)} ({sequences.kind.value}), {counted(len(sequences), 'sequence')}, "
        f"{len(sequences.ids):,} tokens"
    )
    if num_learned < len(sequences.ids) - len(sequences):
        text += f", {num_learned:,} of them in the loss"
    return "\n".join([text, *(f"warning: {warning}" for warning in _warnings(sequences))])


def _warnings(sequences: Sequences) -> Iterator[str]:
    if sequences.num_cut:
        lost = counted(sequences.lost_tokens, "token")
        yield f"longer than --length and cut: {counted(sequences.num_cut, 'row')}, {lost} lost"
    if sequences.num_dropped:
        yield f"{counted(sequences.num_dropped, 'row')} left out: none of their tokens is in the loss"
    if not sequences.has_end:
        what = "document" if sequences.kind is RowKind.TEXT else "completion"
        yield (
            f"the tokenizer has no end token, so nothing teaches the model where a {what} ends: it will write on. Name "
            "one of its tokens as eos_token in the tokenizer_config.json of its folder, and train anew"
        )


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Callable[[float], None]]:
    bar = Progress(
        TextColumn(title),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=1.0)
        yield lambda share: bar.update(task, completed=share)
