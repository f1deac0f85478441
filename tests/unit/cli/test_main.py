"""The command around all others."""

from __future__ import annotations

import pytest

from hightide.cli import main


def test_warnings_of_ours_are_told_without_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    main._show_warning(UserWarning("text"), UserWarning, main.__file__, 3)
    assert capsys.readouterr().err == "warning: text\n"
    for category, file in ((UserWarning, pytest.__file__), (DeprecationWarning, main.__file__)):
        main._show_warning(category("text"), category, file, 3)
        assert capsys.readouterr().err.startswith(f"{file}:3: {category.__name__}: text")
