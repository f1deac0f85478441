"""A message of several ranks is told once; that no store answers makes nobody silent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hightide.shard import told
from hightide.shard.told import in_company, tell_once, told_elsewhere


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    made = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(told, "WITHIN_S", 20.0)
    return made


def test_ranks_with_the_same_message_tell_it_once(store: dist.TCPStore) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda _: tell_once("no data", 2, lambda: said.append("no data")), range(4)))
    assert said == ["no data"] and codes == [2] * 4
    assert tell_once("another", 1, lambda: said.append("another")) == 1 and said == ["no data", "another"]


def test_who_has_the_same_message_ends_after_it_was_told(store: dist.TCPStore) -> None:
    order: list[str] = []

    def second() -> None:
        tell_once("no data", 2, lambda: order.append("told twice"))
        order.append("second ends")

    with ThreadPoolExecutor(1) as threads:

        def say() -> None:
            threads.submit(second)
            while store.get(_count_key("no data")) != b"2":  # until the second has come
                pass
            order.append("told")

        tell_once("no data", 2, say)
    assert order == ["told", "second ends"]


def test_the_code_is_known_to_those_that_end_because_of_it(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_once("no memory", 1, lambda: None)
    assert told_elsewhere() == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(told, "WITHIN_S", 0.05)
    assert told_elsewhere() is None  # what was told before a restart


def test_without_a_store_everyone_tells(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(told, "WITHIN_S", 0.2)
    monkeypatch.setenv("MASTER_PORT", "1")
    for _ in range(2):
        tell_once("no data", 2, lambda: said.append("told"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not in_company() and tell_once("no data", 2, lambda: said.append("told")) == 2
    assert len(said) == 3 and told_elsewhere() is None


def _count_key(message: str) -> str:
    import hashlib

    return f"hightide told 0/{hashlib.sha256(message.encode()).hexdigest()} told by"
