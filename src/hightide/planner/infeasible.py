"""The error that says that a plan or a schedule must not run."""

from __future__ import annotations

from collections.abc import Mapping

from hightide.ir.tier import Tier


def growth(raised: Mapping[Tier, int], limits: Mapping[Tier, int]) -> float:
    """By how much limits must grow for what is needed of some tiers: to be compared."""
    return len(raised) * max((size / max(1, limits[tier]) for tier, size in raised.items()), default=0.0)


class InfeasiblePlan(ValueError):
    """A plan or schedule that must not run. `moment` is the id of the action, `tier` and `num_bytes` say what is
    short. `enough`: limits that would do, the smallest change first: of one tier each, or where that is not enough, of
    several. `num_calls`: of a step, with which it was found."""

    def __init__(
        self,
        message: str,
        moment: str = "",
        tier: Tier | None = None,
        num_bytes: int = 0,
        enough: tuple[Mapping[Tier, int], ...] = (),
        num_calls: int = 1,
    ) -> None:
        super().__init__(message)
        self.moment = moment
        self.tier = tier
        self.num_bytes = num_bytes
        self.enough = enough
        self.num_calls = num_calls


class TooFewSlots(InfeasiblePlan):
    """A plan in which one block's chunks do not find room at once. `num_slots`: what they need."""

    def __init__(self, message: str, num_slots: int) -> None:
        super().__init__(message)
        self.num_slots = num_slots
