"""A model that lives on disk is loaded from its folder and written to one without ever being in memory as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, sys, threading, time
from pathlib import Path
import torch, transformers
import hightide
from hightide.ir.tier import Tier

folder, width, num_layers = Path(sys.argv[1]), 192, int(sys.argv[2])
torch.set_num_threads(1)
shape = transformers.LlamaConfig(
    vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=num_layers,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, dtype="float32", architectures=["LlamaForCausalLM"])
shape.save_pretrained(folder)
with torch.device("meta"):
    params = list(transformers.LlamaForCausalLM(shape).named_parameters())
header, end = {}, 0
for name, param in params:
    header[name] = {"dtype": "F32", "shape": list(param.shape), "data_offsets": [end, end + param.nbytes]}
    end += param.nbytes
text = json.dumps(header).encode()
with open(folder / "model.safetensors", "wb") as file:  # mostly a hole: norms are zero, and so is all else
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)

class Most:
    # Of anonymous memory: pages of files can be taken away at any time.
    def __enter__(self):
        gc.collect()
        self.is_over, self.most = threading.Event(), 0
        self.before = self.read()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def read(self):
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def look(self):
        while not self.is_over.wait(0.002):
            self.most = max(self.most, self.read() - self.before)

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()

def run(saved):
    tokens = torch.ones(1, 8, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    model = hightide.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limits = hightide.Limits(gpu="16MiB", host="32MiB", disk=f"{folder}:1GiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, update="in_backward")
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(saved)
    return model

with Most() as most:
    model = run(folder / "saved")
stats = hightide.stats(model)
on_disk = sum(block.params is Tier.DISK for block in stats.plan.blocks)
again = transformers.LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
same = all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
hightide.unwrap(model)
print(json.dumps({"model": end, "most": most.most, "on_disk": on_disk, "blocks": len(stats.plan.blocks), "same": same,
                  "left": sorted(path.name for path in folder.iterdir())}))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_model_on_disk_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("reads resident memory from /proc")
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}
    found = {}
    for num_layers in (8, 26):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(folder), str(num_layers)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        found[num_layers] = json.loads(done.stdout.splitlines()[-1])
    small, large = found[8], found[26]
    assert large["same"] and large["on_disk"] > 0.7 * large["blocks"]
    assert large["left"] == ["config.json", "model.safetensors", "saved"]
    # What libraries load with the first model is in both; the rest is limits, and what the profiler knows of blocks.
    assert large["most"] - small["most"] < 0.4 * (large["model"] - small["model"]), found
