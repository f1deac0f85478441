"""`hightide plan` from the outside: models by preset, folder and function; what it prints, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, T5Config, ViTConfig
from typer.testing import CliRunner, Result

import hightide
from forked import run_script
from hightide.cli import plan_command as plan_module
from hightide.cli import workload as machine_module
from hightide.cli.main import app
from hightide.cli.workload import load_workload
from hightide.doctor.known import Known, load_machine
from hightide.integrations.lora import Lora
from hightide.integrations.shapes import SHAPES, config_of
from hightide.ir.codec import from_json
from hightide.ir.machine import SIMULATED
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import format_bytes, format_seconds
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.search.calls import search_calls
from hightide.planner.search.search import search
from hightide.planner.solution import Searched
from hightide.process import files
from hightide.report.outlook import PlanReport

WHOLE = ("tiny", "--sequences", 4, "--length", 32)
TINY = (*WHOLE, "--calls", 1)
TIGHT = (*TINY, "--gpu", "1MiB", "--micro-batch", 4)  # one problem for all tests that need no other


@cache  # the same problem has the same answer
def quickly(problem: Problem) -> Searched:
    """Another command may find a better plan: these tests are about what is made of one."""
    assert not problem.quick
    return search(replace(problem, quick=True))


SEARCHED_ONCE = {"search": quickly, "search_calls": cache(search_calls)}

SOURCE = """
import torch
from torch import nn
from neighbour import WIDTH

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        return self.layers(x).sum()

def with_batch():
    return Stack(), {"x": torch.randn(6, WIDTH)}

def alone():
    return Stack()

def nothing():
    return 7

def boom():
    raise RuntimeError("boom")

def wants(width):
    return Stack()

llama = with_batch
"""


@pytest.fixture(autouse=True)
def _here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured here: an H200 where torch reserves nothing beside tensors, so that tiny models do not fit."""
    known = load_machine("h200")
    machine = replace(known, gpu=replace(known.gpu, name=SIMULATED))
    monkeypatch.setattr(machine_module, "known_machine", lambda device: Known(machine))
    monkeypatch.setattr(plan_module, "ANSWER_S", 0.0)
    monkeypatch.setattr(plan_module, "HELP_S", 0.0)
    for name, once in SEARCHED_ONCE.items():
        monkeypatch.setattr(plan_module, name, once)


def plan(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == exit_code, result.output
    return result


def report(*arguments: object, exit_code: int = 0) -> PlanReport:
    return from_json(PlanReport, plan(*arguments, "--json", exit_code=exit_code).stdout)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 24\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "speeds.json").write_text('{"nam": "mine", "speeds": []}')
    return path


def llama_folder(folder: Path, **settings: object) -> Path:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=96, max_position_embeddings=64, **{**size, **settings})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_a_preset_in_80_columns() -> None:
    output = plan(*TIGHT, "--why", "layers.1").stdout
    for words in ("fits the limits", "tokens/s", "floor: ", "limit: ", "gpu   peak", "host  peak", "micro-batch"):
        assert words in output
    for words in ("master copies", "gradient sums", "moments", "why model.layers.1", "what would help"):
        assert words in output
    assert "speed of light" not in output, "the simulated accelerator has none"
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80


def test_json_says_the_same_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ANSWER_S", math.inf)
    found = report(*TIGHT, "--why", "embed_tokens")
    assert found.fits and found.refusal is None and found.outlook is not None
    outlook, subject = found.outlook, found.subject
    assert (subject.num_samples, subject.tokens_per_sample, subject.gpu_limit_bytes) == (4, 32, 2**20)
    assert outlook.tokens_per_s == pytest.approx(4 * 32 / outlook.step_s)
    gpu, host = outlook.tiers
    assert gpu.tensor_bytes == gpu.peak_bytes, "the simulated accelerator reserves nothing beside tensors"
    assert (gpu.tier, host.tier) == (Tier.GPU, Tier.HOST)
    assert gpu.free_bytes == gpu.limit_bytes - gpu.peak_bytes >= 0 and gpu.limit_bytes == 2**20
    assert outlook.floor_s == max(lane.floor_s for lane in outlook.lanes)
    assert outlook.light_s is None and outlook.light_share is None, "nor has it a speed of light"
    assert outlook.needed_flop > 0
    assert outlook.floor_share == pytest.approx(outlook.floor_s / outlook.step_s) and 0 < outlook.floor_share <= 1
    assert outlook.limiting_lane is max(outlook.lanes, key=lambda lane: lane.busy_s).lane
    assert [lane.lane for lane in outlook.lanes] == list(Lane)
    assert {row.state: row.dtype for row in outlook.precisions}["moments"] == "2 in float32"
    assert found.why is not None and found.why.block == "model.embed_tokens" and found.why.alternatives
    embedding, head = outlook.blocks[0], outlook.blocks[-1]  # of one parameter, tied
    assert (head.name, head.params, head.states) == ("lm_head", embedding.params, embedding.states)
    assert found.would_help is not None and found.would_help.found and not found.would_help.untried


