"""The trained model that comes of a run: a folder for transformers, or an adapter for PEFT, with the tokenizer; and
some text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from hightide.cli.train.company import Company
from hightide.cli.train.config import SampleConfig
from hightide.cli.train.saves import SaveFailed
from hightide.integrations.model_files import without_bars
from hightide.ir.foreign import shown


def save_trained(model: Any, tokenizer: Any, folder: Path, company: Company) -> None:
    """All ranks take part. A folder that is there, of a run that went on, is replaced."""

    def remove() -> str:
        shutil.rmtree(folder, ignore_errors=True)
        return ""

    company.from_first("room for the model", remove)
    try:
        with without_bars():
            model.save_pretrained(folder)
        if company.is_first:
            _save_tokenizer(tokenizer, folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # half of a model looks like one
        raise SaveFailed(
            f"the trained model cannot be saved in {shown(folder)}: {shown(error.strerror or error)}. Free some space: "
            "the same command goes on from the last checkpoint, if there is one"
        ) from error


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # what `tokenizers` raises of a full disk has no class of its own
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error


def write_sample(model: Any, tokenizer: Any, config: SampleConfig, seed: int) -> str:
    """Lets the model go on from the prompt."""
    device = next(model.parameters()).device
    prompt = tokenizer(config.prompt, return_tensors="pt").input_ids.to(device)
    was_training = model.training
    model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        tokens = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=config.tokens,
            do_sample=True,
            temperature=config.temperature,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
    model.train(was_training)
    return printable(tokenizer.decode(tokens[0], skip_special_tokens=True))


def printable(text: str) -> str:
    """Text that cannot upset a terminal, whatever an untrained model wrote."""
    return "".join(char if char == "\n" or char.isprintable() else "�" for char in text.expandtabs(4))
