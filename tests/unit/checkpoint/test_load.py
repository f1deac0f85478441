"""What a load refuses before it changes anything, what it does with damage, and the forms of a parameter's value."""

from __future__ import annotations

import copy
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_save import LIMITS, Net, batch, pair, train
from torch import Tensor, nn

import hightide
from disk_plans import placed
from hightide.checkpoint import load as load_module
from hightide.checkpoint import places
from hightide.checkpoint.files.folder import GoneCheckpoint
from hightide.optim.chunk_updates import ChunkUpdates
from hightide.runtime.surgery import run_of


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def assert_equal_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = pair()
    train(model, optimizer, 1, 2)
    return hightide.save(model, optimizer, tmp_path / "saved", extra={"a": 1}).wait()


def refused(path: Path, model: nn.Module, optimizer: Any, match: str) -> None:
    """And nothing has changed."""
    before, states_before = values(model), None if optimizer is None else states(optimizer)
    draws = torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        hightide.load(model, optimizer, path)
    assert_equal_values(values(model), before)
    assert torch.equal(torch.get_rng_state(), draws)
    if optimizer is not None:
        after = states(optimizer)
        assert after["param_groups"] == states_before["param_groups"]
        for index, state in states_before["state"].items():
            assert all(torch.equal(value, after["state"][index][name]) for name, value in state.items())
    model(batch()).backward()


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_another_optimizer_is_refused(is_wrapped: bool, saved: Path) -> None:
    model, optimizer = pair(is_wrapped, seed=1, sgd=True)
    train(model, optimizer, 5)
    refused(saved, model, optimizer, r"does not fit this SGD: it was saved with 'AdamW'.*hightide.load\(model, None")


def test_other_groups_are_refused(saved: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    vectors = [param for param in model.parameters() if param.dim() < 2]
    matrices = [param for param in model.parameters() if param.dim() > 1]
    refused(saved, model, torch.optim.AdamW([{"params": matrices}, {"params": vectors}]), "1 groups .* instead of 2")
    refused(
        saved, model, torch.optim.AdamW(matrices), r"group 0 lacks 3 of its parameters: layers.0.bias, layers.1.bias"
    )
    model, optimizer = hightide.wrap(model, torch.optim.AdamW(matrices), batch(), limits=LIMITS)
    refused(saved, model, optimizer, "group 0 lacks 3")


def test_other_options_of_states_are_refused(tmp_path: Path) -> None:
    model, _ = pair(wrapped=False)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, 1)
    path = hightide.save(model, optimizer, tmp_path).path
    other, its = pair(seed=1)
    refused(path, other, its, r"exp_avg, exp_avg_sq, max_exp_avg_sq of .* keeps exp_avg, exp_avg_sq: .*other options")


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Linear(16, 16, bias=False)
        self.more = nn.Linear(16, 2)
        self.layers[2].weight = nn.Parameter(torch.zeros(16, 16).half())


def test_another_model_is_refused_with_what_differs(saved: Path) -> None:
    model = Wider().float()
    with pytest.raises(ValueError) as refusal:
        hightide.load(model, None, saved)
    assert "2 tensors are missing: more.bias, more.weight" in str(refusal.value)
    assert "1 tensors are not in the model: layers.1.bias" in str(refusal.value)
    narrow = Net()
    narrow.layers[0] = nn.Linear(16, 12)
    with pytest.raises(
        ValueError, match=r"2 tensors have another shape: .*layers.0.weight \(16, 16\) instead of \(12, 16"
    ):
        hightide.load(narrow, None, saved)
    with pytest.raises(ValueError, match=r"6 tensors have another dtype: .* float32 instead of float16"):
        hightide.load(Net().half(), None, saved)


