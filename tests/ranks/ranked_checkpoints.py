"""What each rank does in the tests of checkpoints: trains a few steps, saves, loads what others have saved."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranked_loop import steps
from ranked_plans import ON_GPU, Plans
from ranked_training import NUM_SAMPLES, digest
from torch import Tensor, nn

import hightide
import models
from hightide.checkpoint.files import checked, filesystem, manifest, shared_folder
from hightide.checkpoint.files import folder as folder_module
from hightide.checkpoint.files.folder import damages
from hightide.checkpoint.shared_content import SharedContent
from hightide.loading.tensor_file import ALL_DTYPES, read_header
from hightide.runtime.surgery import run_of

EPS = 1e-4
PIECE_BYTES = 16 * 1024  # so that files of small models have several
SAVED_WITHIN_S = 60.0
BUILD = {
    "hand_written": lambda: models.hand_written(num_layers=3, num_samples=NUM_SAMPLES),
    "llama_tied": lambda: models.llama(tied=True, num_layers=2, num_samples=NUM_SAMPLES),
    "llama_dropout": lambda: models.llama(num_layers=2, dropout=0.2, num_samples=NUM_SAMPLES),
    "lora": lambda: with_adapters(*models.llama(num_layers=2, num_samples=NUM_SAMPLES)),
    "lora_inside": lambda: with_adapter_inside(*models.llama(num_layers=2, num_samples=NUM_SAMPLES)),
    "qwen3_moe": lambda: models.qwen3_moe(num_layers=2, num_samples=NUM_SAMPLES),
}


def with_adapters(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    import peft

    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("judge", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return adapted.train(), example


def with_adapter_inside(model: Any, example: Any) -> tuple[nn.Module, Any]:
    """As transformers itself puts it in."""
    import peft

    torch.manual_seed(4)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.train(), example


def built(subject: str, dtype: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, example = BUILD[subject]()
    model.to(getattr(torch, dtype))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}], lr=3e-3, eps=EPS
    )
    return model, optimizer, cast(example, dtype)


def made(
    subject: str, dtype: str, where: str, world: int, device: str | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrapped. On a `device` that the ranks share, over gloo."""
    torch.set_num_threads(1)
    if device is not None:
        dist.init_process_group("gloo")
    model, optimizer, example = built(subject, dtype)
    plan = Plans(model, optimizer, example, gpu="32MiB" if device is None else ON_GPU).of(world, where)
    limits = hightide.Limits(disk=f"{tempfile.gettempdir()}:64MiB") if plan.disk_limit_bytes else None
    return hightide.wrap(model, optimizer, example, plan=plan, limits=limits, device=device)


