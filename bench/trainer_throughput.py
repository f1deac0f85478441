"""Speed of `hightide.Trainer`, in the form of bench/throughput.py, whose loop is what it is held against.

    python bench/trainer_throughput.py --gpu 24GiB --host 112GiB --update in_backward --gradients param

One JSON line. Steps are marked where the Trainer tells its callbacks that one has ended, on a GPU by events, without
waiting for it. Logging is off: what is logged is read from the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

import throughput
import torch
from shapes import batches, build
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

import hightide


class Sequences(torch.utils.data.Dataset):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class StepEnds(TrainerCallback):
    def __init__(self, warmup: int, cuda: bool) -> None:
        self.warmup, self.cuda = warmup, cuda
        self.marks: throughput.Marks | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.marks is not None:
            self.marks.set()
        elif state.global_step == self.warmup:
            self.marks = throughput.Marks(self.cuda)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.device(options.device).type == "cuda"
    if cuda:
        torch.zeros(1, device=options.device)
    bare_bytes = throughput.rss_bytes("VmRSS")
    if cuda and options.gpu:
        throughput.limit_gpu(options.gpu)
    model = build(options.model, options.length, getattr(torch, options.dtype))
    num_steps = options.warmup + options.steps
    data = Sequences(torch.cat(batches(model, options.sequences, options.length, num_steps)))  # one epoch
    ends = StepEnds(options.warmup, cuda)
    with tempfile.TemporaryDirectory() as folder:
        trainer = hightide.Trainer(
            model,
            TrainingArguments(
                folder,
                per_device_train_batch_size=options.sequences,
                max_steps=num_steps,
                learning_rate=throughput.LR,
                max_grad_norm=options.clip or 0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                use_cpu=not cuda,
                disable_tqdm=True,
            ),
            train_dataset=data,
            callbacks=[ends],
            limits=hightide.Limits(gpu=options.gpu, host=options.host),
            update=options.update,
            gradients=options.gradients,
            micro_batch=options.micro_batch,
            compile=cuda if options.compile is None else options.compile,
        )
        trainer.train()
        throughput.synchronize()
    assert ends.marks is not None
    seconds = ends.marks.seconds()
    stats, memory = hightide.stats(trainer.model), throughput._memory(cuda, bare_bytes)
    told_bytes = (stats.forecast.process_bytes or bare_bytes) + stats.forecast.host_peak_bytes
    return {
        "label": options.label or "trainer",
        **{key: getattr(options, key) for key in ("model", "sequences", "length", "gpu", "clip", "dtype", "update")},
        "calls": stats.plan.accumulate,
        "event_s": throughput.summary(seconds),
        "tokens_per_s": options.sequences * options.length * len(seconds) / sum(seconds),
        "forecast": vars(stats.forecast),
        "tier_peak_bytes": stats.peak_bytes,
        **memory,
        "host_above_plan_bytes": memory["host_rss_peak_bytes"] - told_bytes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


if __name__ == "__main__":
    print(json.dumps(measure(throughput.parse(sys.argv[1:]))), flush=True)
