from __future__ import annotations

from dataclasses import replace

import pandas as pd

from tune_configs import paper_tables as paper


def test_every_agent_of_the_paper_has_five_seeds_at_its_length_in_both_tables():
    for table, env_steps in (("I", 200_000), ("II", 400_000)):
        trained = [cell for cell in paper.cells([table]) if cell.trial is not None]
        assert {cell.trial["env_steps"] for cell in trained} == {env_steps}
        for algorithm in ("ppo", "a2c", "dqn"):
            seeds = {cell.training_seed for cell in trained if cell.policy == algorithm}
            assert len(seeds) == 5


def test_every_removed_reward_term_has_three_seeds():
    seeds = {}
    for cell in paper.cells(["ablation"]):
        seeds.setdefault(cell.reward_weights, set()).add(cell.training_seed)
    assert len(seeds) >= 5
    assert all(len(each) == 3 for each in seeds.values())


def test_no_two_cells_share_a_key():
    keys = [cell.key for cell in paper.cells(list(paper.TABLES))]
    assert len(keys) == len(set(keys))


def test_what_is_written_counts_as_finished_and_is_summarised(tmp_path):
    out = tmp_path / "tables.csv"
    rule = next(cell for cell in paper.cells(["I"]) if cell.policy == "least_loaded")
    curve, episodes = paper.run_cell(rule, str(tmp_path))
    paper.append(out, curve)
    paper.append(out, episodes)
    assert paper.finished(out) == {rule.key}
    (row,) = paper.summary(pd.read_csv(out))
    assert row["policy"] == "least_loaded"
    assert row["episodes"] == paper.NUM_EPISODES
    assert 0 < row["slo_violation_fraction"] < 1


def test_a_cell_of_another_seed_is_not_finished(tmp_path):
    out = tmp_path / "tables.csv"
    cell = next(cell for cell in paper.cells(["I"]) if cell.training_seed == 1)
    head = dict(zip(("table", "policy", "reward_weights", "training_seed"), cell.key, strict=True))
    paper.append(out, [{**head, "reward": 1.0}])
    assert paper.finished(out) == {cell.key}
    assert replace(cell, training_seed=2).key not in paper.finished(out)
