"""Conversations are written by the tokenizer's own template; of them the assistant's turns are learned, and no more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hightide.cli.train.tiny_model import CHAT_TEMPLATE as OWN
from hightide.data.conversation import Conversations
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a tide?"},
    {"role": "assistant", "content": "yes: é"},
    {"role": "user", "content": "in the affairs?"},
    {"role": "assistant", "content": "of men"},
]
MARKED = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}!{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # earlier turns are written in another way when more follow, as thoughts are
    "{% for message in messages %}<{{ message.role }}>{% if loop.last %}thought {% endif %}{{ message.content }}"
    "{% endfor %}"
)
THINKING = (  # as Qwen3: of earlier turns only what was said, of the last one its thoughts too, and be they none
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% if message.role == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ message.content.split('</think>')[-1] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
STRICT = "{% for message in messages %}{{ raise_exception('only users may speak') }}{% endfor %}"


def tokenizer(template: str | None = "own") -> Any:
    made = transformers.AutoTokenizer.from_pretrained(tiny_folder())
    if template != "own":
        made.chat_template = template
    return made


def said(made: Any, ids: list[int], flags: list[bool]) -> list[str]:
    """The runs of tokens that are learned."""
    runs: list[list[int]] = []
    for index, (token, flag) in enumerate(zip(ids, flags, strict=True)):
        if flag and (index == 0 or not flags[index - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [made.decode(run) for run in runs]


def test_everything_is_learned_where_nothing_else_is_asked() -> None:
    made = tokenizer()
    ids, flags = Conversations(made, completions_only=False).tokens(TURNS, "here")
    assert made.decode(ids) == made.apply_chat_template(TURNS, tokenize=False) and all(flags)


def test_the_assistants_turns_are_learned_with_their_ends() -> None:
    made = tokenizer()
    ids, flags = Conversations(made, completions_only=True).tokens(TURNS, "here")
    assert made.decode(ids) == made.apply_chat_template(TURNS, tokenize=False)
    assert said(made, ids, flags) == ["yes: é<|im_end|>\n", "of men<|im_end|>\n"]


def test_a_template_that_marks_them_is_asked() -> None:
    made = tokenizer(MARKED)
    ids, flags = Conversations(made, completions_only=True).tokens(TURNS, "here")
    assert said(made, ids, flags) == ["yes: é!", "of men!"]


def test_earlier_turns_that_a_template_writes_without_thoughts_are_learned_as_it_writes_them() -> None:
    made = tokenizer(THINKING)
    ids, flags = Conversations(made, completions_only=True).tokens(TURNS, "here")
    assert said(made, ids, flags) == ["yes: é<end>", "<think></think>of men<end>"]
    for short in ("d", "end", "<end>", " a", "role"):  # as the end is, or the turn's beginning
        turns = [*TURNS[:2], {"role": "assistant", "content": short}, *TURNS[3:]]
        ids, flags = Conversations(made, completions_only=True).tokens(turns, "here")
        assert said(made, ids, flags)[0] == f"{short}<end>"
    thoughtful = [*TURNS[:2], {"role": "assistant", "content": "a moon</think>yes"}, *TURNS[3:]]
    with pytest.raises(ValueError, match=r"here: the chat template writes turn 3 in another way"):
        Conversations(made, completions_only=True).tokens(thoughtful, "here")


def test_words_that_begin_a_turn_are_not_learned_of_the_first_one_either() -> None:
    made = tokenizer()
    ids, flags = Conversations(made, completions_only=True).tokens(TURNS[2:], "here")
    assert said(made, ids, flags) == ["yes: é<|im_end|>\n", "of men<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (None, TURNS, r"line 7: it has messages, and the model's tokenizer has no chat template; take the instruct"),
        (FORGETFUL, TURNS, r"line 7: the chat template writes turn 3 in another way.*leave --completions-only out"),
        (STRICT, TURNS, r"line 7: the chat template does not take these messages: only users may speak"),
        ("own", [{"role": "user", "content": "\ud83d"}], r"line 7: its text has \\ud83d, half of a character"),
        ("own", "hello", r"line 7: messages are 'hello', which is no JSON list"),
        ("own", f"[{'9' * 5000}]", r"line 7: messages are '\[9+.*, which is no JSON list"),  # too many for int
        ("own", [], r"line 7: messages are \[\]; they must be a list"),
        ("own", [{"role": "user"}], r"line 7: a message is \{'role': 'user'\}; each has a role and a content"),
    ],
)
def test_what_cannot_be_written_is_named_with_its_line(template: str | None, turns: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Conversations(tokenizer(template), completions_only=True).tokens(turns, "line 7")


def test_tools_of_a_row_are_written_by_the_template() -> None:
    made = tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + OWN)
    conversations = Conversations(made, completions_only=True)
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        ids, flags = conversations.tokens(TURNS, "here", given)
        assert made.decode(ids) == made.apply_chat_template(TURNS, tools=tools, tokenize=False)
        assert '"name": "tide"' in made.decode(ids)
        assert said(made, ids, flags) == ["yes: é<|im_end|>\n", "of men<|im_end|>\n"]
    for none in (None, [], ""):  # of the next row, which has none
        assert made.decode(conversations.tokens(TURNS, "here", none)[0]) == tokenizer().apply_chat_template(
            TURNS, tokenize=False
        )
    for wrong in ("nonsense", {"name": "tide"}, ["tide"]):
        with pytest.raises(ValueError, match=r"here: tools are"):
            conversations.tokens(TURNS, "here", wrong)
    with pytest.raises(ValueError, match=r"here: it has tools, and the chat template writes none"):
        Conversations(tokenizer(), completions_only=True).tokens(TURNS, "here", tools)


def test_no_content_is_not_learned_as_a_word() -> None:
    conversations = Conversations(tokenizer(), completions_only=True)
    with pytest.raises(ValueError, match=r"here: the content of a message of role 'assistant' is null"):
        conversations.tokens([TURNS[1], {"role": "assistant", "content": None}], "here")
    calls = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    with pytest.raises(ValueError, match=r"here: a message has tool_calls, and the chat template writes none"):
        conversations.tokens(calls, "here")
    calling = "{% for message in messages %}<{{ message.role }}>{% if message.tool_calls %}calls "
    calling += "{{ message.tool_calls[0].name }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    made = tokenizer(calling)
    ids, _ = Conversations(made, completions_only=False).tokens(calls, "here")
    assert made.decode(ids) == "<user>a tide?<assistant>calls f"
    del calls[1]["content"]  # as some write it
    assert Conversations(made, completions_only=False).tokens(calls, "here")[0] == ids


def test_keys_without_a_value_are_as_if_they_were_not_there() -> None:
    asking = "{% for message in messages %}{% if 'tool_calls' in message %}{{ message.tool_calls | length }}{% endif %}"
    made = tokenizer(asking + "{{ message.content }}|{% endfor %}")
    turns = [{**turn, "tool_calls": None, "name": None} for turn in TURNS[1:3]]
    ids, _ = Conversations(made, completions_only=False).tokens(turns, "here")
    assert made.decode(ids) == "a tide?|yes: é|"


def test_arguments_that_are_json_get_no_quotes_around_them() -> None:
    calling = (
        "{% for message in messages %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "{% if call.function %}{% set call = call.function %}{% endif %}{{ call.arguments WRITTEN }}"
        "{% endfor %}{% endfor %}"
    )
    for written, arguments, expected in (
        ("| tojson", '{"a": 1}', '{"a": 1}'),
        ("| tojson", {"a": 1}, '{"a": 1}'),
        ("| tojson", "tide", '"tide"'),
        ("", '{"a":1}', '{"a":1}'),  # by a template that takes text
        ("if call.arguments is string else call.arguments | tojson", '{"a":1.0}', '{"a":1.0}'),  # or asks
        ("if call['arguments'] is not mapping else call['arguments'] | tojson", '{"a":1.0}', '{"a":1.0}'),
    ):
        made = tokenizer(calling.replace("WRITTEN", written))
        for one in ({"name": "f", "arguments": arguments}, {"function": {"name": "f", "arguments": arguments}}):
            turns = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [one]}]
            ids, _ = Conversations(made, completions_only=False).tokens(turns, "here")
            assert made.decode(ids) == f"a tide?{expected}"


def test_content_in_parts_is_written_as_one_text_or_by_a_template_that_looks_into_them() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "tide?"}]
    turns = [{"role": "user", "content": parts}, TURNS[2]]
    plain = Conversations(tokenizer(), completions_only=True)
    assert plain.tokens(turns, "here") == plain.tokens([TURNS[1], TURNS[2]], "here")
    for template in (
        "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}",
        "{% for part in messages[0]['content'] %}{{ part['text'] if part['type']=='text' }}|{% endfor %}",
    ):
        made = tokenizer(template)
        ids, _ = Conversations(made, completions_only=False).tokens(turns, "here")
        assert made.decode(ids) == "a |tide?|"
    for odd, message in (
        ([{"type": "image", "url": "x"}], "a part of a message is .*; this command learns from text only"),
        (3, "the content of a message is 3; it must be text"),
    ):
        with pytest.raises(ValueError, match=f"here: {message}"):
            plain.tokens([{"role": "user", "content": odd}, TURNS[2]], "here")


def test_messages_may_be_json_as_csv_has_them() -> None:
    made = tokenizer()
    text = '[{"role": "user", "content": "a"}]'
    ids, _ = Conversations(made, completions_only=False).tokens(text, "here")
    assert made.decode(ids) == "<|im_start|>user\na<|im_end|>\n"
