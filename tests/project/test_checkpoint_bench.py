"""bench/checkpoint.py: it empties no folder of others, and its table has what was told beside what was found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import checkpoint

from hightide.planner.predict.save_forecast import SaveForecast


def test_only_its_own_folder_is_emptied(tmp_path: Path) -> None:
    new = tmp_path / "above" / "new"
    checkpoint._claim(new)
    (new / "step-1").mkdir()
    (new / "step-1" / "model").touch()
    (new / "torch-save.pt").touch()
    checkpoint._claim(new)
    assert [path.name for path in new.iterdir()] == [checkpoint.MARK]
    others = tmp_path / "others"
    others.mkdir()
    (others / "notes").touch()
    (tmp_path / "link").symlink_to(new)
    (tmp_path / "file").touch()
    for folder in (others, tmp_path / "link", tmp_path / "file", tmp_path):
        with pytest.raises(SystemExit, match=r"--folder .*; name "):
            checkpoint._claim(folder)
    assert [path.name for path in others.iterdir()] == ["notes"]
    with pytest.raises(AssertionError, match="not ours"):
        checkpoint._empty(others)


def test_the_table_has_what_was_told_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    told = SaveForecast(10**10, 5.0, 0.1, 0.5, 2**35, 2e9, "as step-20 was written:", 2**33, 2**33, 2**28)
    sizes = {"gpu": 2**34, "host": 2**35, "rss": 2**36}
    trained = {
        **{
            "phase": "train",
            "model": "a-model",
            "sequences": 8,
            "length": 128,
            "update": "deferred",
            "device": "a gpu",
        },
        **{"step_s": 0.5, "spread": 0.001, "every": 20, "saves": 2, "prepared": True, "overhead": 0.02, "cost_s": 0.2},
        **{"first_s": 0.3, "waited_s": [0.1, 0.1], "copied_bytes": [2**32, 2**33], "saved_bytes": 10**10},
        **{"call_s": {"median": 0.02}, "save_s": {"median": 4.0}, "told_save": checkpoint._told(told)},
        **{"save_peak_bytes": 2**33, "told": {"gpu": 2**34, "host": 2**34}, "limits": sizes, "peak_with": sizes},
        **{"blocking_s": 6.0, "torch_save_s": 30.0, "torch_save_bytes": 12 * 10**9},
    }
    resumed = {"total_s": 30.0, "import_s": 8.0, "wrap_s": 12.0, "load_s": 6.0, "first_step_s": 4.0}
    checkpoint.print_table({"train": trained, "resume": resumed})
    rows = {line[:40].strip(): line[40:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["written in"] == ["5.000", "s", "4.000", "s"]
    assert rows["speed (as step-20 was written)"] == ["2.00", "GB/s", "2.50", "GB/s"]
    assert rows["cost over 20 steps"] == ["1.00%", "+2.00%"]
    assert rows["the first save costs more"][-2:] == ["0.100", "s"]
    assert rows["from the kill to the end of the first st"][-2:] == ["30.00", "s"]
    assert rows["blocking torch.save of 11.2 GiB"][-2:] == ["30.000", "s"]
    checkpoint.print_table({"train": trained | {"told_save": None}, "resume": {"error": "exit 1"}})
    assert "not simulated" in capsys.readouterr().out
