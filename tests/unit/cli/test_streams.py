"""What a terminal cannot show is shown otherwise; a closed stream is no place for other files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from hightide.cli import streams

SOURCE = str(Path(streams.__file__).parents[2])
START = f"import sys; sys.path.insert(0, {SOURCE!r}); from hightide.cli.streams import make_usable; make_usable(); "


def shown(script: str, redirection: str = "", **variables: str) -> bytes:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", START + script]
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        command, env={**environment, **variables}, capture_output=True, check=True, timeout=60
    ).stdout.replace(b"\r", b"")


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"a -> b x 3 us ? ?\n"),
        ("latin-1", b"a -> b \xd7 3 \xb5s ? ?\n"),
        ("cp1252", b"a -> b \xd7 3 \xb5s ? ?\n"),
        ("utf-8", "a → b × 3 µs 日 █\n".encode()),
    ],
)
def test_letters_that_a_terminal_lacks_are_written_otherwise(encoding: str, expected: bytes) -> None:
    assert shown("print('a → b × 3 µs 日 █')", PYTHONIOENCODING=encoding) == expected


def test_posix_locales_without_utf8_mode_are_ascii() -> None:
    variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert shown("print(chr(0x2192))", **variables) == b"->\n"


def test_a_closed_stream_takes_what_is_printed_and_no_file_takes_its_number(tmp_path: Path) -> None:
    target = tmp_path / "file"
    script = (
        f"import os; file = open({str(target)!r}, 'w'); assert file.fileno() > 2, file.fileno(); "
        "print('lost'); print('lost', file=sys.stderr); os.write(1, b'lost'); file.write('kept'); file.close()"
    )
    shown(script, "<&- >&- 2>&-")
    assert target.read_text() == "kept"


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ("80", "80"),
        ("1", "1"),
        ("0", None),
        ("-5", None),
        ("²", None),
        ("wide", None),
        ("9" * 30, None),
        ("1001", None),
    ],
)
def test_widths_that_are_none_are_not_used(columns: str, kept: str | None) -> None:
    assert shown("import os; print(os.environ.get('COLUMNS'))", COLUMNS=columns) == f"{kept}\n".encode()


def test_a_working_folder_that_is_gone_is_said_before_torch_is_there() -> None:
    script = 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$@"'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "hightide", "--version"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2 and "the working folder is gone" in ended.stderr


def test_an_interrupt_while_the_command_is_loaded_ends_it() -> None:
    script = f"""
        import os, runpy, signal, sys
        sys.path.insert(0, {SOURCE!r})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        class Interrupt:
            def find_spec(self, name, path=None, target=None):
                if name == "hightide.cli.main":
                    try:
                        os.kill(os.getpid(), signal.SIGINT)
                    except BaseException:  # as torch does, while it imports numpy
                        pass
        sys.meta_path.insert(0, Interrupt())
        runpy.run_module("hightide", run_name="__main__")
    """
    ended = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "\ninterrupted\n")