@pytest.mark.timeout(300)  # four plans and every change that might help
def test_the_two_most_useful_changes_are_tried_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TIGHT
    late = report(*options).would_help
    assert late is not None and late.num_tried == 2 and late.look_longer == "--look 30"
    assert "--gradients param" in {change.option for change in late.untried}
    assert not {"--sequences 8", "--update in_backward"} & {change.option for change in late.untried}
    assert "to try them: --look 30" in " ".join(plan(*options).stdout.split())
    longer = report(*options, *late.look_longer.split()).would_help
    assert longer is not None and not longer.untried and not longer.look_longer
    assert longer.num_tried == 2 + len(late.untried)
    monkeypatch.setattr(plan_module, "LARGE_STEP", 1)
    large = report(*options).would_help
    assert large is not None and large.num_tried == 0 and large.look_longer


def test_the_number_of_calls_is_searched_or_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "LARGE_STEP", 1)  # what would help is not asked here
    found = report(*WHOLE).outlook
    assert found is not None and (found.calls, found.samples_per_call) == (1, 4)
    pinned = plan(*WHOLE, "--calls", 2, "--gpu", "1MiB", "--micro-batch", 2).stdout
    assert "loop: 2 calls of 2 samples, then step()" in pinned and "4 x 32 tokens per step" in pinned
    assert "cannot be cut into 3 equal calls" in plan(*WHOLE, "--calls", 3, exit_code=2).stderr


@pytest.mark.long  # many calls are found in test_calls.py, and shown above
def test_many_calls_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "LARGE_STEP", 1)
    many = report("llama-3.2-1b", "--sequences", 8, "--length", 8192, "--gpu", "40GiB", "--machine", "h200").outlook
    assert many is not None and many.calls * many.samples_per_call == 8 and many.calls > 1


def test_of_a_real_gpu_the_peak_is_what_torch_reserves(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = (*TINY, "--machine", "h200", "--gpu", "1GiB", "--host", "8GiB")
    text = plan(*options, "--save", path, "--html", tmp_path / "page.html").stdout
    found = report(*options, "--why", "layers.1")
    assert found.outlook is not None and found.why is not None
    outlook = found.outlook
    assert outlook.light_s is not None and outlook.light_share == pytest.approx(outlook.light_s / outlook.step_s)
    assert f"speed of light: {format_seconds(outlook.light_s)}, {outlook.light_share:.0%} of the step: " in text
    gpu, host = outlook.tiers
    forecast = Plan.load(path).forecast
    assert forecast.gpu_reserved_bytes is not None
    assert (gpu.peak_bytes, gpu.tensor_bytes) == (forecast.gpu_reserved_bytes, forecast.gpu_peak_bytes)
    assert gpu.tensor_bytes < gpu.peak_bytes == gpu.limit_bytes - gpu.free_bytes
    assert host.tensor_bytes == host.peak_bytes
    tensors, peak, free = (format_bytes(size) for size in (gpu.tensor_bytes, gpu.peak_bytes, gpu.free_bytes))
    assert re.search(rf"gpu +peak +{peak} of .*{free} free", text)
    assert max(map(len, text.splitlines())) <= 80
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f"of it {tensors} tensors, " in shown for shown in (text, page))
    assert f"torch reserves up to {peak} of 1.0 GiB, {free} stay free" in page
    assert "<th scope=row>share of the speed of light</th>" in page


