"""Settings are read strictly: what is not understood is named, never ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hightide.cli.train.config import LrSchedule, OnSaveError, SaveConfig, TrainConfig
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.workload import Dtype
from hightide.ir.limits import DiskLimit
from hightide.ir.plan import Update

REPOSITORY = Path(__file__).parents[4]


def load(tmp_path: Path, text: str, **overrides: object) -> TrainConfig:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return load_config(path, TrainOptions(**overrides))  # type: ignore[arg-type]


def test_no_file_gives_the_defaults() -> None:
    assert load_config(None, TrainOptions()) == TrainConfig()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing\n") == TrainConfig()


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("stpes: 3", "stpes", "steps"),
        ("model: {hiden: 64}", "hiden", "hidden"),
        ("optimizer: {learning_rate: 0.1}", "learning_rate", None),
        ("limits: {gpus: 24MiB}", "gpus", "gpu"),
        ("3: 4", "3", None),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(
    tmp_path: Path, text: str, unknown: str, nearest: str | None
) -> None:
    with pytest.raises(ValueError, match=r"unknown key .*; did you mean '\w+'\?") as caught:
        load(tmp_path, text)
    assert unknown in str(caught.value)
    assert nearest is None or f"did you mean '{nearest}'" in str(caught.value)
    assert "settings.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"lr": float("nan")}, "--lr is nan; it must be finite"),
        ({"lr": -1.0}, "--lr=-1.0 must be at least 0"),
        ({"gpu": "lots"}, "--gpu='lots' is not a size"),
        ({"keep_every": 3}, "--keep-every=3, but nothing is saved; set save.every too (--save-every)"),
        ({"steps": 3, "epochs": 2.0}, "--steps=3 and --epochs=2 are both given; choose one"),
        ({"micro_batch": 17}, "--micro-batch=17 is more than data.sequences=16, the rows of a step; choose fewer"),
        ({"dtype": Dtype.FLOAT16}, "--dtype float16 needs its losses scaled"),
        ({"timeout_s": 0.0}, "--timeout-s=0 must be more than 0"),
        ({"timeout_s": float("inf")}, "--timeout-s is inf; it must be finite"),
        ({"calls": 3}, "--calls=3 does not divide data.sequences=16; choose a divisor of it"),
    ],
)
def test_options_of_the_line_are_told_as_they_were_written(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        load_config(None, TrainOptions(**given))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^steps=0 must be at least 1$"):
        load(tmp_path, "steps: 0", lr=1e-3)  # of the file, as it is there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: many", r"steps is 'many'; it must be of type int"),
        ("steps: true", r"steps is True; it must be of type int"),
        ("steps: 0", r"steps=0 must be at least 1"),
        ("update: later", r"update is 'later'; it must be one of deferred, in_backward"),
        ("micro_batch: 0", r"micro_batch=0 must be at least 1"),
        ("data: {date: 2026-02-30}", r"data.date='2026-02-30' is no date; write it as year-month-day"),
        ("model: 7", r"model must be a mapping"),
        ("model: {hidden: 100, heads: 6}", r"hidden=100 .*heads=6; the nearest below is 96"),
        ("optimizer: {betas: [0.9]}", r"betas has 1 values"),
        ("limits: {gpu: lots}", r"Limits\(gpu\)='lots' is not a size"),
        ("name: a/b", r"name='a/b' names a folder"),
        ("sample: {prompt: ''}", r"sample.prompt is empty"),
        ("data: {sequence_bytes: 64}", r"data.sequence_bytes is now data.length, in tokens; rename it"),
        ("sample: {num_bytes: 0}", r"sample.num_bytes is now sample.tokens; rename it"),
        ("data: {length: 1}", r"data.length=1 must be at least 2"),
        ("model: {path: folder}", r"a model without data.*--data"),
        ("steps: 3\nepochs: 2", r"steps=3 and epochs=2 are both given"),
        ("epochs: 0", r"epochs=0.0 must be more than 0"),
        ("epochs: 1.0e+300", r"epochs=1e\+300 must be at most 1000000"),
        ("steps: 1000000000001", r"steps=1000000000001 must be at most 1000000000000"),
        ("timeout_s: long", r"timeout_s is 'long'; it must be of type float"),
        ("timeout_s: -5", r"timeout_s=-5 must be more than 0"),
        ("timeout_s: 100000000", r"timeout_s=100000000.0 must be at most 10000000"),
        ("lora: many", r"--lora 'many' is not RANK"),
        ("calls: 3", r"calls=3 does not divide data.sequences=16"),
        ("eval: {share: 1.5}", r"eval.share=1.5 must be between 0 and 1"),
        ("eval: {share: 0.1, path: x}", r"eval.path and eval.share are both given"),
        ("eval: {every: 5}", r"nothing to evaluate on"),
        ("compile: 1", r"compile is 1; it must be of type bool"),
        ("update: in_backward", r"in_backward cannot clip.*clip_norm=1.0"),
        ("save: {every: 0}", r"save.every=0 must be at least 1"),
        ("save: {every: -3}", r"save.every=-3 must be at least 1"),
        ("save: {every: 2.5}", r"save: every is 2.5; it must be of type int"),
        ("save: {keep: -1}", r"save.keep=-1 must be at least 0"),
        ("save: {every: 20, keep_every: 0}", r"save.keep_every=0 must be at least 1"),
        ("save: {every: 20, keep_every: 50}", r"keep_every=50 must be a multiple of save.every=20.*; 40 is"),
        ("save: {keep_every: 50}", r"save.keep_every=50, but nothing is saved"),
        ("save: {on_error: ignore}", r"on_error is 'ignore'; it must be one of warn, stop"),
        ("save: 20", r"save must be a mapping with keys such as every, keep, keep_every, on_error, not 20"),
        ("resume: perhaps", r"resume is 'perhaps'; it must be of type bool"),
        ("steps: 3\nsteps: 4", r"settings.yaml, line 2: the key 'steps' is given twice"),
        ("steps: [", r"settings.yaml is not YAML"),
        ("- steps", r"must hold settings"),
    ],
)
def test_bad_values_are_refused_with_the_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the settings file .*absent.yaml"):
        load_config(tmp_path / "absent.yaml", TrainOptions())


@pytest.mark.parametrize("name", ["folder", "data.jsonl", "notes.txt"])
def test_a_model_or_data_in_the_place_of_the_settings_say_how_they_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch() if path.suffix else path.mkdir()
    with pytest.raises(ValueError, match=rf"{name} is no settings file; name a model with --model, and data with"):
        load_config(path, TrainOptions())


def test_a_path_and_a_rank_alone_are_enough(tmp_path: Path) -> None:
    config = load(tmp_path, "model: folder\ndata: rows.jsonl\nlora: 8")
    assert (config.model.path, config.data.path, config.lora) == ("folder", "rows.jsonl", "8")


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    config = load(tmp_path, "optimizer: {lr: 1e-3, weight_decay: 0, eps: 1.5E-4}")
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.eps) == (1e-3, 0.0, 1.5e-4)


def test_the_command_line_wins_over_the_file_and_leaves_the_rest(tmp_path: Path) -> None:
    text = "steps: 3\nseed: 5\nlimits: {gpu: 1GiB, host: 2GiB}"
    config = load(tmp_path, text, steps=7, gpu="24MiB", device="cpu", update=Update.IN_BACKWARD, clip_norm=0.0)
    assert (config.steps, config.seed) == (7, 5)
    assert (config.limits.resolve().gpu_bytes, config.limits.resolve().host_bytes) == (24 * 2**20, 2 * 2**30)
    assert config.device == "cpu"
    assert (config.update, config.optimizer.clip_norm) == (Update.IN_BACKWARD, 0.0)


def test_every_option_has_a_place_in_the_settings(tmp_path: Path) -> None:
    given = {
        "model": "folder",
        "data": "file.jsonl",
        "lora": "8:q_proj",
        "completions_only": True,
        "pack": False,
        "length": 512,
        "sequences": 8,
        "calls": 4,
        "eval_data": "more.jsonl",
        "eval_every": 7,
        "epochs": 2.5,
        "lr": 3e-5,
        "schedule": LrSchedule.LINEAR,
        "warmup_steps": 5,
        "compile": True,
    }
    config = load(tmp_path, "steps: 3\nmodel: other", **given)
    assert (config.model.path, config.data.path, config.lora) == ("folder", "file.jsonl", "8:q_proj")
    assert config.steps is None and config.epochs == 2.5 and config.compile and config.calls == 4
    assert (config.data.completions_only, config.data.pack) == (True, False)
    assert (config.data.length, config.data.sequences) == (512, 8)
    assert (config.eval.path, config.eval.every) == ("more.jsonl", 7)
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (3e-5, 5)
    assert config.optimizer.schedule is LrSchedule.LINEAR
    assert load(tmp_path, config.to_yaml()) == config


def test_saving_is_set_by_the_file_and_by_options(tmp_path: Path) -> None:
    text = "save: {every: 20, keep: 0, keep_every: 100, on_error: stop}\nresume: false"
    config = load(tmp_path, text)
    assert config.save == SaveConfig(20, 0, 100, OnSaveError.STOP) and config.resume is False
    assert load(tmp_path, config.to_yaml()) == config
    given = load(tmp_path, text, save_every=5, keep=3, keep_every=10, on_save_error=OnSaveError.WARN, resume=True)
    assert given.save == SaveConfig(5, 3, 10, OnSaveError.WARN) and given.resume is True
    assert load(tmp_path, "", save_every=5).save == SaveConfig(5, 2, None, OnSaveError.WARN)
    assert TrainConfig().save.every is None and TrainConfig().resume is None


def test_disks_are_a_folder_or_several(tmp_path: Path) -> None:
    one = load(tmp_path, "limits: {disk: /a:1GiB}")
    two = load(tmp_path, "limits: {disk: [/a:1GiB, /b:2MiB]}")
    assert one.limits.resolve().disks == (DiskLimit("/a", 2**30),)
    assert two.limits.resolve().disks == (DiskLimit("/a", 2**30), DiskLimit("/b", 2**21))
    assert load(tmp_path, two.to_yaml()) == two
    given = load(tmp_path, "limits: {disk: /a:1GiB}", disk=["/c:3KiB"])
    assert given.limits.resolve().disks == (DiskLimit("/c", 3072),)
    with pytest.raises(ValueError, match="is not a folder and a size"):
        load(tmp_path, "limits: {disk: 1GiB}")


def test_the_effective_settings_can_be_read_back(tmp_path: Path) -> None:
    config = load(tmp_path, "steps: 3\nlimits: {gpu: 1GiB}\noptimizer: {lr: 3e-5}", micro_batch=2)
    assert load(tmp_path, config.to_yaml()) == config


def test_the_demo_limits_the_accelerator_below_the_states_of_its_model() -> None:
    config = load_config(REPOSITORY / "examples" / "demo.yaml", TrainOptions())
    shape = config.model
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.feed_forward + 2 * shape.hidden
    num_params = shape.layers * per_layer + 2 * shape.vocabulary * shape.hidden + shape.hidden
    limits = config.limits.resolve()
    gpu_bytes = limits.gpu_bytes
    assert gpu_bytes is not None
    assert gpu_bytes < 16 * num_params
    assert limits.disks, "it shows all three tiers"


def test_paths_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "settings.yaml"
    path.write_text("out: ~/runs\nmodel: {path: ~/llama}\ndata: {path: ~/a~.jsonl}\n")
    config = load_config(path, TrainOptions(eval_data="~/b"))
    paths = config.out, config.model.path, config.data.path, config.eval.path
    assert paths == ("/home/me/runs", "/home/me/llama", "/home/me/a~.jsonl", "/home/me/b")
