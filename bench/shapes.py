"""Model shapes by name, with random weights made fast: what is measured here does not depend on trained values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

PIECE_NUMEL = 1 << 24  # elements that one generator fills: the values depend on it, so it is not a setting


def _llama(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool, vocab: int = 128256, kv: int = 8):
    return lambda: LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
    )


def _gpt(layers: int, hidden: int, heads: int, positions: int = 2048):
    """Without dropout: it is the same work for every system, and its masks would hide a difference in the losses."""
    return lambda: GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=positions, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )


def _qwen3_8b() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny": _llama(4, 64, 128, 4, tied=True, vocab=256, kv=2),  # for a look at the scripts without a GPU
    "tiny-gpt": _gpt(3, 64, 4, positions=128),
    "llama-200m": _llama(14, 1024, 2816, 16, tied=True, vocab=32000),  # loss curves, long runs
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, tied=False),
    "qwen3-8b": _qwen3_8b,
    "gpt2-xl": _gpt(48, 1600, 25, positions=1024),
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-65b": _gpt(80, 8192, 64),
    "gpt-175b": _gpt(96, 12288, 96),
}


def config_of(name: str, length: int) -> PretrainedConfig:
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    config = SHAPES[name]()
    if length > config.max_position_embeddings:
        raise ValueError(f"{name} takes sequences of up to {config.max_position_embeddings} tokens, not {length}")
    config.use_cache = False
    return config


def build(name: str, length: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> nn.Module:
    """The model in training mode. On the meta device it has no values; elsewhere they depend on the seed only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name, length), dtype=dtype, attn_implementation="sdpa")
    model.train()
    if device == "meta":
        return model
    model.to_empty(device="cpu")
    model.tie_weights()
    for module in model.modules():  # rotary frequencies: transformers computes them where weights are initialised
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    _fill(model, model.config.initializer_range, seed)
    return model.to(device)


def _fill(model: nn.Module, std: float, seed: int) -> None:
    """Normal weights, norms one, biases zero, by all cores: the library's own initialisation takes minutes."""
    jobs: list[tuple[Tensor, int]] = []
    for name, param in model.named_parameters():
        if param.dim() > 1:
            for piece in param.data.view(-1).split(PIECE_NUMEL):
                jobs.append((piece, seed * 1_000_003 + len(jobs)))
        else:
            param.data.fill_(0.0 if name.endswith("bias") else 1.0)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda job: job[0].normal_(0.0, std, generator=torch.Generator().manual_seed(job[1])), jobs))


def batches(model: nn.Module, num_sequences: int, length: int, count: int = 4, seed: int = 1) -> list[Tensor]:
    """Random tokens in host memory, pinned where there is a GPU; the labels are the tokens themselves."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, length)
    made = [torch.randint(model.config.vocab_size, shape, generator=generator) for _ in range(count)]
    return [tokens.pin_memory() for tokens in made] if torch.cuda.is_available() else made


def num_params(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def step_flop(model: nn.Module, num_sequences: int, length: int) -> float:
    """Operations that one step needs by the model's definition: recomputation does not count, and causal attention
    counts half. Embeddings are looked up, not multiplied, unless they are the output projection too."""
    head = model.get_output_embeddings().weight
    looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up.pop(id(head), None)
    matmul_numel = num_params(model) - sum(weight.numel() for weight in looked_up.values())
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6.0 * num_sequences * length**2 * config.num_attention_heads * head_size * config.num_hidden_layers
    return 6.0 * matmul_numel * num_sequences * length + attention


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of equal blocks."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
