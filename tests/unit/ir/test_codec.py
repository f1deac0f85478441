import json
from dataclasses import replace

import pytest

from hightide.ir.block import ModelProfile
from hightide.ir.codec import from_json, to_json
from hightide.ir.plan import Forecast, Plan
from unit.planner.profiles import plan_with, stack

PLAN = plan_with(stack())


def changed(**changes):
    return json.dumps({**json.loads(to_json(PLAN)), **changes})


def test_plans_and_profiles_survive_json():
    assert from_json(Plan, to_json(PLAN)) == PLAN
    assert from_json(ModelProfile, to_json(stack())) == stack()


def test_an_unknown_key_is_named_with_the_nearest_valid_one():
    with pytest.raises(ValueError, match=r"'micro_bacth'; did you mean 'micro_batch'"):
        from_json(Plan, changed(micro_bacth=3))


def test_another_file_is_told_from_a_slip():
    with pytest.raises(ValueError, match=r"is no Plan: it has none of the keys \w+, \w+"):
        from_json(Plan, json.dumps({"architectures": ["LlamaForCausalLM"]}))


def test_a_missing_key_is_named():
    data = json.loads(to_json(PLAN))
    del data["num_slots"]
    with pytest.raises(ValueError, match=r"lacks the key 'num_slots'"):
        from_json(Plan, json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": "two"}, "micro_batch is 'two'; it must be of type int"),
        ({"micro_batch": True}, "micro_batch is True"),
        ({"update": "later"}, "update is 'later'; it must be one of deferred, in_backward"),
        ({"blocks": 5}, "blocks must be a list"),
        ({"layout": []}, "layout must be a mapping"),
    ],
)
def test_a_wrong_value_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(Plan, changed(**change))


def test_what_is_not_json_names_its_source(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{nonsense")
    with pytest.raises(ValueError, match=r"plan\.json is not JSON"):
        Plan.load(path)


def test_a_plan_of_before_what_torch_reserves_was_written_can_be_read(tmp_path):
    real = replace(PLAN, forecast=Forecast(5, 6, step_s=0.5, gpu_reserved_bytes=7))
    real.save(tmp_path / "new.json")
    assert Plan.load(tmp_path / "new.json") == real and real.forecast.gpu_bytes == 7
    data = json.loads(to_json(real))
    del data["forecast"]["gpu_reserved_bytes"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = Plan.load(tmp_path / "old.json").forecast
    assert old == Forecast(5, 6, step_s=0.5) and old.gpu_bytes == old.gpu_peak_bytes == 5


@pytest.mark.parametrize(
    "forecast",
    [
        Forecast(5, 6, step_s=float("nan")),
        Forecast(5, 6, step_s=float("inf")),
        Forecast(5, 6, step_s=-0.5),
        Forecast(-5, 6),
        Forecast(5, 6, gpu_reserved_bytes=-7),
    ],
)
def test_a_forecast_that_nobody_can_have_made_is_refused(tmp_path, forecast):
    replace(PLAN, forecast=forecast).save(tmp_path / "plan.json")
    with pytest.raises(
        ValueError, match=r"plan\.json: forecast: \w+ is (nan|inf|-0\.5|-5|-7); it must be (0 or more|finite)"
    ):
        Plan.load(tmp_path / "plan.json")
