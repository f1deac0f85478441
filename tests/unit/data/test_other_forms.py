"""Rows in the forms of public data: read as messages where they can mean one thing only, refused with a remedy else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hightide.data.other_forms import as_messages
from hightide.data.readers import Row
from hightide.data.tokens import tokenize
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")

TURNS = [{"from": "human", "value": "a tide?"}, {"from": "gpt", "value": "yes"}]
MESSAGES = [{"role": "user", "content": "a tide?"}, {"role": "assistant", "content": "yes"}]
SYSTEM = {"role": "system", "content": "be brief"}


def read(**fields: Any) -> Any:
    return as_messages(Row("file, line 3", fields), "messages").fields.get("messages")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"conversations": TURNS, "id": "x"}, MESSAGES),
        ({"conversations": [{"from": "system", "value": "be brief"}, *TURNS], "system": ""}, [SYSTEM, *MESSAGES]),
        ({"conversations": TURNS, "system": "be brief", "images": []}, [SYSTEM, *MESSAGES]),
        ({"conversations": json.dumps(TURNS)}, MESSAGES),  # of CSV
        (
            {"conversations": [{"from": "user", "value": ""}, {**TURNS[1], "from": "assistant", "weight": None}]},
            [{"role": "user", "content": ""}, MESSAGES[1]],
        ),
        ({"conversations": MESSAGES}, MESSAGES),
        ({"text": "a"}, None),
    ],
)
def test_turns_of_sharegpt_are_messages(fields: dict[str, Any], expected: list[dict[str, str]] | None) -> None:
    assert read(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"conversations": [*TURNS, {"from": "function_call", "value": "{}"}]},
            r'line 3: turn 3 is from .function_call.; conversations are of human, gpt and system\. .*"tool_calls"',
        ),
        ({"conversations": [{"from": "Human", "value": "a"}]}, r"line 3: turn 1 is from .Human."),
        ({"conversations": [{"from": "human", "value": None}]}, r"line 3: turn 1 has value None; it must be text"),
        ({"conversations": [{"from": "human"}]}, r"line 3: turn 1 has value None; it must be text"),
        ({"conversations": [{"value": "a"}]}, r'line 3: turn 1 is .*; it must be a mapping with "from" and "value"'),
        ({"conversations": [MESSAGES[0], TURNS[1]]}, r'line 3: turn 1 is .*; it must be a mapping with "from"'),
        ({"conversations": ["a"]}, r"line 3: turn 1 is 'a'; it must be a mapping"),
        ({"conversations": []}, r"line 3: conversations are \[\]; they must be a list of"),
        ({"conversations": "a tide"}, r"line 3: conversations are 'a tide'; they must be a list of"),
        ({"conversations": None}, r"line 3: conversations are None; they must be a list of"),
        (
            {"conversations": [{"from": "system", "value": "a"}, *TURNS], "system": "b"},
            r"line 3: it has system 'b' beside conversations; give it as their first turn, once and as text",
        ),
    ],
)
def test_what_no_message_could_be_is_refused_with_its_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**fields)


def test_conversations_are_learned_as_the_same_messages_are() -> None:
    made = transformers.AutoTokenizer.from_pretrained(tiny_folder())

    def learned(fields: dict[str, Any], **options: Any) -> int:
        return tokenize([Row("file, line 1", fields)], made, 200, **options).checksum

    for completions_only in (False, True):
        messages = learned({"messages": MESSAGES}, completions_only=completions_only)
        assert learned({"conversations": TURNS}, completions_only=completions_only) == messages
    # What a row has under our names, or the user has named, is taken.
    assert learned({"conversations": TURNS, "messages": MESSAGES[:1]}) == learned({"messages": MESSAGES[:1]})
    assert learned({"conversations": "odd", "text": "a tide"}) == learned({"text": "a tide"})
    assert learned({"conversations": "a tide"}, column="conversations") == learned({"text": "a tide"})


@pytest.mark.parametrize(
    "fields", [{"conversations": TURNS}, {"messages": MESSAGES}, {"prompt": "<image>a", "completion": "b"}]
)
def test_images_beside_words_are_refused(fields: dict[str, Any]) -> None:
    made = transformers.AutoTokenizer.from_pretrained(tiny_folder())
    with pytest.raises(ValueError, match=r"line 1: it has 'images' beside its text; .* from text only"):
        tokenize([Row("file, line 1", {**fields, "images": ["a.png"]})], made, 200)
    assert len(tokenize([Row("file, line 1", {**fields, "images": []})], made, 200)) == 1


def test_rows_of_alpaca_are_refused_with_the_row_to_write_instead() -> None:
    row = {"instruction": "say", "input": "a", "output": "b"}
    with pytest.raises(ValueError, match=r"line 1: .*this one has instruction, input, output") as refused:
        tokenize([Row("file, line 1", row)], None, 20)
    assert "Rename" not in str(refused.value)
    shown = str(refused.value).partition("on a line as ")[2].partition(", for a chat")[0]
    assert [turn["role"] for turn in json.loads(shown)["messages"]] == ["user", "assistant"]
