"""Files of strangers, damaged in every way that comes to mind, against whatever reads them.

    python bench/bad_files.py --seed 7 --count 600
    python bench/bad_files.py --seed 7 --count 200 --kind safetensors --show

Valid files are changed: keys dropped, doubled, renamed, values of other types and extremes, offsets moved, bytes cut
off, flipped, random. Each is then given to what reads it, in a child process with bounded memory and a clock, and must
be refused in a short message, or read exactly as an independent reader reads it. Everything else is counted as a fault,
a hang, an abort or a silent difference, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import hightide
from hightide.cli import plan_command
from hightide.cli.main import app
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.options import TrainOptions, load_config
from hightide.doctor.known import load_machine
from hightide.integrations.foreign_folder import INDEX, SINGLE
from hightide.ir.codec import to_json
from hightide.ir.plan import Plan
from hightide.loading.tensor_file import read_header
from hightide.loading.unloaded import origins_in

KINDS = ("plan", "machine", "yaml", "safetensors", "index", "config")
CASE_S = 20.0  # for one file; a machine that is busy with other things needs some
ROOM_BYTES = 3 * 1024**3  # that reading may take beyond what the process had
LONG = 5000  # characters: a message must be shorter

REFUSED, EQUAL = "refused", "equal"
FAULT, HANG, ABORT, SILENT = "fault", "hang", "abort", "silent"
BAD = (FAULT, HANG, ABORT, SILENT)

EXTREMES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        2**31,
        2**31 - 1,
        2**32,
        2**40 + 1,
        2**63,
        -(2**63),
        10**15,
        10**39,
        10**400,
    ),
    *(0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 2_000_000_000),
    *(
        "",
        "x",
        "a/b",
        "../../etc/passwd",
        "/etc/passwd",
        "nul\0",
        "\x1b[31mred\x1b[0m",
        "\ud800",
        "9" * 400,
        "1e999GiB",
    ),
    *("A" * 100_000, "kernels-community/flash-attn", "eager", "float16", "int32", "load", "Trainer", "pipeline"),
    *([], {}, [1], [[]], [None], {"a": 1}, [0, 1], [1, 0], [-1, 2**62], list(range(1000)), [2**63, 2**63]),
]


class Hang(BaseException):
    pass


# -- valid files ---------------------------------------------------------------------------------------------------


def llama(**settings: Any) -> transformers.LlamaConfig:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.LlamaConfig(**{**size, **tokens, "dtype": "float32", **settings})


def make_valid(folder: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama())
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "parts", max_shard_size="8KB")
    half = transformers.LlamaForCausalLM(llama(dtype="bfloat16")).to(torch.bfloat16)
    half.save_pretrained(folder / "half")
    gpt = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    configs = {
        "config0": llama(),
        "config1": transformers.GPT2Config(**gpt, bos_token_id=1, eos_token_id=2),
        "config2": transformers.MixtralConfig(**llama().to_diff_dict() | {"num_local_experts": 4}),
        "config3": transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    }
    kinds = ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "T5ForConditionalGeneration")
    for (name, config), kind in zip(configs.items(), kinds, strict=True):
        config.architectures = [kind]
        if name == "config3":
            config.decoder_start_token_id = 0
        config.save_pretrained(folder / name)
    various = {
        "matrix": torch.randn(3, 4),
        "half": torch.randn(5).half(),
        "bf": torch.randn(2, 2).bfloat16(),
        "long": torch.arange(6),
        "int": torch.arange(4, dtype=torch.int32),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
    }
    save_file(various, folder / "various.safetensors", metadata={"format": "pt"})
    batch = {"input_ids": torch.ones(4, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)}
    limits = hightide.Limits(gpu="60KiB", host="64MiB")
    hightide.plan(model, torch.optim.AdamW(model.parameters()), batch, limits=limits).save(folder / "plan.json")
    load_machine("h200").save(folder / "machine.json")
    (folder / "settings.yaml").write_text(TrainConfig().to_yaml())


# -- changes -------------------------------------------------------------------------------------------------------


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in plain data: the container, and the key in it."""
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    for key in keys:
        yield data, key
        yield from places(data[key])


