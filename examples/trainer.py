"""Fine-tunes a Hugging Face folder with transformers' Trainer; that of hightide takes its place, where it is marked.

python examples/trainer.py                            # a tiny model, made on the spot: nothing to download
python examples/trainer.py path/to/model --gpu 24GiB  # your own, on less of the GPU than there is
python examples/trainer.py path/to/model --resume     # goes on where it was stopped
"""

from __future__ import annotations

import argparse

import torch
from tiny import make_tiny_folder, read_tokens, say
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import hightide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a Hugging Face folder; left out: a tiny model is made")
    parser.add_argument("--text", help="a text file to learn; left out: source code of Python's standard library")
    parser.add_argument("--out", default="runs/trainer", help="where checkpoints and the model are saved")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--lr", type=float, help="default: 1e-5, and 1e-3 for the tiny model")
    parser.add_argument("--gpu", help="how much of the GPU to use, as 24GiB; left out: all that is free")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    args = parser.parse_args()

    folder = args.model or make_tiny_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = read_tokens(tokenizer, args.text)
    pieces = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    if not len(pieces):
        raise SystemExit(f"the text has {len(tokens)} tokens, and a sample --length {args.length}: give more of it")
    settings = TrainingArguments(
        args.out,
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        learning_rate=args.lr or (1e-5 if args.model else 1e-3),
        logging_steps=5,
        save_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),  # without it ranks on CPUs would not see each other
    )
    trainer = hightide.Trainer(  # instead of transformers.Trainer
        AutoModelForCausalLM.from_pretrained(folder),
        settings,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        processing_class=tokenizer,
        limits=hightide.Limits(gpu=args.gpu),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    say(hightide.stats(trainer.model))  # memory and time of the steps; .plan.explain() has the whole plan
    trainer.save_model()
    say(f"saved to {args.out}; AutoModelForCausalLM.from_pretrained({args.out!r}) loads it")


if __name__ == "__main__":
    main()
