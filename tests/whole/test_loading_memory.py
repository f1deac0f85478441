"""Peaks of resident memory, in a process of its own: a model is loaded, made, and saved without existing twice, and an
optimizer that has trained already is taken over without its states existing twice."""

from __future__ import annotations

import pytest

from hightide.loading.initial import REAL_BYTES
from hightide.runtime.chunks.chunks import RETURN_BYTES
from resident_memory import reported

SLACK_BYTES = 64 * 2**20

SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch, transformers
import hightide
from hightide.ir.tier import ChunkKind
from hightide.runtime.surgery import run_of

folder = Path(sys.argv[1])
torch.set_num_threads(1)

def config(width, num_layers):
    return transformers.LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, dtype="float32")

def on_meta(shape):
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(shape)

def write(shape, folder):
    # Two files as large as the model, mostly holes: all values are zero.
    shape.architectures = ["LlamaForCausalLM"]
    shape.save_pretrained(folder)
    weight_map = {}
    params = list(on_meta(shape).named_parameters())
    for number, part in enumerate((params[: len(params) // 2], params[len(params) // 2 :]), start=1):
        header, end = {}, 0
        for name, param in part:
            header[name] = {"dtype": "F32", "shape": list(param.shape), "data_offsets": [end, end + param.nbytes]}
            end += param.nbytes
            weight_map[name] = f"model-{number}.safetensors"
        text = json.dumps(header).encode()
        with open(folder / f"model-{number}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}

def wrap(model, optimizer=None, plan=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    limits = {"limits": hightide.Limits(gpu="200MiB", host="3GiB"), "micro_batch": 1}
    return hightide.wrap(model, optimizer, batch, **({"plan": plan} if plan else limits))

def rss_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def measure(work):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
    before = rss_bytes("VmRSS:")
    result = work()
    return result, rss_bytes("VmHWM:") - before

def written_bytes(model):
    # Parameters wherever they have a place, and their master copies. Moments and gradients are zero: pages that nobody
    # wrote to are not there yet.
    chunks = run_of(model).chunks
    copies = [place.copies.items() for place in chunks.placed]
    places = sum(size for copy in copies for (kind, _), size in copy if kind == ChunkKind.PARAM)
    masters = [spec for spec in chunks.specs if spec.has_master and not spec.has_remainder]
    return places + sum(4 * spec.optimised_numel for spec in masters)

report = {}
small = config(64, 2)
write(small, folder / "small")
write(config(512, 16), folder / "large")
model = wrap(hightide.from_pretrained(folder / "small"))[0]  # all that is loaded lazily
model(**batch).loss.backward()
model.save_pretrained(folder / "small-saved")
wrap(on_meta(small))
del model

(model, optimizer), report["load"] = measure(lambda: wrap(hightide.from_pretrained(folder / "large")))
report["load_written"] = written_bytes(model)
plan = hightide.stats(model).plan
report["model"] = sum(spec.param_bytes for spec in run_of(model).chunks.specs)
_, report["save"] = measure(lambda: model.save_pretrained(folder / "saved"))
report["saved"] = sum(file.stat().st_size for file in (folder / "saved").glob("*.safetensors"))
del model, optimizer
gc.collect()

(model, optimizer), report["load_bf16"] = measure(
    lambda: wrap(hightide.from_pretrained(folder / "large", dtype=torch.bfloat16)))
report["load_bf16_written"] = written_bytes(model)
del model, optimizer
gc.collect()

(model, optimizer), report["initialise"] = measure(lambda: wrap(on_meta(config(512, 16)), plan=plan))
report["initialise_written"] = written_bytes(model)
del model, optimizer
gc.collect()

plain = transformers.LlamaForCausalLM(config(512, 16))
optimizer = torch.optim.AdamW(plain.parameters())
for param in plain.parameters():
    param.grad = torch.zeros_like(param)
optimizer.step()
optimizer.zero_grad()
pair, report["take_over"] = measure(lambda: wrap(plain, optimizer, plan))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    report = reported(SCRIPT, str(tmp_path_factory.mktemp("folders")))
    assert report["model"] > 4 * SLACK_BYTES, "the model must stand out from the slack"
    return report


def test_a_folder_is_read_straight_into_chunks(measured: dict[str, int]) -> None:
    assert measured["load_written"] < 1.5 * measured["model"]
    assert measured["load"] <= measured["load_written"] + SLACK_BYTES, measured


def test_converting_on_the_way_takes_no_more(measured: dict[str, int]) -> None:
    assert measured["load_bf16_written"] < measured["model"], "16-bit parameters, whose masters begin with nothing more"
    assert measured["load_bf16"] <= measured["load_bf16_written"] + SLACK_BYTES, measured


def test_a_model_is_initialised_in_its_chunks(measured: dict[str, int]) -> None:
    assert measured["initialise"] <= measured["initialise_written"] + REAL_BYTES + SLACK_BYTES, measured


def test_saving_copies_nothing(measured: dict[str, int]) -> None:
    assert measured["saved"] >= measured["model"]
    assert measured["save"] <= SLACK_BYTES, measured


def test_states_of_a_trained_optimizer_move(measured: dict[str, int]) -> None:
    """Parameters and two moments take up new pages while the old ones are freed; a part may exist twice."""
    assert measured["take_over"] <= RETURN_BYTES + SLACK_BYTES, measured
