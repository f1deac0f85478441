"""`hightide.Trainer` against transformers' own, side by side: losses, norms and evaluations of 20 steps.

    python bench/trainer_parity.py --model llama-3.2-1b --gpu 8GiB

In fp32, so that both compute the same: all weights with accumulation over four batches and clipping, then LoRA, with
sequences of several lengths. The plain Trainer has the whole GPU. One line of JSON: `logs_off` is the largest relative
difference of anything that both have logged, `weights_off` that of the trained weights at the end, relative to the
largest of their tensor; `gpu_peak_bytes` what the wrapped one had of the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from typing import Any

import throughput
import torch
from shapes import build
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import hightide
from hightide.integrations.shapes import SHAPES

LOGGED = ("loss", "grad_norm", "eval_loss")
LENGTHS = (1.0, 0.6, 0.3, 0.8)  # shares of the longest, in turn
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0},
    "lora": {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", choices=SHAPES)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: the simulated accelerator")
    add("--gpu", default="8GiB")
    add("--host", default="64GiB")
    add("--sequences", type=int, default=4, help="of a batch")
    add("--length", type=int, default=512)
    add("--steps", type=int, default=20)
    return parser.parse_args(argv)


class Sequences(torch.utils.data.Dataset[Any]):
    """Of several lengths, padded on the right; padding is not learned."""

    def __init__(self, number: int, length: int, vocabulary: int, seed: int) -> None:
        self._number, self._length, self._vocabulary, self._seed = number, length, vocabulary, seed

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self._length * LENGTHS[index % len(LENGTHS)])
        generator = torch.Generator().manual_seed(self._seed + index)
        tokens = torch.randint(self._vocabulary, (length,), generator=generator)
        rest = self._length - length
        return {
            "input_ids": torch.cat([tokens, tokens.new_zeros(rest)]),
            "labels": torch.cat([tokens, tokens.new_full((rest,), -100)]),
            "attention_mask": torch.cat([tokens.new_ones(length), tokens.new_zeros(rest)]),
        }


def built(options: argparse.Namespace, variant: str) -> nn.Module:
    model = build(options.model, options.length, torch.float32)
    if variant == "full":
        return model
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def trained(options: argparse.Namespace, variant: str, is_plain: bool) -> tuple[list[tuple[str, float]], Any]:
    """What was logged, and the trained weights."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=options.sequences,
            per_device_eval_batch_size=options.sequences,
            max_steps=options.steps,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=options.steps // 2,
            save_strategy="no",
            learning_rate=1e-4,
            adam_epsilon=1e-4,
            report_to=[],
            disable_tqdm=True,
            label_names=["labels"],
            use_cpu=options.device == "cpu",
            **VARIANTS[variant],
        )
        model = built(options, variant)
        vocabulary = model.config.vocab_size
        data = {
            "train_dataset": Sequences(64 * options.sequences, options.length, vocabulary, 1),
            "eval_dataset": Sequences(2 * options.sequences, options.length, vocabulary, 10_000),
        }
        limits = hightide.Limits(gpu=options.gpu, host=options.host)
        trainer = (
            Trainer(model, arguments, **data) if is_plain else hightide.Trainer(model, arguments, limits=limits, **data)
        )
        trainer.train()
        logs = [(name, entry[name]) for entry in trainer.state.log_history for name in LOGGED if name in entry]
        if not is_plain:
            hightide.unwrap(trainer.model)
        weights = {
            name: value.detach().cpu() for name, value in trainer.model.named_parameters() if value.requires_grad
        }
    return logs, weights


def differences(options: argparse.Namespace, variant: str) -> dict[str, float]:
    cuda = options.device == "cuda"
    expected, plain = trained(options, variant, is_plain=True)
    _forget(cuda)
    if cuda:
        throughput.limit_gpu(options.gpu)
    found, wrapped = trained(options, variant, is_plain=False)
    peak_bytes = torch.cuda.max_memory_reserved() if cuda else 0
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    _forget(cuda)
    assert [name for name, _ in found] == [name for name, _ in expected], "other things were logged"
    assert len(expected) >= 2 * options.steps, "losses and norms of all steps are wanted"
    return {
        "logs_off": max(abs(one / other - 1) for (_, one), (_, other) in zip(found, expected, strict=True)),
        "weights_off": max(
            float((wrapped[name] - value).abs().max() / value.abs().max()) for name, value in plain.items()
        ),
        "loss_first": expected[0][1],
        "loss_last": next(value for name, value in reversed(expected) if name == "loss"),
        "gpu_peak_bytes": peak_bytes,
    }


def _forget(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(argv: list[str]) -> int:
    options = parse(argv)
    found = {variant: differences(options, variant) for variant in VARIANTS}
    worst = {key: max(one[key] for one in found.values()) for key in ("logs_off", "weights_off", "gpu_peak_bytes")}
    print(json.dumps({"model": options.model, "gpu": options.gpu, **worst, "variants": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
