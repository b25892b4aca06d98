"""Our rules decide as the routers do that they are named after: the real ones, as processes."""

import dataclasses
import json
import math
import sys

import pytest
from scripts import ROOT, call, load_script, refusal

sys.path.append(str(ROOT / "benchmarks"))
PARITY = load_script("benchmarks/rival_parity.py")
LEAST_AGREEMENT = {"sglang_cache_aware": 0.9}
"""Where no snapshot tells what the router goes by: docs/results/fidelity.md."""
PICKS = 1000


def name_of(case):
    return "-".join((case.rival, case.policy, case.setting.replace(" ", "_"))).rstrip("-")


def check(case):
    parity = PARITY.measure(case, PARITY.Args(picks=PICKS))
    least = 0.99 if case.names_first else LEAST_AGREEMENT.get(case.rule, 0.99)
    assert parity.possible_fraction >= least
    assert math.isnan(parity.agreement_fraction) or parity.agreement_fraction >= least
    if parity.degrees:
        # One run in a million of a router that draws as we do is below.
        assert parity.p_value > 1e-6


PROCESSES = [case for case in PARITY.CASES if case.rival != PARITY.RAY]
CLASSES = [case for case in PARITY.CASES if case.rival == PARITY.RAY]


@pytest.mark.integration
@pytest.mark.parametrize("case", PROCESSES, ids=name_of)
def test_a_rule_decides_as_its_router_does(case):
    if absent := PARITY.missing(case.rival):
        pytest.skip(absent)
    check(case)


@pytest.mark.parametrize("case", CLASSES, ids=name_of)
def test_a_rule_decides_as_its_class_of_ray_serve_does(case, ray_cluster):
    check(case)


def test_the_command_writes_a_row_per_policy(ray_cluster, monkeypatch, tmp_path):
    # The script has its own for the process that it is.
    monkeypatch.setattr(PARITY.signal, "signal", lambda *_: None)
    path, table = tmp_path / "rows.json", tmp_path / "rows.csv"
    call(PARITY, "--rivals", PARITY.RAY, "--picks", "30", "--json", path, "--csv", table)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["policy"], row["rule"]) for row in rows] == [
        (case.policy, case.rule) for case in CLASSES
    ]
    assert all(row["num_picks"] == 30 for row in rows)
    assert len(table.read_text(encoding="utf-8").splitlines()) == 1 + len(CLASSES)


def test_without_the_routers_it_is_refused_with_what_installs_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENYARD_RIVALS", str(tmp_path))
    sentence = refusal(PARITY, "--rivals", "smg")
    assert "no smg in" in sentence
    assert "make rivals" in sentence


def test_a_rule_that_never_draws_has_a_sure_law_and_one_that_does_has_all_of_it():
    from rival_record import Pick
    from rival_replay import parity_of

    nothing = Pick(100, (1, 0, 0, 3), (0, 0, 0, 0), -1, (0, 0, 0, 0), 0)
    picks = [dataclasses.replace(nothing, chosen=i % 4) for i in range(40)]
    turns = parity_of(picks, "round_robin", {})
    assert (turns.agreement_fraction, turns.num_drawn) == (1.0, 0)
    pairs = parity_of(picks, "ray_p2c", {})
    # The longest queue never wins a pair.
    assert (pairs.possible_fraction, pairs.num_drawn) == (0.75, 40)
    uniform = parity_of(picks, "random", {})
    assert (uniform.chi_square, uniform.degrees, uniform.p_value) == (0.0, 3, 1.0)
    assert parity_of(picks, "random", {}, draws_ties=False).degrees == 0
