"""hightide.Trainer against transformers' own: what it logs, evaluates, saves and resumes from, and the weights that it
ends with."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import assert_close_weights
from torch import nn
from torch.utils.data import IterableDataset

import hightide
import models
from trainers import (
    LENGTHS,
    LIMITS,
    arguments,
    assert_same_logs,
    collate,
    data,
    fresh_accelerate,
    full,
    logs,
    lora,
    plain_trainer,
    rows,
    trainer,
)

long = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with fresh_accelerate():
        yield


def check(folder: Path, given: dict[str, Any] | None = None, error: float = 1e-5, **options: Any) -> Any:
    """Trains both. Returns both trainers."""
    plain = plain_trainer(folder / "plain", **options)
    plain.train()
    wrapped = trainer(folder / "wrapped", given=given, **options)
    wrapped.train()
    assert_same_logs(logs(wrapped), logs(plain), error)
    assert {name for name, _ in logs(wrapped)} == {"loss", "grad_norm", "eval_loss", "learning_rate"}
    if error <= 1e-5:
        assert_close_weights(plain.model.state_dict(), wrapped.model.state_dict())
    return plain, wrapped


ACCUMULATED = {"gradient_accumulation_steps": 4}
NOT_CLIPPED = {"max_grad_norm": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": LENGTHS, **ACCUMULATED, "max_grad_norm": 0.3},
        {"build": lora, "label_names": ["labels"], "given": {"update": "in_backward"}, **NOT_CLIPPED},
        pytest.param({}, marks=long),
        pytest.param({**ACCUMULATED, **NOT_CLIPPED}, marks=long),
        pytest.param({"lengths": LENGTHS, **NOT_CLIPPED}, marks=long),
        pytest.param({"build": lora, "label_names": ["labels"], **ACCUMULATED, "lengths": LENGTHS}, marks=long),
        pytest.param(
            {"lengths": LENGTHS, **ACCUMULATED, **NOT_CLIPPED, "given": {"update": "in_backward"}}, marks=long
        ),
    ],
    ids=["lengths", "LoRA", "full", "accumulated", "lengths not clipped", "LoRA accumulated", "in backward"],
)
def test_twenty_steps(options: dict[str, Any], tmp_path: Path) -> None:
    _, wrapped = check(tmp_path, max_steps=20, eval_steps=10, **options)
    plan = hightide.stats(wrapped.model).plan
    assert wrapped._calls == plan.accumulate and plan.num_samples * plan.accumulate in (2, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5, "eval_steps": 1},
        {"lengths": LENGTHS, "given": {"lengths": [4, 8, 10]}, "gradient_accumulation_steps": 2, "max_steps": 3},
        pytest.param({"train_sampling_strategy": "group_by_length", "lengths": LENGTHS}, marks=long),
        pytest.param({"dataloader_num_workers": 1}, marks=long),
        pytest.param({"neftune_noise_alpha": 5.0, "lengths": LENGTHS, "gradient_accumulation_steps": 2}, marks=long),
        pytest.param({"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2}, marks=long),
        pytest.param({"label_smoothing_factor": 0.1, **ACCUMULATED, "given": {"limits": "2MiB"}}, marks=long),
        pytest.param({"max_grad_norm": 1e9, "given": {"gradients": "param", "micro_batch": 1}}, marks=long),
        pytest.param({"torch_compile": True, "max_steps": 3}, marks=long),
    ],
    ids=["epochs", "buckets", "by length", "workers", "noise", "SGD", "smoothed", "options of wrap", "compiled"],
)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs whole logits.*")
        check(tmp_path, **options)


class EndsInTheMiddle(transformers.TrainerCallback):
    """Ends one epoch, after one batch of a step of two."""

    has_ended = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and not self.has_ended:
            self.has_ended = control.should_epoch_stop = True


def test_an_epoch_that_ends_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The gradients of its batches stay for the next step, and its loss for the next log."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
        "lengths": LENGTHS,
    }
    trainers = plain_trainer(tmp_path / "plain", **options), trainer(tmp_path / "wrapped", **options)
    for one in trainers:
        one.add_callback(EndsInTheMiddle())
        one.train()
    plain, wrapped = trainers
    assert wrapped._calls is not None and wrapped.state.global_step == 7
    assert_same_logs(logs(wrapped), logs(plain))
    assert_close_weights(plain.model.state_dict(), wrapped.model.state_dict())


def test_nobody_is_told_of_a_shorter_last_step(tmp_path: Path) -> None:
    """The number of calls is the plan's, and no promise of the user."""
    one = trainer(tmp_path, gradient_accumulation_steps=5, max_steps=-1, num_train_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*wrapped with accumulate")
        one.train()
    plan = hightide.stats(one.model).plan
    assert plan.accumulate > 1 and one.state.global_step > len(one.get_train_dataloader()) // 5
    hightide.unwrap(one.model)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=long)])
