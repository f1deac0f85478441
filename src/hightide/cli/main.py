"""The command: reads settings, starts the work, and turns errors into exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import Parameter, Signature, signature
from pathlib import Path
from signal import SIGINT
from traceback import print_exc
from typing import Annotated, Any, NoReturn, Protocol, TextIO, get_type_hints, runtime_checkable

import torch
import typer
from rich.console import Console

from hightide import asked
from hightide.cli.checkpoints_command import CheckpointsOptions, checkpoints
from hightide.cli.doctor_command import DoctorOptions, doctor
from hightide.cli.plan_command import PlanOptions, plan
from hightide.cli.simulate_command import SimulateOptions, simulate
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.train.saves import SaveFailed
from hightide.cli.train.train_command import train
from hightide.cli.verify_command import VerifyOptions, verify
from hightide.ir.foreign import shown
from hightide.shard.agreement import FailedElsewhere
from hightide.shard.told import in_company, tell_once, told_elsewhere
from hightide.shard.watchman import RankFailure
from hightide.stores.store import OutOfMemory

PACKAGE = Path(asked.__file__).parent
LONGEST = 4000  # characters of a message
EXIT_OUT_OF_MEMORY = 1
EXIT_NOT_EQUAL = 1
EXIT_DAMAGED = 1
EXIT_BAD_INPUT = 2
EXIT_FAILED = 3  # there is no answer: a file or the output failed, or it is a fault of the program
EXIT_SIGNAL = 128  # and the number of the signal that ended it, as shells have it
EXIT_INTERRUPTED = EXIT_SIGNAL + SIGINT
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


def _command(name: str, options: type[Any]) -> Callable[[Callable[[Any], int]], None]:
    """Of the command line: its arguments are the fields of `options`, and --traceback. What it runs has the help as its
    docstring, and returns the exit code."""

    def add(run: Callable[[Any], int]) -> None:
        def command(traceback: bool, **given: Any) -> None:
            with _errors_as_exit_codes(traceback):
                code = run(options(**given))
            if code:
                raise typer.Exit(code)

        types = {**get_type_hints(options, include_extras=True), "traceback": _TRACEBACK}
        last = Parameter("traceback", Parameter.KEYWORD_ONLY, default=False)
        parameters = [
            parameter.replace(annotation=types[parameter.name])
            for parameter in (*signature(options).parameters.values(), last)
        ]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__, command.__doc__ = types, run.__doc__
        app.command(name)(command)

    return add


_TRACEBACK = Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")]


@_command("train", TrainOptions)
def _train(options: TrainOptions) -> int:
    """Fine-tune a model from a Hugging Face folder, or LoRA adapters on it.

    hightide train --model FOLDER --data chat.jsonl --completions-only --gpu 24GiB

    The trained model and its tokenizer end up in the run folder.

    Without --model and --data, a tiny model is trained on Python's own source.

    Several GPUs: torchrun --nproc-per-node 2 -m hightide train ..."""
    if options.config is not None and options.config_option is not None:
        raise ValueError(f"two settings files, {options.config} and {options.config_option}; give one")
    config = load_config(options.config or options.config_option, options)
    stopped = train(config, _console(), options.record)
    return 0 if stopped is None else EXIT_SIGNAL + stopped


@_command("doctor", DoctorOptions)
def _doctor(options: DoctorOptions) -> int:
    """Measure this machine (links, matrix products, memory, host update) and point out what is set up badly."""
    doctor(options, _present_device(), _console(), _console(stderr=True))
    return 0


@_command("plan", PlanOptions)
def _plan(options: PlanOptions) -> int:
    """Forecast a training run: does it fit, how fast is it, what would help. Needs no weights and no GPU."""
    return 0 if plan(options, _present_device(), _console(), _console(stderr=True)) else EXIT_OUT_OF_MEMORY


@_command("verify", VerifyOptions)
def _verify(options: VerifyOptions) -> int:
    """Train a few steps in plain PyTorch and in hightide, and report whether the two differ, and where first."""
    return 0 if verify(options, _console(), _console(stderr=True)) else EXIT_NOT_EQUAL


@_command("checkpoints", CheckpointsOptions)
def _checkpoints(options: CheckpointsOptions) -> int:
    """List the checkpoints of a run: step, loss, size, plan, and if they are intact. Exit code 1 if one is damaged."""
    return 0 if checkpoints(options, _console(), _console(stderr=True)) else EXIT_DAMAGED


@_command("simulate", SimulateOptions)
def _simulate(options: SimulateOptions) -> int:
    """Simulate one step of a plan: its time, what each lane does when, and what GPU memory is used for."""
    simulate(options, _present_device(), _console())
    return 0


def run() -> NoReturn:
    """The command of this process. What is wrong with its line is told by one of several ranks, too."""
    warnings.showwarning = _show_warning
    if not in_company():
        app(prog_name="hightide")
        raise SystemExit
    try:
        code = app(prog_name="hightide", standalone_mode=False)
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except Exception as error:
        if not isinstance(error, _WrongLine):
            raise
        code = tell_once(error.format_message(), error.exit_code, error.show)
    raise SystemExit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Of ours the text alone: users of the command have no use for the place in hightide that it comes from."""
    text = f"warning: {message}\n"
    if not (category is UserWarning and Path(filename).is_relative_to(PACKAGE)):
        text = warnings.formatwarning(message, category, filename, lineno, line)
    with suppress(OSError):
        (file or sys.stderr).write(text)


@runtime_checkable
class _WrongLine(Protocol):
    """An error of typer's parser, which is click's or, in newer versions, its own copy of that."""

    exit_code: int

    def format_message(self) -> str: ...
    def show(self) -> None: ...


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled: rich would exit with the code for "does not fit"


def _console(stderr: bool = False) -> Console:
    """Text as it is: no numbers in colour, no ":llama:" as an emoji."""
    return _Output(stderr=stderr, highlight=False, emoji=False)


def _present_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if asked.has_cuda() else torch.device("cpu")


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
    except (FailedElsewhere, RankFailure) as error:
        code = told_elsewhere()
        if code is None:
            code = _say(errors, str(error), EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED, traceback)
        raise typer.Exit(code) from None
    except (ValueError, OutOfMemory) as error:
        code = EXIT_OUT_OF_MEMORY if isinstance(error, OutOfMemory) else EXIT_BAD_INPUT
        raise typer.Exit(_say(errors, str(error), code, traceback)) from None
    except SaveFailed as error:
        raise typer.Exit(_say(errors, str(error), EXIT_FAILED, traceback)) from None
    except OSError as error:
        _discard(sys.stdout)
        what = error.filename if error.filename is not None else "the output"
        message = f"{what} cannot be read or written: {error.strerror or error}"
        raise typer.Exit(_say(errors, message, EXIT_FAILED, traceback)) from None
    except Exception as error:
        print_exc()
        message = f"{type(error).__name__}, which is a fault of hightide; please report it, with the lines above"
        raise typer.Exit(_say(errors, message, EXIT_FAILED)) from None


def _say(errors: Console, message: str, code: int, traceback: bool = False) -> int:
    """Once, by one of several ranks. Returns the exit code."""

    def say() -> None:
        if traceback:
            print_exc()
        else:
            errors.print(f"error: {shown(message, LONGEST)}", style="red", markup=False, soft_wrap=True)

    return tell_once(message, code, say)


def _discard(*streams: TextIO) -> None:
    """What they still hold. Python would try once more to write it when it ends, and exit with a code of its own."""
    for stream in streams:
        with suppress(OSError):  # one that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
