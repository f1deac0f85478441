"""`hightide train` learns what a plain PyTorch loop learns that takes the same sequences one by one, each in a call of
its own: whatever is packed, padded, cut into calls or left out of the loss."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hightide.cli.main import app
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.learning_rate import lr_factor
from hightide.cli.train.model_source import find_model
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.train.training_data import TrainingData, read_data
from hightide.data.batches import Steps
from hightide.integrations.lora import Lora
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

WORDS = ["tide", "flood", "fortune", "voyage", "shallows", "miseries", "current", "ventures", "serve", "lose"]
STEPS, EPS = 4, 1e-5  # with AdamW's own, the first steps are as large for gradients that are only rounding


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 7 + index * 3) % len(WORDS)] for index in range(count))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    with (folder / "chat.jsonl").open("w") as chat, (folder / "pairs.jsonl").open("w") as pairs:
        for row in range(14):
            turns = [{"role": "user", "content": words(row, 1 + row % 4)}]
            for turn in range(1 + row % 2):
                turns.append({"role": "assistant", "content": words(row + turn, 2 + row % 3)})
                turns.append({"role": "user", "content": "more"})
            print(json.dumps({"messages": turns[:-1]}), file=chat)
            print(
                json.dumps({"prompt": words(row, 1 + row % 3), "completion": words(row, 1 + row * 5 % 24)}), file=pairs
            )
    (folder / "text.txt").write_text("\n".join(words(row, 9) for row in range(60)))
    return folder


def settings(out: Path, **options: Any) -> TrainConfig:
    given = {"seed": 3, "steps": STEPS, "length": 64, "sequences": 4, "lr": 2e-3, "warmup_steps": 2, "device": "cpu"}
    limits = {"gpu": "32MiB", "host": "256MiB"}
    options |= {"model": str(tiny_folder()), "dtype": "float32", "out": str(out), **limits}
    return load_config(_eps(out), TrainOptions(**{**given, **options}))


def _eps(out: Path) -> Path:
    out.mkdir(exist_ok=True)
    (out / "eps.yaml").write_text(f"optimizer: {{eps: {EPS}}}\nname: run\n")
    return out / "eps.yaml"


def run(config: TrainConfig, out: Path) -> tuple[list[float], list[float], Path]:
    (out / "all.yaml").write_text(config.to_yaml())
    result = CliRunner().invoke(app, ["train", str(out / "all.yaml")])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "run-001" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], out / "run-001"


def plain(config: TrainConfig) -> tuple[list[float], list[float], Any]:
    console = Console(file=io.StringIO())
    source = find_model(config, console)
    config = source.settled(config)
    found = read_data(config, source, console)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    if config.lora is not None:
        lora = Lora.parse(config.lora)
        targets = "all-linear" if "all-linear" in lora.targets else list(lora.targets) or None
        options = {"r": lora.rank, "lora_alpha": 2 * lora.rank, "target_modules": targets, "task_type": "CAUSAL_LM"}
        torch.manual_seed(config.seed)
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    its = config.optimizer
    optimizer = torch.optim.AdamW(trained, lr=its.lr, betas=its.betas, eps=EPS, weight_decay=its.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, STEPS, its))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(_backward(model, found, config, step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, its.clip_norm)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, model


def _backward(model: Any, found: TrainingData, config: TrainConfig, step: int) -> float:
    """The mean over all tokens of the step that are learned, from single sequences."""
    order, size = Steps(found.train, config.data.sequences, config.seed), config.data.sequences
    rows = [order._row(number) for number in range(step * size, (step + 1) * size)]
    data = found.train._sequences
    pieces = [data.starts[index : index + 2].tolist() for row in rows for index in found.train._rows.of(row)]
    total = sum(int(data.is_learned[begin:end].sum()) for begin, end in pieces)
    value = 0.0
    for begin, end in pieces:
        ids, learned = data.ids[begin:end].long(), data.is_learned[begin:end][1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits[learned], ids[1:][learned], reduction="sum") / total
        loss.backward()
        value += loss.item()
    return value


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("chat.jsonl", {"completions_only": True}),
        ("chat.jsonl", {"completions_only": True, "lora": "4", "calls": 2}),
        ("pairs.jsonl", {"completions_only": True, "pack": False, "calls": 4, "length": 200}),
        pytest.param("pairs.jsonl", {"pack": False, "lora": "4:q_proj,down_proj"}, marks=pytest.mark.long),
        pytest.param("pairs.jsonl", {"calls": 2}, marks=pytest.mark.long),
        pytest.param("text.txt", {"calls": 2}, marks=pytest.mark.long),
        pytest.param("text.txt", {"lora": "2:all-linear", "micro_batch": 1}, marks=pytest.mark.long),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_losses_and_weights_are_those_of_a_plain_loop(
    data: Path, tmp_path: Path, file: str, options: dict[str, Any]
) -> None:
    config = settings(tmp_path, data=str(data / file), **options)
    losses, norms, folder = run(config, tmp_path)
    expected, expected_norms, model = plain(config)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert norms == pytest.approx(expected_norms, rel=2e-4)
    if config.lora is None:
        trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
        trained = peft.PeftModel.from_pretrained(base, folder / "adapter")
    values = dict(trained.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(values[name].detach(), param.detach(), rtol=1e-3, atol=2e-5)
