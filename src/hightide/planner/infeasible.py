"""What says that a plan or a schedule must not run."""

from __future__ import annotations

from hightide.ir.tier import Tier


class InfeasiblePlan(ValueError):
    """A plan or schedule that must not run. `moment` is the id of the action, `tier` and `num_bytes` say what is
    short."""

    def __init__(self, message: str, moment: str = "", tier: Tier | None = None, num_bytes: int = 0) -> None:
        super().__init__(message)
        self.moment = moment
        self.tier = tier
        self.num_bytes = num_bytes
