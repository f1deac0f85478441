"""The error that says that a plan or a schedule must not run."""

from __future__ import annotations

from collections.abc import Mapping

from hightide.ir.tier import Tier


class InfeasiblePlan(ValueError):
    """A plan or schedule that must not run. `moment` is the id of the action, `tier` and `num_bytes` say what is
    short. `enough`: limits that would do, the smallest change first: of one tier each, or where that is not enough, of
    several."""

    def __init__(
        self,
        message: str,
        moment: str = "",
        tier: Tier | None = None,
        num_bytes: int = 0,
        enough: tuple[Mapping[Tier, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.moment = moment
        self.tier = tier
        self.num_bytes = num_bytes
        self.enough = enough