def test_the_saved_plan_runs_and_the_page_is_of_it(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "llama", dtype="float32")
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ("--sequences", 4, "--length", 16, "--gpu", "300KiB", "--host", "1GiB")
    plan(folder, *options, "--save", path, "--html", page)
    made = Plan.load(path)
    assert "<h1>llama: the tide of one step</h1>" in page.read_text(encoding="utf-8")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(96, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    wrapped, stepper = hightide.wrap(model, optimizer, batch, plan=made, device="cpu")
    wrapped(**batch).loss.backward()
    stepper.step()
    assert hightide.stats(wrapped).peak_bytes[Tier.GPU] <= made.gpu_limit_bytes


def test_a_plan_edited_beyond_its_limit_is_refused_with_moment_tier_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(*TIGHT, "--save", path)
    made = Plan.load(path)
    edited = json.loads(path.read_text())
    edited["gpu_limit_bytes"] = made.forecast.gpu_peak_bytes - 1000
    path.write_text(json.dumps(edited))
    result = CliRunner().invoke(app, ["simulate", str(path), "--machine", "h200"])
    assert result.exit_code == 2
    for words in ("of gpu memory", "during ", "1000 bytes too many"):
        assert words in result.output
    path.write_text(json.dumps({**edited, "micro_batchs": 2}))
    result = CliRunner().invoke(app, ["simulate", str(path), "--machine", "h200"])
    assert result.exit_code == 2 and "did you mean 'micro_batch'" in result.output


def test_options_reach_the_plan() -> None:
    options = ("--update", "in_backward", "--gradients", "param", "--micro-batch", 2, "--dtype", "float16")
    outlook = report(*TINY, "--gpu", "1MiB", *options).outlook
    assert outlook is not None
    assert (outlook.update, str(outlook.gradients), outlook.micro_batch) == (Update.IN_BACKWARD, "param", 2)
    assert {row.state: row.dtype for row in outlook.precisions}["gradients"].startswith("float16")


def test_lora_trains_adapters_only(tmp_path: Path) -> None:
    def trained(model: object, lora: str) -> int:
        params = load_workload(str(model), 4, 32, None, Lora.parse(lora)).model.parameters()
        return sum(param.numel() for param in params if param.requires_grad)

    assert trained("tiny", "2:q_proj") == 4 * 2 * (64 + 64)
    assert trained("tiny", "4:q_proj,v_proj") == 4 * 4 * (64 + 64 + 64 + 32)
    assert trained("tiny", "2:all-linear") > trained("tiny", "2:q_proj,v_proj")
    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96, n_positions=64).save_pretrained(tmp_path)
    assert trained(tmp_path, "4") == 2 * 4 * (32 + 96)
    subject = report(*TINY, "--lora", "2:q_proj").subject
    assert subject.num_trained_params == 4 * 2 * (64 + 64) and subject.num_params > 100 * subject.num_trained_params


def test_a_folder_gives_dtype_and_length(tmp_path: Path) -> None:
    found = report(llama_folder(tmp_path, dtype="float16"))
    assert (found.subject.num_samples, found.subject.tokens_per_sample) == (8, 64)
    assert found.outlook is not None and found.outlook.precisions[0].dtype.startswith("float16")
    assert "up to 64 tokens, not 65" in plan(tmp_path, "--length", 65, exit_code=2).stderr


