"""The findings of `verify`, and how they are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 80
MAX_WORST = 10  # rows that are shown where something differs
MAX_CLOSEST = 3  # where nothing does
MAX_NAMED = 3  # of many
LOOSE = 1e-3  # of its size: what is allowed to differ by more was hardly checked
NEGLIGIBLE = 1e-4  # of the largest of its kind
NAMED_ITSELF = ("buffer", "attribute", "result", "random state")  # the others are something of what is named
MARGIN = 8  # times what rounding was seen to do: hightide rounds in more places
_COLUMNS = (38, 10, 10, 9, 9)  # with one space between them: 80


@dataclass(frozen=True)
class ComparedRow:
    """One number or tensor of both runs. `plain` and `hightide` are its entries where they differ most."""

    what: str  # "output" of a block, "loss", "result" of the model, "gradient", "gradient norm", "update", ...
    where: str  # the block, parameter, buffer or attribute; "" where there is only one
    step: int  # counted from 1; 0: after training, in evaluation mode
    plain: float
    hightide: float
    difference: float  # infinite where one of the two does not exist, or is not a number
    allowed: float
    size: float  # the largest entry of the plain run
    run: str  # which one of `Verdict.runs`

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed

    @property
    def place(self) -> str:
        of = "of " if self.what not in NAMED_ITSELF else ""
        what = f"the {self.what}" + (f" {of}{self.where}" if self.where else "")
        return f"{what}, {f'step {self.step}' if self.step else 'after training'}"

    @property
    def excess(self) -> float:
        """1 is just allowed."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.allowed if self.allowed else float("inf")


@dataclass(frozen=True)
class Verdict:
    """`print` it: a table of at most 80 columns."""

    equal: bool
    rows: tuple[ComparedRow, ...]  # of every run, in the order in which it was computed
    runs: tuple[str, ...]  # how the model was trained in hightide
    changed: tuple[str, ...]  # in what the copies differ from the model, optimizer and batch that were given
    unsplit: tuple[tuple[str, str], ...]  # blocks that run the whole batch at once, and why
    warnings: tuple[str, ...]  # what hightide warned of meanwhile
    refusal: str  # why hightide does not train this model; "": it does
    failure: str  # what hightide raised though plain PyTorch did not; "": nothing
    tolerance: float
    seconds: float

    @property
    def first(self) -> ComparedRow | None:
        """The earliest place where something differs."""
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self) -> str:
        lines = _wrapped(self._sentence())
        lines += self._table()
        lines += _listed("run", self.runs)
        lines += _listed("changed for the comparison", self.changed)
        lines += _listed("unsplit", _by_reason(self.unsplit))
        lines += _listed("warned", self.warnings)
        lines.append(f"took {self.seconds:.1f} s")
        return "\n".join(lines)

    def _sentence(self) -> str:
        if self.first is not None:
            text = f"NOT equal: first differs in {self.first.place} ({self.first.run})"
            if self.refusal or self.failure:
                return (
                    f"{text}; then hightide {f'refused: {self.refusal}' if self.refusal else f'raised {self.failure}'}"
                )
            return text + self._hint(self.first)
        if self.refusal:
            return f"REFUSED{'' if self.rows else ', so there is nothing to compare'}: {self.refusal}"
        if self.failure:
            return f"NOT equal: hightide raised {self.failure}, and plain PyTorch did not"
        kinds = ", ".join(dict.fromkeys(row.what for row in self.rows))
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"equal to plain PyTorch: {len(self.rows)} numbers and tensors in {runs} ({kinds})"

    def _hint(self, first: ComparedRow) -> str:
        """Weights are read at the end only: an update that is wrong or late shows in the next step's forward."""
        if first.what != "output" or first.step < 2:
            return ""
        return f": step {first.step - 1} was equal, so its update there, or the weights used now, are wrong"

    def _table(self) -> list[str]:
        different = [row for row in self.rows if not row.equal]
        shown = sorted(different or self.rows, key=lambda row: -row.excess)[: MAX_WORST if different else MAX_CLOSEST]
        if not shown:
            return []
        lines = [_cells("differs most" if different else "closest to differing", "plain", "hightide", "by", "allowed")]
        for row in shown:
            numbers = (row.plain, row.hightide, row.difference, row.allowed)
            lines.append(_cells(_short(row), *(f"{number:.3g}" for number in numbers)))
        rest = len(different) - len(shown)
        if rest > 0:
            lines.append(f"and {rest} more differ, of {len(self.rows)} compared")
        lines += _wrapped(
            f"allowed: {self.tolerance:g} of the largest entry, or {MARGIN} times what the last bits of the weights "
            "change in plain PyTorch"
        )
        return lines + self._loosely_judged()

    def _loosely_judged(self) -> list[str]:
        largest: dict[tuple[str, int], float] = {}
        for row in self.rows:
            largest[row.what, row.step] = max(row.size, largest.get((row.what, row.step), 0.0))
        loose = [
            row
            for row in self.rows
            if row.allowed > LOOSE * row.size > LOOSE * NEGLIGIBLE * largest[row.what, row.step]
        ]
        if not loose:
            return []
        places = list(dict.fromkeys(row.place for row in loose))
        return _wrapped(
            f"{len(loose)} of {len(self.rows)} were allowed more than {LOOSE:.1%} of their size, because the last bits "
            f"of the weights decide about as much in plain PyTorch, in {len(places)} place{'s' * (len(places) > 1)}: "
            f"{few(places)}"
        )


def _cells(name: str, *cells: str) -> str:
    widths = _COLUMNS[1:]
    clipped = name if len(name) <= _COLUMNS[0] else "…" + name[-(_COLUMNS[0] - 1) :]
    return f"{clipped:<{_COLUMNS[0]}}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _short(row: ComparedRow) -> str:
    """Names of parameters are long, and their ends tell them apart."""
    when = str(row.step) if row.step else "end"
    head = f"{when} {row.what}"
    room = _COLUMNS[0] - len(head) - 1
    where = row.where if len(row.where) <= room else "…" + row.where[-(room - 1) :]
    return f"{head} {where}" if row.where else head


def _by_reason(unsplit: Iterable[tuple[str, str]]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in unsplit:
        names.setdefault(reason, []).append(name)
    return [f"{few(named)}: {reason}" for reason, named in names.items()]


def few(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for number, entry in enumerate(entries):
        head = f"{title}: " if number == 0 else "  "
        lines += textwrap.wrap(head + " ".join(entry.split()), WIDTH, subsequent_indent="    ")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, subsequent_indent="  ")
