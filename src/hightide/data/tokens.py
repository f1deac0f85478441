"""Rows as sequences of tokens: plain text, a prompt with its completion, or a conversation in the tokenizer's template.

The first row says which of the three all of them are. Text that is longer than a sequence is cut into several, and
nothing of it is lost; the end of a longer conversation or completion is, and how often is counted."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hightide.data.conversation import ASSISTANT, TOOLS, Conversations, check_characters, roles_of
from hightide.data.other_forms import as_messages, check_text_only, instead_of_alpaca
from hightide.data.readers import Row
from hightide.ir.foreign import quoted, shown
from hightide.ir.units import counted

NAMED_ROLES = 8
TEXT, PROMPT, COMPLETION, MESSAGES = "text", "prompt", "completion", "messages"


class RowKind(StrEnum):
    TEXT = "text"
    PAIRS = "prompt and completion"
    CHAT = "conversation"


class Learned(NamedTuple):
    """Tokens, and which of them the loss is to count."""

    ids: list[int]
    is_learned: list[bool]


@dataclass(frozen=True)
class Sequences:
    """End to end: sequence i is ids[starts[i] : starts[i + 1]]. The first token of a sequence is never predicted, so it
    is not learned."""

    ids: Tensor  # int32
    is_learned: Tensor  # bool
    starts: Tensor  # int64, one more than there are sequences
    kind: RowKind
    num_rows: int = 0
    num_cut: int = 0  # rows that lost their end
    num_dropped: int = 0  # rows of which nothing is learned
    lost_tokens: int = 0
    has_end: bool = True  # each document or completion ends with a token that says so, or a template writes one

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    @property
    def num_learned(self) -> Tensor:
        """Tokens of each sequence, none of which is empty."""
        flags = self.is_learned.numpy()
        return torch.from_numpy(np.add.reduceat(flags, self.starts[:-1].numpy(), dtype=np.int64))

    @property
    def checksum(self) -> int:
        """Of all that a run learns from: the same data have it, wherever they lie."""
        found = 0
        for tensor in (self.ids, self.is_learned, self.starts):
            found = zlib.crc32(tensor.numpy().data, found)
        return found

    def split(self, num_last: int) -> tuple[Sequences, Sequences]:
        """The first ones, and the last `num_last`."""
        first = len(self) - num_last
        parts = []
        for begin, end in ((0, first), (first, len(self))):
            starts = self.starts[begin : end + 1]
            low, high = int(starts[0]), int(starts[-1])
            parts.append(Sequences(self.ids[low:high], self.is_learned[low:high], starts - low, self.kind))
        return parts[0], parts[1]


@dataclass
class _Collected:
    """Grows as rows are read."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    is_learned: bytearray = field(default_factory=bytearray)
    starts: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, ids: Iterable[int], is_learned: Iterable[bool]) -> None:
        self.ids.extend(ids)
        self.is_learned.extend(is_learned)
        self.is_learned[self.starts[-1]] = False
        self.starts.append(len(self.ids))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.frombuffer(self.ids, dtype=torch.int32) if self.ids else torch.empty(0, dtype=torch.int32)
        flags = torch.frombuffer(self.is_learned, dtype=torch.bool) if self.ids else torch.empty(0, dtype=torch.bool)
        return ids, flags, torch.frombuffer(self.starts, dtype=torch.int64)


def tokenize(
    rows: Iterable[Row],
    tokenizer: Any,
    length: int,
    *,
    completions_only: bool = False,
    column: str | None = None,
    source: str = "the data",
    date: date | None = None,
) -> Sequences:
    """Sequences of at most `length` tokens. `tokenizer`: of transformers. `completions_only`: the loss counts what
    follows a prompt, or what the assistant says, and nothing else. `column`: where plain text is, if not in `text`.
    `date`: what a chat template takes for today; None: today."""
    collected = _Collected()
    rest = (_in_our_form(row, column) for row in rows)
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{source} has no rows; give data with at least one")
    kind = _kind_of(first, column)
    if completions_only and kind is RowKind.TEXT:
        raise ValueError(
            f"{first.where}: plain text has no completions; leave --completions-only out, or give rows with "
            f"{PROMPT} and {COMPLETION}, or with {MESSAGES}"
        )
    make = _maker(kind, tokenizer, completions_only, date)
    num_rows = num_cut = num_dropped = lost_tokens = 0
    roles: set[str] = set()  # of conversations of which nothing is learned
    for row in _chained(first, rest):
        if _kind_of(row, column) is not kind:
            raise ValueError(
                f"{row.where}: it is {_kind_of(row, column).value}, and the rows before it are {kind.value}; keep the "
                "two in files of their own"
            )
        if kind is RowKind.TEXT:
            text = _text_of(row, column or TEXT)
            num_rows += not row.goes_on
            _add_text(collected, tokenizer, text, row, length)
            continue
        num_rows += 1
        check_text_only(row)
        learned = make(row)
        if not any(learned.is_learned[1:length]):
            num_dropped += 1
            if kind is RowKind.CHAT and len(roles) < NAMED_ROLES:
                roles |= set(roles_of(row.fields[MESSAGES]))
            continue
        if len(learned.ids) > length:
            num_cut, lost_tokens = num_cut + 1, lost_tokens + len(learned.ids) - length
        collected.add(learned.ids[:length], learned.is_learned[:length])
    if kind is RowKind.TEXT:
        _end_text(collected, length)
    has_end = kind is RowKind.CHAT or bool(last_ids(tokenizer))
    made = Sequences(*collected.tensors(), kind, num_rows, num_cut, num_dropped, lost_tokens, has_end)
    if not len(made):
        rows_text = counted(num_rows, "row")
        why = f"{rows_text} without text; give some"
        if num_dropped and roles and ASSISTANT not in roles:
            why = (
                f"in {rows_text} no message has the role {ASSISTANT!r}, which --completions-only learns; they have "
                f"{', '.join(map(quoted, sorted(roles)))}"
            )
        elif num_dropped:
            why = (
                f"in {rows_text} nothing within {length} tokens is learned; a larger --length, or no --completions-only"
            )
        raise ValueError(f"{source} has nothing to learn: {why}")
    return made


