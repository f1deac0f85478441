"""Where tests are: those of one source file in the folder that mirrors it, under its name."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src" / "hightide"


def is_of_a_source(test: Path) -> bool:
    """test_search.py and test_search_quick.py are of search.py, or of the folder search."""
    room = SOURCES / test.parent.relative_to(TESTS / "unit")
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(
        (room / f"{name}.py").exists() or (room / name / "__init__.py").exists() for name in [*names, *_dunder(names)]
    )


def _dunder(names: list[str]) -> list[str]:
    return [f"__{name}__" for name in names]


def test_unit_tests_mirror_the_sources() -> None:
    tests = sorted((TESTS / "unit").rglob("test_*.py"))
    assert len(tests) > 50
    assert [str(test.relative_to(TESTS)) for test in tests if not is_of_a_source(test)] == []


def test_what_has_no_source_is_found() -> None:
    assert is_of_a_source(TESTS / "unit" / "planner" / "search" / "test_search_quick.py")
    assert not is_of_a_source(TESTS / "unit" / "planner" / "search" / "test_quick_search.py")
    assert not is_of_a_source(TESTS / "unit" / "runtime" / "test_search.py")


def test_names_differ_between_folders() -> None:
    """pytest imports them by name."""
    names = [test.name for test in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_no_constant_has_two_values() -> None:
    """The later one would count for the readers of both."""
    for source in sorted(SOURCES.rglob("*.py")):
        names = re.findall(r"^(_?[A-Z][A-Z0-9_]+)(?:: [^=\n]+)? = ", source.read_text(), flags=re.M)
        assert len(names) == len(set(names)), source