def change_data(data: Any, rng: random.Random) -> Any:
    """One to three places of plain data are changed."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        everywhere = list(places(data))
        if not everywhere:
            return rng.choice(EXTREMES)
        container, key = rng.choice(everywhere)
        value = container[key]
        how = rng.randrange(10)
        if how == 0:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[rng.choice(["", "x\0", "\x1b[2J", "__class__", "auto_map", str(key) + "_", "K" * 50_000])] = value
        elif how == 2 and isinstance(container, list):
            container.append(copy.deepcopy(value))
        elif how == 3:
            other, place = rng.choice(everywhere)
            container[key] = copy.deepcopy(other[place])
        elif how == 4 and isinstance(value, int) and not isinstance(value, bool):
            container[key] = rng.choice(
                [
                    value + 1,
                    value - 1,
                    -value,
                    value * 2,
                    value * 10**6,
                    value / 2 if abs(value) < 2**53 else 0.5,
                    str(value),
                ]
            )
        elif how == 5:
            container[key] = [value] if rng.random() < 0.5 else {"a": value}
        else:
            container[key] = copy.deepcopy(rng.choice(EXTREMES))
    return data


def change_text(text: bytes, rng: random.Random) -> bytes:
    """Of a file that holds text, or a header."""
    how = rng.randrange(9)
    at = rng.randrange(max(1, len(text)))
    if how == 0:
        return text[:at]
    if how == 1:
        flipped = bytearray(text)
        for _ in range(rng.choice((1, 3, 30))):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if how == 2:
        return rng.randbytes(rng.randrange(200))
    if how == 3:
        return b"[" * rng.choice((100, 100_000)) + text
    if how == 4:
        return b'{"a":' * rng.choice((100, 100_000)) + b"1" + b"}" * 100_000
    if how == 5:
        return b"\xef\xbb\xbf" + text
    if how == 6:
        return text.replace(b"\n", b"\0", 1) if b"\n" in text else b"\0" + text
    if how == 7:
        return text[:at] + text[at : at + 60] + text[at:]
    return text + rng.choice([b"}", b"\n{}", b"\n---\na: b\n", text])


def doubled_key(text: bytes, rng: random.Random) -> bytes:
    """The same key twice, in JSON."""
    start = text.find(b"{") + 1
    key = rng.choice([b'"version"', b'"name"', b'"weight_map"', b'"hidden_size"', b'"model_type"', b'"metadata"'])
    return text[:start] + key + b":1," + key + b":2," + text[start:]


def change_json(text: bytes, rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.75:
        return json.dumps(change_data(json.loads(text), rng)).encode()
    return doubled_key(text, rng) if chance < 0.8 else change_text(text, rng)


def change_yaml(text: bytes, rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.65:
        return yaml.safe_dump(change_data(yaml.safe_load(text), rng), allow_unicode=True).encode(
            "utf-8", "surrogatepass"
        )
    if chance < 0.75:
        bombs = [
            b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nname: [*b,*b,*b,*b,*b,*b,*b]\n",
            b"&a name: *a\n",
            b"name: !!python/object/apply:os.system [true]\n",
            b"steps: " + b"9" * 5000,
            b"steps: " + b"1:" * 5000 + b"1",
            b"? [a, b]\n: 1\n",
            b"name: !!timestamp 2001-99-99\n",
            b"name: !!binary '%'\n",
            b"<<: [1]\n",
            b"name: &a {b: *a}\n",
            b"steps: 0x" + b"f" * 300,
            b"optimizer: {lr: 1e999}\n",
            b"seed: .inf\n",
        ]
        return text + rng.choice(bombs) if rng.random() < 0.5 else rng.choice(bombs)
    return change_text(text, rng)


SAME_SIZE = {
    "F32": "I32",
    "I32": "F32",
    "F16": "BF16",
    "BF16": "F16",
    "I64": "F64",
    "F64": "I64",
    "BOOL": "U8",
    "U8": "I8",
}


def change_tensors(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length], data[8 + length :]
    chance = rng.random()
    if chance < 0.1:
        return change_text(data, rng)
    if chance < 0.2:  # the length of the header
        wrong = rng.choice([0, 1, 2, length - 1, length + 1, len(data), 2**32, 2**63, 2**64 - 1, 100_000_001])
        return wrong.to_bytes(8, "little") + data[8:]
    if chance < 0.3:  # values: no header can tell, both readers must read the same
        return data[: 8 + length] + (change_text(values, rng) if rng.random() < 0.5 else values[::-1])
    if chance < 0.4:
        header = change_json(header, rng)
    else:
        entries = json.loads(header)
        names = [name for name in entries if name != "__metadata__"]
        one, other = (entries[rng.choice(names)] for _ in range(2))
        size = one["data_offsets"][1] - one["data_offsets"][0]
        shift = rng.choice([-size, -4, -1, 1, 2, 4, 8, size, 2**40, 2**63])
        how = rng.randrange(9)
        if how == 0:
            one["data_offsets"] = list(other["data_offsets"])
        elif how == 1:
            one["data_offsets"], one["shape"], one["dtype"] = other["data_offsets"], other["shape"], other["dtype"]
        elif how == 2:
            one["data_offsets"] = [offset + shift for offset in one["data_offsets"]]
        elif how == 3:
            one["data_offsets"][rng.randrange(2)] += shift
        elif how == 4:
            one["dtype"] = SAME_SIZE.get(one["dtype"], "F32")
        elif how == 5:
            for name in names:
                entries[name]["dtype"] = SAME_SIZE.get(entries[name]["dtype"], "F32")
        elif how == 6:
            one["shape"] = rng.choice(
                [one["shape"][::-1], [-1], [2**63], [*one["shape"], 1], [1] * 100, "x", [2**32, 2**32]]
            )
        elif how == 7:
            entries.pop(rng.choice(names))
        else:
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
        header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + values


def change_index(text: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return change_json(text, rng)
    index = json.loads(text)
    files = sorted(set(index["weight_map"].values()))
    name = rng.choice(list(index["weight_map"]))
    odd = [
        "/dev/zero",
        "../parts/" + files[0],
        "./" + files[0],
        "fifo.safetensors",
        "folder.safetensors",
        "config.json",
        "",
    ]
    index["weight_map"][name] = rng.choice(
        [*odd, *files, "/etc/passwd", "a\0.safetensors", ".safetensors", files[0] + "\n"]
    )
    if rng.random() < 0.3:
        index["weight_map"]["stranger"] = rng.choice(files)
    return json.dumps(index).encode()


CONFIG_KEYS: dict[str, list[Any]] = {
    "_attn_implementation": ["a/b", "flash_attention_2", "paged|a/b", "sdpa", {"": "a/b"}, 3],
    "attn_implementation": ["a/b", "kernels-community/flash-attn2", "eager"],
    "_experts_implementation": ["a/b", "deepgemm", ["a/b"]],
    "auto_map": [{"AutoConfig": "a--b.C", "AutoModelForCausalLM": "m.C"}, "x", 3],
    "architectures": [
        ["Trainer"],
        ["pipeline"],
        ["GPT2LMHeadModel"],
        ["PreTrainedModel"],
        "LlamaForCausalLM",
        [3],
        [[]],
    ],
    "quantization_config": [{"quant_method": "gptq"}, {"quant_method": "fp8"}, {}, 1],
    "trust_remote_code": [True],
    "configuration_files": [["config.4.0.0.json"], ["../config.json"], 3],
    "dtype": ["load", "int8", "float8_e4m3fn", "float64", 3, [1]],
    "torch_dtype": ["nn", "bfloat16", {}],
    "model_type": ["gpt2", "timm_wrapper", "nope", 3, None, [], "bert", "vit"],
    "num_hidden_layers": [0, -1, 10**9, 3.5, "2", None, True],
    "hidden_size": [0, -16, 17, 10**12, "16", None, [16], 2**63],
    "num_attention_heads": [0, -2, 3, 10**6, "2", None],
    "num_key_value_heads": [0, -1, 3, 10**6],
    "vocab_size": [0, -1, 10**15, 2**62, 1.5, None],
    "max_position_embeddings": [0, -5, 10**15, "x", 1e30],
    "rope_parameters": [{"rope_type": "x"}, 3, {"rope_type": "yarn", "factor": -1}, {"rope_theta": 0}, []],
    "rope_scaling": [{"type": "linear"}, {"rope_type": "dynamic", "factor": "x"}, 7],
    "head_dim": [0, -1, 7, 10**12],
    "hidden_act": ["x", 3, None, "silu"],
    "num_labels": [10**9, -1, "x"],
    "id2label": [{"x": 1}, [1], 5],
    "to_dict": [3],
    "get_text_config": [3],
    "attribute_map": [{"hidden_size": "vocab_size"}, 3],
    "n_positions": [10**7, 0],
    "pruned_heads": [{"0": [1]}, 3],
    "per_layer_config": [{"0": {"hidden_size": 3}}, 3],
}


def change_config(text: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return change_json(text, rng)
    settings = json.loads(text)
    for key in rng.sample(list(CONFIG_KEYS), rng.choice((1, 1, 2))):
        settings[key] = rng.choice(CONFIG_KEYS[key])
    return json.dumps(settings).encode()


# -- readers -------------------------------------------------------------------------------------------------------

Verdict = tuple[str, str]  # what it was, and a few words


def command(*words: object) -> Verdict:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "100"})
    if isinstance(result.exception, Hang):
        raise result.exception
    text = result.output
    if result.exit_code == 2 and (len(text) > LONG or any(ord(c) < 32 and c not in "\n\t" for c in text)):
        return FAULT, f"a message of {len(text)} characters: {text[:100]!r}"
    if result.exit_code in (0, 1):
        return EQUAL, text[-200:]
    if result.exit_code == 2:
        return REFUSED, text[-300:]
    return FAULT, f"exit code {result.exit_code}: {text[-1500:]}"


def contains(whole: Any, part: Any) -> bool:
    """Whether what was read has every value that is in the file, as it is there."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part) and isinstance(whole, bool) == isinstance(part, bool)


