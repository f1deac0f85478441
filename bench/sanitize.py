"""A few steps of a tiny model through every kind of transfer, for compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 9 python bench/sanitize.py
"""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers

import hightide
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it only shows that it runs


def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    tokens = torch.randint(0, 257, (4, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    for update, gradients, dtype in (
        ("deferred", "float32", torch.float32),
        ("in_backward", "param", torch.bfloat16),
    ):
        model = transformers.LlamaForCausalLM(config).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        limits = hightide.Limits(gpu="512MiB", host="1GiB")
        options = {"update": update, "gradients": gradients}
        plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, device=DEVICE, **options)
        away = {"params": Tier.HOST, "states": Tier.HOST, "inputs": Tier.HOST, "activation": Activation.RECOMPUTE}
        blocks = [replace(block, **away) if index not in (1, 2) else block for index, block in enumerate(plan.blocks)]
        widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
        plan = replace(plan, blocks=tuple(blocks), num_slots=3 * widest, num_grad_slots=3 * widest)
        model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, device=DEVICE, **options)
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            if update == "deferred":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
        print(f"{update}, {dtype}: loss {loss.item():.4f}", flush=True)
        hightide.unwrap(model)


if __name__ == "__main__":
    main()
