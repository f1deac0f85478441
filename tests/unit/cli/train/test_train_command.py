"""The command from the outside: real runs of a tiny model, its exit codes and what it leaves behind."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import hightide
from hightide import wrapping
from hightide.cli.main import app
from hightide.cli.train import training_run as train_module
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.model_source import find_model
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.train.readings import Moment, Readings
from hightide.cli.train.run_folder import RunFolder
from hightide.cli.train.train_command import prepare
from hightide.cli.train.training_data import read_data
from hightide.cli.train.training_run import TrainingRun
from hightide.data.batches import Call
from hightide.ir.machine import MatmulRates
from hightide.ir.plan import Plan
from hightide.planner.predict.light import needed_flop
from tiny_folders import SHAPE, tiny_folder

pytest.importorskip("transformers")

TINY = """
name: tiny
device: cpu
steps: {steps}
log_every: 1
limits: {{gpu: 4MiB, host: 1GiB}}
micro_batch: 1
model: {{path: FOLDER, dtype: float32}}
data: {{sequences: 3, length: 16, path: TEXT}}
optimizer: {{lr: 2e-3}}
sample: {{tokens: 8}}
""".replace("TEXT", __file__)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(settings(3))
    return path


def settings(steps: int, more: str = "") -> str:
    shape = replace(SHAPE, layers=3)
    return (
        TINY.replace("optimizer: {{lr: 2e-3}}\n", more or "optimizer: {{lr: 2e-3}}\n")
        .format(steps=steps)
        .replace("FOLDER", str(tiny_folder(shape)))
    )


def prepared(config: TrainConfig) -> TrainingRun:
    """As the command does it."""
    console = Console(file=io.StringIO())
    source = find_model(config, console)
    config = source.settled(config)
    data = read_data(config, source, console)
    return prepare(data.settled(config), console, source, data)


def metrics(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_tiny(tiny: Path, *options: str) -> Path:
    """Runs the command in this process; returns the run folder."""
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs"), *options])
    assert result.exit_code == 0, result.output
    return sorted((tiny.parent / "runs").iterdir())[-1]


def test_three_steps_leave_settings_plan_metrics_and_summary(tiny: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs")], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    folder = tiny.parent / "runs" / "tiny-001"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "model",
        "plan.json",
        "summary.json",
    ]
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batch == 1 and plan.gpu_limit_bytes == 4 * 2**20
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["peak_bytes"]["gpu"] <= 4 * 2**20 for line in lines)  # type: ignore[index]
    assert 5.0 < lines[0]["loss"] < 6.0  # type: ignore[operator]
    assert plan.explain().splitlines()[0] in result.output
    assert "device: simulated accelerator" in result.output
    for state in ("parameters", "gradient sums", "gradients", "master copies", "moments", "loss"):
        assert any(line.split("  ")[1] == state for line in result.output.splitlines() if line.startswith("  ")), state
    assert "what the model writes" in result.output
    assert "forecast" in result.output
    assert all(
        len(line) <= 80 for line in result.output.splitlines() if not line.startswith(("run folder", "trained: "))
    )


def test_a_run_from_a_disk_tells_what_it_writes(tiny: Path) -> None:
    limits = ("--gpu", "400KiB", "--host", "300KiB", "--disk", f"{tiny.parent}:8MiB", "--endurance", "600TBW")
    command = ["train", str(tiny), "--out", str(tiny.parent / "runs"), *limits]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    folder = tiny.parent / "runs" / "tiny-001"
    assert all(line["peak_bytes"]["disk"] > 0 for line in metrics(folder))  # type: ignore[index]
    assert re.search(r"disk: .* written per step, .* TB a day; 600 TB last .* days", result.output)
    assert re.search(r"^disk +8.0 MiB ", result.output, re.MULTILINE)
    assert "disk 8.0 MiB" in result.output
    summary = json.loads((folder / "summary.json").read_text())
    plan = Plan.load(folder / "plan.json")
    assert summary["disk_written_bytes_per_step"] > 0 and summary["disk_terabytes_per_day"] > 0
    assert summary["disk_days"] * summary["disk_terabytes_per_day"] == pytest.approx(600)
    tiers = {peak["name"]: peak for peak in summary["peaks"]}
    assert tiers["disk"]["measured_bytes"] == plan.forecast.disk_peak_bytes <= 8 * 2**20
    assert tiers["host"]["measured_bytes"] <= 300 * 2**10


def test_what_is_told_of_the_host_has_room_for_saves_in_it(tiny: Path) -> None:
    """All else of this plan is on the accelerator."""
    folder = run_tiny(tiny, "--save-every", "1")
    host = next(peak for peak in json.loads((folder / "summary.json").read_text())["peaks"] if peak["name"] == "host")
    assert Plan.load(folder / "plan.json").forecast.host_peak_bytes == 0
    # A save that begins while memory is still made ready for it finds room behind that: twice as much for a moment.
    assert 0 < host["measured_bytes"] <= 2 * host["forecast_bytes"] + 64 * 512


def test_the_simulated_accelerator_has_no_share_of_the_speed_of_light(tiny: Path) -> None:
    """Its products are the processor's, and its speeds assumed."""
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs")])
    folder = tiny.parent / "runs" / "tiny-001"
    assert [line["light_share"] for line in metrics(folder)] == [None] * 3 and "light" not in result.output
    assert json.loads((folder / "summary.json").read_text())["light_share"] is None


