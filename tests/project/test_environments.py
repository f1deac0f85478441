"""A few odd environments; for all of them, bench/environments.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "bench" / "environments.py"


@pytest.fixture(scope="module")
def environments() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environments", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["environments"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_many_and_each_has_its_name(environments: ModuleType) -> None:
    names = [one.name for one in environments.ENVIRONMENTS]
    assert len(set(names)) == len(names) > 60


@pytest.mark.parametrize(
    ("name", "program"),
    [
        pytest.param("HOME a file", "script", marks=pytest.mark.long),  # a cache that is a file: test_build.py
        ("streams closed", "script"),
        ("ascii: POSIX", "plan"),
        pytest.param("out a dangling link", "train", marks=pytest.mark.long),  # in one process: test_run_folder.py
    ],
)
def test_it_holds_there(environments: ModuleType, name: str, program: str) -> None:
    (environment,) = (one for one in environments.ENVIRONMENTS if one.name == name)
    outcome = environments.tried(environment, program)
    assert outcome.verdict == "held", outcome