def test_autocast(precision: str, tmp_path: Path) -> None:
    check(tmp_path, {"micro_batch": 2}, error=1e-3, **{precision: True})


def collate_left(samples: Any) -> Any:
    turned = collate([{name: value.flip(0) for name, value in sample.items() if value.dim()} for sample in samples])
    return {name: value.flip(1) for name, value in turned.items()}


class PadsLeft:
    """What a Trainer asks of a tokenizer."""

    padding_side, pad_token_id = "left", 0


@pytest.mark.parametrize("build", [models.gpt2, pytest.param(models.t5, marks=long)])
def test_buckets_where_the_tokenizer_pads_on_the_left(build: Any, tmp_path: Path) -> None:
    """Positions are counted from the left, by many models: nothing may be put there."""
    options: dict[str, Any] = {"build": lambda: build()[0], "lengths": LENGTHS, "max_steps": 3, **ACCUMULATED}
    plain = plain_trainer(tmp_path / "plain", **options)
    wrapped = trainer(tmp_path / "wrapped", given={"limits": "2MiB"}, **options)
    wrapped._lengths = [10, 12]
    wrapped.processing_class = PadsLeft()
    for one in (plain, wrapped):
        one.data_collator = collate_left
        one.train()
    assert_same_logs(logs(wrapped), logs(plain))


def test_buckets_without_a_pad_token_where_it_decides_about_the_result(tmp_path: Path) -> None:
    config: Any = full().config
    config.pad_token_id = None
    classifier: Any = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(ValueError, match="pad_token_id"):
        trainer(tmp_path, lambda: classifier, given={"lengths": [12]}).get_train_dataloader()
    classifier.config.pad_token_id = 0
    assert trainer(tmp_path, lambda: classifier, given={"lengths": [12]})._pad_id() == 0


def long_rope() -> nn.Module:
    torch.manual_seed(0)
    config: Any = full().config
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, **factors} | {
        "original_max_position_embeddings": 7
    }
    return transformers.LlamaForCausalLM(config)


def test_rotary_embeddings_that_follow_the_length_of_a_call(tmp_path: Path) -> None:
    """Batches of other lengths must not be in it, nor padding."""
    _, wrapped = check(tmp_path, build=long_rope, lengths=LENGTHS, per_device_train_batch_size=1, **ACCUMULATED)
    assert wrapped._calls is None
    with pytest.raises(ValueError, match="leave lengths out"):
        trainer(tmp_path, long_rope, given={"lengths": [12]}).train()


