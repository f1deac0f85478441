import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Action, ActionKey, Mode, Op, Place, Schedule
from hightide.ir.tier import ChunkKind, Lane, Tier

numbers = st.none() | st.integers(0, 10**6)
kinds = st.none() | st.sampled_from(list(ChunkKind))
ticks = st.builds(ActionKey, st.sampled_from([Op.FORWARD, Op.BACKWARD]), st.integers(0, 10**6))
ids = st.builds(ActionKey, st.sampled_from(list(Op)), st.integers(0, 10**6), kinds, st.none() | ticks)
sizes = st.integers(0, 2**50)
places = st.none() | st.builds(Place, st.sampled_from(list(Tier)), st.none() | st.integers(0, 99))
names = st.lists(ids, max_size=3).map(tuple)
actions = st.builds(
    Action,
    id=ids,
    op=st.sampled_from(list(Op)),
    lane=st.sampled_from(list(Lane)),
    tick=st.integers(0, 10**6),
    opens=st.integers(-1, 10**6),
    block=numbers,
    call=numbers,
    chunk=numbers,
    kind=kinds,
    source=places,
    target=places,
    num_bytes=sizes,
    after=names,
    after_prev=names,
    gpu_takes=sizes,
    gpu_gives=sizes,
    gpu_transient=sizes,
    host_takes=sizes,
    host_gives=sizes,
)


@given(actions)
def test_an_action_survives_its_text(action):
    assert Action.parse(str(action)) == action


@given(st.sampled_from(list(Mode)), sizes, sizes, st.lists(actions, max_size=4).map(tuple))
def test_a_schedule_survives_its_text(mode, gpu, host, content):
    schedule = Schedule(mode, gpu, host, content)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_the_text_is_what_the_documentation_shows():
    line = (
        "h2d fetch fetch.param.3@fwd.3 tick=3 opens=0 block=3 chunk=3 kind=param from=host to=gpu[1] bytes=4096 "
        "after=evict.param.0@fwd.3 prev=update.3"
    )
    action = Action.parse(line)
    assert action.target == Place(Tier.GPU, 1) and action.after_prev == ("update.3",)
    assert str(action) == line


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match=r"unknown field 'colour'"):
        Action.parse("h2d fetch update.3 tick=3 colour=red")


def test_what_is_not_a_schedule_is_refused():
    with pytest.raises(ValueError, match=r"not a schedule"):
        Schedule.from_text("hello\n")


def test_lookups():
    first = Action("a", Op.FORWARD, Lane.COMPUTE, tick=0)
    second = Action("b", Op.FETCH, Lane.H2D, tick=0)
    schedule = Schedule(Mode.EVAL, 0, 0, (second, first))
    assert schedule.ticks == (first,) and schedule.lane(Lane.H2D) == (second,) and schedule.by_id["b"] is second
