"""The trained model that comes of a run: a folder for transformers, or an adapter for PEFT, with the tokenizer; and
some text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from hightide.cli.train.company import Company
from hightide.cli.train.config import SampleConfig
from hightide.integrations.model_files import without_bars


def save_trained(model: Any, tokenizer: Any, folder: Path, company: Company) -> None:
    """All ranks take part. A folder that is there, of a run that went on, is replaced."""

    def remove() -> str:
        shutil.rmtree(folder, ignore_errors=True)
        return ""

    company.from_first("room for the model", remove)
    with without_bars():
        model.save_pretrained(folder)
    if company.is_first:
        tokenizer.save_pretrained(folder)


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