def test_a_function_brings_its_own_batch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ANSWER_S", math.inf)
    result = report(f"{source}:with_batch")
    assert result.subject.num_samples == 6 and result.outlook is not None and result.outlook.tokens_per_s is None
    assert result.would_help is not None and all(
        one.change.option != "--sequences 12" for one in result.would_help.found
    )
    assert "samples/s" in plan(f"{source}:with_batch").stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere"], "presets are tiny, tiny-gpt"),
        (["{folder}/empty"], "has no config.json"),
        (["{folder}/none.py:make"], "there is no file"),
        (["{folder}/mine.py:made"], "with_batch, alone, nothing"),
        (["{folder}/mine.py:nothing"], "returned an int; it must return"),
        (["{folder}/mine.py:boom"], "mine.py:boom raised RuntimeError: boom"),
        (["{folder}/mine.py:wants"], "mine.py:wants raised TypeError: wants() missing 1 required"),
        (["{folder}/neighbour.py:make"], "has no function 'make'"),
        (["{folder}/broken.py:make"], "broken.py raised ZeroDivisionError"),
        (["{folder}/mine.py:alone"], "return the model with a batch of its own"),
        (["{folder}/mine.py:with_batch", "--length", "8"], "leave out --sequences and --length"),
        (["tiny", "--disk", "60GiB"], "--disk='60GiB' is not a folder and a size"),
        (["tiny", "--disk", "/scratch:much"], "--disk of '/scratch'='much' is not a size"),
        (["tiny", "--disk", "/a:1TB,/b:1TB"], "is more than one folder; give each by itself"),
        (["tiny", "--disk", "{folder}/mine.py:1TB"], "mine.py is no folder; name one, such as --disk {folder}:200GiB"),
        (["tiny", "--disk", "{folder}/mine.py:1TB", "--machine", "h200"], "mine.py is no folder"),
        (["tiny", "--disk", "{folder}/none:1TB"], "none: there is no such folder on this machine; make it"),
        (["tiny", "--clip", "--update", "in_backward"], "use --update deferred"),
        (["tiny", "--sequences", "0"], "--sequences is 0"),
        (["tiny", "--micro-batch", "99"], "--micro-batch 99 does not fit the batch of 8 samples"),
        (["tiny", "--micro-batch", "0"], "choose a number from 1 to 8, or leave it out"),
        (["tiny", "--look", "-1"], "--look -1 is no number of seconds"),
        (["tiny", "--look", "nan"], "write 0 or more"),
        (["tiny", "--gpu", "much"], "--gpu='much' is not a size"),
        (["tiny", "--lora", "q_proj"], "write 16"),
        (["tiny", "--lora", "4:nothing"], "not found in the base model"),
        (
            ["{folder}/mine.py:with_batch", "--lora", "8"],
            "of a Stack to adapt; name them by the ends of their names: --lora",
        ),
        (["{folder}/mine.py:with_batch", "--lora", "8"], "--lora 8:NAMES, such as 8:0,1"),
        (
            ["tiny", "--machine", "{folder}/mine.py"],
            "mine.py is no machine file (made by `hightide doctor --out FILE`)",
        ),
        (["tiny", "--machine", "{folder}/config.json"], "config.json is no machine file"),
        (["tiny", "--machine", "{folder}/list.json"], "list.json is no machine file"),
        (["tiny", "--machine", "{folder}/speeds.json"], "speeds.json has an unknown key 'nam'; did you mean 'name'"),
        (["tiny", "--why", "layers.99"], "near are 'model.layers."),
        (["tiny", "--why", "layers.99", "--gpu", "40KiB"], "near are 'model.layers."),
        (["tiny", "--save", "{folder}/none/plan.json"], "there is no folder"),
        (["tiny", "--save", "{folder}"], "is a folder; name a file"),
        (["tiny", "--html", "{folder}"], "is a folder; name a file"),
        (["tiny", "--machine", "pdp-11"], "rtx-4090"),
        (["gpt2-xl", "--length", "1025"], "up to 1024 tokens, not 1025"),
    ],
)
def test_bad_input_is_one_message(options: list[str], said: str, source: Path) -> None:
    words = [option.replace("{folder}", str(source.parent)) for option in options]
    result = plan(*words, exit_code=2)
    assert said.replace("{folder}", str(source.parent)) in result.stderr and not result.stdout


def test_folders_of_another_machine_need_not_be_here(tmp_path: Path) -> None:
    there = ("--disk", tmp_path / "none:1GiB", "--disk", tmp_path / "another:2GiB", "--machine", "h200")
    found = report(*TINY, *there, "--gpu", "1GiB", "--host", "8GiB")
    assert found.subject.disk_limit_bytes == 3 * 2**30


def test_a_traceback_is_shown_where_it_is_asked_for(source: Path) -> None:
    said = plan(f"{source}:boom", "--traceback", exit_code=2).stderr
    assert "Traceback" in said and "in boom" in said and "RuntimeError: boom" in said


