"""A zoo of tiny models with batches, deterministic by seed. Each function returns (model, batch); ZOO lists them all.

Sizes are chosen so that no two dimensions agree by accident: 6 samples, 10 tokens, 32 features, 4 heads, 96 words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

NUM_SAMPLES = 6
NUM_TOKENS = 10
HIDDEN = 32
HEADS = 4
VOCABULARY = 96
Pair = tuple[nn.Module, dict[str, Any]]


def token_batch(
    seed: int = 1, num_samples: int = NUM_SAMPLES, padded: bool = False, mask: bool = True
) -> dict[str, Any]:
    """Tokens with labels. `padded`: the last samples are shorter, with mask 0 and label -100 at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (num_samples, NUM_TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :2] = -100
    attention = torch.ones_like(ids)
    if padded:
        for sample in range(num_samples // 2, num_samples):
            length = NUM_TOKENS - 1 - sample % 4
            attention[sample, length:] = 0
            labels[sample, length:] = -100
    batch = {"input_ids": ids, "labels": labels}
    return batch | {"attention_mask": attention} if mask or padded else batch


def token_batches(num_steps: int, seed: int = 1, **options: Any) -> Iterator[dict[str, Any]]:
    for step in range(num_steps):
        yield token_batch(seed + step, **options)


def image_batch(seed: int = 1, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(num_samples, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (num_samples,), generator=generator),
    }


def vector_batch(seed: int = 1, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, HIDDEN, generator=generator),
        "labels": torch.randn(num_samples, 8, generator=generator),
    }


def translation_batch(**options: Any) -> dict[str, Any]:
    """Tokens whose labels have another length."""
    tokens = token_batch(**options)
    return {**tokens, "labels": tokens["labels"][:, :7].clone()}


