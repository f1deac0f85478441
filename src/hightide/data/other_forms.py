"""Rows in the forms in which much public data comes: what can only mean one thing is read as messages.

ShareGPT's are `conversations` of turns {"from", "value"}. Alpaca's (`instruction`, `input`, `output`) do not say with
which words a model is to see them: they are refused, with the row to write instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hightide.data.readers import Row
from hightide.ir.foreign import quoted

CONVERSATIONS = "conversations"
_FROM, _VALUE, _SYSTEM = "from", "value", "system"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", _SYSTEM: _SYSTEM}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # beside the text, which has a mark in their place
_ALPACA = ("instruction", "output")


def as_messages(row: Row, name: str) -> Row:
    """A row of ShareGPT's with its turns under this name; any other row as it is."""
    if CONVERSATIONS not in row.fields:
        return row
    turns = _turns(row.fields[CONVERSATIONS], row.where)
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):  # messages, but for their name
        return replace(row, fields={**row.fields, name: turns})
    messages = [_message(turn, f"{row.where}: turn {number}") for number, turn in enumerate(turns, 1)]
    if system := row.fields.get(_SYSTEM):
        if messages[0]["role"] == _SYSTEM or not isinstance(system, str):
            raise ValueError(
                f"{row.where}: it has {_SYSTEM} {quoted(system)} beside {CONVERSATIONS}; give it as their first turn, "
                f"once and as text: {{{_FROM!r}: {_SYSTEM!r}, {_VALUE!r}: ...}}"
            )
        messages.insert(0, {"role": _SYSTEM, "content": system})
    return replace(row, fields={**row.fields, name: messages})


def check_text_only(row: Row) -> None:
    """Where a prompt or a conversation has an image beside it, the words alone would be learned, mark and all."""
    if other := next((key for key in _MEDIA if row.fields.get(key)), None):
        raise ValueError(
            f"{row.where}: it has {quoted(other)} beside its text; this command learns from text only. Leave such rows "
            "out, or the column, if the text means the same without it"
        )


def _turns(given: object, where: str) -> list[Any]:
    """CSV has them as JSON."""
    turns = given
    if isinstance(given, str):
        try:
            turns = json.loads(given)
        except (ValueError, RecursionError):
            turns = None
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{where}: {CONVERSATIONS} are {quoted(given)}; they must be a list of "
            f'{{"{_FROM}": "human", "{_VALUE}": ...}}'
        )
    return turns


def _message(turn: object, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get(_FROM), str):
        raise ValueError(f'{where} is {quoted(turn)}; it must be a mapping with "{_FROM}" and "{_VALUE}"')
    if turn[_FROM] not in _ROLES:
        raise ValueError(
            f"{where} is from {quoted(turn[_FROM])}; {CONVERSATIONS} are of human, gpt and system. For calls of tools "
            'and their results give rows with messages: {"role": "assistant", "tool_calls": ...}, {"role": "tool", '
            '"content": ...}'
        )
    if not isinstance(turn.get(_VALUE), str):
        raise ValueError(f"{where} has {_VALUE} {quoted(turn.get(_VALUE))}; it must be text")
    return {"role": _ROLES[turn[_FROM]], "content": turn[_VALUE]}


def instead_of_alpaca(fields: Mapping[str, Any]) -> str | None:
    """What to do with a row of that form. None: it is of another."""
    if not all(name in fields for name in _ALPACA):
        return None
    given, content = "instruction", "the instruction"
    if "input" in fields:
        given, content = "instruction and input", "the instruction, an empty line, the input"
    messages = f'{{"role": "user", "content": "{content}"}}, {{"role": "assistant", "content": "the output"}}'
    return (
        f"A model is to see {given} with words around them, which such rows do not say. Write each row on a line as "
        f'{{"messages": [{messages}]}}, for a chat template; or with all words of your own as {{"prompt": "...", '
        '"completion": "..."}'
    )
