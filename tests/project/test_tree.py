"""The tree: where tests are (those of one source file in the folder that mirrors it, under its name), names that stand
for one thing each, and documents that say where things are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SOURCES = ROOT / "src" / "hightide"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MOST_WORDS = 40  # of the glossary


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


def test_names_of_sources_differ() -> None:
    names = [source.name for source in SOURCES.rglob("*.py") if not source.name.startswith("__")]
    assert len(names) > 300
    assert _twice(names) == []


def test_public_classes_differ() -> None:
    sources = [source.read_text() for source in SOURCES.rglob("*.py")]
    classes = [name for text in sources for name in re.findall(r"^class ([A-Z]\w*)", text, flags=re.M)]
    assert len(classes) > 300
    assert _twice(classes) == []


def test_sources_say_what_they_are() -> None:
    """A docstring that begins with "What" begins with no name for it."""
    sources = sorted(SOURCES.rglob("*.py"))
    assert [source for source in sources if source.read_text().startswith('"""What ')] == []


def _twice(names: list[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


def test_files_that_architecture_names_exist() -> None:
    rooms = [ROOT / name for name in ("src", "tests", "bench", "examples")]
    files = [f"/{file.relative_to(ROOT).as_posix()}" for room in rooms for file in room.rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text()))
    assert len(named) > 100
    assert sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files)) == []


def test_the_glossary_is_short() -> None:
    glossary = ARCHITECTURE.read_text().split("\n## Words\n")[1].split("\n\n")[0]
    words = ", ".join(re.findall(r"^- \*\*([^*]+)\*\*", glossary, flags=re.M)).split(", ")
    assert 10 < len(words) <= MOST_WORDS
    assert _twice(words) == []


def test_lines_of_documents_are_short() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(documents) > 5
    for document in documents:
        lines = enumerate(document.read_text().splitlines(), start=1)
        assert [number for number, line in lines if len(line) > 120] == [], document