def read_plan(path: Path, valid: Path) -> Verdict:
    verdict = command("simulate", path, "--machine", "h200")
    if verdict[0] == EQUAL:
        plan = json.loads(to_json(Plan.load(path)))
        if not contains(plan, json.loads(path.read_text(encoding="utf-8-sig"))):
            return SILENT, "the plan has other values than its file"
    return verdict


def read_machine(path: Path, valid: Path) -> Verdict:
    verdict = command("simulate", valid / "plan.json", "--machine", path)
    if verdict[0] == EQUAL:
        machine = json.loads(to_json(load_machine(path)))
        if not contains(machine, json.loads(path.read_text(encoding="utf-8-sig"))):
            return SILENT, "the machine has other values than its file"
    return verdict


def read_yaml(path: Path, valid: Path) -> Verdict:
    config = load_config(path, TrainOptions())
    said = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    read = json.loads(to_json(config))
    read["limits"] = said.get("limits", read["limits"])
    return (EQUAL, "") if contains(read, said) or numbers_as_text(read, said) else (SILENT, f"{said} became {read}")


def numbers_as_text(read: Any, said: Any) -> bool:
    """PyYAML alone takes 1e-3 for text."""
    made = json.dumps(said)
    return contains(read, json.loads(re.sub(r'"([-+]?\d+(?:\.\d*)?[eE][-+]?\d+)"', r"\1", made)))