class Silent(nn.Module):
    """Net's tensors, without its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def test_extra_states_of_modules_are_compared(saved: Path, tmp_path: Path) -> None:
    model = Silent()
    before = values(model)
    with pytest.raises(ValueError, match="1 extra states are of modules that have none: the model"):
        hightide.load(model, None, saved)
    assert_equal_values(values(model), before)
    hightide.save(model, None, tmp_path / "silent", step=1)
    with pytest.raises(ValueError, match="1 modules have an extra state of which it has none: the model"):
        hightide.load(Net(), None, tmp_path / "silent")


def test_buffers_of_all_kinds(tmp_path: Path) -> None:
    """Negation and conjugation may be notes on a tensor whose memory is as before."""
    waves = torch.randn(3, dtype=torch.complex64)
    buffers = {"waves": waves, "conjugated": waves.conj(), "negated": waves.conj().imag, "rows": torch.randn(3, 4).t()}
    for number, is_wrapped in enumerate((True, False)):
        model, other = Net(), Net()
        for name, value in buffers.items():
            model.register_buffer(name, value)
            other.register_buffer(name, torch.zeros_like(value))
        optimizer = torch.optim.AdamW(model.parameters())
        if is_wrapped:
            model, optimizer = hightide.wrap(model, optimizer, batch(), limits=LIMITS)
        extra = {"codes": torch.ones(2).to(torch.float8_e5m2)}
        hightide.save(model, optimizer, tmp_path / f"{number}", step=1, extra=extra, on_error="raise", wait=True)
        loaded = hightide.load(other, None, tmp_path / f"{number}")
        for name, value in buffers.items():
            assert torch.equal(getattr(other, name), value), name
        assert loaded.extra["codes"].dtype == torch.float8_e5m2


def test_whatever_device_is_the_default(tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    plain, its = pair(wrapped=False, seed=1)
    with torch.device("meta"):
        hightide.save(model, optimizer, tmp_path, extra={"order": list(range(2000))}, on_error="raise", wait=True)
        loaded = hightide.load(plain, its, tmp_path)
        hightide.load(model, optimizer, tmp_path)
        found = hightide.optimizer_state_dict(tmp_path)
    assert loaded.extra["order"] == list(range(2000))
    assert_equal_values(values(plain), values(model))
    assert all(not value.is_meta for state in found["state"].values() for value in state.values())
    torch.testing.assert_close(train(model, optimizer, 2), train(plain, its, 2))


def test_a_checkpoint_without_an_optimizer_has_weights_alone(tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    path = hightide.save(model, None, tmp_path, step=3).wait()
    assert not list(path.glob("optimizer-*"))
    other, its = pair(seed=1)
    train(other, its, 7)
    refused(path, other, its, r"saved without an optimizer; load the weights alone: hightide.load\(model, None")
    before = states(its)
    hightide.load(other, None, path)
    assert_equal_values(values(other), values(model))
    after = states(its)
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][name]) for name, value in state.items())
    with pytest.raises(ValueError, match="without an optimizer"):
        hightide.optimizer_state_dict(path)


def test_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = pair(wrapped=False)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        hightide.load(model, optimizer, tmp_path)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        hightide.load(model, optimizer, tmp_path / "nowhere")
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ValueError, match="wrap it first"):
        hightide.load(empty, None, tmp_path)


# -- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path, pattern: str) -> str:
    """The last byte of the last such file."""
    file = sorted(path.glob(pattern))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file.name


@pytest.mark.parametrize("pattern", ["model*", "optimizer*"])
def test_damage_names_itself_and_the_half_loaded_run_refuses_to_go_on(pattern: str, saved: Path) -> None:
    model, optimizer = pair(seed=1)
    train(model, optimizer, 5)
    good = hightide.save(model, optimizer, saved.parent, step=1).wait()
    expected = values(model)
    name = damage(saved, pattern)
    with pytest.raises(
        ValueError, match=rf"step-2 is damaged: {name}, piece 1 of 1 .*newest whole checkpoint is .*step-1"
    ):
        hightide.load(model, optimizer, saved.parent)
    for act in (
        lambda: model(batch()),
        model.state_dict,
        optimizer.state_dict,
        lambda: hightide.save(model, optimizer, saved.parent),
    ):
        with pytest.raises(RuntimeError, match="load a whole one"):
            act()
    hightide.load(model, optimizer, good)
    assert_equal_values(values(model), expected)
    train(model, optimizer, 6)


@pytest.mark.parametrize("pattern", ["model*", "optimizer*", "training.safetensors", "training.json"])
def test_damage_changes_nothing_of_a_plain_pair(pattern: str, saved: Path) -> None:
    name = damage(saved, pattern)
    model, optimizer = pair(wrapped=False, seed=1)
    train(model, optimizer, 5)
    refused(saved, model, optimizer, rf"damaged: {name}.*no whole checkpoint beside it")


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_newest_one_that_is_not_whole_is_told_and_named_where_there_is_no_other(
    is_wrapped: bool, saved: Path
) -> None:
    model, optimizer = pair(is_wrapped, seed=1)
    for step in (3, 4):
        hightide.save(model, optimizer, saved.parent, step=step, wait=True)
    (saved.parent / "step-3" / "training.json").unlink()
    os.truncate(saved.parent / "step-4" / "training.json", 2)
    (saved.parent / "step-5.tmp").mkdir()  # a save that was cut off is no loss
    with pytest.warns(UserWarning) as told:
        assert hightide.load(model, optimizer, saved.parent).step == 2
    texts = [str(one.message) for one in told]
    assert len(texts) == 2 and all("step-2 is taken instead" in text for text in texts)
    assert "step-4 is damaged: training.json has 2 bytes" in texts[0]
    assert "step-3 is damaged: training.json is missing" in texts[1]
    (saved / "manifest.json").unlink()
    for read in (
        lambda: hightide.load(model, optimizer, saved.parent),
        lambda: hightide.optimizer_state_dict(saved.parent),
    ):
        with pytest.raises(
            ValueError, match=r"step-4 is damaged: training.json has 2 bytes.*no whole checkpoint beside"
        ):
            read()


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_folder_into_which_another_process_saves(
    is_wrapped: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is replaced while it is loaded: the one that took its place is loaded. By its name it is told."""
    model, optimizer = pair(is_wrapped, seed=1)
    other, its = pair(False, seed=5)
    name = "_fill_run" if is_wrapped else "_fill_plain"
    fill, replaced = getattr(load_module, name), []

    def replace_first(*args: Any) -> None:
        if not replaced:
            with torch.enable_grad():
                train(other, its, 6)  # else it is the same to the bit
            replaced.append(hightide.save(other, its, saved.parent, step=2).path)
        fill(*args)

    monkeypatch.setattr(load_module, name, replace_first)
    with pytest.raises(GoneCheckpoint, match="step-2 was removed, or replaced by another save"):
        hightide.load(model, optimizer, saved)
    replaced.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hightide.load(model, optimizer, saved.parent).extra is None
    assert_equal_values(values(model), values(other))


