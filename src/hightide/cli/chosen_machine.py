"""The machine that a command plans for."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console

from hightide.doctor.known import known_machine, load_machine, preset_names
from hightide.ir.machine import Machine

MachineOption = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="A preset or a machine file; default: what doctor measured here."),
]


def chosen_machine(name: str | None, device: torch.device, notes: Console) -> Machine:
    """A preset or a file by name, else what `hightide doctor` has measured here."""
    if name is not None:
        return load_machine(name)
    known = known_machine(device)
    if known.machine is None:
        raise ValueError(
            f"{known.problem}; run `hightide doctor`, or name a machine: --machine {'|'.join(preset_names())} or a file"
        )
    if known.problem:
        notes.print(f"note: {known.problem}; `hightide doctor` measures again", soft_wrap=True)
    return known.machine