def is_strict(data: bytes) -> bool:
    """A header as the format describes it, read without hightide: the values fill the file, each byte once."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
    ranges = []
    for name, entry in entries.items():
        if name != "__metadata__":
            numel = 1
            for size in entry["shape"]:
                numel *= size
            start, end = entry["data_offsets"]
            if end - start != numel * sizes[entry["dtype"]] or min([start, *entry["shape"]]) < 0:
                return False
            ranges.append((start, end))
    at = 0
    for start, end in sorted(ranges):
        if start != at:
            return False
        at = end
    return 8 + length + at == len(data)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return (
        one.contiguous().view(-1).view(torch.uint8).tolist() == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


def read_tensors(path: Path, valid: Path) -> Verdict:
    """Alone where the file is one of several dtypes, else as a model's."""
    if path.parent.name == "various":
        read = {name: stored.read() for name, stored in read_header(path).items()}
    else:
        read = read_folder(path.parent)
    if not is_strict(path.read_bytes()):
        return SILENT, "read, though the header is none"
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name in read and not same_bits(read[name], file.get_tensor(name).to(read[name].dtype)):
                return SILENT, f"{name} has other values than the format's own reader says"
    if path.parent.name != "various" and dtypes_of(path) != dtypes_of(valid / path.parent.name / SINGLE):
        return (REFUSED, "said by a warning") if heard("16 bits") else (SILENT, "another dtype, and not a word")
    return EQUAL, ""