def test_a_fault_of_the_program_is_not_the_code_for_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(plan_module, "search", fail)
    said = plan(*TINY, exit_code=3).stderr
    assert "Traceback" in said and "RuntimeError: boom" in said and "a fault of hightide; please report it" in said


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("closed", 141, ""),
        ("/dev/full", 3, "error: the output cannot be read or written: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written_has_a_code_of_its_own(output: str, code: int, said: str) -> None:
    """In a process of its own: Python writes what is left when it ends."""
    program = """
        import os, runpy, sys
        if sys.argv[1] == "closed":
            read_end, write_end = os.pipe()
            os.close(read_end)
        else:
            write_end = os.open(sys.argv[1], os.O_WRONLY)
        os.dup2(write_end, 1)
        sys.argv = ["hightide", *sys.argv[2:]]
        runpy.run_module("hightide", run_name="__main__")
    """
    command = ["plan", "tiny", "--length", "16", "--machine", "h200", "--gpu", "8GiB", "--host", "8GiB"]
    ended = run_script(program, [output, *command], timeout_s=100)
    assert (ended.status, ended.stderr) == (code, said)


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_a_file_that_cannot_be_written_is_one_message(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_text("of yesterday")
    monkeypatch.setattr(files.os, "fsync", full)
    said = plan(*TINY, option, tmp_path / "file", exit_code=2).stderr
    assert said.replace("\n", "") == f"error: {option} {tmp_path / 'file'} cannot be written: No space left on device"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of yesterday"]


def test_a_name_between_colons_is_no_emoji(source: Path) -> None:
    assert plan(f"{source}:llama").stdout.startswith("mine.py:llama: 2.40k parameters\n")


def test_a_model_that_is_no_language_model_needs_a_function(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=16, patch_size=8, **size)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    said = plan(tmp_path, exit_code=2).stderr
    assert "does not run without values" in said and "FILE.py:FUNCTION" in said


def test_a_model_that_asks_for_values_gets_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(
        "import torch\n"
        "class Asks(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x)\n"
        "        return y.sin() if y.detach().sum().item() > 0 else y\n"
        "def make():\n"
        "    return torch.nn.Sequential(Asks(8, 8), Asks(8, 8)), torch.zeros(4, 8)\n"
    )
    result = plan(f"{path}:make", exit_code=2)
    said = " ".join(result.stderr.split())
    assert "does not run without values: DataDependentOutputException" in said and not result.stdout
    assert "hightide.plan measure it in one pass on values" in said
    assert "batch of its own" not in said, "it has one"


def test_an_encoder_with_a_decoder_needs_its_first_token(tmp_path: Path) -> None:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
    config = T5Config(**size)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    said = plan(tmp_path, "--length", 16, exit_code=2).stderr
    assert "config.json has no decoder_start_token_id" in said and "0 for T5" in said and "FILE.py:FUNCTION" in said
    config.decoder_start_token_id = 0
    config.save_pretrained(tmp_path)
    assert report(tmp_path, "--length", 16).fits


def test_what_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ANSWER_S", math.inf)
    path = tmp_path / "plan.json"
    result = plan(*TINY, "--gpu", "40KiB", "--save", path, "--why", "layers.1", exit_code=1)
    assert "what would make it fit" in result.stdout and "Limits(" not in result.stdout
    assert re.search(r"DOES NOT FIT: .*B \(\d+ bytes\) short on the gpu\n", result.stdout)
    assert re.search(r"the peak is in (forward|backward) of \S+\n", result.stdout)
    assert re.search(r"\n  [\d.]+ [KM]iB of GPU memory +--gpu [\d.]+[KM]iB\n", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "not written" in result.stderr and not path.exists()
    assert "no answer to --why layers.1: there is no plan" in result.stderr
    found = report(*TINY, "--gpu", "40KiB", exit_code=1)
    assert not found.fits and found.outlook is None and found.refusal is not None
    assert found.refusal.tier is Tier.GPU and found.refusal.needed_bytes > 40 * 1024
    assert [(one.tier, one.needed_bytes) for one in found.refusal.shortages] == [(Tier.GPU, found.refusal.needed_bytes)]
    option, size = found.would_fit[0].option.split()
    assert option == "--gpu"
    plan(*TINY, option, size)


def test_a_disk_is_planned_refused_by_wrap_and_named_where_it_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "ANSWER_S", math.inf)
    folder, path = llama_folder(tmp_path / "llama", dtype="float32", num_hidden_layers=8), tmp_path / "plan.json"
    small = (folder, "--sequences", 4, "--length", 16, "--gpu", "300KiB", "--host", "800KiB")
    named = [change.option for change in report(*small, exit_code=1).would_fit if "--disk" in change.option]
    monkeypatch.setattr(plan_module, "ANSWER_S", 0.0)
    option, size = named[0].split()
    assert option == "--disk" and size.startswith("FOLDER:")
    found = report(*small, option, size.replace("FOLDER", str(tmp_path)), "--save", path, "--why", "layers.1").outlook
    assert found is not None
    assert [tier.tier for tier in found.tiers] == [Tier.GPU, Tier.HOST, Tier.DISK]
    assert all(0 < tier.peak_bytes <= tier.limit_bytes for tier in found.tiers)
    busy = {lane.lane: lane.busy_s for lane in found.lanes}
    assert busy[Lane.DISK_READ] > 0 and busy[Lane.DISK_WRITE] > 0
    cut = report(*small, "--disk", f"{tmp_path}:1GiB", "--calls", 2).outlook
    assert cut is not None and (cut.calls, cut.samples_per_call) == (2, 2) and cut.wear is not None
    rated = report(*small, "--disk", f"{tmp_path}:1GiB", "--endurance", "600TBW").outlook
    assert rated is not None and rated.wear is not None and rated.wear.days is not None
    assert rated.wear.days * rated.wear.terabytes_per_day == pytest.approx(600)
    assert rated.wear.terabytes_per_day == pytest.approx(rated.wear.written_bytes / rated.step_s * 86400 / 1e12)
    assert "--endurance='much'" in plan(*small, "--endurance", "much", exit_code=2).stderr
    text = plan(*small, "--disk", f"{tmp_path}:1GiB", "--html", tmp_path / "page.html").stdout
    assert re.search(r"  limit: .*[,;]\n    \w", text), "what does not fit the line is indented"
    assert "disk per step" in text and "disk  peak" in text and max(map(len, text.splitlines())) <= 80
    assert CliRunner().invoke(app, ["simulate", str(path), "--machine", "h200"]).exit_code == 0
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).train()
    saved, optimizer = Plan.load(path), torch.optim.AdamW(model.parameters())
    assert saved.num_samples * saved.accumulate == 4
    tokens = torch.randint(96, (saved.num_samples, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    limits = hightide.Limits(disk=f"{tmp_path}:1GiB")
    hightide.wrap(model, optimizer, batch, plan=saved, limits=limits, device="cpu", accumulate=saved.accumulate)
    assert hightide.stats(model).peak_bytes["disk"] == saved.forecast.disk_peak_bytes
    hightide.unwrap(model)


def test_a_machine_without_a_known_disk_prices_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(load_machine("h200"), disk=None)
    monkeypatch.setattr(machine_module, "known_machine", lambda device: Known(machine))
    assert "doctor --disk" in plan(*TINY, "--disk", f"{tmp_path}:60GiB", exit_code=2).stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama-9", "there is no model 'llama-9': .*presets are .*llama-3.1-8b"),
        ("no.py:make", "there is no file no.py"),
    ],
)
def test_a_wrong_model_is_told_before_a_machine_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.setattr(machine_module, "known_machine", lambda device: Known(None, "nothing was measured"))
    assert re.search(message, plan(model, exit_code=2).stderr)
    assert "nothing was measured" in plan("llama-3.1-8b", exit_code=2).stderr


def test_a_plan_that_is_refused_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise InfeasiblePlan("the schedule cannot run")

    monkeypatch.setattr(plan_module, "search", refuse)
    assert "the schedule cannot run" in plan(*TINY, exit_code=2).stderr


def test_every_shape_has_a_config() -> None:
    sizes = {name: config_of(name, 128).num_hidden_layers for name in SHAPES}
    assert sizes["llama-3.1-8b"] == 32 and sizes["gpt-175b"] == 96
