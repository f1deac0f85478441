"""The default model of `hightide train`, and what it has to say after training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hightide.cli.config import SampleConfig, TrainConfig
from hightide.cli.data import VOCABULARY


def build_model(config: TrainConfig) -> nn.Module:
    """A Llama-shaped model over bytes with untied embeddings, initialised from the run's seed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # optional: only this command needs it
    except ImportError as error:
        raise ValueError("hightide train needs transformers: pip install 'hightide[hf]'") from error
    shape, sample = config.model, config.sample
    sample_bytes = len(sample.prompt.encode()) + sample.num_bytes
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=max(config.data.sequence_bytes, sample_bytes),
            tie_word_embeddings=False,
            bos_token_id=None,  # every byte is text; none is special
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def write_sample(model: Any, config: SampleConfig, seed: int) -> str:
    """Lets the model go on from the prompt. Bytes that are no printable text are shown as a replacement mark."""
    prompt = torch.tensor([list(config.prompt.encode())], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        tokens = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=config.num_bytes,
            do_sample=True,
            temperature=config.temperature,
            pad_token_id=0,
        )
    model.train(was_training)
    return printable(bytes(tokens[0].tolist()))


def printable(data: bytes) -> str:
    """Text that cannot upset a terminal, whatever an untrained model wrote."""
    text = data.decode("utf-8", errors="replace").expandtabs(4)
    return "".join(char if char == "\n" or char.isprintable() else "�" for char in text)