def cast(batch: Any, dtype: str) -> Any:
    return {
        name: value.to(getattr(torch, dtype)) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


if not torch.backends.cuda.is_built():  # profiles that most tests need, made once: see ranked_training.py
    for kept in ("bfloat16", "float16"):
        Plans(*built("hand_written", kept))


def trained(model: Any, optimizer: Any, subject: str, dtype: str, rank: int, begin: int, end: int) -> list[float]:
    batch = models.vector_batch if subject == "hand_written" else models.token_batch
    batches = [cast(batch(seed=100 * rank + step, num_samples=NUM_SAMPLES), dtype) for step in range(begin, end)]
    return steps(model, optimizer, batches, 0.5, 1)["losses"]


def tensors_in(path: Path) -> dict[str, str]:
    """Of a checkpoint: of the model and of the optimizer, each with its bits."""
    return {
        f"{file.name[:5]} {name}": digest({name: stored.read()})[:16]
        for file in sorted(path.glob("*.safetensors"))
        if not file.name.startswith("training")
        for name, stored in sorted(read_header(file, ALL_DTYPES).items())
    }


def save_then_train(
    rank: int,
    world: int,
    subject: str,
    dtype: str,
    where: str,
    folder: str,
    num_steps: int = 2,
    device: str | None = None,
) -> dict[str, Any]:
    """Saves after two steps, and goes on for two more beside it."""
    manifest.PIECE_BYTES = PIECE_BYTES
    model, optimizer = made(subject, dtype, where, world, device)
    trained(model, optimizer, subject, dtype, rank, 0, num_steps)
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    saving = hightide.save(model, optimizer, folder, extra={"rank": rank}, rank_extra={"at": 10 * rank})
    drawn = [torch.rand(1).item(), random.random()]
    losses = trained(model, optimizer, subject, dtype, rank, num_steps, num_steps + 2)
    path = saving.wait(SAVED_WITHIN_S)
    hightide.unwrap(model)
    return {"losses": losses, "drawn": drawn, "tensors": tensors_in(path), "digest": digest(dict(model.state_dict()))}


def load_then_train(
    rank: int,
    world: int,
    subject: str,
    dtype: str,
    where: str,
    folder: str,
    again: str = "",
    num_steps: int = 2,
    device: str | None = None,
) -> dict[str, Any]:
    """`again`: where it is saved once more, at once."""
    manifest.PIECE_BYTES = PIECE_BYTES
    model, optimizer = made(subject, dtype, where, world, device)
    trained(model, optimizer, subject, dtype, rank, 7, 8)  # has states of its own
    loaded = hightide.load(model, optimizer, folder)
    found: dict[str, Any] = {"step": loaded.step, "extra": loaded.extra, "rank_extra": loaded.rank_extra}
    found["rank_extras"] = list(loaded.rank_extras)
    if again:
        found["tensors"] = tensors_in(hightide.save(model, optimizer, again, wait=True, on_error="raise").path)
    found["drawn"] = [torch.rand(1).item(), random.random()]
    found["losses"] = trained(model, optimizer, subject, dtype, rank, num_steps, num_steps + 2)
    hightide.unwrap(model)
    return {**found, "digest": digest(dict(model.state_dict()))}


def states_to_file(rank: int, world: int, subject: str, dtype: str, where: str, folder: str) -> dict[str, Any]:
    """State dicts, which the first rank saves; and a checkpoint of the same moment."""
    model, optimizer = made(subject, dtype, where, world)
    trained(model, optimizer, subject, dtype, rank, 0, 2)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    hightide.save(model, optimizer, folder, wait=True, on_error="raise")
    found: dict[str, Any] = {"is_empty": not states["model"] and not states["optimizer"]}
    if rank == 0:
        torch.save(states, f"{folder}/states.pt")
        saved = hightide.optimizer_state_dict(folder)["state"]
        its = states["optimizer"]["state"]
        found["same"] = its.keys() == saved.keys() and all(
            its[index].keys() == state.keys() and all(torch.equal(its[index][name], one) for name, one in state.items())
            for index, state in saved.items()
        )
        found["masters"] = len(states["optimizer"].get("hightide_masters", ()))
    found["losses"] = trained(model, optimizer, subject, dtype, rank, 2, 4)
    return found


def states_from_file(
    rank: int, world: int, subject: str, dtype: str, where: str, folder: str, optimizer_first: bool = False
) -> dict[str, Any]:
    model, optimizer = made(subject, dtype, where, world)
    trained(model, optimizer, subject, dtype, rank, 7, 8)
    if optimizer_first:
        states = torch.load(f"{folder}/states.pt", weights_only=True)
        optimizer.load_state_dict(states["optimizer"])
        model.load_state_dict(states["model"])
        step = states["step"]
    else:
        step = hightide.load(model, optimizer, f"{folder}/states.pt").step
    path = hightide.save(model, optimizer, f"{folder}/again", wait=True, on_error="raise").path
    losses = trained(model, optimizer, subject, dtype, rank, 2, 4)
    return {"step": step, "losses": losses, "tensors": tensors_in(path), "saved": tensors_in(Path(folder) / "step-2")}


def pretrained(rank: int, world: int, subject: str, where: str, folder: str) -> dict[str, Any]:
    model, optimizer = made(subject, "float32", where, world)
    trained(model, optimizer, subject, "float32", rank, 0, 1)
    model.save_pretrained(f"{folder}/of-ranks")
    with hightide.on_all_ranks(model):
        state = model.state_dict()
    try:
        refusal = str(model.save_pretrained(f"{folder}/refused", max_shard_size="1GB"))
    except hightide.Refused as refused:
        refusal = str(refused)
    hightide.unwrap(model)
    if rank == 0:
        model.save_pretrained(f"{folder}/plain")
    return {"num_tensors": len(state), "digest": digest(dict(state)), "refusal": refusal}


def in_groups(rank: int, world: int, folder: str, subject: str, groups: list[list[int]]) -> list[str]:
    """Each group trains a model, and saves it in folders of its own; and each rank a plain one. The files there are."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = next(members for members in groups if rank in members)
    group = {members[0]: dist.new_group(members) for members in groups}[mine[0]]
    model, optimizer, example = built(subject, "float32")
    hightide.save(model, optimizer, f"{folder}/{rank}/plain", step=0)
    plan = Plans(model, optimizer, example).of(len(mine), "mixed")
    model, optimizer = hightide.wrap(model, optimizer, example, plan=plan, group=group)
    trained(model, optimizer, subject, "float32", rank, 0, 1)
    own = f"{folder}/{mine[0]}"
    hightide.save(model, optimizer, f"{own}/saved", wait=True, on_error="raise")
    model.save_pretrained(f"{own}/pretrained")
    state = model.state_dict()
    if rank == mine[0]:
        model.save_pretrained(f"{own}/state", state_dict=state)
    hightide.unwrap(model)
    dist.barrier()
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


# ---- what goes wrong


FAULTS = {"full": ("write", errno.ENOSPC), "read-only": ("open_to_write", errno.EROFS), "unsynced": ("sync", errno.EIO)}


def failing(kind: str, rank: int, victim: int) -> Any:
    """From now on, on one rank. Returns what makes it good again."""
    if rank != victim:
        return lambda: None
    name, number = FAULTS[kind]
    real = getattr(filesystem, name)

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    setattr(filesystem, name, fail)
    return lambda: setattr(filesystem, name, real)


def fails(rank: int, world: int, folder: str, kinds: list[tuple[str, int]]) -> dict[str, Any]:
    """Every second save, each in its own way; training goes on."""
    shared_folder.VISIBLE_S = 0.5
    model, optimizer = made("hand_written", "float32", "mixed", world)
    found: dict[str, Any] = {}
    for index, (kind, victim) in enumerate(kinds):
        trained(model, optimizer, "hand_written", "float32", rank, 2 * index, 2 * index + 1)
        hightide.save(model, optimizer, folder, wait=True, on_error="raise", keep=1)
        trained(model, optimizer, "hand_written", "float32", rank, 2 * index + 1, 2 * index + 2)
        found[f"{kind} {victim}"] = _failed(model, optimizer, folder, kind, rank, victim)
    return found


def _failed(model: Any, optimizer: Any, folder: str, kind: str, rank: int, victim: int) -> dict[str, Any]:
    other = f"{folder}/elsewhere" if (kind, rank) == ("elsewhere", victim) else folder
    rank_extra = object() if (kind, rank) == ("extra", victim) else 1
    step = 100 if kind == "tensors" or (kind, rank) == ("step", victim) else None
    its_optimizer = None if (kind, rank) == ("tensors", victim) else optimizer
    make_good = failing(kind, rank, victim) if kind in FAULTS else None
    said = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            hightide.save(model, its_optimizer, other, step=step, rank_extra=rank_extra).wait(SAVED_WITHIN_S)
        except ValueError as error:
            said = str(error)
    if make_good is not None:
        make_good()
    there = sorted(path.name for path in Path(folder).glob("step-*") if not path.name.endswith(".tmp"))
    whole = [name for name in there if not damages(Path(folder) / name)]
    return {"said": said, "warned": " ".join(str(one.message) for one in warned), "there": there, "whole": whole}


def is_busy(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The first rank still writes, the other has done its part."""
    real, may_end = SharedContent._look_at_others, threading.Event()

    def look(content: SharedContent, saving: Any) -> None:
        if rank == 0:
            may_end.wait(SAVED_WITHIN_S)
        real(content, saving)

    SharedContent._look_at_others = look  # type: ignore[method-assign]
    model, optimizer = made("hand_written", "float32", "streamed", world)
    first = hightide.save(model, optimizer, folder, step=1)
    if rank == 1:
        first.wait(SAVED_WITHIN_S)
    try:
        hightide.save(model, optimizer, folder, step=2, busy="refuse")
        told = ""
    except hightide.Refused as refused:
        told = str(refused)
    is_done = first.done
    may_end.set()
    last = hightide.save(model, optimizer, folder, step=3, wait=True, on_error="raise")
    return {"told": told, "was_done": is_done, "last": last.path.name, "lent": hightide.stats(model).save_peak_bytes}


def half_loads(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The newest checkpoint is damaged where one rank has its states."""
    manifest.PIECE_BYTES, read = 1024, []
    real = checked._Piece

    def piece(*args: Any) -> Any:
        read.append(args[1].name)
        return real(*args)

    model, optimizer = made("hand_written", "float32", "streamed", world)
    for step in range(2):
        trained(model, optimizer, "hand_written", "float32", rank, step, step + 1)
        path = hightide.save(model, optimizer, folder, wait=True, on_error="raise").path
    if rank == 1:
        file, chunks = path / "optimizer-00001-of-00001.safetensors", run_of(model).chunks
        key = max(chunks.places, key=lambda key: len(chunks.updated_range(key)))
        own, content = chunks.updated_range(key), bytearray(file.read_bytes())
        assert 4 * len(own) > 2 * manifest.PIECE_BYTES, (key, own)
        content[read_header(file)[f"{key}/exp_avg"].offset + 4 * (own.start + len(own) // 2)] ^= 1
        file.write_bytes(content)
    dist.barrier()
    tried = {
        "load": lambda: hightide.load(model, optimizer, folder),
        "train": lambda: trained(model, optimizer, "hand_written", "float32", rank, 2, 3),
        "save": lambda: hightide.save(model, optimizer, folder),
    }
    found: dict[str, Any] = {}
    for what, attempt in tried.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            found[what] = str(error)
    checked._Piece = piece
    loaded = hightide.load(model, optimizer, path.with_name("step-1"))
    sums = folder_module.manifest_of(loaded.path).files
    num_pieces = {file.name: len(file.crc32) for file in sums if file.name.startswith(("model", "optimizer"))}
    num_read = sum(name in num_pieces for name in read)
    found |= {"step": loaded.step, "num_read": num_read, "num_pieces": sum(num_pieces.values())}
    found["losses"] = trained(model, optimizer, "hand_written", "float32", rank, 1, 2)
    return found


def dies(rank: int, world: int, folder: str, victim: int, num_writes: int) -> None:
    """While the second checkpoint is written: one rank, by itself."""
    manifest.PIECE_BYTES = PIECE_BYTES
    model, optimizer = made("hand_written", "float32", "mixed", world)
    trained(model, optimizer, "hand_written", "float32", rank, 0, 1)
    hightide.save(model, optimizer, folder, wait=True, on_error="raise")
    trained(model, optimizer, "hand_written", "float32", rank, 1, 2)
    real, left = filesystem.write, [num_writes]

    def write(file: int, memory: memoryview, offset: int) -> int:
        left[0] -= 1
        if not left[0]:
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(file, memory, offset)

    if rank == victim:
        filesystem.write = write
    hightide.save(model, optimizer, folder).wait(SAVED_WITHIN_S)
