"""Trains LoRA adapters with PEFT on a frozen model; only the adapters are saved. Two lines are hightide's.

python examples/lora.py                                  # a tiny model, made on the spot: nothing to download
python examples/lora.py path/to/model --data my.txt      # your own: a folder with weights and a tokenizer
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from tiny import make_tiny_folder, read_batches, say
from transformers import AutoModelForCausalLM, AutoTokenizer

import hightide  # the first line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a Hugging Face folder; left out: a tiny model is made")
    parser.add_argument("--data", help="what to learn: txt, jsonl, csv ...; left out: some of Python's own source")
    parser.add_argument("--completions-only", action="store_true", help="the loss counts what the assistant says only")
    parser.add_argument("--out", default="runs/adapters", help="where the adapters are saved")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, help="default: 1e-4, and 5e-3 for the tiny model")
    parser.add_argument("--gpu", help="how much of the GPU to use, as 24GiB; left out: all that is free")
    args = parser.parse_args()

    torch.manual_seed(0)
    folder = args.model or make_tiny_folder(f"{args.out}/base")  # to which the adapters refer
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=args.lr or (1e-4 if args.model else 5e-3)
    )
    data = read_batches(folder, args.data, args.batch, args.length, args.completions_only)

    limits = hightide.Limits(gpu=args.gpu)
    model, optimizer = hightide.wrap(model, optimizer, next(data), limits=limits)  # the second line
    say(hightide.stats(model).plan.explain())

    model.train()
    for step, batch in zip(range(args.steps), data, strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss.item():.4f}")

    model.save_pretrained(args.out)  # adapters only; hightide.unwrap(model).merge_and_unload() gives a whole model
    AutoTokenizer.from_pretrained(folder).save_pretrained(args.out)
    say(f"saved to {args.out}; PeftModel.from_pretrained(base_model, {args.out!r}) loads it")


if __name__ == "__main__":
    main()
