"""`hightide train` as a user has it: a folder and conversations made on the spot, LoRA, adapters; killed, resumed.

    python bench/train_command.py --shape llama-3.1-8b --gpu 8GiB --folder /scratch/train

Three runs of the command in `--folder`: one from beginning to end, one that is killed (SIGKILL, with all that it has
started) after its first checkpoint, and the same command again, which goes on. One line of JSON: seconds from the
command to the saved adapters, of the restart to its first new step, and by how much the losses of the resumed run
differ from those of the whole one at most (relative). Weights are random, bf16, in shards; the tokenizer is learned
from the conversations. What the folder holds: the model once (16 GB for the 8B) and checkpoints of adapters.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import build
from torch import Tensor

from hightide.cli.train.config import ModelConfig
from hightide.cli.train.tiny_model import make_tiny_model
from hightide.data.readers import read_rows
from hightide.integrations.shapes import SHAPES

SHARD_BYTES = 2 << 30
CONVERSATIONS = 400
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="llama-3.1-8b", choices=SHAPES)
    add("--folder", required=True, help="for the model, the data and the runs; what this makes there is removed")
    add("--device", help="cpu: the simulated accelerator")
    add("--gpu", default="8GiB")
    add("--host")
    add("--rank", type=int, default=16, help="of LoRA")
    add("--sequences", type=int, default=8)
    add("--length", type=int, default=1024)
    add("--steps", type=int, default=12)
    add("--save-every", type=int, default=4)
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    folder = Path(options.folder) / "train-command"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        print(json.dumps(measure(options, folder)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    began_s = time.perf_counter()
    data = write_conversations(folder / "chat.jsonl")
    num_bytes = write_model(options.shape, options.length, folder / "model", data)
    made_s = time.perf_counter() - began_s
    tell(f"made in {made_s:.0f} s")
    whole = Command(options, folder, "whole")
    whole_s = whole.run()
    killed = Command(options, folder, "killed")
    killed_s = killed.run(kill_at=options.save_every + 2)
    before = killed.losses()
    resumed_s = killed.run()
    wanted, found = whole.losses(), killed.losses()
    assert set(wanted) == set(found) == set(range(1, options.steps + 1)), (sorted(wanted), sorted(found))
    adapter = whole.run_folder() / "adapter" / "adapter_model.safetensors"
    return {
        "shape": options.shape,
        "gpu": options.gpu,
        "model_bytes": num_bytes,
        "made_s": made_s,
        "whole_s": whole_s,
        "killed_s": killed_s,
        "killed_after_step": max(before, default=0),
        "resumed_s": resumed_s,
        "resumed_first_step_s": killed.first_step_s,
        "resumed_off": max(abs(found[step] / wanted[step] - 1) for step in wanted),
        "loss_first": wanted[1],
        "loss_last": wanted[options.steps],
        "adapter_bytes": adapter.stat().st_size,
        "resumed_adapter_bytes": (killed.run_folder() / "adapter" / adapter.name).stat().st_size,
        "summary": json.loads((whole.run_folder() / "summary.json").read_text()),
    }


def tell(what: str) -> None:
    """For who has to end this before it is through."""
    print(what, file=sys.stderr, flush=True)


class Command:
    """`hightide train` under one name, in its own session."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str) -> None:
        self._runs, self._name = folder / "runs", name
        self.first_step_s: float | None = None  # of the latest run: from the command to its first line of metrics
        self._command = [sys.executable, "-m", "hightide", "train", "--model", str(folder / "model")]
        self._command += ["--data", str(folder / "chat.jsonl"), "--completions-only", "--lora", str(options.rank)]
        self._command += ["--gpu", options.gpu, "--sequences", str(options.sequences), "--length", str(options.length)]
        self._command += ["--steps", str(options.steps), "--save-every", str(options.save_every), "--keep", "2"]
        self._command += ["--out", str(self._runs), "--name", name, "--compile" if options.compile else "--no-compile"]
        for option in ("device", "host"):
            if getattr(options, option):
                self._command += [f"--{option}", getattr(options, option)]

    def run_folder(self) -> Path:
        """The newest."""
        return max(self._runs.glob(f"{self._name}-*"))

    def losses(self) -> dict[int, float]:
        """By step, of the lines that are there."""
        try:
            text = (self.run_folder() / "metrics.jsonl").read_text()
        except (OSError, ValueError):
            return {}
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: line["loss"] for line in lines}

    def run(self, kill_at: int | None = None) -> float:
        """To its end, or until a checkpoint is whole and step `kill_at` is through; its seconds."""
        began_s, known = time.perf_counter(), set(self.losses())
        log = self._runs.with_name(f"{self._name}.log")
        with log.open("w") as file:
            process = subprocess.Popen(self._command, stdout=file, stderr=file, start_new_session=True)
            self.first_step_s = None
            try:
                while process.poll() is None:
                    losses = self.losses()
                    if self.first_step_s is None and set(losses) - known:
                        self.first_step_s = time.perf_counter() - began_s
                        tell(f"{self._name}: the first step after {self.first_step_s:.0f} s")
                    if kill_at is not None and max(losses, default=0) >= kill_at and self._is_saved():
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                        tell(f"{self._name}: killed after {time.perf_counter() - began_s:.0f} s")
                        return time.perf_counter() - began_s
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode != 0 or kill_at is not None:
            raise SystemExit(f"{self._name}: exit {process.returncode}\n{log.read_text()[-3000:]}")
        tell(f"{self._name}: ended after {time.perf_counter() - began_s:.0f} s")
        return time.perf_counter() - began_s

    def _is_saved(self) -> bool:
        return any(self.run_folder().glob("**/step-*/manifest.json"))


def write_conversations(path: Path) -> Path:
    """Questions about Python's modules, answered by their own first lines."""
    import pkgutil

    rows = []
    for number, module in enumerate(sorted(pkgutil.iter_modules(), key=lambda one: one.name)):
        if len(rows) == CONVERSATIONS:
            break
        answer = f"{module.name} is module {number} of this Python; it is {'a package' if module.ispkg else 'a file'}. "
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"What is {module.name}?"},
                    {"role": "assistant", "content": answer * (1 + number % 7)},
                ]
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(shape: str, length: int, folder: Path, data: Path) -> int:
    """A Hugging Face folder with random weights in bf16, and a tokenizer; its bytes of weights."""
    small = folder.with_name("tokenizer")
    make_tiny_model(
        small,
        ModelConfig(hidden=8, layers=1, heads=1, feed_forward=8, vocabulary=512),
        0,
        read_rows(data, lambda share: None, 1_000_000),
    )
    model = build(shape, length)
    if model.config.vocab_size < 512:
        model.resize_token_embeddings(512)
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (small / name).exists():
            shutil.copy(small / name, folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    shards = cut({name: value for name, value in model.state_dict().items() if name not in tied})
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda one: save_file(one[0], folder / one[1], {"format": "pt"}), zip(shards, names, strict=True))
        )
    placed = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
    num_bytes = sum(value.nbytes for shard in shards for value in shard.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def cut(values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in values.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + value.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = value.contiguous()
    return shards


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
