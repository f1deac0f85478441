"""The figures that the project wants of itself on an H200: one command, a table of wanted and found.

    python bench/figures.py --list                         # figures, cases, calls to paste, with their seconds
    python bench/figures.py --call 1 --disk /tmp --save runs/figures.json --save "$KEPT/figures.json"
    python bench/figures.py --only w1,1b --budget 570      # groups by name
    python bench/figures.py --rehearse                     # every case with a tiny model, without a GPU
    python bench/figures.py --table --save figures.json    # what was found so far; runs nothing

A figure needs one or more cases (`figure_cases.py`), each in a process of its own with a limit of seconds. Cases run in
the order of the list, while the budget lasts; what each one printed is saved at once, in every file of `--save`, so
that a call that is cut off loses one case only, and the next call with the same file goes on behind it. A ratio is
taken of cases of one call alone, because no two machines are alike: where one of them is missing or of another call,
all of them run again. What failed runs again too.

`--call N` is the N-th of the calls of at most 9.5 minutes that `--list` shows, the most valuable first. On a machine
with nothing but a checkout they are pasted one after the other:

    for N in 1 2 3: PYTHONPATH=src python bench/figures.py --call N --save runs/figures.json

Other systems need `--peers DIR`, a folder with `py/` (DeepSpeed, RoundPipe and what they need) and `aio/` (libaio);
comparisons with an older version need `--old DIR` (`git archive COMMIT src bench | tar -x -C DIR`). Cases without
theirs are left out, and said so. Each case has the folder `--disk`/figures-scratch for itself, emptied before and after
it: a case that was killed leaves nothing that the next one has no room beside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any

from figure_cases import BY_NAME_ONLY, CALLS, CASES, FIGURES, FIRST, Case, Figure, Result, step_s

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
GIB = 1 << 30
CALL_S = 570.0
KEPT_CHARS = 4000  # of what a case printed beside its JSON, and of its errors
MEDIAN_OFF, WORST_OFF = 0.04, 0.10  # wanted of forecasts of seconds
DISK_MEDIAN_OFF, DISK_WORST_OFF = 0.05, 0.12  # where a disk takes part


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="figures, cases and calls; runs nothing")
    add("--table", action="store_true", help="what is saved; runs nothing")
    add("--only", help="groups of figures, with commas")
    add("--call", type=int, metavar="N", help=f"the groups of the N-th call, 1 to {len(CALLS)}")
    add("--budget", type=float, default=CALL_S, help="seconds; no case begins that is expected to outlast it")
    add("--save", action="append", help="what was found; the next call goes on from the first that is there")
    add("--disk", default="/tmp", help="folder for checkpoints and what is trained from a disk")
    add("--peers", help="folder with DeepSpeed and RoundPipe")
    add("--old", help="folder with src and bench of an older version")
    add("--rehearse", action="store_true", help="all cases as they are, but with a tiny model and without a GPU")
    options = parser.parse_args(argv)
    if options.call is not None and not 1 <= options.call <= len(CALLS):
        parser.error(f"--call {options.call}: there are 1 to {len(CALLS)}")
    groups = {figure.group for figure in FIGURES.values()}
    options.groups = groups - BY_NAME_ONLY
    if options.only or options.call:
        options.groups = set(options.only.split(",") if options.only else CALLS[options.call - 1])
    if options.groups - groups:
        unknown = ", ".join(sorted(options.groups - groups))
        parser.error(f"--only {options.only}: no group {unknown}; {', '.join(sorted(groups))}")
    options.save = options.save or ["figures.json"]
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the case that runs is ended too
    figures = {name: figure for name, figure in FIGURES.items() if figure.group in options.groups}
    if options.list:
        print_list(figures)
        return 0
    if options.rehearse:
        return rehearse(options, cases_of(options.groups))
    results = Results([Path(path) for path in options.save], Runner(options.disk, options.peers, options.old))
    if not options.table:
        results.run(figures.values(), options.budget)
    print_runs(results.of, figures.values())
    print_figures(results.of, figures)
    return 0


# -- running ----------------------------------------------------------------------------------------------------------


class Runner:
    """Starts cases, one at a time, each with a folder and an environment of its own."""

    def __init__(self, disk: str, peers: str | None = None, old: str | None = None) -> None:
        self.scratch = Path(disk).resolve() / "figures-scratch"
        self.extensions = (
            Path(disk).resolve() / "figures-extensions"
        )  # of other systems, compiled by the first case of a machine
        self.given = {"peers": peers and str(Path(peers).resolve()), "old": old and str(Path(old).resolve())}

    def missing(self, case: Case) -> str:
        """The option without which a case is left out; "" where all is there."""
        return f"--{case.needs}" if case.needs and not self.given[case.needs] else ""

    def run(self, name: str, command: str, limit_s: float) -> Result:
        program, *options = shlex.split(command.format(disk=self.scratch, old=self.given["old"] or "OLD"))
        print(f"{name}: {program} {shlex.join(options)}", flush=True)
        start = [str(BENCH / program)] if program.endswith(".py") else ["-m", program]
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        for lock in self.extensions.glob("**/lock"):  # of a case that was ended while it compiled: others wait for ever
            lock.unlink()
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, *start, *options],
                stdout=printed,
                stderr=errors,
                cwd=ROOT,
                env=self._environment(name),
                start_new_session=True,
            )
            try:
                status = f"exit {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                status = f"not finished in {limit_s:.0f} s"
            finally:
                _end(process)
                shutil.rmtree(self.scratch, ignore_errors=True)
            text, error = _text(printed), _text(errors)
        result = found_in(text, is_pytest=program == "pytest")
        if status != "exit 0" and not (program == "pytest" and "failed" in result):
            result = {"error": status, "stderr": error[-KEPT_CHARS:], **result}
            print(f"{name}: {status}\n{error[-1500:]}", flush=True)
        return {**result, "wall_s": round(time.monotonic() - began_s, 1)}

    def _environment(self, name: str) -> dict[str, str]:
        paths, more = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")], {}
        if CASES[name].needs == "peers" and self.given["peers"]:
            peers = Path(self.given["peers"])
            paths.append(str(peers / "py"))
            libraries = [str(peers / "aio" / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib")]
            more = {
                "CPATH": str(peers / "aio" / "usr" / "include"),
                "LIBRARY_PATH": ":".join(libraries),
                "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
                "TORCH_CUDA_ARCH_LIST": "9.0",
                "TORCH_EXTENSIONS_DIR": str(self.extensions),
            }
        return {**os.environ, **more, "PYTHONPATH": ":".join(filter(None, paths))}


def _end(process: subprocess.Popen[Any]) -> None:
    """With its children, whatever became of it: the next case needs the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def found_in(text: str, is_pytest: bool = False) -> Result:
    """What a case has printed. Lines of JSON are taken together, and kept one by one where there are several."""
    if is_pytest:
        return pytest_counts(text)
    rows = [(line, _json(line)) for line in text.splitlines()]
    lines = [row for _, row in rows if row is not None]
    words = "\n".join(line for line, row in rows if row is None)[-KEPT_CHARS:]
    found: Result = {}
    for line in lines:
        found |= line
    return found | ({"lines": lines} if len(lines) > 1 else {}) | ({"printed": words} if words else {})


