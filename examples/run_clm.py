"""Trains a causal language model with the arguments of transformers' example of that name. Two lines are hightide's;
they are marked: with transformers' Trainer in their place it is an ordinary script.

python examples/run_clm.py --output_dir runs/clm --do_train --do_eval --max_steps 20  # a tiny model, made on the spot
python examples/run_clm.py --model_name_or_path path/to/model --train_file my.txt --output_dir runs/clm \\
    --do_train --do_eval --bf16 --per_device_train_batch_size 8 --gradient_accumulation_steps 16 --save_steps 100
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tiny import make_tiny_folder, read_tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import hightide  # the first line


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A folder; left out: a tiny model is made."})
    config_name: str | None = field(default=None, metadata={"help": "Trains from scratch a model of this config."})
    dtype: str = field(default="auto", metadata={"help": "Of the weights: auto, float32, bfloat16 or float16."})
    gpu: str | None = field(default=None, metadata={"help": "How much of the GPU to use, as 24GiB."})


@dataclass
class DataArguments:
    train_file: str | None = field(default=None, metadata={"help": "Text; left out: source code of Python itself."})
    validation_file: str | None = field(default=None, metadata={"help": "Text; left out: a part of the other."})
    validation_split_percentage: int = field(default=5, metadata={"help": "How large that part is."})
    block_size: int = field(default=128, metadata={"help": "Tokens of a sample."})
    max_train_samples: int | None = field(default=None, metadata={"help": "No more than these."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "No more than these."})


def samples(tokens: torch.Tensor, length: int, most: int | None) -> list[dict[str, torch.Tensor]]:
    """One after the other; the rest of the text is dropped."""
    pieces = tokens[: len(tokens) // length * length].view(-1, length)[:most]
    if not len(pieces):
        raise SystemExit(f"the text has {len(tokens)} tokens, and a sample --block_size {length}: give more of it")
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(argv: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    chosen, data, settings = parser.parse_args_into_dataclasses(args=argv)
    set_seed(settings.seed)

    folder = chosen.model_name_or_path or make_tiny_folder()
    if chosen.config_name is not None:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(chosen.config_name))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    tokens = read_tokens(tokenizer, data.train_file)
    if data.validation_file is not None:
        others = read_tokens(tokenizer, data.validation_file)
    else:
        split = len(tokens) * (100 - data.validation_split_percentage) // 100
        tokens, others = tokens[:split], tokens[split:]

    trainer = hightide.Trainer(  # the second line
        model=model,
        args=settings,
        train_dataset=samples(tokens, data.block_size, data.max_train_samples) if settings.do_train else None,
        eval_dataset=samples(others, data.block_size, data.max_eval_samples) if settings.do_eval else None,
        processing_class=tokenizer,
        limits=hightide.Limits(gpu=chosen.gpu),
    )
    if settings.do_train:
        last = get_last_checkpoint(settings.output_dir) if Path(settings.output_dir).is_dir() else None
        result = trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint or last)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if settings.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
