"""What a run says about its data, and how rows become batches where a model asks how long a call is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hightide.cli.main import app
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")

FACTORS = [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "model"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "tide " * (1 + row % 3), "completion": "flood " * (1 + 11 * (row % 4 == 0))} for row in range(24)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def change(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text())
    settings.update({name: value for name, value in values.items() if value is not None})
    path.write_text(json.dumps({name: one for name, one in settings.items() if name not in values or values[name]}))


def train(model: Path, data: Path, name: str, *options: str) -> Result:
    command = ["train", "--model", str(model), "--data", str(data), "--steps", "2", "--sequences", "4", "--dtype"]
    command += ["float32", "--length", "96", "--device", "cpu", "--gpu", "64MiB", "--host", "1GiB", "--lr", "1e-3"]
    command += ["--out", str(data.parent / "runs"), "--name", name, *options]
    return CliRunner().invoke(app, command, env={"COLUMNS": "80"})


def run_of(data: Path, name: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((data.parent / "runs" / f"{name}-001" / "summary.json").read_text())
    return summary


def test_a_tokenizer_without_an_end_token_is_told_once_with_the_remedy(model: Path, pairs: Path) -> None:
    told = "warning: the tokenizer has no end token, so nothing teaches the model where a completion ends"
    good = train(model, pairs, "good")
    assert good.exit_code == 0 and "end token" not in good.output and not run_of(pairs, "good")["warnings"]
    change(model / "tokenizer_config.json", eos_token=None)
    result = train(model, pairs, "endless")
    assert result.exit_code == 0, result.output
    plain = " ".join(result.output.split())
    assert plain.count(told) == 1 and "as eos_token in the tokenizer_config.json of its folder" in plain
    (warning,) = run_of(pairs, "endless")["warnings"]
    assert f"warning: {warning}" in plain


def test_data_that_are_less_than_a_step_are_told(model: Path, pairs: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(pairs.read_text().splitlines(keepends=True)[:3]))
    result = train(model, few, "few", "--no-pack", "--eval-data", str(few))
    assert result.exit_code == 0, result.output
    told = "a step of 4 rows is more than the data, 3 rows, so each step learns them 1.33 times"
    assert f"warning: {told}" in " ".join(result.output.split()) and "evaluation data: 3 rows" in result.output
    assert [told in one for one in run_of(few, "few")["warnings"]] == [True]


@pytest.mark.parametrize("original", [80, 96])
def test_rotary_embeddings_that_follow_the_length_of_a_call_are_the_same_in_any_calls(
    original: int, model: Path, pairs: Path
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original}
    rope |= {"short_factor": [1.0] * 8, "long_factor": FACTORS}
    change(model / "config.json", rope_parameters=rope)
    weights = load_file(model / "model.safetensors")  # attention that looks at places
    scaled = {name: value * (30 if "q_proj" in name or "k_proj" in name else 1) for name, value in weights.items()}
    save_file(scaled, model / "model.safetensors", metadata={"format": "pt"})
    results = [train(model, pairs, f"in-{calls}", "--calls", calls) for calls in ("1", "4")]
    for result in results:
        assert result.exit_code == 0, result.output
        plain = " ".join(result.output.split())
        told = "every row is padded to 96 tokens: rotary embeddings of this model change where a call has more than 80"
        assert (told in plain) == (original == 80) == ("packed into" not in plain)
    one, four = (run_of(pairs, f"in-{calls}") for calls in ("1", "4"))
    assert one["first_loss"] == pytest.approx(four["first_loss"], rel=1e-6)
    assert one["last_loss"] == pytest.approx(four["last_loss"], rel=1e-5)
    packed = train(model, pairs, "packed", "--pack")
    assert packed.exit_code == (2 if original == 80 else 0)
    if original == 80:
        assert "give --length 80, or leave --pack out: then every row is padded to 96 tokens" in packed.output