def series_batch(seed: int = 1, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    """14 moments of the past, 5 of the future."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(num_samples, *sizes, generator=generator)

    return {
        "past_values": draw(14),
        "past_time_features": draw(14, 2),
        "past_observed_mask": torch.ones(num_samples, 14),
        "future_values": draw(5),
        "future_time_features": draw(5, 2),
    }


def llama(tied: bool = False, num_layers: int = 4, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**_llama_options(tied, num_layers, dropout))
    return transformers.LlamaForCausalLM(config).train(), token_batch(**batch)


def mistral(tied: bool = False, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    config = transformers.MistralConfig(**_llama_options(tied, num_layers, dropout), sliding_window=5)
    return transformers.MistralForCausalLM(config).train(), token_batch(**batch)


def qwen3(tied: bool = True, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**_llama_options(tied, num_layers, dropout), head_dim=8)
    return transformers.Qwen3ForCausalLM(config).train(), token_batch(**batch)


def gemma2(tied: bool = True, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    """Soft-capped logits, and layers that attend in two ways by turns: two masks."""
    torch.manual_seed(seed)
    config = transformers.Gemma2Config(
        **_llama_options(tied, num_layers, dropout),
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=5,
        final_logit_softcapping=10.0,
        attn_logit_softcapping=20.0,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).train(), token_batch(**batch)


def gemma3(tied: bool = True, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    """Its queries are normalised, so small weights make large gradients of rounding: these are not so small."""
    torch.manual_seed(seed)
    options = {**_llama_options(tied, num_layers, dropout), "head_dim": 8, "query_pre_attn_scalar": 8}
    config = transformers.Gemma3TextConfig(**options, sliding_window=5, sliding_window_pattern=2, initializer_range=0.1)
    return transformers.Gemma3ForCausalLM(config).train(), token_batch(**batch)


def qwen3_moe(
    tied: bool = False,
    num_layers: int = 3,
    dropout: float = 0.0,
    seed: int = 0,
    router_loss: bool = True,
    experts: str | None = None,
    **batch: Any,
) -> Pair:
    """The middle layer is dense. `router_loss`: an auxiliary loss of what hooks take out of the routers."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **_llama_options(tied, num_layers, dropout),
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        output_router_logits=router_loss,
        router_aux_loss_coef=0.3,
        **({"experts_implementation": experts} if experts else {}),
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()
    for name, param in model.named_parameters():
        if name.endswith("gate.weight"):  # made as zeros: ties between experts would be broken by rounding
            nn.init.normal_(param, std=0.5)
    return model, token_batch(**batch)


def _llama_options(tied: bool, num_layers: int, dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": dropout,
        "tie_word_embeddings": tied,
        **_special_tokens(),
    }


def gpt2(tied: bool = True, num_layers: int = 4, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=num_layers,
        n_head=HEADS,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        **_special_tokens(),
    )
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(config).train(), token_batch(**batch)


def opt(tied: bool = True, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=48,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        dropout=dropout,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        **_special_tokens(),
    )
    torch.manual_seed(seed)
    return transformers.OPTForCausalLM(config).train(), token_batch(**batch)


def bert(tied: bool = True, num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return transformers.BertForMaskedLM(config).train(), token_batch(**batch)


def t5(tied: bool = True, num_layers: int = 2, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=num_layers,
        num_heads=HEADS,
        dropout_rate=dropout,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.T5ForConditionalGeneration(config).train()
    return model, translation_batch(**batch)


def vit(num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=5,
    )
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(config).train(), image_batch(**batch)


def autoformer(num_layers: int = 3, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    """Its attention looks for the longest delays in the values that it computes."""
    torch.manual_seed(seed)
    config = transformers.AutoformerConfig(
        prediction_length=5,
        context_length=12,
        label_length=6,
        lags_sequence=[1, 2],
        num_time_features=2,
        moving_average=5,
        d_model=HIDDEN,
        **_coder_options(num_layers, dropout),
    )
    return transformers.AutoformerForPrediction(config).train(), series_batch(**batch)


def switch_transformers(num_layers: int = 4, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    """Every other layer has experts, which get as many tokens as their router likes."""
    torch.manual_seed(seed)
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        num_sparse_encoder_layers=num_layers // 2,
        num_sparse_decoder_layers=num_layers // 2,
        num_heads=HEADS,
        num_experts=4,
        router_jitter_noise=0.0,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config).train(), translation_batch(**batch)


def nllb_moe(num_layers: int = 4, dropout: float = 0.0, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    config = transformers.NllbMoeConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=4,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        moe_token_dropout=dropout,
        **_coder_options(num_layers, dropout),
        **_special_tokens(),
    )
    return transformers.NllbMoeForConditionalGeneration(config).train(), translation_batch(**batch)


def _coder_options(num_layers: int, dropout: float) -> dict[str, Any]:
    return {
        "encoder_layers": num_layers,
        "decoder_layers": num_layers,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
    }


class PlainTransformer(nn.Module):
    """A language model of torch's own layers. Returns a mapping with the loss."""

    def __init__(self, num_layers: int = 3, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(64, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 48, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        num_tokens = input_ids.shape[1]
        hidden = self.tokens(input_ids) + self.positions(torch.arange(num_tokens, device=input_ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(num_tokens, device=input_ids.device)
        logits = self.head(self.norm(self.encoder(hidden, mask=mask, is_causal=True)))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def plain(num_layers: int = 3, dropout: float = 0.0, tied: bool = False, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    return PlainTransformer(num_layers, dropout, tied).train(), token_batch(mask=False, **batch)


class StackLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mlp(self.norm(x))) * gate


class HandWritten(nn.Module):
    """A stack by hand. `scale` is loose: the model's own code uses it, between and as an argument of blocks."""

    def __init__(self, num_layers: int = 3, dropout: float = 0.0, unused: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.9))
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(StackLayer(dropout) for _ in range(num_layers))
        if unused:
            self.never = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 8)
        self.skip: set[int] = set()  # layers left out, for tests of a changing order

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x) * self.scale
        for index, layer in enumerate(self.layers):
            if index not in self.skip:
                hidden = layer(hidden, gate=self.scale)
        prediction = self.head(hidden)
        return {"prediction": prediction} if labels is None else {"loss": F.mse_loss(prediction, labels)}


def hand_written(num_layers: int = 3, dropout: float = 0.0, unused: bool = False, seed: int = 0, **batch: Any) -> Pair:
    torch.manual_seed(seed)
    return HandWritten(num_layers, dropout, unused).train(), vector_batch(**batch)


def sequential(dropout: float = 0.0, seed: int = 0, **batch: Any) -> tuple[nn.Module, torch.Tensor]:
    """A plain nn.Sequential; its batch is a single tensor and it returns no loss."""
    torch.manual_seed(seed)
    layers = [
        nn.Linear(HIDDEN, 48),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(48, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, 8),
    ]
    return nn.Sequential(*layers).train(), vector_batch(**batch)["x"]


def llama_untied(**options: Any) -> Pair:
    return llama(tied=False, **options)


def llama_tied(**options: Any) -> Pair:
    return llama(tied=True, **options)


ZOO: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "llama": llama_untied,
    "llama_tied": llama_tied,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "qwen3_moe": qwen3_moe,
    "opt": opt,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "plain": plain,
    "hand_written": hand_written,
    "sequential": sequential,
}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of any model of the zoo."""
    result = model(batch) if isinstance(batch, torch.Tensor) else model(**batch)
    if isinstance(result, torch.Tensor):
        return result.square().mean()
    return result["loss"]


def _special_tokens() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
