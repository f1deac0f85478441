"""The command: reads settings, starts the work, and turns errors into exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import print_exc
from typing import Annotated, TextIO

import torch
import typer
from rich.console import Console

from hightide import api
from hightide.cli.config import Overrides, load_config
from hightide.cli.doctor_command import DoctorOptions, doctor
from hightide.cli.plan_command import PlanOptions, plan
from hightide.cli.simulate_command import SimulateOptions, simulate
from hightide.cli.train_command import train
from hightide.cli.verify_command import VerifyOptions, verify
from hightide.cli.workload import LENGTH, SEQUENCES, Dtype
from hightide.ir.foreign import shown
from hightide.ir.plan import GradientDtype, Update
from hightide.stores.store import OutOfMemory

LONGEST = 4000  # characters of a message
EXIT_OUT_OF_MEMORY = 1
EXIT_NOT_EQUAL = 1
EXIT_BAD_INPUT = 2
EXIT_FAILED = 3  # there is no answer: a file or the output failed, or it is a fault of the program
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: nobody reads the rest

app = typer.Typer(
    help="Train PyTorch models that are bigger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hightide {importlib.metadata.version('hightide')}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("train")
def train_command(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; all have defaults.", show_default=False)
    ] = None,
    config_option: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu: the simulated accelerator.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Limit of accelerator memory, such as 24MiB.")] = None,
    host: Annotated[str | None, typer.Option(help="Limit of host memory, such as 2GiB.")] = None,
    update: Annotated[Update | None, typer.Option(help="When the optimizer's updates run.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm; 0: do not.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder that run folders are made in.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data and sample.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Record the last step, for `hightide simulate`.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Train a small Llama-shaped model on bytes of text: by default, Python's own source."""
    console = _console()
    overrides = Overrides(
        name=name,
        out=out,
        seed=seed,
        steps=steps,
        micro_batch=micro_batch,
        update=update,
        device=device,
        gpu=gpu,
        host=host,
        clip_norm=clip_norm,
    )
    with _errors_as_exit_codes(traceback):
        if config is not None and config_option is not None:
            raise ValueError(f"two settings files, {config} and {config_option}; give one")
        finished = train(load_config(config or config_option, overrides), console, record)
    if not finished:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command("doctor")
