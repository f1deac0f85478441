"""Rows become sequences: what is in them, what is learned of them, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hightide.data.readers import Row
from hightide.data.tokens import RowKind, Sequences, tokenize
from tiny_folders import tiny_folder

tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_folder())


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [Row(f"file, line {number}", one) for number, one in enumerate(fields, 1)]


def parts(made: Sequences) -> list[list[int]]:
    return [part.tolist() for part in made.ids.split(made.lengths.tolist())]


def learned(made: Sequences) -> list[list[bool]]:
    return [part.tolist() for part in made.is_learned.split(made.lengths.tolist())]


def test_text_is_cut_and_nothing_of_it_is_lost(tokenizer: Any) -> None:
    text = "There is a tide in the affairs of men. " * 4
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    made = tokenize(rows({"text": text}, {"text": ""}, {"text": "flood"}), tokenizer, 16)
    assert made.kind is RowKind.TEXT and made.num_rows == 3
    last = [*tokenizer("flood").input_ids, tokenizer.eos_token_id]
    assert len(ids) % 16 == 1  # an end alone has nothing to predict it
    assert [one for part in parts(made)[:-1] for one in part] == ids[:-1] and parts(made)[-1] == last
    assert all(len(part) == 16 for part in parts(made)[:-2])
    assert all(flags == [False] + [True] * (len(flags) - 1) for flags in learned(made))


def test_pieces_of_a_document_are_one_document(tokenizer: Any) -> None:
    lines = ["which, taken at the flood,\n", "leads on to fortune\n"]
    pieces = [Row("file", {"text": lines[0]}, goes_on=True), Row("file", {"text": lines[1]})]
    made = tokenize(pieces, tokenizer, 1000)
    assert len(made) == 1 and made.num_rows == 1
    assert tokenizer.decode(made.ids[:-1]) == "".join(lines) and int(made.ids[-1]) == tokenizer.eos_token_id


def test_a_tokenizer_that_begins_texts_with_a_mark_does_so_here(tokenizer: Any) -> None:
    class Marking:
        bos_token_id, eos_token_id = 7, None

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> Any:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            return type("Made", (), {"input_ids": [7, *ids] if add_special_tokens else ids})

    made = tokenize(rows({"text": "a tide"}, {"text": "a flood"}), Marking(), 100)
    assert [part[0] for part in parts(made)] == [7, 7] and tokenizer.decode(parts(made)[0][1:]) == "a tide"
    pair = tokenize(rows({"prompt": "a", "completion": "b"}), Marking(), 100)
    assert parts(pair)[0][0] == 7 and 7 not in parts(pair)[0][1:]


@pytest.mark.parametrize("completions_only", [False, True])
def test_of_a_pair_the_completion_and_its_end_are_learned(tokenizer: Any, completions_only: bool) -> None:
    made = tokenize(
        rows({"prompt": "a tide in", "completion": " the affairs", "more": 1}),
        tokenizer,
        100,
        completions_only=completions_only,
    )
    prompt, completion = tokenizer("a tide in").input_ids, tokenizer(" the affairs").input_ids
    assert parts(made) == [[*prompt, *completion, tokenizer.eos_token_id]]
    flags = [not completions_only] * len(prompt) + [True] * (len(completion) + 1)
    assert learned(made) == [[False, *flags[1:]]]


@pytest.mark.parametrize(
    ("prompt", "completion"), [("tide=", "2"), ("tide= ", "2"), ("2", "2"), ("", "2"), ("a", ""), ("tide", " 2")]
)
def test_nothing_comes_between_a_prompt_and_its_completion(prompt: str, completion: str) -> None:
    """Also of a tokenizer that puts a space before each text, and joins it with what follows."""
    letters = ["<unk>", "</s>", "\n", "▁", *"tide=2a", "▁2"]
    model = tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, [("▁", "2")])
    spaced = tokenizers.Tokenizer(model)
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="</s>")
    whole = tokenize(rows({"prompt": prompt, "completion": completion}), made, 20)
    assert "".join(made.convert_ids_to_tokens(whole.ids)) == f"▁{prompt}{completion}</s>".replace(" ", "▁")


def test_rows_that_are_too_long_are_cut_and_those_that_teach_nothing_left_out(tokenizer: Any) -> None:
    long = {"prompt": "a", "completion": "tide " * 50}
    lost = {"prompt": "tide " * 50, "completion": "a"}
    made = tokenize(rows(long, lost, {"prompt": "a", "completion": "b"}), tokenizer, 20, completions_only=True)
    num_ids = len(tokenizer("a" + "tide " * 50).input_ids) + 1
    assert (made.num_rows, len(made), made.num_cut, made.num_dropped) == (3, 2, 1, 1)
    assert made.lost_tokens == pytest.approx(num_ids - 20, abs=1)
    with pytest.raises(ValueError, match=r"nothing to learn: in 1 row nothing within 20 tokens is learned"):
        tokenize(rows(lost), tokenizer, 20, completions_only=True)


def test_conversations_without_the_assistant_name_the_roles_that_they_have(tokenizer: Any) -> None:
    turns = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    with pytest.raises(ValueError, match=r"in 1 row no message has the role 'assistant', .* have 'gpt', 'human'"):
        tokenize(rows({"messages": turns}), tokenizer, 20, completions_only=True)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, r"the data has no rows"),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}],
            {},
            r"line 1: prompt is a list of messages; put those of prompt and completion into one list, messages",
        ),
        ([{"text": ""}], {}, r"1 row without text"),
        ([{"words": "a", "id": 3}], {}, r"line 1: a row has text, or prompt and .*has words, id.*--column NAME"),
        ([{"prompt": "a"}], {}, r"line 1: a row has text, or prompt and completion.*this one has prompt"),
        ([{"text": "a"}, {"text": 3}], {}, r"line 2: text is 3; it must be text"),
        (
            [{"text": "a b"}, {"prompt": "a", "completion": "b"}],
            {},
            r"line 2: it is prompt and completion, and .* text",
        ),
        ([{"prompt": "a", "completion": None}], {}, r"line 1: completion is empty \(null\); leave such rows out"),
        ([{"text": "ab\ud83d"}], {}, r"line 1: its text has \\ud83d, half of a character, at 3; correct it"),
        ([{"text": "a"}], {"completions_only": True}, r"line 1: plain text has no completions"),
        ([{"text": "a"}], {"column": "body"}, r"line 1: there is no column 'body'; it has text"),
    ],
)
def test_wrong_rows_are_named_with_their_line(
    tokenizer: Any, given: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize(rows(*given), tokenizer, 20, **options)


def test_a_column_of_another_name_is_text(tokenizer: Any) -> None:
    made = tokenize(rows({"body": "a tide", "text": "other"}), tokenizer, 20, column="body")
    assert tokenizer.decode(made.ids[:-1]) == "a tide"


def test_a_checksum_is_of_what_is_learned(tokenizer: Any) -> None:
    def of(given: Iterable[dict[str, Any]], **options: Any) -> int:
        return tokenize(rows(*given), tokenizer, 50, **options).checksum

    pair = {"prompt": "a tide", "completion": "flood"}
    assert of([pair]) == of([{**pair, "more": 1}])
    assert (
        len({of([pair]), of([pair], completions_only=True), of([pair, pair]), of([{**pair, "completion": "x"}])}) == 4
    )


def test_the_last_ones_are_split_off(tokenizer: Any) -> None:
    made = tokenize(rows(*({"text": word} for word in ("a tide", "b", "the flood"))), tokenizer, 50)
    first, last = made.split(1)
    assert parts(first) + parts(last) == parts(made) and len(last) == 1
    assert torch.equal(torch.cat([first.is_learned, last.is_learned]), made.is_learned)