class OwnLoss(transformers.Trainer):
    """A mean of each call, whatever the others have."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].reshape(-1, models.VOCABULARY)
        loss = 3 * nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


class OwnLossWrapped(hightide.TrainerMixin, OwnLoss):
    pass


def test_a_mean_of_means_keeps_the_cut_of_the_user(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lengths": LENGTHS, "gradient_accumulation_steps": 2, "max_steps": 3}
    given = {"limits": hightide.Limits(gpu="2MiB", host="64MiB")}
    wrapped = trainer(tmp_path / "wrapped", kind=OwnLossWrapped, given=given, **options)
    plain = plain_trainer(tmp_path / "plain", kind=OwnLoss, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs whole logits.*")
        wrapped.train()
        plain.train()
    assert wrapped._calls is None and hightide.stats(wrapped.model).plan.accumulate == 2
    assert_same_logs(logs(wrapped), logs(plain))


SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("build", [full, pytest.param(lora, marks=long)])
def test_a_run_resumes_with_the_same_bits(build: Any, tmp_path: Path) -> None:
    options = {**SAVING, "build": build, "label_names": ["labels"], "lengths": LENGTHS}
    options["accelerator_config"] = {"use_seedable_sampler": False}  # the order follows from everybody's generator
    straight = trainer(tmp_path / "straight", **options)
    straight.train()
    folder = tmp_path / "straight"
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    shutil.copytree(folder / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = trainer(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert logs(resumed) == logs(straight)
    expected = straight.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_what_a_checkpoint_has(tmp_path: Path) -> None:
    """What others look for in it; the oldest go, the best stays, and is loaded at the end."""
    seen: list[set[str]] = []

    class Look(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            seen.append({one.name for one in folder.iterdir()})

    wrapped = trainer(
        tmp_path,
        given={"callbacks": [Look()], "compute_metrics": lambda _: {"mark": -len(seen)}},
        **SAVING,
        max_steps=8,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="mark",
        greater_is_better=True,
    )
    wrapped.train()
    needed = {"trainer_state.json", "scheduler.pt", "rng_state.pth", "training_args.bin", "model.safetensors"}
    assert len(seen) == 4 and all(needed <= names for names in seen)
    best = Path(wrapped.state.best_model_checkpoint)
    assert best.name == "checkpoint-2", "the last one is in place anyway"
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-2"]
    saved = transformers.AutoModelForCausalLM.from_pretrained(best)
    for name, value in wrapped.model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name]), name
    wrapped.save_model(str(tmp_path / "final"))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final").num_parameters() > 0


@long
def test_checkpoints_of_the_plain_trainer(tmp_path: Path) -> None:
    plain = plain_trainer(tmp_path / "plain", **SAVING)
    plain.train()
    wrapped = trainer(tmp_path / "wrapped", **SAVING)
    wrapped.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert_same_logs(logs(wrapped), logs(plain))


@long
def test_a_model_that_was_never_loaded(tmp_path: Path) -> None:
    """Its values come from files, also those of a checkpoint of another Trainer."""
    full().save_pretrained(tmp_path / "model")

    def build() -> Any:
        return hightide.from_pretrained(tmp_path / "model")

    plain = plain_trainer(tmp_path / "plain", **SAVING)
    plain.train()
    for resumes in (False, True):
        wrapped = trainer(tmp_path / f"wrapped {resumes}", build, **SAVING)
        wrapped.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2") if resumes else None)
        assert_same_logs(logs(wrapped), logs(plain))


class Stream(IterableDataset[Any]):
    """Nothing comes twice out of it."""

    def __init__(self) -> None:
        self.samples = iter(rows(40, 1, LENGTHS))

    def __iter__(self) -> Any:
        return self.samples


class ReadOn(Stream):
    """Each iterator goes on where another was."""

    def __iter__(self) -> Any:
        yield from self.samples


@pytest.mark.parametrize("kind", [ReadOn, pytest.param(Stream, marks=long)])
def test_nothing_is_missing_from_a_stream(kind: Any, tmp_path: Path) -> None:
    plain = plain_trainer(tmp_path / "plain", gradient_accumulation_steps=2)
    plain.train_dataset = kind()
    wrapped = trainer(tmp_path / "wrapped", gradient_accumulation_steps=2, given={"train_dataset": kind()})
    for one in (plain, wrapped):
        one.train()
    assert_same_logs(logs(wrapped), logs(plain))


def test_evaluation_before_training_and_prediction(tmp_path: Path) -> None:
    metrics = {"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}}
    plain, wrapped = plain_trainer(tmp_path / "plain"), trainer(tmp_path / "wrapped", given=metrics)
    plain.compute_metrics = metrics["compute_metrics"]
    for _ in range(2):
        expected, found = plain.evaluate(), wrapped.evaluate()
        assert hightide.stats(wrapped.model).plan is not None
        for name in ("eval_loss", "eval_mean"):
            assert abs(expected[name] - found[name]) < 1e-5
        plain.train()
        wrapped.train()
    assert_same_logs(logs(wrapped), logs(plain))
    assert abs(wrapped.predict(rows(6, 100)).predictions - plain.predict(rows(6, 100)).predictions).max() < 1e-4


def test_a_plan_that_is_given(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", **ACCUMULATED)
    first.train()
    plan = hightide.stats(first.model).plan
    second = trainer(tmp_path / "second", given={"plan": plan, "limits": None}, **ACCUMULATED)
    second.train()
    assert hightide.stats(second.model).plan == plan and second._calls == plan.accumulate
    assert logs(second) == logs(first)


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_an_optimizer_that_a_subclass_makes_by_itself(evaluates_first: bool, tmp_path: Path) -> None:
    """As many do, for rates of their own; they ask nobody else, and the model is wrapped all the same."""

    class Groups:
        def create_optimizer(self, model: Any = None) -> Any:
            its: Any = self
            weights = [param for param in its.model.parameters() if param.dim() > 1]
            norms = [param for param in its.model.parameters() if param.dim() == 1]
            its.optimizer = torch.optim.AdamW([{"params": weights}, {"params": norms, "lr": 1e-4}], lr=3e-3, eps=1e-4)
            return its.optimizer

    class Plain(Groups, transformers.Trainer): ...

    class Wrapped(Groups, hightide.Trainer): ...

    plain, wrapped = plain_trainer(tmp_path / "plain", kind=Plain), trainer(tmp_path / "wrapped", kind=Wrapped)
    for one in (plain, wrapped):
        if evaluates_first:
            one.evaluate()
        one.train()
    assert_same_logs(logs(wrapped), logs(plain))
    assert 0 < hightide.stats(wrapped.model).peak_bytes["gpu"] <= LIMITS.gpu_bytes


@long
def test_a_pair_that_is_wrapped_already_and_a_model_that_is_made_anew(tmp_path: Path) -> None:
    batch = {name: value[:2] for name, value in models.token_batch(1).items()}
    model: Any = full()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.0)
    hightide.wrap(model, optimizer, batch, limits=LIMITS)
    with pytest.raises(ValueError, match="wrapped already"):
        trainer(tmp_path, lambda: model, given={"limits": None}).train()
    hightide.unwrap(model)
    plain = plain_trainer(tmp_path / "plain", **NOT_CLIPPED)
    plain.train()
    of = full()
    wrapped, its = hightide.wrap(
        of,
        torch.optim.AdamW(of.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.0),
        batch,
        limits=LIMITS,
        update="in_backward",
    )
    again = trainer(
        tmp_path / "again", lambda: wrapped, given={"limits": None, "optimizers": (its, None)}, **NOT_CLIPPED
    )
    again.train()
    assert_same_logs(logs(again), logs(plain))
    plain = transformers.Trainer(None, arguments(tmp_path / "plain anew"), model_init=full, **data())
    plain.train()
    anew = hightide.Trainer(None, arguments(tmp_path / "anew"), model_init=full, limits=LIMITS, **data())
    for _ in range(2):
        anew.train()
        assert_same_logs(logs(anew), logs(plain))


@long
def test_generation_in_evaluation(tmp_path: Path) -> None:
    class Generating(hightide.TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    found = []
    for kind in (Generating, transformers.Seq2SeqTrainer):
        given: dict[str, Any] = {"limits": LIMITS} if kind is Generating else {}
        torch.manual_seed(0)
        model = models.t5()[0]
        settings = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            predict_with_generate=True,
            generation_max_length=6,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        of = kind(
            model,
            settings,
            train_dataset=rows(8, 1),
            eval_dataset=rows(4, 9),
            data_collator=lambda rows: {
                name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")
            },
            **given,
        )
        of.train()
        found.append((of.predict(rows(4, 9)).predictions.tolist(), logs(of)))
    assert found[0][0] == found[1][0]
    assert_same_logs(found[0][1], found[1][1])
