"""Runs on real data go on too: adapters, packed conversations, several calls, evaluations; to the bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hightide.cli.main import app
from hightide.cli.train.training_run import TrainingRun
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    with (tmp_path / "chat.jsonl").open("w") as file:
        for row in range(30):
            turns = [{"role": "user", "content": "tide " * (1 + row % 5)}]
            turns.append({"role": "assistant", "content": "flood " * (1 + row % (40 if row % 9 == 0 else 4))})
            print(json.dumps({"messages": turns}), file=file)
    return tmp_path / "chat.jsonl"


def train(chat: Path, name: str, *options: str) -> Result:
    command = ["train", "--model", str(tiny_folder()), "--data", str(chat), "--completions-only", "--lora", "4"]
    command += ["--length", "64", "--sequences", "4", "--calls", "2", "--steps", "7", "--lr", "1e-2", "--eval-share"]
    command += ["0.2", "--eval-every", "3", "--save-every", "3", "--device", "cpu", "--gpu", "32MiB", "--host", "1GiB"]
    command += ["--out", str(chat.parent / "runs"), "--name", name, *options]
    return CliRunner().invoke(app, command, env={"COLUMNS": "80"})


def lines(chat: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (chat.parent / "runs" / f"{name}-001" / file).read_text().splitlines()]


def test_a_run_of_adapters_goes_on_as_if_it_had_never_been_stopped(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(chat, "whole")
    assert whole.exit_code == 0, whole.output
    assert "warning: longer than --length and cut: " in whole.output and "packed into" in whole.output
    assert whole.output.count("evaluation loss") == 3 and "7 steps of 4 rows in 2 calls" in whole.output
    kept = ("data:", "run folder", "trained:", "evaluation:", "warning:", "packed")
    assert all(len(line) <= 80 for line in whole.output.splitlines() if not line.startswith(kept))
    step = TrainingRun.step

    def signalled(self: TrainingRun, number: int, *rest: Any) -> None:
        if number == 4:
            signal.raise_signal(signal.SIGTERM)
        step(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "step", signalled)
        assert train(chat, "cut").exit_code == 143
    again = train(chat, "cut")
    assert again.exit_code == 0 and "resuming from step 4 of 7" in again.output, again.output
    for file, keys in (("metrics.jsonl", ("step", "loss", "grad_norm", "lr")), ("evaluations.jsonl", ("step", "loss"))):
        found, expected = (
            [[line[key] for key in keys] for line in lines(chat, name, file)] for name in ("cut", "whole")
        )
        assert found == expected, file
    assert [line["step"] for line in lines(chat, "cut", "evaluations.jsonl")] == [3, 6, 7]
    losses = [line["loss"] for line in lines(chat, "whole", "evaluations.jsonl")]
    assert losses[-1] < losses[0]
    adapters = [
        peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(tiny_folder()),
            chat.parent / "runs" / f"{name}-001" / "adapter",
        ).state_dict()
        for name in ("whole", "cut")
    ]
    assert all(adapters[0][key].equal(adapters[1][key]) for key in adapters[0])
    refused = train(chat, "cut", "--lora", "8")
    assert refused.exit_code == 2 and "lora was '4' and is '8'" in refused.stderr
