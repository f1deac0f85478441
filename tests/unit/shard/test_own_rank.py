"""What a rank tells of itself while the user's thread waits in another model."""

from __future__ import annotations

from hightide.shard.own_rank import OwnRank, Standing
from hightide.shard.signs import Sign
from hightide.shard.verdicts import deadlock, stuck

CONTROL = "control"


class Process:
    """A rank of two models."""

    def __init__(self, rank: int) -> None:
        self.models = [OwnRank(rank, 2, [CONTROL], CONTROL) for _ in range(2)]
        for number, model in enumerate(self.models):
            model.title, model.beside = f"model {number}", self.models
            model.standing = lambda: Standing(waits=False, is_idle=True, at_others=(), num_done=0)

    def waits_in(self, number: int) -> None:
        self.models[number].issue(CONTROL, "the beginning of a forward", lambda: False)

    def sign(self, number: int) -> Sign:
        for model in self.models:
            model.sign()
        return self.models[number].sign()


def test_ranks_that_wait_in_two_models_wait_for_each_other() -> None:
    first, second = Process(0), Process(1)
    first.waits_in(0)
    second.waits_in(1)
    for number in range(2):
        signs = {0: first.sign(number), 1: second.sign(number)}
        assert stuck(signs) == [0, 1]
    told = deadlock([0, 1], {0: first.sign(0), 1: second.sign(0)}, CONTROL).text
    assert "rank 1 (at the start" in told and "waits for model 1, to which rank 0 has not come" in told


def test_a_wait_in_one_model_is_that_models_affair() -> None:
    first, second = Process(0), Process(1)
    first.waits_in(1)
    second.waits_in(1)
    for number in range(2):
        assert stuck({0: first.sign(number), 1: second.sign(number)}) == []


def test_who_works_is_not_waited_for_in_vain() -> None:
    first, second = Process(0), Process(1)
    first.waits_in(0)
    assert stuck({0: first.sign(0), 1: second.sign(0)}) == []
    second.waits_in(1)
    second.models[1].through(second.models[1].waits()[0])
    assert stuck({0: first.sign(0), 1: second.sign(0)}) == []
