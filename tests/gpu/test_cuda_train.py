"""`hightide train` on a real GPU: its loop does not wait for it, and its numbers are right all the same."""

from __future__ import annotations

import gc
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import hightide
from gpu.streamed import silence_transformers, wrap
from hightide.cli.config import DataConfig, LimitsConfig, ModelConfig, OptimizerConfig, TrainConfig
from hightide.cli.data import Batches, read_text
from hightide.cli.demo_model import build_model
from hightide.cli.main import app
from hightide.cli.readings import Readings
from hightide.cli.run_folder import RunFolder
from hightide.cli.train_command import TrainingRun, prepare
from hightide.ir.plan import Update

pytestmark = pytest.mark.gpu

NUM_STEPS = 10
STEADY_FROM = 4  # by then every workspace and pinned buffer exists


def settings(out: Path, update: Update, clip_norm: float) -> TrainConfig:
    return TrainConfig(
        name="gpu",
        out=str(out),
        steps=NUM_STEPS,
        micro_batch=2,
        update=update,
        model=ModelConfig(hidden=64, layers=4, heads=2, feed_forward=128),
        data=DataConfig(sequences=6, sequence_bytes=32, text_bytes=100_000),
        optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, clip_norm=clip_norm, warmup_steps=2),
        limits=LimitsConfig(gpu="1GiB", host="2GiB"),
    )


def streamed_run(config: TrainConfig) -> TrainingRun:
    """As the command prepares it, but with everything moving: the rule would keep so small a model on the GPU."""
    text = read_text(config.data)
    example = next(Batches(text, config.data, config.seed))
    model = build_model(config)
    num_params = sum(param.numel() for param in model.parameters())
    first, second = config.optimizer.betas
    options = {"lr": config.optimizer.lr, "betas": (first, second), "weight_decay": config.optimizer.weight_decay}
    model, optimizer = wrap(model, example, update=config.update.value, **options)
    run = TrainingRun(config, Console(file=io.StringIO()), model, optimizer, num_params, text)
    run.begin(None)
    return run


def watched(stream: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """From the fourth batch on, an operation that waits for the GPU is an error."""
    for step, batch in enumerate(stream, 1):
        if step == STEADY_FROM:
            torch.cuda.set_sync_debug_mode("error")
        yield batch


def logged(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(run: TrainingRun) -> list[dict[str, object]]:
    with RunFolder(run.config) as folder:
        assert run.steps(folder) is None
    return logged(folder.path)


@pytest.mark.parametrize(("update", "clip_norm"), [(Update.DEFERRED, 1.0), (Update.IN_BACKWARD, 0.0)])
def test_the_steady_loop_of_the_command_never_waits_for_the_gpu(
    tmp_path: Path, update: Update, clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence_transformers(monkeypatch)
    config = settings(tmp_path, update, clip_norm)
    run = streamed_run(config)
    assert run.device.type == "cuda"
    run.batches = watched(run.batches)  # type: ignore[assignment]
    try:
        lines = train(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hightide.stats(run.model).deviations == 0
    hightide.unwrap(run.model)
    plain = replace(config, device="cpu")
    expected = train(prepare(plain, Console(file=io.StringIO()), read_text(config.data)))
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)
        norm = other["grad_norm"]
        assert line["grad_norm"] == (None if norm is None else pytest.approx(norm, rel=2e-2))
        assert line["step_s"] > 0  # type: ignore[operator]
    losses = [line["loss"] for line in lines]
    assert losses[0] - losses[-1] > 0.1  # type: ignore[operator]  # so that a loss of another step would be noticed


def test_waiting_for_the_gpu_in_the_loop_is_noticed() -> None:
    """What the test above relies on."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_of_a_busy_gpu_are_handed_on_later_and_right() -> None:
    seen: list[tuple[list[float], float]] = []
    start = torch.ones((), device="cuda", dtype=torch.bfloat16)
    (start * 3).double()  # the kernels are loaded
    torch.cuda.synchronize()
    with Readings(torch.device("cuda", torch.cuda.current_device())) as readings:
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        begun_s = time.perf_counter()
        readings.add([start * 3, start * 5], lambda values, step_s: seen.append((values, step_s)))
        assert time.perf_counter() - begun_s < 0.2
        assert seen == []
    ((values, step_s),) = seen
    assert values == [3.0, 5.0]
    assert step_s > 0.2


@pytest.mark.timeout(300)  # the compilation
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_the_command_takes_the_gpu_by_itself_and_says_so(tmp_path: Path, compile: bool) -> None:
    config = replace(settings(tmp_path / "runs", Update.DEFERRED, 1.0), compile=compile)
    (tmp_path / "gpu.yaml").write_text(config.to_yaml())
    result = CliRunner().invoke(app, ["train", str(tmp_path / "gpu.yaml")], env={"COLUMNS": "80"})
    gc.collect()  # the model goes, and its limit with it
    assert result.exit_code == 0, result.output
    assert f"device: {torch.cuda.get_device_name()} (cuda:" in result.output
    assert ("blocks compiled" in result.output) == compile
    assert "what the model writes" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith("run folder"))
    lines = logged(tmp_path / "runs" / "gpu-001")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert json.loads((tmp_path / "runs" / "gpu-001" / "summary.json").read_text())["steps"] == NUM_STEPS
