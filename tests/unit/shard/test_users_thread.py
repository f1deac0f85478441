"""What another thread sees of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hightide.shard import users_thread
from hightide.shard.users_thread import frame_of, line_of, outside
from waiting import soon

OF_TORCH = dist.distributed_c10d.__file__


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Waiting:
    """A thread in a function of that name and file, which waits as a collective does: in C."""

    def __init__(self, name: str, file: str, caller: str = __file__, source: int | None = None) -> None:
        self._goes_on = threading.Lock()
        self._goes_on.acquire()
        namespace: dict[str, Callable[[], None]] = {"wait": self._goes_on.acquire}
        exec(compile(f"def {name}(group=None, group_src={source}):\n    wait()", file, "exec"), namespace)
        exec(compile(f"def user():\n    {name}()", caller, "exec"), namespace)
        self._thread = threading.Thread(target=namespace["user"])
        self._thread.start()
        self.ident = self._thread.ident or 0
        assert soon(lambda: (found := frame_of(self.ident)) is not None and found.f_code.co_name == name)

    def __enter__(self) -> int:
        return self.ident

    def __exit__(self, *_: object) -> None:
        self._goes_on.release()
        self._thread.join()


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "all_gather"])
def test_a_collective_of_the_users_is_found_with_its_group(one_rank: None, name: str) -> None:
    with Waiting(name, OF_TORCH) as thread:
        found = outside(frame_of(thread))
        assert found is not None and (found.name, found.members) == (name, (0,))
        again = outside(frame_of(thread))
        assert again is not None and again.call == found.call
        assert line_of(frame_of(thread)) == f"{Path(__file__).name}:2"


def test_the_next_call_of_the_same_collective_is_another(one_rank: None) -> None:
    """Its frame lies where the former one lay; a rank that goes from one to the next does not stand still."""
    comes, goes_on = threading.Lock(), threading.Lock()  # in C, as a collective waits
    comes.acquire()
    goes_on.acquire()
    namespace: dict[str, Callable[[], None]] = {"come": comes.release, "wait": goes_on.acquire}
    exec(compile("def barrier(group=None):\n    come()\n    wait()", OF_TORCH, "exec"), namespace)
    exec(compile("def user():\n    for _ in range(5):\n        barrier()", __file__, "exec"), namespace)
    thread = threading.Thread(target=namespace["user"])
    thread.start()
    calls = []
    for _ in range(5):
        assert comes.acquire(timeout=10)
        twice = [outside(frame_of(thread.ident or 0)) for _ in range(2)]
        calls.append({None if found is None else found.call for found in twice})
        goes_on.release()
    thread.join()
    assert None not in set.union(*calls) and [len(call) for call in calls] == [1] * 5
    assert len(set.union(*calls)) == 5


def test_who_waits_for_one_rank_waits_for_no_other(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 0, 7])
    with Waiting("broadcast", OF_TORCH, source=2) as thread:
        found = outside(frame_of(thread))
        assert found is not None and (found.name, found.members) == ("broadcast", (7, 0))
    with Waiting("broadcast", OF_TORCH, source=1) as thread:  # it is the source
        assert outside(frame_of(thread)) is None


@pytest.mark.parametrize(
    ("name", "file", "caller"),
    [
        ("recv", OF_TORCH, __file__),  # it waits for one rank, and not for all
        ("broadcast", OF_TORCH, __file__),  # nobody knows from whom
        ("barrier", __file__, __file__),  # a function of the user's that is called so
        ("all_to_all_single", OF_TORCH, users_thread.__file__),  # hightide's own
    ],
)
def test_nothing_else_is_taken_for_one(one_rank: None, name: str, file: str, caller: str) -> None:
    with Waiting(name, file, caller) as thread:
        assert outside(frame_of(thread)) is None


def test_a_group_that_is_gone_is_nobodys() -> None:
    with Waiting("barrier", OF_TORCH) as thread:
        assert outside(frame_of(thread)) is None
    assert outside(None) is None and frame_of(0) is None


def test_lines_are_of_the_users_program() -> None:
    """Not of what is installed, nor of hightide."""
    with Waiting("forward", torch.__file__) as thread:
        assert line_of(frame_of(thread)) == f"{Path(__file__).name}:2"
    with Waiting("forward", users_thread.__file__, torch.__file__) as thread:
        assert line_of(frame_of(thread)) == ""
    assert line_of(None) == ""


def test_what_ends_nowhere_before_all_have_come_is_there_in_torch() -> None:
    """Names differ from version to version; most must be there."""
    known = [name for name in users_thread.TOGETHER if callable(getattr(dist, name, None))]
    assert {"barrier", "all_reduce", "all_gather", "all_to_all_single"} <= set(known)
