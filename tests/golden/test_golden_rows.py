"""Rows of `evaluate.py`, decisions of shipped policies, the HTTP schema and help are as recorded.

A difference that is meant is recorded with `PYTHONPATH=.:tests python tests/golden/record.py
--write`, and the commit says why.
"""

import pytest
from golden import decisions, record

QUICK = (
    "routing/nominal",
    "routing/bursty_serial/recorded",
    "routing/azure_code_slo",
    "routing/churn",
    "allocation/a100x8_13b_budget",
)


def group_of(name):
    """Of what is decided in one test: to find the plans of a pool takes a second."""
    problem, rest = name.split("/", 1)
    return name if problem == "allocation" and "/" not in rest else problem


@pytest.mark.parametrize("group", dict.fromkeys(map(group_of, decisions.entries())))
def test_shipped_policies_decide_as_recorded(group):
    names = [name for name in decisions.entries() if group_of(name) == group]
    assert record.differences("decisions", record.decisions_part(names)) == []


def test_every_policy_has_recorded_decisions():
    assert set(record.expected("decisions")) == set(decisions.entries())


def test_every_verb_explains_itself_as_recorded():
    assert record.differences("help", record.help_part()) == []


def test_http_schema_is_as_recorded():
    assert record.differences("schema", record.schema_part()) == []


def test_every_scenario_has_recorded_rows():
    assert set(record.expected("rows")) == set(record.entries())


FILES = {name: entry.file for name, entry in record.entries().items()}


def with_its_file(name):
    """A row, which is skipped where the file of its traffic is missing."""
    return pytest.param(name, marks=[pytest.mark.recorded(FILES[name])] if FILES[name] else [])


@pytest.mark.parametrize("name", [with_its_file(name) for name in QUICK])
def test_rows_are_as_recorded(name):
    assert record.differences("rows", record.rows_part([name])) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [with_its_file(name) for name in FILES if name not in QUICK])
def test_all_rows_are_as_recorded(name):
    assert record.differences("rows", record.rows_part([name])) == []


def test_a_changed_number_is_named():
    old, new = {"a": {"b": [1.0, 2.0]}}, {"a": {"b": [1.0, 2.0 + 1e-6], "c": 1}}
    assert list(record.compare("rows", old, old)) == []
    assert list(record.compare("rows", old, new)) == [
        "rows/a/b[1]: 2.0 -> 2.000001",
        "rows/a/c: is new",
    ]