def dtypes_of(path: Path) -> list[str]:
    data = path.read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [entry["dtype"] for name, entry in sorted(entries.items()) if name != "__metadata__"]


HEARD: list[str] = []


def heard(words: str) -> bool:
    return any(words in one for one in HEARD)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All parameters of a folder by hightide."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = hightide.from_pretrained(folder)
    HEARD[:] = [str(one.message) for one in caught]
    origins, values = origins_in(model), {}
    for name, param in model.named_parameters():
        values[name] = torch.empty(param.shape, dtype=param.dtype)
        origins[id(param)].fill(values[name])
    return values


def plain_folder(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    return dict(model.named_parameters())


def compared(read: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Verdict:
    wrong = [name for name in right if name not in read or not same_bits(read[name], right[name].detach())]
    return (SILENT, f"{wrong[:3]} have other values") if wrong or len(read) != len(right) else (EQUAL, "")


def read_index(path: Path, valid: Path) -> Verdict:
    return compared(read_folder(path.parent), plain_folder(valid / "whole"))


def read_config(path: Path, valid: Path) -> Verdict:
    if path.parent.name != "whole":
        options = ("--sequences", 2, "--length", 8, "--machine", "h200", "--gpu", "2GiB", "--host", "8GiB")
        return command("plan", path.parent, *options)
    read = read_folder(path.parent)
    try:
        right = plain_folder(path.parent)
    except Exception as error:
        return EQUAL, f"transformers alone refuses it: {error}"[:200]
    return compared(read, right)


# -- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    sources: tuple[str, ...]  # of which one is changed
    change: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path, Path], Verdict]


HOW = {
    "plan": Kind(("plan.json",), change_json, read_plan),
    "machine": Kind(("machine.json",), change_json, read_machine),
    "yaml": Kind(("settings.yaml",), change_yaml, read_yaml),
    "safetensors": Kind((f"whole/{SINGLE}", f"half/{SINGLE}", "various.safetensors"), change_tensors, read_tensors),
    "index": Kind((f"parts/{INDEX}",), change_index, read_index),
    "config": Kind(
        tuple(f"{name}/config.json" for name in ("whole", *(f"config{n}" for n in range(4)))),
        change_config,
        read_config,
    ),
}


def prepared(kind: str, number: int, seed: int, valid: Path, folder: Path) -> Path:
    """The changed file, with what belongs to it beside it."""
    rng = random.Random(f"{seed} {kind} {number}")
    source = valid / rng.choice(HOW[kind].sources)
    folder = folder / (source.parent.name if source.parent != valid else "various")
    shutil.rmtree(folder, ignore_errors=True)
    if source.parent != valid:
        shutil.copytree(source.parent, folder)
        os.mkfifo(folder / "fifo.safetensors")
        (folder / "folder.safetensors").mkdir()
    else:
        folder.mkdir(parents=True)
    path = folder / source.name
    path.write_bytes(HOW[kind].change(source.read_bytes(), rng))
    return path


