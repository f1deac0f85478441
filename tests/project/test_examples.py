"""The examples run as the README says, from a checkout, without a network, and do what they say."""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forked import run_file

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = run_file(ROOT, *arguments)
    assert done.status == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    return run("examples/finetune.py", "--steps", "8", "--length", "64", "--out", str(folder)), folder


def test_finetuning_lowers_the_loss_and_saves_a_model_with_its_tokenizer(tuned: tuple[str, Path]) -> None:
    output, folder = tuned
    assert len(losses(output)) == 8 and losses(output)[-1] < losses(output)[0] - 0.3
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names


def test_adapters_learn_conversations_and_only_they_are_saved(tuned: tuple[str, Path], tmp_path: Path) -> None:
    chat, out = tmp_path / "chat.jsonl", tmp_path / "adapters"
    turns = [{"role": "user", "content": "a tide?"}, {"role": "assistant", "content": "in the affairs of men"}]
    chat.write_text(f"{json.dumps({'messages': turns})}\n" * 9)
    options = ("--data", str(chat), "--completions-only", "--steps", "20", "--length", "64", "--lr", "5e-3")
    output = run("examples/lora.py", str(tuned[1]), *options, "--out", str(out))
    assert losses(output)[-1] < losses(output)[0] - 0.1
    saved = {file.name: file.stat().st_size for file in out.iterdir()}
    assert "model.safetensors" not in saved and "tokenizer.json" in saved
    assert saved["adapter_model.safetensors"] < (tuned[1] / "model.safetensors").stat().st_size / 2


@pytest.mark.long
def test_a_trainer_saves_and_goes_on(tmp_path: Path) -> None:
    options = ("--length", "64", "--out", str(tmp_path))
    run("examples/trainer.py", "--steps", "10", *options)
    run("examples/trainer.py", "--steps", "12", "--resume", *options)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"checkpoint-10", "checkpoint-12", "config.json", "model.safetensors"} <= names


@pytest.mark.long
@pytest.mark.parametrize("name", ["finetune", "lora", "trainer"])
def test_two_ranks_run_them_too(name: str, tmp_path: Path) -> None:
    """As they are, under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", "4", "--length", "64", "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, f"examples/{name}.py", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    assert {weights, "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}


def test_the_tiny_model_goes_when_the_script_ends_unless_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        atexit, "register", lambda *call, **_: at_exit.append(call) if call[0] is shutil.rmtree else None
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = runpy.run_path(str(ROOT / "examples/tiny.py"))["make_tiny_folder"]
    assert Path(make(str(tmp_path / "adapters" / "base")), "config.json").is_file() and not at_exit
    folder = Path(make())
    assert (folder / "config.json").is_file() and folder.parent == tmp_path and at_exit == [(shutil.rmtree, folder)]


def test_the_readme_names_them() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in ("examples/finetune.py", "examples/lora.py", "examples/trainer.py", "examples/run_clm.py"):
        assert command in readme and (ROOT / command).exists()
        assert sum("hightide." in line for line in (ROOT / command).read_text().splitlines()) <= 6


def test_a_model_of_the_users_own_is_not_wrecked_by_default() -> None:
    """Rates for the tiny model are a hundred times those that a trained one stands."""
    for command in ("examples/finetune.py", "examples/lora.py", "examples/trainer.py"):
        found = re.search(r"args\.lr or \((\S+) if args\.model else \S+\)", (ROOT / command).read_text())
        assert found is not None and float(found[1]) <= 1e-4, command
