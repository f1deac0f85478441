"""Conversations as tokens, by the tokenizer's own chat template, and which of them the assistant says.

[Note: what the assistant says] A template may mark it itself ({% generation %}), and then it is asked. Most do not:
then the conversation is written up to each of the assistant's turns, with the words that begin one, and up to its end.
Where both are beginnings of the whole, what lies between them is the turn. Templates that write earlier turns in
another way later (without their thoughts, say) are found out by that. There a turn is its content with what ended it,
if both follow the words that begin one; else it is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from hightide.ir.foreign import KEPT, quoted, shown

ASSISTANT = "assistant"
TOOLS, TOOL_CALLS = "tools", "tool_calls"
_ASKS_DATE = "strftime_now"  # what transformers lets templates call
# A template that writes each part of a content by its type. Others write text that is given as one.
_PARTS = re.compile(r"""(\[["']type["']\]|\.type)\s*==\s*["']text["']""")
# A template that writes what a function is called with as JSON: text that is JSON already would get quotes around it,
# unless the template asks for that itself.
_WRITES_JSON = re.compile(r"""arguments["'\]\s]*\|\s*tojson""")
_TAKES_TEXT = re.compile(r"""arguments["'\]\s]*\bis\s+(not\s+)?(string|mapping)\b""")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversations:
    def __init__(self, tokenizer: Any, completions_only: bool, today: date | None = None) -> None:
        """`today`: for a template that asks for the date (`strftime_now`), so that a run which goes on tomorrow has the
        same data. None: the clock says."""
        self._tokenizer, self._completions_only = tokenizer, completions_only
        template = getattr(tokenizer, "chat_template", None)
        self._given: dict[str, Any] = {}  # beside the messages; what a template is given goes before its globals
        if today is not None and _ASKS_DATE in str(template):
            self._given[_ASKS_DATE] = today.strftime
        self._has_template, self._writes_tools = template is not None, TOOLS in str(template)
        self._writes_calls = TOOL_CALLS in str(template)
        self._writes_json = _WRITES_JSON.search(str(template)) is not None and _TAKES_TEXT.search(str(template)) is None
        self._looks_into_parts = _PARTS.search(str(template)) is not None
        self._is_marked = isinstance(template, str) and _MARKED.search(template) is not None

    def tokens(self, messages: object, where: str, tools: object = None) -> tuple[list[int], list[bool]]:
        """With what is learned of them. `where`: the row, for messages. `tools`: what the assistant may call, which the
        template describes."""
        if not self._has_template:
            raise ValueError(
                f"{where}: it has messages, and the model's tokenizer has no chat template; take the instruct variant "
                "of the model, put a chat_template.jinja into its folder, or give rows with prompt and completion"
            )
        turns = _checked(messages, where)
        if not self._writes_calls and any(turn.get(TOOL_CALLS) for turn in turns):
            raise ValueError(
                f"{where}: a message has {TOOL_CALLS}, and the chat template writes none; take a model whose template "
                "does, or leave such rows out"
            )
        if self._writes_json:
            turns = [_with_mappings(turn) for turn in turns]
        if not self._looks_into_parts:
            turns = _as_text(turns, where)
        self._given[TOOLS] = _checked_tools(tools, where)
        if self._given[TOOLS] is not None and not self._writes_tools:
            raise ValueError(
                f"{where}: it has {TOOLS}, and the chat template writes none; take a model whose template does, or "
                "leave the column out"
            )
        if self._completions_only and self._is_marked:
            return self._as_marked(turns, where)
        text = self._written(turns, where)
        if not self._completions_only:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            return ids, [True] * len(ids)
        return self._between(text, self._spans(turns, text, where), where)

    def _written(self, turns: Sequence[dict[str, Any]], where: str, begins_turn: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=begins_turn, **self._given
            )
        except Exception as error:  # of the template, which raises what it likes
            raise ValueError(
                f"{where}: the chat template does not take these messages: {shown(error, KEPT)}; roles are "
                f"{', '.join(str(turn['role']) for turn in turns[:8]) or 'none'}"
            ) from error
        check_characters(text, where)
        return text

    def _as_marked(self, turns: list[dict[str, Any]], where: str) -> tuple[list[int], list[bool]]:
        try:
            made = self._tokenizer.apply_chat_template(
                turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self._given
            )
        except Exception as error:
            raise ValueError(f"{where}: the chat template does not take it: {shown(error, KEPT)}") from error
        return list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]

    def _spans(self, turns: list[dict[str, Any]], text: str, where: str) -> list[tuple[int, int]]:
        """Characters of the text. See [Note: what the assistant says]."""
        spans = []
        for index, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            before = self._written(turns[:index], where, begins_turn=True) if index else self._begin(turns, text, where)
            behind = self._written(turns[: index + 1], where) if index + 1 < len(turns) else text
            if not text.startswith(behind):
                ends = _with_their_ends(turn["content"], behind.removeprefix(before))
                behind = next((before + end for end in ends if text.startswith(before + end)), behind)
            if not behind.startswith(before) or not text.startswith(behind):
                raise ValueError(
                    f"{where}: the chat template writes turn {index + 1} in another way when more follow, so what the "
                    "assistant says cannot be told; leave --completions-only out, mark it in the template "
                    "({% generation %}), or give rows with prompt and completion"
                )
            spans.append((len(before), len(behind)))
        return spans

    def _begin(self, turns: list[dict[str, Any]], text: str, where: str) -> str:
        """Up to the words that begin the first turn, which is the assistant's: those that a second one would have."""
        alone, begun = self._written(turns[:1], where), self._written(turns[:1], where, begins_turn=True)
        words = begun.removeprefix(alone)
        return text[: text.find(words) + len(words)] if words in text else ""

    def _between(self, text: str, spans: list[tuple[int, int]], where: str) -> tuple[list[int], list[bool]]:
        if not getattr(self._tokenizer, "is_fast", False):
            raise ValueError(
                f"{where}: --completions-only needs a tokenizer that tells which characters a token is; this is a "
                f"{type(self._tokenizer).__name__} without a tokenizer.json: save it as a fast one, or leave it out"
            )
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        is_learned, current = [], 0
        for begin, end in made["offset_mapping"]:
            while current < len(spans) and spans[current][1] <= begin:
                current += 1
            is_learned.append(current < len(spans) and spans[current][0] <= begin and end > begin)
        return made["input_ids"], is_learned


def roles_of(messages: object) -> list[str]:
    """Of messages that have been written."""
    return [str(turn["role"]) for turn in _checked(messages, "")]


def check_characters(text: str, where: str) -> None:
    """JSON can write halves of characters, which are none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{where}: its text has {half}, half of a character, at {error.start + 1}; correct it"
        ) from None


def _checked(messages: object, where: str) -> list[dict[str, Any]]:
    """CSV has them as JSON."""
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: messages are {quoted(messages)}, which is no JSON list of turns") from error
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: messages are {quoted(messages)}; they must be a list of {{"role", "content"}}')
    turns = [_without_nulls(turn, where) for turn in messages]
    for turn in turns:
        if turn["content"] is None and not turn.get(TOOL_CALLS):  # templates write it as the word None
            raise ValueError(
                f"{where}: the content of a message of role {quoted(turn['role'])} is null; give it a text"
            )
        if turn["content"] is not None and not isinstance(turn["content"], str | list):
            raise ValueError(f"{where}: the content of a message is {quoted(turn['content'])}; it must be text")
    return turns


def _without_nulls(turn: object, where: str) -> dict[str, Any]:
    """A key without a value is as if it were not there: templates ask whether it is."""
    has_content = isinstance(turn, dict) and ("content" in turn or bool(turn.get(TOOL_CALLS)))
    if not isinstance(turn, dict) or not has_content or not isinstance(turn.get("role"), str):
        raise ValueError(f"{where}: a message is {quoted(turn)}; each has a role and a content")
    return {"content": None} | {name: value for name, value in turn.items() if value is not None}


def _with_mappings(turn: dict[str, Any]) -> dict[str, Any]:
    """With what functions are called with as mappings. Some APIs give them as JSON."""
    calls = turn.get(TOOL_CALLS)
    return {**turn, TOOL_CALLS: [_with_mapping(call) for call in calls]} if isinstance(calls, list) else turn


def _with_mapping(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_mapping(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        given = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": given} if isinstance(given, dict) else call


def _with_their_ends(content: object, written: str) -> Iterator[str]:
    """Of a turn as it was written last: its content, with what follows it there. The end may have the same words in it,
    and a template may leave spaces out."""
    given = content if isinstance(content, str) else ""
    for words in dict.fromkeys((given, given.strip())):
        places = [found.end() for found in re.finditer(re.escape(words), written)] if words.strip() else []
        yield from (words + written[place:] for place in places[::-1] if place < len(written))


def _as_text(turns: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Content that comes in parts as one text: a template that does not look into parts would write the list itself."""
    return [
        {**turn, "content": "".join(_text_of(part, where) for part in turn["content"])}
        if isinstance(turn["content"], list)
        else turn
        for turn in turns
    ]


def _text_of(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"{where}: a part of a message is {quoted(part)}; this command learns from text only")
    text: str = part["text"]
    return text


def _checked_tools(tools: object, where: str) -> list[Any] | None:
    """CSV, and some tables, have them as JSON."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {TOOLS} are {quoted(tools)}, which is no JSON list of functions") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: {TOOLS} are {quoted(tools)}; they must be a list of functions, as JSON schemas")
    return tools
