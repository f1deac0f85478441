"""`hightide verify` from the outside: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import models
from hightide.cli.main import app

SOURCE = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(8))  # has no initialiser: the function must be called for real

    def forward(self, x):
        return (self.layers(x) * self.scale).square().mean()

class Writing(nn.Linear):
    def forward(self, x):
        x += 1
        return super().forward(x)

def good():
    model = Stack()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(6, 8)

def refused():
    return nn.Sequential(Writing(8, 8), Stack()), torch.randn(6, 8)

def alone():
    return Stack()

def broken():
    return Stack(), torch.randn(6, 9)

def nothing():
    return 7
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_a_function_whose_model_is_equal(source: Path) -> None:
    result = run(f"{source}:good", "--gpu", "1MiB", "--host", "8MiB", "--steps", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("mine.py:good\nequal to plain PyTorch: ")
    assert "momentum_buffer" in result.stdout and "within your limits" in result.stdout
    assert "run: 1 step, 3 micro-batches, everything streamed" in result.stdout


def test_a_refusal_is_exit_code_1(source: Path) -> None:
    result = run(f"{source}:refused")
    assert result.exit_code == 1 and "REFUSED" in result.stdout and "in place" in result.stdout, result.output


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alone", "has 0 embeddings, so its batch is not known"),
        ("broken", "mine.py:broken raised RuntimeError, without hightide: mat1 and mat2 shapes"),
        ("nothing", "returned int; it must return module, (module, batch) or"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_bad_input_is_exit_code_2(source: Path, function: str, message: str) -> None:
    result = run(f"{source}:{function}")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_a_folder_with_nothing_but_a_configuration(tmp_path: Path) -> None:
    model, _ = models.llama(num_layers=2)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    result = run(tmp_path, "--sequences", 3, "--length", 8)
    assert result.exit_code == 0, result.output
    assert "without values" in result.stdout
