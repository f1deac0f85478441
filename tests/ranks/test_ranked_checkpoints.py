"""A model that several ranks train is saved, and goes on with any number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import hightide
from hightide.checkpoint.files.folder import damages
from hightide.ir.save_sizes import BLOCK_BYTES, NUM_OPEN
from hightide.loading.tensor_file import read_header
from started_ranks import StartedRanks

WITHIN_S = 100.0
LONG = pytest.mark.long


def saved_and_loaded(
    checkpoints: StartedRanks, folder: Path, before: tuple[int, str], after: tuple[int, str], **subject: str
) -> tuple[list[dict], list[dict]]:
    """What each rank found, of those that have saved and of those that have loaded."""
    (world, where), (next_world, next_where) = before, after
    own = {**subject, "folder": str(folder)}
    saved = [rank.result for rank in checkpoints.run("save_then_train", world, WITHIN_S, where=where, **own)]
    own |= {"again": str(folder / "again"), "where": next_where}
    loaded = [rank.result for rank in checkpoints.run("load_then_train", next_world, WITHIN_S, **own)]
    assert not damages(folder / "step-2") and not damages(folder / "again" / "step-2")
    return saved, loaded


@pytest.mark.parametrize(
    ("subject", "dtype", "where"),
    [
        ("hand_written", "bfloat16", "mixed"),
        pytest.param("llama_dropout", "float32", "streamed", marks=LONG),
        pytest.param("lora", "bfloat16", "from disk", marks=LONG),
        pytest.param("llama_tied", "float16", "whole parameters", marks=LONG),
    ],
)
def test_as_many_ranks_go_on_to_the_bit(
    checkpoints: StartedRanks, subject: str, dtype: str, where: str, tmp_path: Path
) -> None:
    """Beside the save, which has the values of its moment, each rank has trained on; the ones that load do the same."""
    ways = (2, where), (2, where)
    saved, loaded = saved_and_loaded(checkpoints, tmp_path, *ways, subject=subject, dtype=dtype)
    for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
        assert {name: other[name] for name in one} == one
        assert (other["step"], other["extra"], other["rank_extra"]) == (2, {"rank": 0}, {"at": 10 * rank})
    assert saved[0]["drawn"] != saved[1]["drawn"] and saved[0]["losses"] != saved[1]["losses"]


@pytest.mark.parametrize(
    ("subject", "dtype", "before", "after"),
    [
        ("hand_written", "float16", (2, "mixed"), (3, "from disk")),
        pytest.param("llama_tied", "float32", (2, "mixed"), (3, "from disk"), marks=LONG),
        pytest.param("lora", "bfloat16", (1, "streamed"), (2, "mixed"), marks=LONG),
        pytest.param("hand_written", "float32", (2, "from disk"), (1, "streamed"), marks=LONG),
        pytest.param("hand_written", "bfloat16", (3, "mixed"), (4, "mixed"), marks=LONG),
        pytest.param("llama_tied", "bfloat16", (4, "streamed"), (2, "replicated"), marks=LONG),
        pytest.param("llama_tied", "float16", (2, "whole parameters"), (3, "states on the host"), marks=LONG),
        pytest.param("lora", "float32", (3, "mixed"), (1, "from disk"), marks=LONG),
        pytest.param("qwen3_moe", "float32", (2, "mixed"), (3, "streamed"), marks=LONG),
        pytest.param("qwen3_moe", "bfloat16", (1, "streamed"), (2, "mixed"), marks=LONG),
    ],
)
def test_other_numbers_of_ranks_have_the_same_bits(
    checkpoints: StartedRanks,
    subject: str,
    dtype: str,
    before: tuple[int, str],
    after: tuple[int, str],
    tmp_path: Path,
) -> None:
    """Weights, masters and moments, as they are saved again; and the next loss of each rank that there was."""
    saved, loaded = saved_and_loaded(checkpoints, tmp_path, before, after, subject=subject, dtype=dtype)
    kept = saved[0]["tensors"]
    assert len(kept) > 20 and all(found["tensors"] == kept for found in loaded)
    for one, other in zip(saved, loaded, strict=False):
        assert one["losses"][0] == pytest.approx(other["losses"][0], rel=1e-5)
        assert one["drawn"] == other["drawn"]
    drawn = [tuple(found["drawn"]) for found in loaded]
    assert len(set(drawn)) == len(drawn), "ranks that are new have random numbers of their own"
    extras = [{"at": 10 * rank} for rank in range(before[0])]
    assert all(found["rank_extra"] is None and found["rank_extras"] == extras for found in loaded)


@pytest.mark.parametrize(
    ("dtype", "after", "optimizer_first"),
    [
        ("bfloat16", (2, "mixed"), True),
        pytest.param("bfloat16", (2, "mixed"), False, marks=LONG),
        pytest.param("float16", (3, "streamed"), False, marks=LONG),
    ],
)
def test_state_dicts_are_whole_on_the_first_rank_and_are_loaded_by_all(
    checkpoints: StartedRanks, dtype: str, after: tuple[int, str], optimizer_first: bool, tmp_path: Path
) -> None:
    own = {"subject": "hand_written", "dtype": dtype, "folder": str(tmp_path)}
    saved = [rank.result for rank in checkpoints.run("states_to_file", 2, WITHIN_S, where="mixed", **own)]
    assert saved[0]["same"] and saved[0]["masters"] > 20
    assert [found["is_empty"] for found in saved] == [False, True]
    own |= {"where": after[1], "optimizer_first": optimizer_first}
    for one, rank in zip(saved, checkpoints.run("states_from_file", after[0], WITHIN_S, **own), strict=False):
        assert rank.result["step"] == 2 and rank.result["tensors"] == rank.result["saved"]
        assert rank.result["losses"][: 2 if after[0] == 2 else 1] == one["losses"][: 2 if after[0] == 2 else 1]


@pytest.mark.parametrize(
    "subject", ["llama_tied", pytest.param("lora", marks=LONG), pytest.param("qwen3_moe", marks=LONG)]
)
def test_save_pretrained_is_called_by_all(checkpoints: StartedRanks, subject: str, tmp_path: Path) -> None:
    first, second = checkpoints.run("pretrained", 2, WITHIN_S, subject=subject, where="mixed", folder=str(tmp_path))
    assert first.result["digest"] == second.result["digest"] and first.result["num_tensors"] > 10
    assert "max_shard_size=...) of a model that several ranks train" in second.result["refusal"]
    made, plain = tmp_path / "of-ranks", tmp_path / "plain"
    names = sorted(str(file.relative_to(plain)) for file in plain.rglob("*"))
    assert sorted(str(file.relative_to(made)) for file in made.rglob("*")) == names
    for name in names:
        assert not name.endswith(".json") or (made / name).read_text() == (plain / name).read_text()
    assert contents(made) == contents(plain)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        f"{file.parent.name if file.parent != folder else ''}:{name}": stored.read().numpy().tobytes()
        for file in folder.rglob("*.safetensors")
        for name, stored in read_header(file).items()
    }


@pytest.mark.parametrize(
    ("subject", "groups", "names"),
    [
        ("llama_tied", [[0], [1, 2]], {"config.json", "model.safetensors"}),
        ("lora_inside", [[0, 1], [2]], {"adapter_config.json", "adapter_model.safetensors"}),
    ],
)
def test_folders_are_whole_whichever_ranks_write_them(
    checkpoints: StartedRanks, subject: str, groups: list[list[int]], names: set[str], tmp_path: Path
) -> None:
    """transformers writes on the first of all ranks only; here others have models of their own, together or alone."""
    own = {"subject": subject, "folder": str(tmp_path), "groups": groups}
    found, *_ = (rank.result for rank in checkpoints.run("in_groups", 3, WITHIN_S, **own))
    folders = [f"{rank}/plain/step-0" for rank in range(3)]
    folders += [f"{group[0]}/{where}" for group in groups for where in ("saved/step-1", "pretrained", "state")]
    for folder in folders:
        assert names <= {Path(name).name for name in found if name.startswith(f"{folder}/")}, folder


FAILURES = {
    ("full", 1): "cannot be written by rank 1: No space left on device",
    ("full", 0): "cannot be written: it needs",
    ("read-only", 1): "cannot be written by rank 1: Read-only file system",
    ("unsynced", 1): "cannot be written by rank 1: Input/output error",
    ("elsewhere", 1): "which rank 0 has made: No such file or directory. Name a folder",
    ("extra", 1): "rank_extra is",
    ("step", 1): "on rank 0; 100 on rank 1. All ranks must save after the same step, with the same step= if they give",
    ("tensors", 0): "All ranks must save the same: a model with the same parameters",
}
REFUSED = ("extra", "step", "tensors")  # as wrong calls


def test_what_one_rank_cannot_do_fails_on_all(checkpoints: StartedRanks, tmp_path: Path) -> None:
    """With the reason; the checkpoint before it is whole, nothing is left of the other, and the next one is saved."""
    for rank in checkpoints.run("fails", 2, WITHIN_S, folder=str(tmp_path), kinds=list(FAILURES)):
        for index, ((kind, victim), text) in enumerate(FAILURES.items()):
            found = rank.result[f"{kind} {victim}"]
            assert text in found["said"], (kind, found)
            assert ("was not saved" in found["warned"]) == (kind not in REFUSED)
            assert found["whole"] == found["there"] == [f"step-{2 * index + 1}"], (kind, found)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{2 * len(FAILURES) - 1}"]


def test_a_save_that_is_refused_on_one_rank_is_refused_on_all(checkpoints: StartedRanks, tmp_path: Path) -> None:
    """Else a loop that catches it would go on there, and end elsewhere."""
    first, second = (rank.result for rank in checkpoints.run("is_busy", 2, WITHIN_S, folder=str(tmp_path)))
    assert (first["was_done"], second["was_done"]) == (False, True)
    assert "step-1 is still being written; save later" in first["told"]
    assert second["told"] == f"a checkpoint failed on rank 0: Refused: {first['told']}"
    assert first["last"] == second["last"] == "step-3"
    least_bytes = (NUM_OPEN + 1) * BLOCK_BYTES  # as all of a save, its blocks are within the plan's limit, and counted
    assert all(found["lent"] >= least_bytes for found in (first, second))


@LONG
def test_a_load_that_fails_on_one_rank_is_half_a_load_on_all(checkpoints: StartedRanks, tmp_path: Path) -> None:
    """A piece is damaged that the last rank reads: none trains or saves before a whole checkpoint is loaded, of which
    no rank reads all."""
    first, last = (rank.result for rank in checkpoints.run("half_loads", 2, WITHIN_S, folder=str(tmp_path)))
    assert "is damaged: optimizer-00001-of-00001.safetensors, piece " in last["load"] and "step-1" in last["load"]
    assert first["load"].startswith("loading a checkpoint failed on rank 1: DamagedFile: optimizer-00001-of-00001")
    for found in (first, last):
        assert all("a checkpoint was being loaded when that failed" in found[what] for what in ("train", "save"))
        assert found["step"] == 1 and len(found["losses"]) == 1
        assert found["num_read"] < 0.75 * found["num_pieces"]


@pytest.mark.parametrize(
    ("victim", "num_writes"),
    [(1, 3), pytest.param(0, 3, marks=LONG), pytest.param(0, 12, marks=LONG), pytest.param(1, 20, marks=LONG)],
)
def test_a_rank_that_dies_while_it_saves(
    checkpoints: StartedRanks, victim: int, num_writes: int, tmp_path: Path
) -> None:
    """The others end, and the last checkpoint is whole; ranks that come after them go on from there."""
    own = {"folder": str(tmp_path), "victim": victim, "num_writes": num_writes}
    ranks = checkpoints.run("dies", 2, WITHIN_S, **own)
    assert ranks[victim].status == -9 and ranks[1 - victim].status == 1 and not ranks[1 - victim].timed_out
    assert "RankFailure" in ranks[1 - victim].error
    assert hightide.latest(tmp_path, verify=True) == tmp_path / "step-1"
    own = {"subject": "hand_written", "dtype": "float32", "where": "mixed", "folder": str(tmp_path), "num_steps": 1}
    again = checkpoints.run("load_then_train", 2, WITHIN_S, again=str(tmp_path), **own)
    assert all(rank.result["step"] == 1 for rank in again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
