"""`hightide plan --gpus`: several ranks, what each has, and how they scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import hightide
from hightide.cli.main import app
from hightide.ir.codec import from_json
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.report.outlook import PlanReport
from unit.planner.profiles import plan_with, stack

TINY = ("tiny", "--sequences", "4", "--length", "32", "--calls", "1", "--machine")


def plan(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["plan", *TINY, *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def report(*arguments: str) -> PlanReport:
    return from_json(PlanReport, plan(*arguments, "--json").stdout)


def test_what_several_gpus_do_in_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output = plan("4-nodes-8x-h100", "--gpus", "8", "--nodes", "4", "--save", str(path)).output
    for words in ("per step and GPU", "4 nodes of 8 GPUs", "limits of each rank", "scaling: ", "times one GPU alone"):
        assert words in output
    for words in ("shards: ", "a node, all its ranks: ", "ranks: 32", "between GPUs per step: "):
        assert words in output
    assert max(map(len, output.replace(f"written: {path}", "").splitlines())) <= 80
    made = Plan.load(path)
    assert made.ranks == 32
    shown = CliRunner().invoke(app, ["simulate", str(path), "--machine", "4-nodes-8x-h100"])
    assert shown.exit_code == 0 and "reduce busy" in shown.output, shown.output
    refused = CliRunner().invoke(app, ["simulate", str(path), "--machine", "8x-h100"])
    assert refused.exit_code == 2 and "4 nodes of 8 GPUs: the machine '8x-h100' has 1 node of 8" in refused.output


def test_numbers_are_of_one_rank_and_speed_is_of_all() -> None:
    """The host's limit is a node's, and so is what the ranks of one take of it."""
    one, four = report("4x-rtx-4090", "--gpu", "1GiB"), report("4x-rtx-4090", "--gpu", "1GiB", "--gpus", "4")
    assert one.scaling is None and one.subject.gpus_per_node == 1
    assert four.outlook is not None and one.outlook is not None and four.scaling is not None
    assert four.subject.gpus_per_node == 4 and four.subject.num_samples == one.subject.num_samples == 4
    assert four.subject.host_limit_bytes == one.subject.host_limit_bytes // 4
    assert four.outlook.samples_per_s == pytest.approx(4 * 4 / four.outlook.step_s)
    assert four.scaling.alone_samples_per_s == pytest.approx(one.outlook.samples_per_s)
    assert four.scaling.efficiency == pytest.approx(four.outlook.samples_per_s / (4 * one.outlook.samples_per_s))
    host = next(tier for tier in four.outlook.tiers if tier.tier is Tier.HOST)
    assert four.scaling.node_host_bytes == 4 * host.peak_bytes
    limited = report("4x-rtx-4090", "--host", "8GiB", "--gpus", "4")
    assert limited.subject.host_limit_bytes == 2 << 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("8x-h100", "--gpus", "9"), "1 node of 9 GPUs: the machine '8x-h100' has 1 node of 8 GPUs"),
        (("8x-h100", "--nodes", "2"), "2 nodes of 1 GPU:"),
        (("h200", "--gpus", "2"), "the machine 'h200' has 1 GPU"),
        (("8x-h100", "--gpus", "0"), "at least one GPU"),
    ],
)
def test_more_than_the_machine_has_is_refused(options: tuple[str, ...], said: str) -> None:
    assert said in " ".join(plan(*options, exit_code=2).output.split())


def test_what_does_not_fit_says_so() -> None:
    output = plan("8x-h100", "--gpus", "2", "--gpu", "1MiB", "--host", "2MiB", exit_code=1).output
    assert "DOES NOT FIT" in output and "with one GPU only" in output


def test_wrap_refuses_a_plan_for_more_ranks_than_there_are() -> None:
    """Rather than train a part of the model."""
    model = torch.nn.Linear(4, 4)
    several = replace(plan_with(stack()), ranks=2)
    with pytest.raises(ValueError, match=r"plan is for 2 ranks, and there are 1"):
        hightide.wrap(model, torch.optim.AdamW(model.parameters()), torch.zeros(2, 4), plan=several)