def test_folders_that_are_none(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(False)
    refused(None, model, optimizer, "folder is None .hightide.latest returns None.*; pass a path")  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(saved.parent.parent))
    assert hightide.load(model, optimizer, "~/saved").path == saved == hightide.latest("~/saved")
    assert hightide.save(model, optimizer, "~/other", step=3).path == saved.parent.parent / "other" / "step-3"


def test_folders_of_the_plain_trainer_beside_checkpoints_are_not_called_damaged(saved: Path) -> None:
    model, optimizer = pair(seed=1)
    plain = saved.parent / "checkpoint-9"
    plain.mkdir()
    (plain / "trainer_state.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"checkpoint-9 is of the plain Trainer; .*step-2 is taken instead"):
        assert hightide.load(model, optimizer, saved.parent).step == 2
    shutil.rmtree(saved)
    refused(saved.parent, model, optimizer, "there is no whole checkpoint in .*; name a folder in which hightide.save")


def test_random_numbers_go_on(saved: Path) -> None:
    drawn = []
    for seed in (7, 8):
        model, optimizer = pair(seed=seed)
        hightide.load(model, optimizer, saved)
        run = run_of(model)
        assert run is not None and run.num_passes == 2
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_options_of_groups_are_those_of_the_file(is_wrapped: bool, tmp_path: Path) -> None:
    """As with torch's load_state_dict: whoever wants others sets them afterwards, and they count."""
    model, optimizer = in_dtype(torch.float32, is_wrapped)
    optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.25)
    train_in(torch.float32, model, optimizer, 1)
    saved = hightide.save(model, optimizer, tmp_path, step=1, wait=True).path
    state = hightide.optimizer_state_dict(saved)
    resumed, its = in_dtype(torch.float32, is_wrapped, seed=5)
    torchs = in_dtype(torch.float32, False, seed=5)[1]
    for one in (its, torchs):
        one.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), mine="kept")
    hightide.load(resumed, its, tmp_path)
    torchs.load_state_dict(state)
    expected = {name: value for name, value in torchs.param_groups[0].items() if name != "params"}
    found = {name: its.param_groups[0][name] for name in expected}
    assert (
        found == expected and found["lr"] == 3e-3 and found["weight_decay"] == 0.25 and found["betas"] == (0.9, 0.999)
    )
    assert its.param_groups[0]["mine"] == "kept", "what the file does not know stays"
    values = truths(resumed, its)
    its.param_groups[0]["lr"] = 0.0
    train_in(torch.float32, resumed, its, 2)
    assert all(torch.equal(value, values[name]) for name, value in truths(resumed, its).items())


