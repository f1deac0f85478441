"""Kernels in C, built on first use with the system's compiler and kept in the user's cache folder. Optional: without a
compiler everything runs on torch's own operations, and says so once."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from importlib import resources
from pathlib import Path

from hightide.machine import KERNELS_SWITCH, cache_folder, own_kernels_allowed

# Never -ffast-math: infinities and NaN must come out as they do in torch. The last two only let loops become vectors.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-shared",
    "-fPIC",
)
COMPILE_TIMEOUT_S = 120.0


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of kernels/<name>.c. None if it is switched off, or cannot be built here."""
    if not own_kernels_allowed():
        return None
    try:
        return ctypes.CDLL(str(build(name, _source(f"{name}.c"), cache_folder() / "kernels")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home folder
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
        warnings.warn(
            f"the compiled {name} update is not available ({detail.strip()[-500:]}), so updates run on torch's "
            "operations: same results, more load on Python. Install a C compiler (or set CC), or silence this with "
            f"{KERNELS_SWITCH}=0",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _source(file: str) -> bytes:
    """With our headers put in: one text to hash and to compile."""
    text = resources.files("hightide.optim").joinpath("kernels", file).read_bytes()
    return re.sub(rb'^#include "(\w+\.h)"$', lambda found: _source(found[1].decode()), text, flags=re.MULTILINE)


def build(name: str, source: bytes, folder: Path) -> Path:
    """The path of the library, compiled unless it is there. Processes that build at once do not see half a file."""
    compiler = _compiler()
    library = folder / f"{name}-{_key(source, compiler)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        code, made = Path(scratch, f"{name}.c"), Path(scratch, f"{name}.so")
        code.write_bytes(source)
        command = [*compiler, *FLAGS, str(code), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(made, library)
    return library


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    found = shutil.which(words[0])
    if found is None:
        raise FileNotFoundError(f"there is no C compiler {words[0]!r}")
    return [found, *words[1:]]


def _key(source: bytes, compiler: list[str]) -> str:
    """A home folder may be shared by machines whose processors differ."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    digest = hashlib.sha256()
    for part in (source, " ".join((*compiler, *FLAGS)).encode(), version.stdout, _processor().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    stable = [
        line for line in lines if line.startswith(("model", "cpu family", "stepping", "flags", "Features", "CPU "))
    ]
    return "\n".join([platform.machine(), platform.processor(), *stable])
