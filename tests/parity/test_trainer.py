"""Transformers' own Trainer, and a loop with Accelerate, on a wrapped pair: what they log, save and resume from is what
they do with the plain pair. Nothing of theirs is changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.optimizer
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from harness import assert_close_weights, streamed
from torch import Tensor, nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.refusal import Refused

LIMITS = hightide.Limits(gpu="4MiB", host="64MiB")
NUM_SAMPLES = 4  # of a batch
Pair = tuple[Any, Any]


def dataset(num_samples: int, seed: int) -> list[dict[str, Tensor]]:
    """With a column that no model knows."""
    rows = [models.token_batch(seed + row, num_samples=1) for row in range(num_samples)]
    return [{**{name: value[0] for name, value in row.items()}, "length": torch.tensor(10)} for row in rows]


TRAIN, EVAL = dataset(24, 1), dataset(6, 100)
BATCH = {name: torch.stack([row[name] for row in TRAIN[:NUM_SAMPLES]]) for name in TRAIN[0] if name != "length"}


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It keeps the first Accelerator's settings for all that follow, and arguments with bf16 leave this behind."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_pair(wrapped: bool, model: nn.Module | None = None, micro_batch: int = 2, **options: Any) -> Pair:
    model = models.llama(num_layers=2)[0] if model is None else model
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=3e-3, eps=1e-4)
    if not wrapped:
        return model, optimizer
    plan = hightide.plan(model, optimizer, BATCH, limits=LIMITS, micro_batch=micro_batch, **options)
    return hightide.wrap(model, optimizer, BATCH, plan=streamed(plan, Activation.RECOMPUTE), **options)


def make_trainer(
    pair: Pair, folder: Path, kind: type[transformers.Trainer] = transformers.Trainer, **options: Any
) -> transformers.Trainer:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": NUM_SAMPLES,
        "per_device_eval_batch_size": NUM_SAMPLES,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    settings = transformers.TrainingArguments(**{**arguments, **options})
    return kind(pair[0], settings, train_dataset=TRAIN, eval_dataset=EVAL, optimizers=(pair[1], None))


LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate")


def logs(trainer: transformers.Trainer) -> list[tuple[str, float]]:
    found = [(name, entry[name]) for entry in trainer.state.log_history for name in LOGGED if name in entry]
    assert {name for name, _ in found} == set(LOGGED)
    return found


def assert_same_logs(found: list[tuple[str, float]], expected: list[tuple[str, float]], error: float = 1e-5) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, other) in zip(found, expected, strict=True):
        assert abs(value - other) <= error * abs(other), (name, value, other)


def check(folder: Path, error: float = 1e-5, model: Any = None, micro_batch: int = 2, **options: Any) -> Any:
    """Trains the plain and the wrapped pair. Returns both trainers."""
    plain = make_trainer(make_pair(False, model and model()), folder / "plain", **options)
    plain.train()
    wrapped = make_trainer(make_pair(True, model and model(), micro_batch), folder / "wrapped", **options)
    wrapped.train()
    assert_same_logs(logs(wrapped), logs(plain), error)
    if error <= 1e-5:
        assert_close_weights(plain.model.state_dict(), wrapped.model.state_dict())
    return plain, wrapped


def names_below(folder: Path) -> set[str]:
    """But for what the two always share."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.bert, models.vit])
def test_a_wrapped_model_looks_as_before(build: Any) -> None:
    plain, batch = build()
    model, _ = build()
    model, _ = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch, limits=hightide.Limits(gpu="16MiB"))
    for (name, module), (_, other) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert inspect.signature(module.forward) == inspect.signature(other.forward), name
        assert inspect.signature(type(module).forward) == inspect.signature(type(other).forward), name
        assert type(module).forward.__doc__ == type(other).forward.__doc__
        assert isinstance(module, type(other)) and type(module).__name__ == type(other).__name__
    assert model.config is not None and model.dtype == plain.dtype and model.device.type == "cpu"
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert type(model.get_input_embeddings()).__name__ == type(plain.get_input_embeddings()).__name__
    assert transformers.utils.generic.find_labels(type(model)) == transformers.utils.generic.find_labels(type(plain))
    hightide.unwrap(model)
    assert type(model).forward is type(plain).forward


