from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import _FIELDS, Action, ActionKey, Mode, Op, Place, Schedule
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
def test_the_text_has_every_field_that_is_not_empty(action):
    words = dict(word.split("=") for word in str(action).split()[3:])
    assert words.pop("tick") == str(action.tick) and set(words) <= set(_FIELDS)
    for label, name in _FIELDS.items():
        value = getattr(action, name)
        if value in (None, (), Action.__dataclass_fields__[name].default):
            assert label not in words
        else:
            assert words[label] == (",".join(value) if isinstance(value, tuple) else str(value))


def test_every_field_has_a_place_in_the_text():
    assert {"id", "op", "lane", "tick", *_FIELDS.values()} == set(Action.__dataclass_fields__)


def test_the_text_is_what_the_documentation_shows():
    at = ActionKey(Op.FORWARD, 3)
    action = Action(
        ActionKey(Op.FETCH, 3, ChunkKind.PARAM, at),
        Op.FETCH,
        Lane.H2D,
        tick=3,
        opens=0,
        block=3,
        chunk=3,
        kind=ChunkKind.PARAM,
        source=Place(Tier.HOST),
        target=Place(Tier.GPU, 1),
        num_bytes=4096,
        after=(ActionKey(Op.EVICT, 0, ChunkKind.PARAM, at),),
        after_prev=(ActionKey(Op.UPDATE, 3),),
    )
    line = (
        "h2d fetch fetch.param.3@fwd.3 tick=3 opens=0 block=3 chunk=3 kind=param from=host to=gpu[1] bytes=4096 "
        "after=evict.param.0@fwd.3 prev=update.3"
    )
    assert str(action) == line
    schedule = Schedule(Mode.EVAL, 7, 8, (action,), standing=((2, 1),))
    head, printed = schedule.to_text().splitlines()
    assert printed == line and head.startswith("# schedule mode=eval gpu_base=7 host_base=8 disk_base=0 rules=")
    assert head.endswith("standing=2:1")


def test_lookups():
    first = Action("a", Op.FORWARD, Lane.COMPUTE, tick=0)
    second = Action("b", Op.FETCH, Lane.H2D, tick=0)
    schedule = Schedule(Mode.EVAL, 0, 0, (second, first))
    assert schedule.ticks == (first,) and schedule.lane(Lane.H2D) == (second,) and schedule.by_id["b"] is second