# -- the forms of a value --------------------------------------------------------------------------------------------


def in_dtype(dtype: torch.dtype, is_wrapped: bool, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    example = batch().to(dtype)
    return hightide.wrap(model, optimizer, example, limits=LIMITS) if is_wrapped else (model, optimizer)


def train_in(dtype: torch.dtype, model: nn.Module, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        model(batch(seed).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def truths(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What is behind each parameter."""
    run = run_of(model)
    found = {}
    for name, param in model.named_parameters():
        master = None if run is None else run.chunks.master_of(name)
        value = model.state_dict()[name] if run is not None else param.detach()
        found[name] = (value.float() if master is None else master).clone()
    return found


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("source", [F32, BF16, F16])
@pytest.mark.parametrize("target", [F32, BF16, F16])
def test_masters_are_what_counts_whatever_form_they_have(
    source: torch.dtype, target: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remainder becomes a part of a master, or of an fp32 parameter, and back; nothing is lost."""
    monkeypatch.setattr(places, "TILE_NUMEL", 100)
    model, optimizer = in_dtype(source, is_wrapped=True)
    train_in(source, model, optimizer, 1, 2)
    expected = truths(model, optimizer)
    hightide.save(model, optimizer, tmp_path, wait=True)
    other, its = in_dtype(target, is_wrapped=True, seed=1)
    train_in(target, other, its, 3)
    hightide.load(other, its, tmp_path)
    for name, truth in truths(other, its).items():
        exact = expected[name]
        if target is BF16 and source is not BF16:  # halfway between two bf16 values, a remainder is one ulp short
            assert ((truth.view(torch.int32) - exact.view(torch.int32)).abs() <= 1).all(), name
        else:
            assert torch.equal(truth, exact), name
        assert torch.equal(other.state_dict()[name], exact.to(target)), name
    train_in(target, other, its, 4)


@pytest.mark.parametrize("source", [BF16, F16])
def test_plain_fp32_takes_masters_as_its_parameters(source: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = in_dtype(source, is_wrapped=True)
    train_in(source, model, optimizer, 1, 2)
    hightide.save(model, optimizer, tmp_path, wait=True)
    plain, its = in_dtype(F32, is_wrapped=False, seed=1)
    plain.layers[1].weight = nn.Parameter(plain.layers[1].weight.detach().t().contiguous().t())  # not in one piece
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    hightide.load(plain, its, tmp_path)
    for name, truth in truths(model, optimizer).items():
        assert torch.equal(plain.get_parameter(name), truth), name


def test_plain_16_bit_training_has_no_masters(tmp_path: Path) -> None:
    plain, its = in_dtype(BF16, is_wrapped=False)
    train_in(BF16, plain, its, 1)
    hightide.save(plain, its, tmp_path, step=1)
    model, optimizer = in_dtype(BF16, is_wrapped=True, seed=1)
    train_in(BF16, model, optimizer, 2, 3)
    hightide.load(model, optimizer, tmp_path)
    for name, truth in truths(model, optimizer).items():
        assert torch.equal(truth, plain.get_parameter(name).float()), name


# -- plain PyTorch's own files ---------------------------------------------------------------------------------------


def test_a_plain_optimizer_takes_the_state_dict_of_a_checkpoint(saved: Path) -> None:
    model, optimizer = pair(wrapped=False, seed=1)
    optimizer.load_state_dict(hightide.optimizer_state_dict(saved))
    other, its = pair(seed=1)
    hightide.load(other, its, saved)
    found, expected = states(optimizer), states(its)
    assert found["param_groups"] == expected["param_groups"] and found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert all(torch.equal(found["state"][index][name], value) for name, value in state.items())
    del model


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("is_zipped", [True, False])
def test_files_of_torch_save_start_a_run(is_wrapped: bool, is_zipped: bool, tmp_path: Path) -> None:
    plain, its = pair(wrapped=False)
    train(plain, its, 1)
    state = {name: value for name, value in plain.state_dict().items() if isinstance(value, Tensor)}
    file, both = tmp_path / "model.pt", tmp_path / "both.pt"
    torch.save(state, file, _use_new_zipfile_serialization=is_zipped)
    content = {"model_state_dict": plain.state_dict(), "optimizer_state_dict": its.state_dict(), "step": 4, "lr": 0.5}
    torch.save(content, both, _use_new_zipfile_serialization=is_zipped)
    model, optimizer = pair(is_wrapped, seed=1)
    loaded = hightide.load(model, optimizer, both)
    assert (loaded.step, loaded.extra, loaded.path) == (4, {"step": 4, "lr": 0.5}, both)
    assert_equal_values(values(model), values(plain))
    assert states(optimizer)["state"][0]["step"] == 1
    with pytest.raises(ValueError, match="no state of an optimizer"):
        hightide.load(model, optimizer, file)


def test_files_of_torch_save_are_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"model": {}, "more": Evil()}, tmp_path / "evil.pt")
    model, _ = pair(wrapped=False)
    torch.save(model, tmp_path / "pickled.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "short.pt").write_bytes((tmp_path / "pickled.pt").read_bytes()[:-50])
    for name in ("evil", "pickled", "empty", "short"):
        with pytest.raises(ValueError, match=rf"{name}.pt is damaged, or holds more than .*weights_only=True.*: save"):
            hightide.load(model, None, tmp_path / f"{name}.pt")
    assert not (tmp_path / "touched").exists()
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 3}, tmp_path / "other.pt")
    for name, match in (("list.pt", "is a list"), ("other.pt", "no state dict of a model")):
        with pytest.raises(ValueError, match=match):
            hightide.load(model, None, tmp_path / name)


# -- what users put into states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_users_put_beside_states_comes_back(is_wrapped: bool, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, 1)
    first = next(iter(optimizer.param_groups[0]["params"]))
    optimizer.state[first]["mine"] = {"count": 3, "mask": torch.tensor([True, False])}
    optimizer.param_groups[0]["label"] = ("a", 1)
    hightide.save(model, optimizer, tmp_path, wait=True)
    other, its = pair(is_wrapped, seed=1)
    hightide.load(other, its, tmp_path)
    mine = its.state[next(iter(its.param_groups[0]["params"]))]["mine"]
    assert mine["count"] == 3 and mine["mask"].tolist() == [True, False]
    assert its.param_groups[0]["label"] == ("a", 1)


def test_counts_that_are_integers_stay_so(tmp_path: Path) -> None:
    """A tensor in their place would calculate in fp32."""
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def five_steps(its: nn.Embedding, updates: torch.optim.Optimizer) -> None:
        for row in range(5):
            updates.zero_grad()
            (its(torch.tensor([row, 3])) ** 2).sum().backward()
            updates.step()

    five_steps(model, optimizer)
    hightide.save(model, optimizer, tmp_path)
    resumed = nn.Embedding(10, 4, sparse=True)
    its = torch.optim.SparseAdam(resumed.parameters(), lr=0.1)
    hightide.load(resumed, its, tmp_path)
    assert its.state[resumed.weight]["step"] == 5 and type(its.state[resumed.weight]["step"]) is int
    five_steps(model, optimizer)
    five_steps(resumed, its)
    assert torch.equal(model.weight, resumed.weight)


def test_a_wrapped_optimizer_takes_counts_that_are_integers(tmp_path: Path) -> None:
    model, optimizer = pair(wrapped=False)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    hightide.save(model, optimizer, tmp_path)
    wrapped, its = pair(seed=1)
    hightide.load(wrapped, its, tmp_path)
    assert not its.others
    train(wrapped, its, 1)
    assert {float(state["step"]) for state in its.state.values()} == {2.0}


def test_an_optimizer_that_keeps_more_than_states_is_refused(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "calls": 3}

    model, _ = pair(wrapped=False)
    with pytest.raises(ValueError, match="Counting keeps 'calls' beside the states"):
        hightide.save(model, Counting(model.parameters()), tmp_path, step=1)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_states_of_parameters_that_are_in_no_group_come_back(is_wrapped: bool, tmp_path: Path) -> None:
    """Whoever puts them back goes on with them."""

    def without_the_first(seed: int, *steps: int) -> tuple[nn.Module, Any, nn.Parameter]:
        model, optimizer = pair(is_wrapped, seed=seed)
        train(model, optimizer, *steps)
        return model, optimizer, optimizer.param_groups[0]["params"].pop(0)

    model, optimizer, first = without_the_first(0, 1, 2)
    hightide.save(model, optimizer, tmp_path, step=2, wait=True)
    other, its, other_first = without_the_first(1)
    hightide.load(other, its, tmp_path)
    for updates, param in ((optimizer, first), (its, other_first)):
        updates.param_groups[0]["params"].append(param)
    assert float(its.state[other_first]["step"]) == 2.0
    assert train(model, optimizer, 3, 4, 5) == train(other, its, 3, 4, 5)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_states_of_parameters_that_were_frozen_for_a_while_come_back(is_wrapped: bool, tmp_path: Path) -> None:
    """From run to run: all train, then one layer does not, then all do again."""

    def resumed(number: int, folder: str, wrapped: bool) -> list[float]:
        model, _ = pair(wrapped=False)
        model.layers[1].requires_grad_(number != 1)  # type: ignore[index]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if wrapped:
            model, optimizer = hightide.wrap(model, optimizer, batch(), limits=LIMITS)
        if number:
            hightide.load(model, optimizer, tmp_path / folder)
        losses = train(model, optimizer, 10 * number, 10 * number + 1)
        hightide.save(model, optimizer, tmp_path / folder, step=number, wait=True)
        counts = [float(state["step"]) for state in optimizer.state.values()]
        assert sorted(counts) == sorted([2.0 * (number + 1)] * 4 + [2.0 * max(1, number)] * 2)
        return losses

    expected = [resumed(number, "expected", wrapped=False) for number in range(3)]
    found = [resumed(number, "found", is_wrapped or number == 1) for number in range(3)]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)


def test_momentum_of_sgd(tmp_path: Path) -> None:
    model, optimizer = pair(sgd=True)
    train(model, optimizer, 1, 2)
    path = hightide.save(model, optimizer, tmp_path, step=2).wait()
    expected = train(model, optimizer, 3, 4)
    other, its = pair(seed=1, sgd=True)
    train(other, its, 9)
    hightide.load(other, its, path)
    assert train(other, its, 3, 4) == expected
    plain, its = pair(wrapped=False, seed=1, sgd=True)
    hightide.load(plain, its, path)
    assert train(plain, its, 3, 4) == pytest.approx(expected, rel=1e-6)
    again = hightide.save(plain, its, tmp_path / "plain", step=4).path
    hightide.load(*pair(seed=2, sgd=True), again)


def test_a_parameter_without_a_state_begins_anew(tmp_path: Path) -> None:
    model, optimizer = pair()
    path = hightide.save(model, optimizer, tmp_path, step=0).wait()
    other, its = pair(seed=1)
    train(other, its, 1, 2)
    hightide.load(other, its, path)
    assert not its.state_dict()["state"]
    assert train(other, its, 3, 4) == train(model, optimizer, 3, 4)


def test_moments_that_somebody_holds_keep_their_values(saved: Path) -> None:
    model, optimizer = pair(seed=1)
    train(model, optimizer, 1)
    first = next(iter(optimizer.param_groups[0]["params"]))
    held = optimizer.state[first]["exp_avg"]
    before = held.clone()
    hightide.load(model, optimizer, saved)
    assert torch.equal(held, before) and not torch.equal(optimizer.state[first]["exp_avg"], before)


def test_updates_that_are_under_way_come_first(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(wrapped=False, seed=1)
    plan = placed(hightide.plan(model, optimizer, batch(), limits=LIMITS), "host")
    model, optimizer = hightide.wrap(model, optimizer, batch(), plan=plan)
    hightide.load(model, optimizer, saved)
    expected = values(model)
    train(model, optimizer, 3)
    apply = ChunkUpdates._apply

    def slowly(*args: Any) -> None:
        time.sleep(0.1)
        apply(*args)

    monkeypatch.setattr(ChunkUpdates, "_apply", slowly)
    train(model, optimizer, 4)
    hightide.load(model, optimizer, saved)
    assert_equal_values(values(model), expected)
