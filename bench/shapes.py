"""Models of the named shapes with random weights made fast: what is measured does not depend on trained values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hightide.integrations.shapes import config_of

PIECE_NUMEL = 1 << 24  # elements that one generator fills: the values depend on it, so it is not a setting


def build(
    name: str,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    tied: bool | None = None,
) -> nn.Module:
    """The model in training mode. On the meta device it has no values; elsewhere they depend on the seed only.
    `tied`: whether embedding and head are one, if not as the shape has it."""
    config = config_of(name, length)
    if tied is not None:
        config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
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
