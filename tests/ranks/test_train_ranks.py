"""`hightide train` on several ranks learns what it learns on one, from the same rows; one of them speaks and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM

import pytest
import torch.distributed as dist

from started_ranks import StartedRanks
from tiny_folders import tiny_folder

transformers = pytest.importorskip("transformers")

STEPS = 6


@pytest.fixture(scope="module")
def commanded() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_train", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    data = tmp_path / "pairs.jsonl"
    with data.open("w") as file:
        for row in range(23):
            print(json.dumps({"prompt": "a tide " * (1 + row % 3), "completion": "flood " * (1 + row % 7)}), file=file)
    path = tmp_path / "settings.yaml"
    path.write_text(
        f"""
name: ranks
device: cpu
steps: {STEPS}
out: {tmp_path / "runs"}
limits: {{gpu: 16MiB, host: 1GiB}}
micro_batch: 1
calls: 2
model: {{path: {tiny_folder()}, dtype: float32}}
data: {{path: {data}, sequences: 4, length: 48, completions_only: true, pack: false}}
eval: {{share: 0.2, every: 3}}
optimizer: {{lr: 2e-3, eps: 1e-5, warmup_steps: 2}}
"""
    )
    return path


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_two_ranks_learn_what_one_learns(commanded: StartedRanks, settings: Path) -> None:
    runs = settings.parent / "runs"
    (alone,) = (ended.result for ended in commanded.run("trained", 1, within_s=60, settings=str(settings)))
    first, second = (ended.result for ended in commanded.run("trained", 2, within_s=90, settings=str(settings)))
    assert [path.name for path in sorted(runs.iterdir())] == ["ranks-001", "ranks-002"]
    assert second["output"] == "" and "6 steps of 4 rows on 2 ranks in 2 calls" in first["output"]
    assert alone["stopped"] is first["stopped"] is None
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        one, both = (lines(runs / run, name) for run in ("ranks-001", "ranks-002"))
        assert [line["step"] for line in both] == [line["step"] for line in one]
        assert [line["loss"] for line in both] == pytest.approx([line["loss"] for line in one], rel=2e-5)
    norms = [[line["grad_norm"] for line in lines(runs / run)] for run in ("ranks-001", "ranks-002")]
    assert norms[0] == pytest.approx(norms[1], rel=2e-4)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(runs / run / "model") for run in ("ranks-001", "ranks-002")
    ]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one - other).abs().max() < 1e-4
    assert transformers.AutoTokenizer.from_pretrained(runs / "ranks-002" / "model").chat_template


def test_one_rank_makes_the_tiny_model(commanded: StartedRanks, settings: Path) -> None:
    """On another one transformers would write nothing, and what it leaves out would be missing ever after."""
    tiny = "{hidden: 16, layers: 1, heads: 2, feed_forward: 32, vocabulary: 260}"
    text = re.sub("model: .*", f"model: {tiny}", settings.read_text()).replace("steps: 6", "steps: 1")
    settings.write_text(text)
    options = {"settings": str(settings), "seed": 1, "timeout_s": 77.0}
    found = commanded.run("trained_with_a_tiny_model", 2, within_s=90, **options)[0].result
    (folder,) = settings.parent.glob("runs/tiny-model-*")
    assert f"training a tiny one: {folder}" in found["output"] and found["stopped"] is None
    assert found["timeouts_s"] == [77, 77]  # of the command, and of the model
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert not list(settings.parent.glob("runs/.tiny-model-*"))


@pytest.mark.timeout(240)
def test_a_signal_to_one_rank_ends_all_in_order_and_they_go_on(commanded: StartedRanks, settings: Path) -> None:
    runs = settings.parent / "runs"
    options = {"settings": str(settings), "save_every": 2}
    whole = [ended.result for ended in commanded.run("trained", 2, within_s=90, name="whole", **options)]
    ended = commanded.run("trained", 2, within_s=90, signalled=1, at_step=3, **options)
    assert [rank.result["stopped"] for rank in ended] == [SIGTERM, SIGTERM]
    assert "interrupted after step 3 of 6\nstep 3 is saved" in ended[0].result["output"]
    again = commanded.run("trained", 2, within_s=90, timeout_s=99.0, **options)
    assert again[1].result["timeouts_s"] == [99, 99] and set(ended[1].result["timeouts_s"]) == {1800}  # command, model
    assert "resuming from step 3 of 6" in again[0].result["output"] and whole[0]["stopped"] is None
    assert lines(runs / "ranks-001") != [] and [line["step"] for line in lines(runs / "ranks-001")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in lines(runs / "ranks-001")] == [line[key] for line in lines(runs / "whole-001")], (
            key
        )
    finished = commanded.run("trained", 2, within_s=60, **options)
    assert "nothing to do" in finished[0].result["output"]


def test_metrics_without_room_cost_one_save_and_no_rank_waits(commanded: StartedRanks, settings: Path) -> None:
    runs, options = settings.parent / "runs", {"settings": str(settings), "save_every": 2, "steps": 4}
    first, _ = (ended.result for ended in commanded.run("trained", 2, within_s=90, no_room=1, **options))
    assert "warning: step 2 is not saved (no step is):" in first["output"] and "step 4 saved: " in first["output"]
    assert [line["step"] for line in lines(runs / "ranks-001")] == [1, 2, 3, 4]
    assert [path.name for path in (runs / "ranks-001" / "checkpoints").iterdir()] == ["step-4"]


@pytest.mark.long
def test_what_two_have_saved_one_goes_on_from(commanded: StartedRanks, settings: Path) -> None:
    runs = settings.parent / "runs"
    options = {"settings": str(settings), "save_every": 2}
    commanded.run("trained", 2, within_s=90, name="whole", **options)
    commanded.run("trained", 2, within_s=90, signalled=0, at_step=3, **options)
    (alone,) = commanded.run("trained", 1, within_s=90, **options)
    assert "resuming from step 3 of 6" in alone.result["output"]
    one, both = lines(runs / "ranks-001"), lines(runs / "whole-001")
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in both], rel=2e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--steps", "abc"], "Invalid value for '--steps'"),
        (["--lr", "-1"], "error: --lr=-1.0 must be at least 0"),
        (["--data", "missing.jsonl"], "error: there is no data at missing.jsonl"),
        (["--data", "RANK.txt"], "error: there is no data at 1.txt"),
        (["--gpu", "1KiB"], "error: no plan fits 1024 bytes"),
    ],
    ids=["line", "setting", "data", "data of one rank", "plan"],
)
def test_bad_input_is_told_once_and_ends_all_with_code_2(
    commanded: StartedRanks, settings: Path, line: list[str], message: str
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    data = settings.parent / "0.txt"
    data.write_text("high tide " * 500)
    if "RANK.txt" in line:
        line = ["--data", str(settings.parent / "RANK.txt")]
        message = message.replace("1.txt", str(settings.parent / "1.txt"))
    options = ["train", str(settings), "--whole-rows", *line]
    ended = commanded.run("commanded", 2, within_s=90, port=store.port, line=options)
    told = [rank.stderr for rank in ended if "rror" in rank.stderr]
    assert len(told) == 1 and message in told[0], [rank.stderr for rank in ended]
    assert "Traceback" not in told[0] and [rank.status for rank in ended] == [2, 2]


@pytest.mark.parametrize(("sequences", "message"), [(3, "give --sequences 4")])
def test_what_cannot_be_divided_is_refused_on_all(
    commanded: StartedRanks, settings: Path, sequences: int, message: str
) -> None:
    options = {"sequences": sequences, "calls": 1}
    for ended in commanded.run("trained", 2, within_s=60, settings=str(settings), **options):
        assert ended.status == 1 and message in ended.error