def _chained(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


def _in_our_form(row: Row, column: str | None) -> Row:
    """Columns that a row has under our names are taken, and it may have others beside them."""
    is_pair = PROMPT in row.fields and COMPLETION in row.fields
    is_ours = column is not None or is_pair or MESSAGES in row.fields or TEXT in row.fields
    return row if is_ours else as_messages(row, MESSAGES)


def _kind_of(row: Row, column: str | None) -> RowKind:
    if column is not None:
        if column not in row.fields:
            raise ValueError(f"{row.where}: there is no column {quoted(column)}; it has {_names(row.fields)}")
        return RowKind.TEXT
    if MESSAGES in row.fields:
        return RowKind.CHAT
    if PROMPT in row.fields and COMPLETION in row.fields:
        return RowKind.PAIRS
    if TEXT in row.fields:
        return RowKind.TEXT
    remedy = instead_of_alpaca(row.fields) or "Rename its columns, or name the one with the text: --column NAME"
    raise ValueError(
        f"{row.where}: a row has {TEXT}, or {PROMPT} and {COMPLETION}, or {MESSAGES}; this one has "
        f"{_names(row.fields)}. {remedy}"
    )


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(shown(name) for name in list(fields)[:8]) or "nothing"


def _text_of(row: Row, name: str) -> str:
    value = row.fields[name]
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        raise ValueError(
            f"{row.where}: {name} is a list of messages; put those of {PROMPT} and {COMPLETION} into one list, "
            f"{MESSAGES}: --completions-only learns the assistant's"
        )
    if not isinstance(value, str):
        remedy = "leave such rows out" if value is None else "it must be text"
        raise ValueError(f"{row.where}: {name} is {'empty (null)' if value is None else quoted(value)}; {remedy}")
    check_characters(value, row.where)
    return value


# -- the three kinds -------------------------------------------------------------------------------------------------


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def first_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("").input_ids[:1] == [begin] else []


def last_ids(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _add_text(collected: _Collected, tokenizer: Any, text: str, row: Row, length: int) -> None:
    """A document may come in several rows. What is full is a sequence; the rest stays open at the end."""
    ids = plain_ids(tokenizer, text)
    is_open = collected.starts[-1] < len(collected.ids)
    if not is_open and ids:
        collected.ids.extend(first_ids(tokenizer))
    collected.ids.extend(ids)
    _cut_full(collected, length)
    if not row.goes_on:
        if collected.starts[-1] < len(collected.ids) or ids:
            collected.ids.extend(last_ids(tokenizer))
        _end_text(collected, length)


def _cut_full(collected: _Collected, length: int) -> None:
    while len(collected.ids) - collected.starts[-1] > length:
        collected.starts.append(collected.starts[-1] + length)


def _end_text(collected: _Collected, length: int) -> None:
    _cut_full(collected, length)
    begin, end = collected.starts[-1], len(collected.ids)
    if end - begin > 1:
        collected.starts.append(end)
    elif end > begin:  # one token: there is nothing to predict
        del collected.ids[begin:]
    added = len(collected.ids) - len(collected.is_learned)
    old = len(collected.is_learned)
    collected.is_learned.extend(b"\1" * added)
    for start in reversed(collected.starts):
        if start < old:
            break
        if start < len(collected.is_learned):
            collected.is_learned[start] = False


def _maker(kind: RowKind, tokenizer: Any, completions_only: bool, today: date | None) -> Callable[[Row], Learned]:
    if kind is RowKind.CHAT:
        conversations = Conversations(tokenizer, completions_only, today)
        return lambda row: Learned(*conversations.tokens(row.fields[MESSAGES], row.where, row.fields.get(TOOLS)))
    begin, end = first_ids(tokenizer), last_ids(tokenizer)

    def pair(row: Row) -> Learned:
        first, second = pair_ids(tokenizer, _text_of(row, PROMPT), _text_of(row, COMPLETION))
        prompt, completion = [*begin, *first], [*second, *end]
        return Learned([*prompt, *completion], [not completions_only] * len(prompt) + [True] * len(completion))

    return pair


def pair_ids(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Of a completion the tokens that go on from the prompt's own, which are all that a model is given later. Some
    tokenizers put a space before whatever they are given: a completion by itself would have one that is not there, so
    it is taken from behind something."""
    own = plain_ids(tokenizer, prompt)
    for before, ids in ((prompt, own), ("\n", plain_ids(tokenizer, "\n"))):  # where a token would be of both
        whole = plain_ids(tokenizer, before + completion)
        if whole[: len(ids)] == ids:
            return own, whole[len(ids) :]
    return own, plain_ids(tokenizer, completion)
