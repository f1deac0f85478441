"""A remembered result is the one that the fake mode would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import models
from hightide.profiler.fake import fake, known_results
from hightide.profiler.fake.known_results import fake_of, result_of
from hightide.profiler.model.model_profile import profile_calls

aten = torch.ops.aten
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "new": lambda x, y: (aten.mm.default, (x, y)),
    "new, of a view": lambda x, y: (aten.mm.default, (y.t(), x.t())),
    "new, transposed": lambda x, y: (aten.clone.default, (x.t(),)),
    "view": lambda x, y: (aten.view.default, (x, [2, 2, 6])),
    "view of a part": lambda x, y: (aten.slice.Tensor, (x[1:], 1, 2, 5)),
    "expanded": lambda x, y: (aten.expand.default, (x[:1], [4, 6])),
    "views": lambda x, y: (aten.split.Tensor, (x, 2, 1)),
    "several": lambda x, y: (aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
    "itself": lambda x, y: (aten.add_.Tensor, (x, x)),
    "itself, as it is": lambda x, y: (aten.contiguous.default, (x,)),
    "a copy, as it is not": lambda x, y: (aten.contiguous.default, (x.t(),)),
    "integer": lambda x, y: (aten.full_like.default, (x.to(torch.int64), 1)),
    "a number": lambda x, y: (aten.div.Tensor, (x.to(torch.int64), 2)),
    "many": lambda x, y: (aten.cat.default, ([x, y.t()], 1)),
    "beside values": lambda x, y: (aten.embedding.default, (x, torch.tensor([[1, 3], [0, 2], [2, 2]]))),
    "beside other values": lambda x, y: (aten.where.self, (torch.ones(6, 1, 6).bool(), x[0], torch.zeros(4, 6))),
    "conjugated": lambda x, y: (aten._conj.default, (x.to(torch.complex64),)),
}


def made(mode: FakeTensorMode) -> tuple[torch.Tensor, torch.Tensor]:
    with mode:
        return torch.empty(4, 6), torch.empty(6, 4)


def look(results: Any, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    flat = [entry for arg in given for entry in (arg if isinstance(arg, list) else [arg])]
    places = {id(arg.untyped_storage()): at for at, arg in enumerate(flat) if isinstance(arg, torch.Tensor)}
    return [
        (
            result.shape,
            result.stride(),
            result.storage_offset(),
            result.dtype,
            result.device,
            result.is_conj(),
            result.untyped_storage().nbytes(),
            places.get(id(result.untyped_storage())),
            [result is arg for arg in flat],
            isinstance(results, list),
        )
        for result in (results if isinstance(results, list | tuple) else [results])
    ]


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_fake_mode_gives(name: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    func, args = CALLS[name](*made(mode))
    expected = look(mode.__torch_dispatch__(func, (), args, {}), args)
    known_results._known.clear()
    for _ in range(3):
        assert look(result_of(mode, func, (), args, {}), args) == expected
    assert len(known_results._known) == 1
    remembered = next(iter(known_results._known.values()))
    assert (remembered is None) == (name == "conjugated")


def test_whatever_changes_a_result_tells_calls_apart() -> None:
    mode = FakeTensorMode()
    x, _ = made(mode)

    def dtype(func: Any, *args: Any, **kwargs: Any) -> torch.dtype:
        found: torch.dtype = result_of(mode, func, (), args, kwargs).dtype
        return found

    whole = x.to(torch.int64)
    assert dtype(aten.add.Tensor, whole, 1) == torch.int64
    assert dtype(aten.add.Tensor, whole, 1.0) == torch.float32
    assert dtype(aten.sum.default, whole > 0) == torch.int64
    assert dtype(aten.add.Tensor, whole > 0, True) == torch.bool
    assert dtype(aten.add.Tensor, whole > 0, 1) == torch.int64
    assert dtype(aten.sum.default, x, dtype=torch.float64) == torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype(aten.add.Tensor, whole, 1.0) == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_shape_of_what_has_values_tells_calls_apart() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x, _ = made(mode)
    for ids in (torch.tensor([1, 2, 3]), torch.tensor([[1, 2], [3, 0]]), torch.tensor([0, 1, 2])):
        assert result_of(mode, aten.embedding.default, (), (x, ids), {}).shape == (*ids.shape, 6)
    for other in (torch.ones(6), torch.ones(6, dtype=torch.float64), torch.ones((), dtype=torch.float64)):
        assert result_of(mode, aten.add.Tensor, (), (x, other), {}).dtype == torch.result_type(torch.ones(4, 6), other)


def test_what_may_share_memory_with_values_is_not_remembered() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x, _ = made(mode)
    known_results._known.clear()
    result_of(mode, aten.add_.Tensor, (), (x, torch.ones(4, 6)), {})  # changes an argument
    result_of(mode, aten.type_as.default, (), (torch.ones(4, 6), x), {})  # may return one
    assert not known_results._known


def test_another_mode_has_tensors_of_its_own() -> None:
    for _ in range(2):
        mode = FakeTensorMode()
        x, y = made(mode)
        assert result_of(mode, aten.mm.default, (), (x, y), {}).fake_mode is mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_without_values_is_as_torch_makes_it(dtype: torch.dtype) -> None:
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    for shape in ((4, 6), (), (0, 3)):
        plain = torch.empty(shape, dtype=dtype, device="meta")
        expected = FakeTensor(mode, plain, cpu)
        for _ in range(2):
            found = fake_of(plain, mode, cpu)
            assert vars(found) == vars(expected)
            assert type(found) is FakeTensor and found.device == cpu and not found.requires_grad
            assert torch._C._dispatch_keys(found) == torch._C._dispatch_keys(expected)
            assert found.untyped_storage() is plain.untyped_storage()
            mode._allow_unsafe_data_ptr_access = False
            with pytest.raises(RuntimeError):
                fake_of(torch.empty_like(plain), mode, cpu).data_ptr()
            mode._allow_unsafe_data_ptr_access = True
            fake_of(torch.empty_like(plain), mode, cpu).data_ptr()


def test_it_forgets_before_it_takes_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_results, "MAX_KNOWN", 3)
    known_results._known.clear()
    mode = FakeTensorMode()
    x, _ = made(mode)
    for number in range(10):
        result_of(mode, aten.add.Tensor, (), (x, number), {})
        assert len(known_results._known) <= 3


@pytest.mark.parametrize("name", ["llama_tied", "hand_written", "vit"])
def test_a_profile_is_the_same_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile() -> Any:
        model, batch = models.ZOO[name]()
        return profile_calls(model, torch.optim.AdamW(model.parameters()), batch, device=None)[0]

    first, again = profile(), profile()
    monkeypatch.setattr(fake, "result_of", lambda mode, *call: mode.__torch_dispatch__(*call))
    assert first == again == profile()
