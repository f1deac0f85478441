"""What a Trainer's checkpoint has beside weights and states."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from hightide.trainer.checkpoint_mixin import files_of  # noqa: E402


class Tokenizer:
    """One with several templates, which lie in a folder of their own."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")
        (Path(folder) / "additional_chat_templates").mkdir()
        (Path(folder) / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def test_templates_of_a_tokenizer_are_there_in_their_folder() -> None:
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(save_only_model=True, should_save=True),
        processing_class=Tokenizer(),
        callback_handler=SimpleNamespace(callbacks=[]),
        control=None,
        state=transformers.TrainerState(global_step=3),
    )
    files = files_of(trainer)
    assert files["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"
    assert sorted(files) == [
        "additional_chat_templates/tool_use.jinja", "tokenizer.json", "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
    assert json.loads(files["trainer_state.json"])["global_step"] == 3
