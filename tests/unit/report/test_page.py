"""The page: one file, nothing from elsewhere, all that the timelines say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hightide.ir.action import Op
from hightide.ir.tier import Lane, Tier
from hightide.ir.timeline import MemoryPart, Timeline
from hightide.ir.units import format_bytes, format_flop, format_seconds
from hightide.planner.predict.simulator import simulate
from hightide.planner.predict.tide import simulated_timeline
from hightide.planner.solution import Solution
from hightide.report.page import BAR_COLOURS, PART_COLOURS, PART_LABELS, timeline_html
from hightide.report.summary import gpu_room, limiting, rows, worst_waits
from unit.planner.advice.test_why import REAL
from unit.planner.predict.test_simulator import machine, one_second
from unit.planner.profiles import plan_with, stack

VOID = {"meta"}


def timeline(num_layers: int = 3, speed: float = 1024.0) -> Timeline:
    profile = stack(num_layers)
    plan = plan_with(profile, inputs=Tier.HOST)
    solution = Solution.of(profile, plan)
    on = replace(machine(alone=speed, shared=0.7), gpu=REAL.gpu)
    return simulated_timeline(solution, simulate(solution.passes, one_second, on), on)


class Reader(HTMLParser):
    """Checks that what is opened is closed, and collects texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, f"{tag} takes something from elsewhere"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def data_of(page: str) -> dict:
    return json.loads(read(page).texts["script"][0])


def test_the_page_is_one_file_with_nothing_from_elsewhere() -> None:
    page = timeline_html("a plan", timeline(), facts=["3 blocks"], plan_text="fits the limits")
    assert set(re.findall(r"https?://[^\"' )]*", page)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert read(page).texts["h1"] == ["a plan"]
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_names_cannot_become_markup() -> None:
    """An action is named by a schedule, which a person may have edited."""
    evil = timeline()
    evil = replace(evil, source="<b>bold</b>", bars=(replace(evil.bars[0], id="</script><script>x()"), *evil.bars[1:]))
    page = timeline_html("<i>t</i>", evil, facts=["</header>"], plan_text="</pre>")
    assert data_of(page)["panels"][0]["bars"][0][4] == "</script><script>x()"
    assert page.count("<script") == 2


def test_the_data_are_the_timelines() -> None:
    shown = timeline()
    [panel] = data_of(timeline_html("a plan", shown))["panels"]
    assert [name for name, _ in panel["parts"]] == [PART_LABELS.get(part, str(part)) for part in shown.parts]
    assert [sum(level[1:]) for level in panel["levels"]] == [sum(level.num_bytes) for level in shown.levels]
    assert max(sum(level[1:]) for level in panel["levels"]) == panel["peak"] == shown.gpu_peak_bytes
    assert panel["reserved"] == shown.gpu_reserved_bytes > panel["peak"]
    drawn = [bar for bar in shown.bars if bar.end_s > bar.start_s or bar.waited_s]
    assert [bar[4] for bar in panel["bars"]] == [bar.id for bar in drawn]
    names = {panel["names"][bar[1]][0] for bar in panel["bars"]}
    assert {"forward", "backward", "update", "parameters move", "gradients move", "block inputs move"} <= names


def test_what_waits_on_the_host_is_shown_and_swap_is_told_from_inputs() -> None:
    shown = timeline()
    stashes = [bar for bar in shown.bars if bar.op in (Op.STASH, Op.UNSTASH) and bar.num_bytes]
    swapped = {bar.id for bar in stashes if bar.id.endswith(".2")}
    assert len(swapped) == 2
    bars = tuple(replace(bar, held_bytes=bar.num_bytes // 4) if bar.id in swapped else bar for bar in shown.bars)
    [panel] = data_of(timeline_html("a plan", replace(shown, bars=bars)))["panels"]
    named = {bar[4]: panel["names"][bar[1]] for bar in panel["bars"]}
    assert all(named[name] == ["activations swap", "swap"] for name in swapped)
    assert all(named[bar.id] == ["block inputs move", "inputs"] for bar in stashes if bar.id not in swapped)
    assert {bar[4]: bar[9] for bar in panel["bars"] if len(bar) > 9} == {
        bar.id: bar.num_bytes // 4 for bar in stashes if bar.id in swapped
    }
    away = panel["away"]
    moments = [at_s for at_s, _, _ in away]
    assert moments == sorted(moments) and away[-1][1:] == [0, 0], "all of it comes back"
    assert max(held for _, _, held in away) == next(bar.num_bytes // 4 for bar in stashes if bar.id in swapped)
    gone = [bar for bar in stashes if bar.op is Op.STASH]
    most, sizes = max(inputs + held for _, inputs, held in away), [bar.num_bytes for bar in gone]
    assert sum(sizes) - max(sizes) <= most <= sum(sizes), "the last may be back before it is gone"
    assert data_of(timeline_html("a plan", replace(shown, bars=())))["panels"][0]["away"] == []


def test_every_part_and_lane_has_a_colour_and_a_row() -> None:
    assert PART_COLOURS.keys() == set(MemoryPart)
    css = timeline_html("a plan", timeline())
    for colour in {*PART_COLOURS.values(), *BAR_COLOURS.values()}:
        assert css.count(f"--{colour}: #") == 2, "one for light, one for dark"
    assert [name for name, _ in data_of(css)["panels"][0]["lanes"]] == [str(lane) for lane in Lane if lane.always_shown]
    assert all(lane.meaning for lane in Lane)


def test_a_measured_step_stands_beside_the_simulated_one() -> None:
    simulated = timeline()
    measured = replace(simulated, source="measured on a GPU", step_s=simulated.step_s * 1.1)
    page = timeline_html("a plan", simulated, measured)
    data = data_of(page)
    assert len(data["panels"]) == 2 and data["seconds"] == pytest.approx(measured.step_s)
    assert "+10.0%" in read(page).texts["td"]


def test_the_numbers() -> None:
    slow = timeline(speed=256.0)
    by_name = {row.name: row for row in rows([slow])}
    assert by_name["step time"].cells == (format_seconds(slow.step_s),)
    assert "compute waits for h2d" in by_name and by_name["step time"].difference == ""
    part = replace(slow, source="simulated; 4 of the 8 passes of a step")
    assert "<p>Shown: simulated; 4 of the 8 passes of a step.</p>" in timeline_html("a plan", part)
    assert "Shown: " not in timeline_html("a plan", slow)
    (first, *_), (beside, *_) = rows([part]), rows([part, slow])
    assert first.name == beside.name == "time of the passes shown"
    assert not beside.difference and rows([slow, slow])[0].difference
    assert limiting(slow).busy_s == max(lane.busy_s for lane in slow.lanes)
    chain, seconds = worst_waits(slow)[0]
    assert chain.startswith("fetch.param.") and ", after " in chain and seconds > 0
    fast = timeline(speed=1e12)
    assert limiting(fast).lane is Lane.COMPUTE and worst_waits(fast) == []


def test_96_blocks_twice_stay_below_a_megabyte() -> None:
    big = timeline(96)
    assert len(timeline_html("a plan", big, replace(big, source="measured")).encode()) < 2**20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.5, "1.500 s"), (0.00125, "1.25 ms"), (0.1834, "183 ms"), (2.5e-5, "25 µs"), (0.0999, "99.9 ms")],
)
def test_seconds_as_people_write_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("flop", "text"),
    [(7, "7 FLOP"), (1.5e9, "1.5 GFLOP"), (336e12, "336 TFLOP"), (9.99e14, "999 TFLOP"), (2e21, "2000 EFLOP")],
)
def test_operations_as_people_write_them(flop: float, text: str) -> None:
    assert format_flop(flop) == text


