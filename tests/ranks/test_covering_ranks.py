"""Any model with any loop trains on several ranks as with DDP of plain PyTorch, and no tier of any rank is above its
limit: every pair of features in some case. A feature is a line of FEATURES. By default some of the cases run, of models
that are unlike; the others are `long`."""

from __future__ import annotations

from typing import Any

import pytest

from architectures import ARCHITECTURES, TRAINED
from pairwise import Case, covering, pairs_of, product
from started_ranks import StartedRanks

WITHIN_S = 100.0
FEATURES: dict[str, tuple[Any, ...]] = {
    "model": tuple(ARCHITECTURES),
    "trained": TRAINED,
    "update": ("deferred", "in_backward"),
    "clip": (None, 0.03),  # below all norms
    "accumulate": (1, 3),
    "limits": ("roomy", "tight"),
    "world": (2, 3, 4),
}


def allowed(*, update: str, clip: float | None, **_: Any) -> bool:
    return update == "deferred" or clip is None  # what the user promised


FULL = product(FEATURES, allowed)
COVERING = covering(FEATURES, FULL)


def name_of(case: Case) -> str:
    features = zip(FEATURES, case, strict=True)
    return " ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in features)


def first_of(model: str, trained: str) -> Case:
    return next(case for case in COVERING if case[:2] == (model, trained))


FAST = [
    first_of(*one)
    for one in (
        ("qwen3_moe", "lora"),
        ("t5", "part"),
        ("vit", "all"),
        ("bert", "lora"),
        ("gpt2", "all"),
        ("gemma2", "part"),
    )
]


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.long) for case in COVERING], ids=name_of
)
def test_every_pair_of_features(any_model: StartedRanks, case: Case) -> None:
    features = dict(zip(FEATURES, case, strict=True))
    world = features.pop("world")
    found = [rank.result for rank in any_model.run("train", world, within_s=WITHIN_S, **features)]
    for of_rank in found:
        plain = of_rank["plain"]
        assert of_rank["ranks"] == world and of_rank["deviations"] == 0
        assert of_rank["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert of_rank["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert of_rank["norms"] == found[0]["norms"]
        assert all(by <= 1 for by in of_rank["differences"].values()), of_rank["differences"]
        assert not of_rank["above"]
        assert features["limits"] == "roomy" or of_rank["moved"]
    assert features["clip"] is None or max(found[0]["plain"]["norms"]) > features["clip"], "clipping is idle"


def test_the_covering_set_has_every_allowed_pair_of_values() -> None:
    assert set().union(*map(pairs_of, COVERING)) == set().union(*map(pairs_of, FULL))
    assert {value for case in FAST for value in zip(FEATURES, case, strict=True) if value[0] != "model"} == {
        (name, value) for name, values in FEATURES.items() for value in values if name != "model"
    }
    assert len(COVERING) < 50 and covering(FEATURES, FULL) == COVERING