def test_training_evaluating_predicting_and_saving(tmp_path: Path) -> None:
    plain, wrapped = check(tmp_path, save_strategy="steps", save_steps=2)
    assert abs(wrapped.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) < 1e-5
    found, expected = wrapped.predict(EVAL), plain.predict(EVAL)
    assert abs(found.predictions - expected.predictions).max() < 1e-4
    assert (found.label_ids == expected.label_ids).all() and found.predictions.shape == (6, 10, models.VOCABULARY)
    for trainer in (plain, wrapped):
        trainer.save_model(str(Path(trainer.args.output_dir) / "final"))
    assert names_below(tmp_path / "wrapped") == names_below(tmp_path / "plain")
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wrapped" / "final")
    assert_close_weights(plain.model.state_dict(), saved.state_dict())
    states = [torch.load(tmp_path / side / "checkpoint-4" / "optimizer.pt") for side in ("plain", "wrapped")]
    assert states[0]["param_groups"] == states[1]["param_groups"] and list(states[0]["state"]) == list(
        states[1]["state"]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_steps": 3, "eval_steps": 3},
        {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"max_grad_norm": 0.3, "label_smoothing_factor": 0.1},
        {"remove_unused_columns": True, "include_num_input_tokens_seen": True, "average_tokens_across_devices": False},
    ],
    ids=["accumulation", "no clipping", "label smoothing", "columns"],
)
def test_options_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs whole logits.*")  # label smoothing uses them
        check(tmp_path, **options)


def test_autocast_and_a_plain_model_afterwards(tmp_path: Path) -> None:
    """In one micro-batch: products in bf16 are rounded. Accelerate puts a forward of its own on the model, which goes
    on working when the model is plain again."""
    _, wrapped = check(tmp_path, error=1e-3, micro_batch=NUM_SAMPLES, bf16=True)
    assert not torch.is_autocast_enabled("cpu")
    model = hightide.unwrap(wrapped.model)
    assert "forward" in vars(model), "Accelerate does it in another way now"
    plain = models.llama(num_layers=2)[0]
    plain.load_state_dict(model.state_dict())
    assert abs(float(model(**BATCH).loss.detach()) - float(plain(**BATCH).loss.detach())) < 1e-3


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    _, wrapped = check(
        tmp_path,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_type="constant",
        metric_for_best_model="loss",
    )
    assert wrapped.state.best_model_checkpoint.endswith("checkpoint-2"), "the last one is in place anyway"


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].reshape(-1, models.VOCABULARY)
        loss = 3 * nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_the_users_own(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs whole logits.*")
        check(tmp_path, kind=OwnLoss)


def test_recomputation_stays_the_plans_decision(tmp_path: Path) -> None:
    calls: dict[bool, int] = {True: 0, False: 0}
    trainers = {}
    for asked in calls:
        pair = make_pair(True)
        trainers[asked] = make_trainer(pair, tmp_path / str(asked), gradient_checkpointing=asked)

        def count(*_: Any, asked: bool = asked) -> None:
            calls[asked] += 1

        pair[0].model.layers[1].mlp.register_forward_pre_hook(count)
    with pytest.warns(UserWarning, match=r"stays off.*plan decides") as caught:
        trainers[True].train()
    assert len([one for one in caught if "stays off" in str(one.message)]) == 1
    assert not trainers[True].model.is_gradient_checkpointing
    trainers[False].train()
    assert calls[True] == calls[False] > 0
    assert logs(trainers[True]) == logs(trainers[False])


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_a_run_resumes_from_a_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """A new pair, in a new Trainer, goes on where another has stopped: with the same bits, masters included; and a
    plain one with an equal run."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "eval_steps": 3, "logging_steps": 3}
    options["seed"] = 7

    def build() -> nn.Module:
        return models.llama(num_layers=2)[0].to(dtype)

    straight = make_trainer(make_pair(True, build()), tmp_path / "straight", **options)
    straight.train()
    resumed = make_trainer(make_pair(True, build()), tmp_path / "resumed", **options)
    checkpoint = str(tmp_path / "straight" / "checkpoint-3")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert logs(resumed)[-3:] == logs(straight)[-3:]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    if dtype is torch.float32:
        plain = make_trainer(make_pair(False, build()), tmp_path / "plain", **options)
        plain.train(resume_from_checkpoint=checkpoint)
        assert_same_logs(logs(plain), logs(straight))


def test_adapters(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(models.llama(num_layers=2)[0], config)  # type: ignore[arg-type,return-value]

    options = {"save_strategy": "steps", "save_steps": 4, "gradient_checkpointing": True, "label_names": ["labels"]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*stays off.*")
        check(tmp_path, model=build, **options)
    assert names_below(tmp_path / "wrapped") == names_below(tmp_path / "plain")


def test_updates_in_backward_are_refused_because_the_trainer_asks_for_norms(tmp_path: Path) -> None:
    trainer = make_trainer(make_pair(True, update="in_backward"), tmp_path, max_grad_norm=0.0)
    with pytest.raises(RuntimeError, match=r"in_backward.*measured afterwards.*update='deferred'"):
        trainer.train()


def accelerated(pair: Pair) -> list[float]:
    """A loop by hand, with accumulation and clipping as Accelerate has them."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    scheduler = torch.optim.lr_scheduler.StepLR(pair[1], 1, 0.7)
    model, optimizer, scheduler = accelerator.prepare(*pair, scheduler)
    found = []
    for step in range(6):
        with accelerator.accumulate(model):
            loss = model(**models.token_batch(30 + step, num_samples=NUM_SAMPLES)).loss
            accelerator.backward(loss)
            found.append(float(loss.detach()))
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] < 3e-3
    return found