def _json(line: str) -> Result | None:
    """None: it is for a reader, or some library's."""
    try:
        return dict(json.loads(line)) if line.startswith('{"') else None
    except ValueError:
        return None


def pytest_counts(text: str) -> Result:
    """Of the last line, errors counted as failures; nothing where there is none. The names of what failed beside."""
    last = next((line for line in reversed(text.splitlines()) if " in " in line and re.search(r"\d+ \w+", line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    if not counts:
        return {"printed": text[-KEPT_CHARS:]}
    failed = counts.pop("failed", 0) + counts.pop("error", 0) + counts.pop("errors", 0)
    names = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"passed": 0, **counts, "failed": failed, "names": names}


class Results:
    """What each case has printed, in files that are written after each of them."""

    def __init__(self, paths: list[Path], runner: Runner) -> None:
        self.paths, self.runner = paths, runner
        there = next((path for path in paths if path.exists()), None)
        self.of: dict[str, Result] = json.loads(there.read_text()) if there else {}
        self.call = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())

    def run(self, figures: Iterable[Figure], budget_s: float) -> None:
        end_s = time.monotonic() + budget_s
        for figure in figures:
            todo = [] if is_found(figure, self.of) else self._todo(figure)
            if lacking := next((name for name in todo if self.runner.missing(CASES[name])), None):
                print(f"{lacking}: left out, it needs {self.runner.missing(CASES[lacking])}")
                continue
            for at, name in enumerate(todo):
                case, left_s = CASES[name], end_s - time.monotonic()
                # Half of a ratio is none.
                expected = todo[at:] if figure.in_one_call else [name]
                if (together_s := sum(CASES[one].expected_s for one in expected)) > left_s:
                    names = ", ".join(expected)
                    print(f"{names}: not begun, {left_s:.0f} s are left and {together_s} are expected")
                    break
                self._add(name, self.runner.run(name, case.command, min(case.limit_s, left_s)))

    def _todo(self, figure: Figure) -> list[str]:
        found = []
        for name in (*FIRST.get(figure.group, ()), *figure.cases):
            known = self.of.get(name, {})
            if known.get("call") != self.call and ("error" in known or not known or figure.in_one_call):
                found.append(name)
        return found

    def _add(self, name: str, result: Result) -> None:
        self.of[name] = {**result, "call": self.call}
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.of, indent=1))
        expected_s = CASES[name].expected_s
        print(f"{name}: {result['wall_s']:.0f} s (expected {expected_s}); {_short(result)}", flush=True)