def test_a_measured_gpu_has_a_share_of_the_speed_of_light_in_every_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = MatmulRates(bfloat16=2e9, float16=2e9, float32=1e9, tf32=None)
    monkeypatch.setattr(wrapping, "measured_products", lambda device: rates)
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs")], env={"COLUMNS": "80"})
    folder = tiny.parent / "runs" / "tiny-001"
    lines = metrics(folder)
    profile = Plan.load(folder / "plan.json").profile
    assert profile is not None
    for line in lines:
        light_s = needed_flop(profile, 3) / 1e9
        assert line["light_share"] == pytest.approx(light_s / line["step_s"])  # type: ignore[operator]
    shares = sorted(line["light_share"] for line in lines)  # type: ignore[type-var]
    assert json.loads((folder / "summary.json").read_text())["light_share"] == shares[1]
    assert f"reached {shares[1]:.0%} of the speed of light" in result.output
    assert result.output.count("% light ") == 3


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(tiny: Path) -> None:
    first, again, other = (run_tiny(tiny, "--seed", seed) for seed in ("1", "1", "2"))
    losses = [[line["loss"] for line in metrics(folder)] for folder in (first, again, other)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_updates_in_backward_run_without_clipping(tiny: Path) -> None:
    folder = run_tiny(tiny, "--update", "in_backward", "--clip-norm", "0", "--gradients", "param")
    plan = Plan.load(folder / "plan.json")
    assert (plan.update, plan.gradients) == ("in_backward", "param")
    assert all(line["grad_norm"] is None for line in metrics(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "24QiB"), "--gpu='24QiB' is not a size"),
        (("--gpu", "1KiB"), "1.0 KiB"),
        (("--gpu", "1KiB"), "; as options: --gpu "),
        (("--steps", "0"), "steps=0"),
        (("--device", "cuda"), "0 usable CUDA devices"),
        (("--device", "tpu"), "device='tpu' is not supported"),
        (("--config", "other.yaml"), "two settings files"),
        (("--disk", "/no/such:1GiB", "--data", "/no/data"), "names '/no/such': there is no such folder"),  # first
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(tiny: Path, options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs"), *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tiny.parent / "runs").exists()


def test_an_unknown_key_is_exit_code_2_and_names_the_nearest(tiny: Path) -> None:
    tiny.write_text("stpes: 3")
    result = CliRunner().invoke(app, ["train", str(tiny)])
    assert result.exit_code == 2
    assert "unknown key 'stpes'; did you mean 'steps'?" in result.stderr


@pytest.mark.parametrize("record", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize(("step", "num_signals"), [(1, 1), (1, 2), (2, 1)], ids=["once", "at once", "later"])
def test_an_interrupt_ends_a_recorded_run_like_any_other(
    tiny: Path, record: bool, step: int, num_signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step = TrainingRun.step

    def interrupted(self: TrainingRun, number: int, *rest: Any) -> None:
        run_step(self, number, *rest)
        for _ in range(num_signals if number == step else 0):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingRun, "step", interrupted)
    options = [
        "train",
        str(tiny),
        "--out",
        str(tiny.parent / "runs"),
        "--steps",
        "9",
        *(["--record"] if record else []),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 130
    assert f"interrupted after step {step} of 9" in result.stdout and "run folder: " in result.stdout
    is_recorded = record and step > 1
    assert (tiny.parent / "runs" / "tiny-001" / "timeline.json").exists() is is_recorded
    assert ("no recording: " in result.stdout) is (record and not is_recorded)


# -- losses that arrive late, as those of a GPU do ---------------------------------------------------------------------


class LateMoment(Moment):
    """Passes when it was asked for a third time: one or two steps later, or when somebody waits for it."""

    num_asked = 0

    def passed(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= 3


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "Readings", lambda device, **_: Readings(device, lambda: LateMoment(device)))


def test_late_losses_are_logged_and_shown_for_every_step_in_order(tiny: Path, late: None) -> None:
    folder = run_tiny(tiny, "--steps", "6")
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert len({line["loss"] for line in lines}) == 6
    assert all(line["step_s"] > 0 and line["grad_norm"] > 0 for line in lines)  # type: ignore[operator]
    at_once = run_tiny(tiny, "--steps", "6")
    for key in ("loss", "grad_norm", "lr", "peak_bytes", "moved_bytes"):
        assert [line[key] for line in metrics(at_once)] == [line[key] for line in lines], key
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("timing", ["at once", "late"])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_its_step(
    tiny: Path, timing: str, request: pytest.FixtureRequest
) -> None:
    tiny.write_text(settings(10, "optimizer: {{lr: 1e+30, warmup_steps: 0}}\n"))
    if timing == "late":
        request.getfixturevalue("late")
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs")])
    assert result.exit_code == 2
    assert "the loss is nan at step 3; lower the learning rate (--lr) or clip gradients" in result.stderr
    steps = [line["step"] for line in metrics(tiny.parent / "runs" / "tiny-001")]
    last = {"at once": 3, "late": 5}[timing]  # what had run by then is logged too
    assert steps == list(range(1, last + 1))


def test_a_loss_that_is_not_finite_in_the_last_step_is_found(tiny: Path, late: None) -> None:
    tiny.write_text(settings(3, "optimizer: {{lr: 1e+30, warmup_steps: 0}}\n"))
    result = CliRunner().invoke(app, ["train", str(tiny), "--out", str(tiny.parent / "runs")])
    assert result.exit_code == 2
    assert "the loss is nan at step 3;" in result.stderr


def run_with(tiny: Path, before_step_3: Callable[[], None]) -> tuple[object, list[object]]:
    """Trains; something happens when the third batch is asked for. How the loop ended, and the steps in the metrics."""
    config = load_config(tiny, TrainOptions(out=str(tiny.parent / "runs"), steps=9))
    run = prepared(config)
    stream = run.batches

    class Disturbed(Iterator[list[Call]]):
        num_tokens = 1

        def __init__(self) -> None:
            self.step = 0

        def __next__(self) -> list[Call]:
            self.step += 1
            if self.step == 3:
                before_step_3()
            return next(stream)

    run.batches = Disturbed()  # type: ignore[assignment]
    ended: signal.Signals | type[BaseException] | None
    with RunFolder(config) as folder:
        try:
            ended = run.steps(folder)
        except BaseException as error:
            ended = type(error)
    assert len(run.losses) == len(metrics(folder.path))
    return ended, [line["step"] for line in metrics(folder.path)]


def _fail() -> None:
    raise ConnectionError("the data are gone")


def _interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("event", "ended", "steps"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), signal.SIGINT, [1, 2, 3]),
        (lambda: signal.raise_signal(signal.SIGTERM), signal.SIGTERM, [1, 2, 3]),
        (_interrupt_twice, KeyboardInterrupt, [1, 2]),
        (_fail, ConnectionError, [1, 2]),
    ],
    ids=["interrupt", "end", "interrupt at once", "failure"],
)
def test_however_a_run_ends_every_finished_step_is_in_the_metrics(
    tiny: Path, late: None, event: Callable[[], None], ended: object, steps: list[int]
) -> None:
    assert run_with(tiny, event) == (ended, steps)


def _no_space(*_: Any, **__: Any) -> None:
    raise Exception("No space left on device (os error 28)")  # as `tokenizers` says it


def test_a_disk_that_is_full_at_the_end_leaves_no_half_of_a_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", _no_space)
    command = ["train", str(tiny), "--out", str(tiny.parent / "runs"), "--steps", "1"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    folder = tiny.parent / "runs" / "tiny-001"
    assert result.exit_code == 3 and "fault of hightide" not in result.output
    assert f"the trained model cannot be saved in {folder / 'model'}: No space left on device" in result.output
    assert (folder / "plan.json").exists() and not (folder / "model").exists()


# -- settings that go to wrap ------------------------------------------------------------------------------------------


class Wrapped(Exception):
    """Ends the command where it calls wrap."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"compile": False, "device": None, "gradients": "float32", "update": "deferred"}),
        ("compile: true\ndevice: cpu\ngradients: param", {"compile": True, "device": "cpu", "gradients": "param"}),
    ],
)
def test_settings_reach_wrap(
    tmp_path: Path, text: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrap(*_: Any, **options: Any) -> Any:
        raise Wrapped(options)

    monkeypatch.setattr(hightide, "wrap", wrap)
    (tmp_path / "settings.yaml").write_text(f"out: {tmp_path}\ndata: {{path: {__file__}}}\ncalls: 1\n{text}")
    config: TrainConfig = load_config(tmp_path / "settings.yaml", TrainOptions())
    with pytest.raises(Wrapped) as caught:
        prepared(config)
    assert caught.value.args[0].items() >= expected.items()
