from dataclasses import replace

from hightide.ir.action import Mode
from hightide.ir.plan import Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower import lower
from hightide.planner.verify.compare_records import compare
from unit.planner.profiles import plan_with, stack
from unit.planner.random_lanes import RandomLanes

PROFILE = stack(4)
PLAN = plan_with(PROFILE, inputs=Tier.HOST, update=Update.IN_BACKWARD)
SCHEDULE = lower(PROFILE, PLAN, Mode.TRAIN)


def executed(seed=0):
    return RandomLanes(PLAN, SCHEDULE, seed).run().records


def test_a_faithful_execution_has_no_deviations_at_any_speed():
    runs = [executed(seed) for seed in range(20)]
    assert [compare(SCHEDULE, records) for records in runs] == [[]] * 20
    orders = {tuple(record.id for record in records if record.lane is Lane.CPU) for records in runs}
    assert len(orders) > 1  # the cpu lane is free in its order, within its rule


def test_a_reordering_on_an_in_order_lane_is_found():
    records = executed()
    first, second = [i for i, record in enumerate(records) if record.lane is Lane.H2D][:2]
    records[first], records[second] = records[second], records[first]
    lines = compare(SCHEDULE, records)
    assert len(lines) == 2 and all(line.startswith("h2d:") and "where" in line for line in lines)


def test_missing_additional_and_repeated_actions_are_found():
    records = executed()
    dropped = next(record for record in records if record.lane is Lane.D2H)
    without = [record for record in records if record is not dropped]
    assert compare(SCHEDULE, without) == [f"d2h: {dropped.id} was scheduled and did not run"]
    extra = replace(dropped, id="fetch.param.1@demand")
    assert compare(SCHEDULE, [*records, extra]) == [f"d2h: {extra.id} ran and was not scheduled"]
    assert compare(SCHEDULE, [*records, dropped]) == [f"d2h: {dropped.id} ran more than once"]


def test_a_pick_against_the_rule_is_found():
    records = executed()
    place = next(i for i, record in enumerate(records) if record.lane is Lane.CPU)
    record = records[place]
    earlier = next(a for a in SCHEDULE.lane(Lane.CPU) if a.tick < SCHEDULE.by_id[record.id].tick)
    records[place] = replace(record, ready=(*record.ready, earlier.id), ready_dues=(*record.ready_dues, earlier.tick))
    assert compare(SCHEDULE, records) == [f"cpu: {record.id} was picked while {earlier.id} was ready and due earlier"]
    records[place] = replace(record, ready=(), ready_dues=())
    assert compare(SCHEDULE, records) == [f"cpu: {record.id} was picked and was not ready"]
    records[place] = replace(record, ready=(record.id,), ready_dues=(-5,))
    assert "recorded as due at -5" in compare(SCHEDULE, records)[0]