def test_peaks_are_compared_with_peaks_of_their_kind() -> None:
    simulated = timeline()
    assert simulated.gpu_reserved_bytes is not None and simulated.gpu_reserved_bytes > simulated.gpu_peak_bytes
    measured = replace(simulated, gpu_peak_bytes=simulated.gpu_peak_bytes // 2)
    found = {row.name: row.difference for row in rows([simulated, measured])}
    assert (found["GPU peak, tensors"], found["GPU peak, reserved"]) == ("-50.0%", "+0.0%")
    accelerator = replace(measured, gpu_reserved_bytes=None)  # the simulated one
    assert "GPU peak, reserved" not in {row.name for row in rows([simulated, accelerator])}


def test_the_share_of_the_speed_of_light_stands_beside_the_measured_one_where_it_is_known() -> None:
    name = "share of the speed of light"
    told = replace(timeline(), light_s=None)
    assert name not in {row.name for row in rows([told])}
    told = replace(told, light_s=0.5 * told.step_s)
    found = replace(told, step_s=2 * told.step_s)
    [row] = [row for row in rows([told, found]) if row.name == name]
    assert row.cells == ("50.0%", "25.0%") and row.difference == "-25.0 points"
    [row] = [row for row in rows([told, replace(found, light_s=None)]) if row.name == name]
    assert row.cells == ("50.0%", "-") and row.difference == ""
    texts = read(timeline_html("a plan", told, found)).texts
    assert name in texts["th"] and "-25.0 points" in texts["td"]


def test_what_stays_free_is_told_of_what_torch_reserves() -> None:
    shown = timeline()
    reserved, tensors = shown.gpu_reserved_bytes, shown.gpu_peak_bytes
    assert reserved is not None and shown.gpu_bytes == reserved
    roomy, tight = (replace(shown, gpu_limit_bytes=reserved + more) for more in (1024, -512))
    most = f"GPU: torch reserves up to {format_bytes(reserved)}"
    assert gpu_room(roomy) == f"{most} of {format_bytes(reserved + 1024)}, 1.0 KiB stay free"
    assert gpu_room(tight) == f"{most}, 512 B more than the limit of {format_bytes(reserved - 512)}"
    assert gpu_room(roomy) in timeline_html("a plan", roomy)
    accelerator = replace(roomy, gpu_reserved_bytes=None, gpu_limit_bytes=tensors + 1024)
    assert gpu_room(accelerator).startswith(f"GPU: tensors take up to {format_bytes(tensors)} of ")
    assert gpu_room(accelerator).endswith(", 1.0 KiB stay free")