def test_a_loop_by_hand_with_accelerate() -> None:
    plain, wrapped = make_pair(False), make_pair(True)
    found, expected = accelerated(wrapped), accelerated(plain)
    assert len(found) == 9
    for value, other in zip(found, expected, strict=True):
        assert abs(value - other) <= 1e-5 * other
    assert_close_weights(plain[0].state_dict(), wrapped[0].state_dict())


def test_accelerate_saves_and_loads_a_state(tmp_path: Path) -> None:
    """Of a tied, 16-bit model, into another pair: the same bits from there on."""

    def build(seed: int) -> nn.Module:
        return models.llama(num_layers=2, tied=True, seed=seed)[0].to(torch.bfloat16)

    def go_on(pair: Pair, seed: int) -> float:
        loss = pair[0](**models.token_batch(seed, num_samples=NUM_SAMPLES)).loss
        loss.backward()
        pair[1].step()
        pair[1].zero_grad()
        return float(loss.detach())

    first, second = make_pair(True, build(0)), make_pair(True, build(5))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*first)
    go_on(first, 40)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator.prepare(*second)
    accelerator.load_state(str(tmp_path))
    for seed in (41, 42):
        assert go_on(first, seed) == go_on(second, seed)
    for name, value in first[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_nothing_is_sent_to_the_accelerator_when_an_optimizer_that_has_trained_is_prepared(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Trainers, one after another, with one pair: the second begins with the states that the first has left, and
    they stay where they are; whoever else asks for them gets them."""
    sent: list[Tensor] = []
    move = accelerate.optimizer.move_to_device

    def note(state: Any, device: Any) -> Any:
        if isinstance(state, Tensor):
            sent.append(state)
        return move(state, device)

    def build() -> nn.Module:
        return models.llama(num_layers=2)[0].to(dtype)

    found: list[list[tuple[str, float]]] = []
    for wrapped in (True, False) if dtype is torch.float32 else (True,):
        pair = make_pair(wrapped, build())
        first = make_trainer(pair, tmp_path / f"first {wrapped}")
        first.train()
        before = pair[1].state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(accelerate.optimizer, "move_to_device", note)
            second = make_trainer(pair, tmp_path / f"second {wrapped}", seed=5)
            second.train()
        assert bool(sent) != wrapped
        for state in (before, first.optimizer.state_dict(), pair[1].state_dict()):
            assert {"state", "param_groups"} <= set(state) and len(state["state"]) == len(list(pair[0].parameters()))
        assert {int(state["step"]) for state in pair[1].state_dict()["state"].values()} == {8}
        found.append(logs(second))
        sent.clear()
    if len(found) == 2:
        assert_same_logs(*found)


def test_a_new_optimizer_of_a_16_bit_model_has_no_masters_to_send_until_it_has_stepped() -> None:
    pair = make_pair(True, models.llama(num_layers=2)[0].to(torch.bfloat16))
    fresh = pair[1].state_dict()
    assert fresh["state"] == {} and fresh["hightide_masters"] == {}
    pair[0](**BATCH).loss.backward()
    pair[1].step()
    pair[1].zero_grad()
    assert len(pair[1].state_dict()["hightide_masters"]) == len(list(pair[0].parameters()))
    hightide.unwrap(pair[0])


def test_a_fresh_state_takes_masters_back_to_the_parameters() -> None:
    """Steps that are too small for bf16 change masters only; the state of before knows that they were parameters."""
    model = models.llama(num_layers=2)[0].to(torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6, eps=1e-4, weight_decay=0.0)
    model, optimizer = hightide.wrap(model, optimizer, BATCH, limits=LIMITS)  # type: ignore[assignment]
    fresh, values = optimizer.state_dict(), model.state_dict()
    for order in (1, -1):
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        masters = optimizer.state_dict()["hightide_masters"]
        assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
        for load, state in [(model.load_state_dict, values), (optimizer.load_state_dict, fresh)][::order]:
            load(state)
        masters = optimizer.state_dict()["hightide_masters"]
        for index, value in enumerate(dict(model.named_parameters())):
            assert torch.equal(masters[index], values[value].float())
    hightide.unwrap(model)


def test_a_refusal_is_one_of_hightide() -> None:
    pair = make_pair(True)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(pair[1])
    with pytest.raises(Refused, match=r"optimizer\.state_dict\(\)"):
        torch.save(optimizer, "/dev/null")
