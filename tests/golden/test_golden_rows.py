"""Rows of `evaluate.py`, decisions of shipped policies and the HTTP schema are as recorded.

A difference that is meant is recorded with `python tests/golden/record.py --write`, and the commit
says why.
"""

import pytest
from golden import record

QUICK = (
    "routing/nominal",
    "routing/bursty_serial/recorded",
    "routing/azure_code_slo",
    "routing/churn",
    "allocation/a100x8_13b_budget",
)


def test_shipped_policies_decide_as_recorded():
    assert record.differences("decisions", record.decisions_part()) == []


def test_http_schema_is_as_recorded():
    assert record.differences("schema", record.schema_part()) == []


def test_every_scenario_has_recorded_rows():
    assert set(record.expected("rows")) == set(record.entries())


@pytest.mark.parametrize("name", QUICK)
def test_rows_are_as_recorded(name):
    found = record.rows_part([name])
    if not found:
        pytest.skip(record.missing(record.entries()[name]))
    assert record.differences("rows", found) == []


@pytest.mark.slow
def test_all_rows_are_as_recorded():
    assert record.differences("rows", record.rows_part()) == []


def test_a_changed_number_is_named():
    old, new = {"a": {"b": [1.0, 2.0]}}, {"a": {"b": [1.0, 2.0 + 1e-6], "c": 1}}
    assert list(record.compare("rows", old, old)) == []
    assert list(record.compare("rows", old, new)) == [
        "rows/a/b[1]: 2.0 -> 2.000001",
        "rows/a/c: is new",
    ]