def _short(result: Result) -> str:
    if "error" in result:
        return str(result["error"])
    if "event_s" in result:
        told_s = (result.get("forecast") or {}).get("step_s")
        return f"{step_s(result):.4f} s a step" + (f", told {told_s:.4f}" if told_s else "")
    return json.dumps({key: result[key] for key in result if key not in ("lines", "printed")})[:300]


def is_found(figure: Figure, results: dict[str, Result]) -> bool:
    cases = [results.get(name, {"error": "not run"}) for name in figure.cases]
    all_run = all("error" not in case for case in cases)
    return all_run and (not figure.in_one_call or len({case["call"] for case in cases}) == 1)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def rehearse(options: argparse.Namespace, names: list[str]) -> int:
    """Finds typos and crashes. Figures are taken of the results, too: what they read must be there."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    runner = Runner(options.disk, options.peers, options.old or str(ROOT))
    results: dict[str, Result] = {}
    for name in names:
        case = CASES[name]
        if case.tiny is None:
            print(f"{name}: needs a GPU, not rehearsed", flush=True)
            continue
        results[name] = {**runner.run(name, f"{case.command} {case.tiny}", 300), "call": "rehearsal"}
        print(f"{name}: {results[name]['wall_s']:.0f} s; {_short(results[name])}", flush=True)
    failed = [name for name, result in results.items() if "error" in result]
    failed += [name for name, figure in FIGURES.items() if is_found(figure, results) and not _is_taken(figure, results)]
    print_runs(results, [figure for figure in FIGURES.values() if set(figure.cases) & set(results)])
    print(f"{len(results)} cases rehearsed, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    return int(bool(failed))


def _is_taken(figure: Figure, results: dict[str, Result]) -> bool:
    if any(CASES[name].command.startswith(("pytest", "turns")) for name in figure.cases):
        return True  # collected only, or of another workload
    found = taken(figure, results)
    return isinstance(found, float) or "gpu" in found  # memory of a GPU is counted on one only


# -- tables -----------------------------------------------------------------------------------------------------------


def print_list(figures: dict[str, Figure]) -> None:
    for group in dict.fromkeys(figure.group for figure in figures.values()):
        print(f"{group} ({expected_s([group])} s)")
        for name, figure in figures.items():
            if figure.group == group:
                print(f"    {name}: {'at least' if figure.at_least else 'at most'} {figure.wanted}")
        for case in cases_of([group]):
            one = CASES[case]
            about = f"{'~' if one.is_estimate else ''}{one.expected_s} s, at most {one.limit_s}"
            print(f"        {case} ({about}{', --' + one.needs if one.needs else ''}): {one.command}")
    print("\ncalls, the most valuable first")
    for number, groups in enumerate(CALLS, 1):
        needs = sorted({CASES[case].needs for case in cases_of(groups)} - {""})
        more = "".join(f" --{need} ..." for need in needs)
        print(f"    --call {number}{more}: {', '.join(groups)} ({expected_s(groups)} s)")


def cases_of(groups: Iterable[str]) -> list[str]:
    """In the order in which they run."""
    asked = set(groups)
    rows = [(figure.group, figure.cases) for figure in FIGURES.values() if figure.group in asked]
    return list(dict.fromkeys(case for group, cases in rows for case in (*FIRST.get(group, ()), *cases)))


def expected_s(groups: Iterable[str]) -> int:
    return sum(CASES[case].expected_s for case in cases_of(groups))


def print_runs(results: dict[str, Result], figures: Iterable[Figure]) -> None:
    """Forecast against found, and memory."""
    off: dict[bool, list[float]] = {False: [], True: []}  # by whether a disk takes part
    held_out: list[float] = []  # of both
    print(
        f"{'case':14} {'s/step':>8} {'told':>8} {'off':>7} {'reserved':>9} {'told':>7} {'retries':>7} {'RSS above':>9}"
    )
    for name in dict.fromkeys(case for figure in figures for case in figure.cases):
        result = results.get(name, {"error": "not run"})
        if "error" in result or "event_s" not in result:
            print(f"{name:14} {result.get('error', 'see its line')}")
            continue
        forecast = result.get("forecast") or {}
        has_disk = bool(forecast.get("disk_peak_bytes"))
        told_s, error = forecast.get("step_s"), None
        if told_s:
            error = told_s / (result["step_s"] if has_disk else step_s(result)) - 1
            off[has_disk].append(error)
            held_out += [error] if CASES[name].held_out else []
        reserved, limit = result.get("gpu_peak_reserved_bytes"), told_bytes(forecast)
        above, allowed = result.get("host_above_plan_bytes"), max(GIB, 0.02 * forecast.get("host_peak_bytes", 0))
        is_above = [
            *(["reserved above told"] if reserved and limit and reserved > limit else []),
            *(["retries"] if result.get("gpu_alloc_retries") else []),
            *(["RSS above told"] if above is not None and above > allowed else []),
        ]
        label = f"{name} *" if CASES[name].held_out else name
        print(
            f"{label:14} {step_s(result):8.4f} {_number(told_s, '8.4f')} {_number(error, '+7.1%')}"
            f" {_gib(reserved, 9)} {_gib(limit, 7)}"
            f" {result.get('gpu_alloc_retries', '-'):>7} {_gib(above, 9)}  {', '.join(is_above)}"
        )
    print_forecasts("", off[False], MEDIAN_OFF, WORST_OFF)
    print_forecasts(" with a disk", off[True], DISK_MEDIAN_OFF, DISK_WORST_OFF)
    print_forecasts(" held out (*: no constant was fitted to them)", held_out, MEDIAN_OFF, WORST_OFF)


def told_bytes(forecast: dict[str, Any]) -> int | None:
    """What the limit of the GPU is held against, as Forecast.gpu_bytes says it."""
    reserved = forecast.get("gpu_reserved_bytes")
    return forecast.get("gpu_peak_bytes") if reserved is None else int(reserved)


def print_forecasts(which: str, errors: list[float], median: float, worst: float) -> None:
    if errors:
        sizes = [abs(error) for error in errors]
        print(
            f"forecasts of {len(errors)} runs{which}: off by {statistics.median(sizes):.1%} in the median (wanted "
            f"{median:.0%}), {max(sizes):.1%} at worst (wanted {worst:.0%})"
        )


def _number(value: float | None, form: str) -> str:
    width = int(form.lstrip("+").split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def _gib(count: float | None, width: int) -> str:
    return f"{'-':>{width}}" if count is None else f"{count / GIB:{width}.2f}"


def taken(figure: Figure, results: dict[str, Result]) -> float | str:
    """What is found, or what a case that ended well has not told: one such figure must not cost the others."""
    try:
        return float(figure.found(*(results[case] for case in figure.cases)))
    except (KeyError, TypeError, IndexError, StopIteration, ZeroDivisionError) as error:
        return repr(error)


def print_figures(results: dict[str, Result], figures: dict[str, Figure]) -> None:
    print(f"\n{'figure':42} {'wanted':>8} {'found':>10}")
    for name, figure in figures.items():
        if not is_found(figure, results):
            print(f"{name:42} {figure.wanted:>8} {'-':>10}")
            continue
        found = taken(figure, results)
        if isinstance(found, str) or isnan(found):
            print(f"{name:42} {figure.wanted:>8} {found if isinstance(found, str) else 'none':>10}")
            continue
        is_met = found >= figure.bound if figure.at_least else found <= figure.bound
        text = f"{found:,.0f}" if found >= 100 else f"{found:.3g}" if abs(found) < 0.01 else f"{found:.3f}"
        print(f"{name:42} {figure.wanted:>8} {text:>10}{'' if is_met else '  not met'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