def doctor_command(
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure this disk too; says how much it will write.")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the temporary file there; 16GiB by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a machine file, for planning elsewhere.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else there.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Measure this machine: links, matrix products, host update, memory; and say what is set up badly."""
    with _errors_as_exit_codes(traceback):
        options = DoctorOptions(disk, disk_bytes, out, as_json)
        doctor(options, _present_device(), _console(), _console(stderr=True))


@app.command("plan")
def plan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset's name, a Hugging Face config folder, or FILE.py:FUNCTION.")
    ],
    sequences: Annotated[int | None, typer.Option(help=f"Sequences per step; {SEQUENCES} by default.")] = None,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence; {LENGTH} by default, or what the model takes.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of GPU memory; else the machine's.")] = None,
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of host memory; else the machine's.")] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER:SIZE", help="For what the host cannot hold; only planned yet. May be repeated."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A preset or a machine file; else what doctor measured here."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the parameters; else the config's, or bfloat16.")] = None,
    lora: Annotated[
        str | None, typer.Option(metavar="RANK[:TARGETS]", help="LoRA with PEFT, such as 16 or 16:q_proj,v_proj.")
    ] = None,
    update: Annotated[Update, typer.Option(help="When the optimizer's updates run.")] = Update.DEFERRED,
    clip: Annotated[bool, typer.Option("--clip", help="The loop clips gradients: updates are deferred.")] = False,
    gradients: Annotated[
        GradientDtype, typer.Option(help="What finished gradients are rounded to.")
    ] = GradientDtype.FLOAT32,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch; else the plan decides.")] = None,
    look: Annotated[
        float, typer.Option(metavar="SECONDS", help="Look for what would help for so long, at least.")
    ] = 0.0,
    why: Annotated[
        str | None, typer.Option(metavar="BLOCK", help="What other ways to plan this block would cost.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan, for wrap(plan=...).")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory and lanes into one HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else there.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Plan a training run before there is one: does it fit, how fast is it, what would help. No weights, no GPU."""
    with _errors_as_exit_codes(traceback):
        options = PlanOptions(
            model=model,
            sequences=sequences,
            length=length,
            gpu=gpu,
            host=host,
            disk=tuple(disk or ()),
            machine=machine,
            dtype=dtype,
            lora=lora,
            update=update,
            clip=clip,
            gradients=gradients,
            micro_batch=micro_batch,
            look=look,
            why=why,
            save=save,
            html=html,
            as_json=as_json,
        )
        fits = plan(options, _present_device(), _console(), _console(stderr=True))
    if not fits:
        raise typer.Exit(EXIT_OUT_OF_MEMORY)


@app.command("verify")
def verify_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset's name, a Hugging Face config folder, or FILE.py:FUNCTION.")
    ],
    sequences: Annotated[int | None, typer.Option(help="Sequences per step; a few by default.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence; a few by default.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the parameters; what is compared is fp32.")] = None,
    lora: Annotated[
        str | None, typer.Option(metavar="RANK[:TARGETS]", help="LoRA with PEFT, such as 16 or 16:q_proj,v_proj.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of GPU memory in hightide.")] = None,
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of host memory in hightide.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch; else a third.")] = None,
    update: Annotated[Update, typer.Option(help="When the optimizer's updates run.")] = Update.DEFERRED,
    gradients: Annotated[
        GradientDtype, typer.Option(help="What finished gradients are rounded to.")
    ] = GradientDtype.FLOAT32,
    compile: Annotated[bool, typer.Option("--compile", help="Blocks through torch.compile.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu: the simulated accelerator.")] = None,
    steps: Annotated[int, typer.Option(help="Number of optimizer steps.")] = 2,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What plain PyTorch may take; else what is free.")
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Train a few steps in plain PyTorch and in hightide, and say whether, or where first, the two differ."""
    with _errors_as_exit_codes(traceback):
        options = VerifyOptions(
            model=model,
            sequences=sequences,
            length=length,
            dtype=dtype,
            lora=lora,
            gpu=gpu,
            host=host,
            micro_batch=micro_batch,
            update=update,
            gradients=gradients,
            compile=compile,
            device=device,
            steps=steps,
            memory=memory,
        )
        is_equal = verify(options, _console(), _console(stderr=True))
    if not is_equal:
        raise typer.Exit(EXIT_NOT_EQUAL)


@app.command("simulate")
def simulate_command(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN.json|FOLDER", help="A plan file, or a folder of `hightide train --record`.")
    ],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A preset or a machine file; else what doctor measured here."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Times of blocks from a rehearsal; else estimated.")
    ] = None,
    measured: Annotated[Path | None, typer.Option(metavar="FILE", help="A recorded step to show beside it.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory and lanes into one HTML page.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the simulated step as JSON.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Show how a step of a plan will go by: its time, what each lane does when, what GPU memory is used for."""
    with _errors_as_exit_codes(traceback):
        options = SimulateOptions(plan, machine, costs, measured, html, json)
        simulate(options, _present_device(), _console())


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled: rich would exit with the code for "does not fit"


def _console(stderr: bool = False) -> Console:
    """Text as it is: no numbers in colour, no ":llama:" as an emoji."""
    return _Output(stderr=stderr, highlight=False, emoji=False)


def _present_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if api.has_cuda() else torch.device("cpu")


@contextmanager
def _errors_as_exit_codes(traceback: bool) -> Iterator[None]:
    """What users can cause is one message; with `traceback` it is shown where it came from."""
    errors = _console(stderr=True)
    try:
        yield
    except KeyboardInterrupt:
        errors.print("\ninterrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _discard(sys.stdout, sys.stderr)
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (ValueError, OutOfMemory) as error:
        _say(errors, str(error), traceback)
        raise typer.Exit(EXIT_OUT_OF_MEMORY if isinstance(error, OutOfMemory) else EXIT_BAD_INPUT) from None
    except OSError as error:
        _discard(sys.stdout)
        what = error.filename if error.filename is not None else "the output"
        _say(errors, f"{what} cannot be read or written: {error.strerror or error}", traceback)
        raise typer.Exit(EXIT_FAILED) from None
    except Exception as error:
        print_exc()
        _say(errors, f"{type(error).__name__}, which is a fault of hightide; please report it, with the lines above")
        raise typer.Exit(EXIT_FAILED) from None


def _say(errors: Console, message: str, traceback: bool = False) -> None:
    if traceback:
        print_exc()
    else:
        errors.print(f"error: {shown(message, LONGEST)}", style="red", markup=False, soft_wrap=True)


def _discard(*streams: TextIO) -> None:
    """What they still hold. Python would try once more to write it when it ends, and exit with a code of its own."""
    for stream in streams:
        with suppress(OSError):  # one that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
