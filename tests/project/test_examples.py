"""The examples run as the README says, from a checkout, without a network, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _path() -> str:
    """This checkout's sources first, however the tests were started."""
    return os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    return run("examples/finetune.py", "--steps", "8", "--length", "64", "--out", str(folder)), folder


def test_finetuning_lowers_the_loss_and_saves_a_model(tuned: tuple[str, Path]) -> None:
    output, folder = tuned
    assert len(losses(output)) == 8 and losses(output)[-1] < losses(output)[0] - 0.3
    assert {"config.json", "model.safetensors"} <= {file.name for file in folder.iterdir()}


def test_adapters_learn_a_text_and_only_they_are_saved(tuned: tuple[str, Path], tmp_path: Path) -> None:
    text, out = tmp_path / "verse.txt", tmp_path / "adapters"
    text.write_text("There is a tide in the affairs of men, which, taken at the flood, leads on to fortune. " * 9)
    options = ("--text", str(text), "--steps", "20", "--length", "64", "--out", str(out))
    output = run("examples/lora.py", str(tuned[1]), *options)
    assert losses(output)[-1] < losses(output)[0] - 0.1
    saved = {file.name: file.stat().st_size for file in out.iterdir()}
    assert "model.safetensors" not in saved
    assert saved["adapter_model.safetensors"] < (tuned[1] / "model.safetensors").stat().st_size / 2


def test_the_readme_names_them() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in ("examples/finetune.py", "examples/lora.py"):
        assert command in readme and (ROOT / command).exists()
        assert sum("hightide." in line for line in (ROOT / command).read_text().splitlines()) <= 6
