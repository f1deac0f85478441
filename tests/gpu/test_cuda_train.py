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
from hightide.cli.main import app
from hightide.cli.train.company import Company
from hightide.cli.train.config import (
    DataConfig,
    LimitsConfig,
    ModelConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)
from hightide.cli.train.model_source import ModelSource, find_model
from hightide.cli.train.readings import Readings
from hightide.cli.train.run_folder import RunFolder
from hightide.cli.train.train_command import prepare
from hightide.cli.train.training_data import TrainingData, read_data
from hightide.cli.train.training_run import TrainingRun
from hightide.cli.workload import Dtype
from hightide.data.batches import Call, Steps
from hightide.ir.plan import Update
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

NUM_STEPS = 10
STEADY_FROM = 4  # by then every workspace and pinned buffer exists


def settings(out: Path, update: Update, clip_norm: float) -> TrainConfig:
    shape = ModelConfig(hidden=64, layers=4, heads=2, feed_forward=128, vocabulary=300)
    return TrainConfig(
        name="gpu",
        out=str(out),
        steps=NUM_STEPS,
        micro_batch=2,
        update=update,
        model=replace(shape, path=str(tiny_folder(shape)), dtype=Dtype.FLOAT32),
        data=DataConfig(path=__file__, sequences=6, length=32),
        optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, clip_norm=clip_norm, warmup_steps=2),
        limits=LimitsConfig(gpu="1GiB", host="2GiB"),
        sample=SampleConfig(tokens=8),
    )


def found(config: TrainConfig) -> tuple[TrainConfig, ModelSource, TrainingData]:
    console = Console(file=io.StringIO())
    source = find_model(config, console)
    config = source.settled(config)
    data = read_data(config, source, console)
    return data.settled(config), source, data


def prepared(config: TrainConfig) -> TrainingRun:
    config, source, data = found(config)
    return prepare(config, Console(file=io.StringIO()), source, data)


def streamed_run(config: TrainConfig) -> TrainingRun:
    """As the command prepares it, but with everything moving: the rule would keep so small a model on the GPU."""
    config, source, data = found(config)
    example = data.train.example(config.data.sequences)
    model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    num_params = sum(param.numel() for param in model.parameters())
    first, second = config.optimizer.betas
    options = {"lr": config.optimizer.lr, "betas": (first, second), "weight_decay": config.optimizer.weight_decay}
    model, optimizer = wrap(model, example, update=config.update.value, **options)
    run = TrainingRun(config, Console(file=io.StringIO()), source, data, Company(), {}, model, optimizer, num_params)
    run.begin(None)
    return run


class Watched(Iterator[list[Call]]):
    """From the fourth batch on, an operation that waits for the GPU is an error."""

    def __init__(self, stream: Steps) -> None:
        self._stream, self._step = stream, 0

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    def __next__(self) -> list[Call]:
        self._step += 1
        if self._step == STEADY_FROM:
            torch.cuda.set_sync_debug_mode("error")
        return next(self._stream)


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
    run.batches = Watched(run.batches)  # type: ignore[assignment]
    try:
        lines = train(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hightide.stats(run.model).deviations == 0
    hightide.unwrap(run.model)
    plain = replace(config, device="cpu")
    expected = train(prepared(plain))
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)
        norm = other["grad_norm"]
        assert line["grad_norm"] == (None if norm is None else pytest.approx(norm, rel=2e-2))
        assert line["step_s"] > 0  # type: ignore[operator]
    losses = [line["loss"] for line in lines]
    assert losses[0] - losses[-1] > 0.1  # type: ignore[operator]  # so that a loss of another step would be noticed


def test_packed_conversations_are_learned_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    with chat.open("w") as file:
        for row in range(40):
            turns = [("user", "tide " * (1 + row % 4)), ("assistant", "flood " * (1 + row % 3))]
            print(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}), file=file)
    config = settings(tmp_path / "runs", Update.DEFERRED, 1.0)
    data = DataConfig(path=str(chat), sequences=6, length=64, completions_only=True)
    config = replace(config, data=data, micro_batch=None, calls=2)
    run = prepared(config)
    assert run.device.type == "cuda" and "position_ids" in run.data.train.batch([0])
    lines = train(run)
    hightide.unwrap(run.model)
    expected = train(prepared(replace(config, device="cpu")))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-3)


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
    assert all(
        len(line) <= 80 for line in result.output.splitlines() if not line.startswith(("run folder", "trained: "))
    )
    lines = logged(tmp_path / "runs" / "gpu-001")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert json.loads((tmp_path / "runs" / "gpu-001" / "summary.json").read_text())["steps"] == NUM_STEPS