def judge(kind: str, path: Path, valid: Path) -> Verdict:
    def ring(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        return HOW[kind].read(path, valid)
    except ValueError as error:
        text = str(error)
        odd = len(text) > LONG or any(ord(char) < 32 and char not in "\n\t" for char in text)
        return (FAULT, f"a message of {len(text)} characters: {text[:100]!r}") if odd else (REFUSED, text)
    except Hang:
        return HANG, f"more than {CASE_S} s"
    except BaseException:
        return FAULT, traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def work(cases: list[tuple[str, int]], seed: int, valid: Path, folder: Path, pipe: int) -> None:
    """In a child: one line for each case that begins, one for each that ends."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    plan_command.ANSWER_S = plan_command.HELP_S = 0.0
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    for kind, number in cases:
        path = prepared(kind, number, seed, valid, folder)
        what, words = judge(kind, path, valid)
        os.write(pipe, json.dumps([kind, number, what, words[:1500]]).encode() + b"\n")


def run(cases: list[tuple[str, int]], seed: int, valid: Path) -> Iterator[tuple[str, int, str, str]]:
    """All verdicts. A child that ends early, or that nothing can wake, has lost the case that it was at."""
    left = list(cases)
    with tempfile.TemporaryDirectory() as scratch:
        while left:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    work(left, seed, valid, Path(scratch), writing)
                finally:
                    os._exit(0)
            os.close(writing)
            stuck = yield from verdicts(reading, child, left)
            os.waitpid(child, 0)
            if left:
                kind, number = left.pop(0)
                yield kind, number, HANG if stuck else ABORT, "the process did not answer" if stuck else "it ended"


def verdicts(reading: int, child: int, left: list[tuple[str, int]]) -> Iterator[tuple[str, int, str, str]]:
    waiting = b""
    while True:
        if not select.select([reading], [], [], 3 * CASE_S)[0]:
            os.kill(child, signal.SIGKILL)
            return True
        part = os.read(reading, 65536)
        if not part:
            os.close(reading)
            return False
        waiting += part
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            kind, number, what, words = json.loads(line)
            left.remove((kind, number))
            yield kind, number, what, words


def tried(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[tuple[str, int, str, str]]:
    """`count` changed files, in turn of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()  # torch's threads are not in a fork of this process: it must have none
        if not child:
            try:
                torch.set_num_threads(1)
                make_valid(Path(folder))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        cases = [(kinds[index % len(kinds)], index // len(kinds)) for index in range(count)]
        return list(run(cases, seed, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=600, help="of changed files, over all kinds")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one; may be repeated")
    parser.add_argument("--show", action="store_true", help="every verdict")
    parser.add_argument("--only", type=int, help="the number of one case of one kind")
    options = parser.parse_args()
    kinds = tuple(options.kind or KINDS)
    started = time.perf_counter()
    if options.only is not None:
        show_one(kinds[0], options.only, options.seed)
        return
    found = tried(options.seed, options.count, kinds)
    counts = Counter((kind, what) for kind, _, what, _ in found)
    print(f"seed {options.seed}, {len(found)} files, {time.perf_counter() - started:.0f} s")
    print("kind         " + "".join(f"{what:>9}" for what in (REFUSED, EQUAL, *BAD)))
    for kind in kinds:
        print(f"{kind:13}" + "".join(f"{counts[kind, what]:9}" for what in (REFUSED, EQUAL, *BAD)))
    for kind, number, what, words in found:
        if what in BAD or options.show:
            print(f"\n{kind} {number}: {what}: {words}")
    sys.exit(any(what in BAD for _, _, what, _ in found))


def show_one(kind: str, number: int, seed: int) -> None:
    """One case in this process, with its file."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        make_valid(Path(folder))
        plan_command.ANSWER_S = plan_command.HELP_S = 0.0
        path = prepared(kind, number, seed, Path(folder), Path(scratch))
        print(path.read_bytes()[:3000])
        print(*judge(kind, path, Path(folder)))


if __name__ == "__main__":
    main()
