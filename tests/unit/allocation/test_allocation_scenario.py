import pytest
import yaml
from pydantic import ValidationError

from tokenyard.allocation.paper.simulator import LiteralWeights
from tokenyard.allocation.plans import load_allocation, plan_table
from tokenyard.allocation.scenario import AllocationScenario, Objective, allocation_names

VALID = {
    "name": "mine",
    "description": "mine",
    "pool": [{"gpu": "a100_80g_sxm", "count": 2}],
    "llm": "llama2_13b",
}


@pytest.mark.parametrize("name", allocation_names())
def test_every_shipped_scenario_has_plans_that_attain_its_slos(name):
    table = plan_table(load_allocation(name))
    assert table.pool_goodput_capacity_per_s > 0
    assert table.num_plans == len(set(table.plans))


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"pool": [{"gpu": "a100_40g", "count": 2}]}, "pool.0.gpu", "unknown gpu 'a100_40g'"),
        ({"pool": [{"gpu": "l4", "count": 0}]}, "pool.0.count", "greater than or equal to 1"),
        ({"llm": "gpt5"}, "llm", "unknown model"),
        ({"memory_fractions": [0.5, 1.1]}, "memory_fractions", r"1.1 is not in \(0, 1\]"),
        ({"memory_fractions": [0.0]}, "memory_fractions", r"0.0 is not in \(0, 1\]"),
        ({"objective": {"usd": -1}}, "objective.usd", "greater than or equal to 0"),
        ({"objective": {}}, "objective", "weights are all zero"),
        ({"restart_s": 400}, "", "longer than slot_s"),
        ({"slot_s": 7000}, "slot_s", "7000 does not divide a day of 86400 s"),
        ({"slot_s": 100_000}, "slot_s", "100000 does not divide a day"),
        ({"demand": {"low": 0.9, "high": 0.5}}, "demand", "must be below high"),
        ({"gpus": 8}, "gpus", "Extra inputs"),
    ],
)
def test_bad_scenarios_are_refused_with_field_and_reason(change, field, reason):
    with pytest.raises(ValidationError, match=reason) as caught:
        AllocationScenario.model_validate({**VALID, **change})
    found = ".".join(str(part) for part in caught.value.errors()[0]["loc"])
    assert found == field


def test_a_model_that_fits_on_no_plan_is_refused_by_the_name_of_its_file(tmp_path):
    file = tmp_path / "mine.yaml"
    change = {"pool": [{"gpu": "l4", "count": 2}], "llm": "llama2_70b"}
    file.write_text(yaml.safe_dump({**VALID, **change}))
    with pytest.raises(
        ValueError, match=r"mine\.yaml: llm 'llama2_70b' fits on no plan of pool 2 x l4"
    ):
        load_allocation(str(file))


@pytest.mark.parametrize(("slot_s", "slots_per_day"), [(86_400, 1), (0.1, 864_000)])
def test_a_day_is_a_whole_number_of_slots(slot_s, slots_per_day):
    fields = {**VALID, "slot_s": slot_s, "restart_s": 0}
    assert AllocationScenario.model_validate(fields).slots_per_day == slots_per_day


def test_slos_that_no_plan_attains_are_refused():
    scenario = AllocationScenario.model_validate({**VALID, "slo": {"tpot_s": 0.001}})
    with pytest.raises(ValueError, match="no plan of scenario 'mine' attains SLO"):
        plan_table(scenario)


@pytest.mark.parametrize("kind", [Objective, LiteralWeights])
def test_weights_that_are_negative_or_all_zero_are_refused(kind):
    zeros = {name: 0.0 for name, f in kind.model_fields.items() if f.annotation is not bool}
    with pytest.raises(ValidationError, match="all zero"):
        kind.model_validate(zeros)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        kind.model_validate({**zeros, "power": -0.1})


def test_an_unknown_scenario_is_refused_with_the_closest():
    with pytest.raises(ValueError, match="did you mean 'a100x8_13b'"):
        load_allocation("a100x8_13bb")
