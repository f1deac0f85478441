"""What a checkpoint costs: the reader's pace, who waits for it, and how often one can save."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hightide.ir.plan import Update
from hightide.ir.state_spec import ADAM_STATES, with_master
from hightide.planner.predict.save_forecast import SavedChunk, SaveForecast, held_up, saved_bytes, update_order
from hightide.planner.solution import Solution
from unit.planner.profiles import plan_with, stack

HUNDREDS = [SavedChunk(100, 0.0, 1.0 + 0.1 * number) for number in range(4)]


def test_with_memory_for_all_of_it_nothing_waits() -> None:
    held = held_up(HUNDREDS, write_bytes_per_s=100.0, spare_bytes=400)
    assert held.written_s == pytest.approx(4.0) and held.waited_s == 0.0
    assert held.copied_bytes == (0, 90, 100, 100), "of the second, ten bytes were read when its update came"


def test_without_memory_each_update_waits_until_the_reader_has_come_by() -> None:
    held = held_up(HUNDREDS, write_bytes_per_s=100.0, spare_bytes=0)
    assert held.waited_s == pytest.approx(4.0 - 1.3) and held.copied_bytes == (0, 0, 0, 0)


def test_with_some_memory_an_update_waits_until_there_is_room() -> None:
    """The second and the third are aside at 1.2 s with 180 bytes; for the last, 80 of them must be read."""
    held = held_up(HUNDREDS, write_bytes_per_s=100.0, spare_bytes=200)
    assert held.waited_s == pytest.approx(2.0 - 1.3) and held.copied_bytes == (0, 90, 100, 100)
    assert held.aside_bytes == 200
    assert held_up(HUNDREDS, write_bytes_per_s=100.0, spare_bytes=400).aside_bytes == 70 + 200, "at 1.3 s"


def test_the_reader_waits_for_updates_of_the_saved_step_alone() -> None:
    late = [replace(chunk, ready_s=0.5 if number == 1 else 0.0) for number, chunk in enumerate(HUNDREDS)]
    assert held_up(late, 1000.0, 0).written_s == pytest.approx(0.8)
    assert held_up(late, 1000.0, 0).waited_s == 0.0


def test_what_is_never_updated_is_never_waited_for() -> None:
    frozen = [*HUNDREDS, SavedChunk(1000, 0.0, None)]
    assert held_up(frozen, 100.0, 0).waited_s == held_up(HUNDREDS, 100.0, 0).waited_s
    assert held_up(frozen, 100.0, 0).written_s == pytest.approx(14.0)


def test_what_leaves_the_gpu_takes_the_link() -> None:
    on_gpu = [replace(chunk, on_gpu=True) for chunk in HUNDREDS]
    assert held_up(on_gpu, 100.0, 400, d2h_bytes_per_s=1e6).waited_s == 0.0
    held = held_up(on_gpu, 100.0, 400, d2h_bytes_per_s=150.0)
    assert held.waited_s == pytest.approx(2.0 - 1.3), "300 bytes were not read in time"
    assert held.copied_bytes == (0, 0, 0, 0), "nothing of it is the cpu lane's"
    assert held.aside_bytes == 400 and held_up(on_gpu, 100.0, 300, 150.0).aside_bytes == 300, "it leaves ahead"


def stepped(chunks: list[SavedChunk], bytes_per_s: int, spare_bytes: int) -> float:
    """The same, byte by byte."""
    unread = [chunk.num_bytes for chunk in chunks]
    aside = [0] * len(chunks)
    order = sorted((chunk.update_s, number) for number, chunk in enumerate(chunks) if chunk.update_s is not None)
    late_s, now, at = 0.0, 0, 0
    for update_s, number in order:
        while True:
            now_s = now / bytes_per_s
            if now_s >= update_s + late_s - 1e-9:
                others = sum(min(aside[one], unread[one]) for one in range(len(chunks)) if one != number)
                if unread[number] + others <= spare_bytes:
                    aside[number] = unread[number]
                    late_s = max(late_s, now_s - update_s)
                    break
            while at < len(chunks) and not unread[at]:
                at += 1
            if at < len(chunks) and now_s >= chunks[at].ready_s - 1e-9:
                unread[at] -= 1
            now += 1
    return late_s


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_happens_byte_by_byte(seed: int) -> None:
    draw = random.Random(seed)
    number, speed = draw.randint(1, 8), 1000
    sizes = [draw.choice([0, 10, 50, 200, 400]) for _ in range(number)]
    starts = sorted(draw.uniform(0.0, 1.5) for _ in range(number))
    if seed % 4 == 3:
        draw.shuffle(starts)  # updates come in another order than was expected
    chunks = [
        SavedChunk(size, draw.choice([0.0, 0.0, draw.uniform(0, 0.4)]), None if draw.random() < 0.1 else start)
        for size, start in zip(sizes, starts, strict=True)
    ]
    chunks = [replace(one, ready_s=min(one.ready_s, one.update_s or 0.0)) for one in chunks]
    for spare_bytes in (0, sum(sizes) // 4, sum(sizes) // 2, sum(sizes)):
        found = held_up(chunks, speed, spare_bytes).waited_s
        assert found == pytest.approx(stepped(chunks, speed, spare_bytes), abs=0.005 * number), spare_bytes


def test_more_memory_and_a_faster_disk_never_hold_training_up_longer() -> None:
    by_memory = [held_up(HUNDREDS, 100.0, spare).waited_s for spare in range(0, 400, 10)]
    by_speed = [held_up(HUNDREDS, speed, 50).waited_s for speed in range(50, 1000, 50)]
    assert by_memory == sorted(by_memory, reverse=True) and by_speed == sorted(by_speed, reverse=True)


def told(held_s: float, written_s: float = 13.0, step_s: float = 1.5) -> SaveForecast:
    return SaveForecast(38_500_000_000, written_s, held_s, step_s, 2**30, 3e9, "measured")


def test_how_often_one_can_save_for_one_percent() -> None:
    assert told(0.4).steps_between() == 27 and told(0.4).steps_between(0.03) == 9
    assert told(0.0).steps_between() == 9, "one at a time"
    assert told(0.0, written_s=0.1).steps_between() == 1


def test_it_is_told_in_one_sentence() -> None:
    assert told(3.15).in_words == (
        "a checkpoint: 35.9 GiB in 13.000 s beside training (measured 3.0 GB/s), holds it up 3.150 s, copies nothing; "
        "one every 210 steps costs 1%"
    )
    assert told(0.0).in_words.endswith("holds nothing up, copies nothing; one every 9 steps costs less than 0.1%")
    from_gpu = replace(told(0.0), aside_bytes=5 * 2**30, pinned_bytes=2**30)
    assert (
        "copies up to 5.0 GiB, takes 5.0 GiB of free host memory (the first one gets it from the system, 1.0 GiB of it "
        "pinned: about 1.627 s more); one every" in from_gpu.in_words
    )
    ready = replace(from_gpu, is_ready=True, buffer_bytes=2**29)
    assert "copies up to 5.0 GiB, takes 5.5 GiB of free host memory; one every" in ready.in_words and ready.first_s == 0
    tight = replace(told(0.0), spare_bytes=0, beside_bytes=2**26)
    assert "copies nothing, 64.0 MiB beside the host's limit; one every" in tight.in_words and tight.host_bytes == 0


def test_bytes_are_those_of_whole_tensors() -> None:
    chunk = plan_with(stack(2)).layout.chunks[0]
    numel = sum(entry.numel for entry in chunk.params)
    assert chunk.dtype == "float32" and saved_bytes(chunk) == numel * 12
    narrow = replace(chunk, dtype="bfloat16", states=with_master(ADAM_STATES, "bfloat16"))
    assert saved_bytes(narrow) == numel * 12 == numel * (2 + 4 + 4 + 2)
    assert saved_bytes(replace(narrow, optimised_numel=0)) == numel * 2


def test_chunks_are_read_as_updates_will_come() -> None:
    profile = stack(4)
    for update, backwards in ((Update.DEFERRED, False), (Update.IN_BACKWARD, True)):
        plan = plan_with(profile, update=update)
        order = update_order(Solution.of(profile, plan).passes.last, len(plan.layout.chunks))
        assert sorted(order) == list(range(len(plan.layout.chunks)))
        assert (order[0] > order[-1]) == backwards
