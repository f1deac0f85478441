"""Model shapes by name, and those of Hugging Face folders, as models without values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hightide.integrations.foreign_folder import CONFIG, blaming, class_of, import_transformers, read_config
from hightide.integrations.pretrained import build_without_values
from hightide.ir.foreign import quoted, shown


@dataclass(frozen=True)
class Shape:
    config_class: str  # of transformers
    settings: dict[str, Any]


def _llama(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool, vocab: int = 128256, kv: int = 8) -> Shape:
    return Shape("LlamaConfig", _decoder(layers, hidden, ffn, heads, kv, vocab, tied, positions=131072, theta=500000.0))


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv: int, *, tied: bool, vocab: int = 152064) -> Shape:
    """Of Qwen2.5."""
    return Shape("Qwen2Config", _decoder(layers, hidden, ffn, heads, kv, vocab, tied, positions=32768, theta=1000000.0))


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv: int, *, head: int, tied: bool = False) -> Shape:
    settings = _decoder(layers, hidden, ffn, heads, kv, 151936, tied, positions=40960, theta=1000000.0)
    return Shape("Qwen3Config", {**settings, "head_dim": head})


def _decoder(
    layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, tied: bool, positions: int, theta: float
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
    }


def _gpt(layers: int, hidden: int, heads: int, positions: int = 2048) -> Shape:
    """Without dropout: it is the same work for every system, and its masks would hide a difference in the losses."""
    size = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return Shape("GPT2Config", {**size, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})


SHAPES: dict[str, Shape] = {
    "tiny": _llama(4, 64, 128, 4, tied=True, vocab=256, kv=2),  # for a look without a GPU
    "tiny-gpt": _gpt(3, 64, 4, positions=128),
    "llama-200m": _llama(14, 1024, 2816, 16, tied=True, vocab=32000),  # loss curves, long runs
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, tied=False),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, tied=True, vocab=151936),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, tied=False),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, tied=False),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, head=128, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, head=128),
    "gpt2-xl": _gpt(48, 1600, 25, positions=1024),
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-65b": _gpt(80, 8192, 64),
    "gpt-175b": _gpt(96, 12288, 96),
}


_LAYERS = ("num_hidden_layers", "n_layer")  # how configs call it


def num_layers_of(name: str) -> int:
    return next(value for key, value in SHAPES[name].settings.items() if key in _LAYERS)


def config_of(name: str, length: int, num_layers: int | None = None) -> Any:
    """The transformers config of a shape, for sequences of `length` tokens. `num_layers`: instead of its own."""
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    fewer = {key: num_layers for key in shape.settings if key in _LAYERS and num_layers is not None}
    config = getattr(import_transformers(), shape.config_class)(**{**shape.settings, **fewer})
    check_length(config, length, name)
    config.use_cache = False
    return config


def config_of_folder(folder: Path) -> Any:
    """The transformers config in a Hugging Face folder; weights need not be there."""
    if not (folder / CONFIG).exists():
        raise ValueError(f"{shown(folder)} has no {CONFIG}; a model's folder needs one, weights are not needed")
    config = read_config(folder, {})
    config.use_cache = False
    with blaming(folder / CONFIG):
        most = max_length(config)
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ValueError(f"{shown(folder / CONFIG)}: max_position_embeddings is {quoted(most)}; it must be at least 1")
    return config


def max_length(config: Any) -> int | None:
    """Tokens that a sequence may have; None: the config does not say."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most: int | None = getattr(text_config, "max_position_embeddings", None)
    return most


def same_rotary_length(config: Any) -> int | None:
    """Tokens of a call up to which rotary embeddings do not depend on how many there are; None: they never do."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = getattr(text_config, "rope_parameters", None) or {}
    # By themselves, or by kind of layer.
    kinds = [given] if "rope_type" in given else [one for one in given.values() if isinstance(one, Mapping)]
    found = [max_length(config)] * any("dynamic" in str(one.get("rope_type")) for one in kinds)
    found += [one.get("original_max_position_embeddings") for one in kinds if one.get("rope_type") == "longrope"]
    return min((length for length in found if isinstance(length, int)), default=None)


def check_length(config: Any, length: int, name: str) -> None:
    most = max_length(config)
    if most is not None and length > most:
        raise ValueError(f"{name} takes sequences of up to {most} tokens, not {length}")


def shaped_model(config: Any, dtype: torch.dtype, source: Path | None = None) -> nn.Module:
    """The model of a config in training mode, its parameters without values. `source`: the file that it is from."""
    config.dtype = dtype
    kind = class_of(config, None)
    with blaming(source) if source is not None else nullcontext():
        return build_without_values(kind, config).train()
