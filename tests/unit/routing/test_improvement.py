"""The command that improves a policy by rollouts: what it starts from, keeps and writes."""

from functools import partial

import pytest
import yaml

from pipelines import search
from pipelines.search import Rollouts, main
from tokenyard.rl.routing.improvement import start_policy
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.choice import Judge
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import PolicySearch
from tokenyard.routing.simulator.streams import StreamSource

NAME = "azure_code_mixed_gpus_085"


@pytest.fixture(autouse=True)
def few_streams(monkeypatch):
    monkeypatch.setattr(search, "Judge", partial(Judge, num_streams=2))


def test_it_writes_every_round_and_the_best(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "choose", lambda rows: len(rows) - 1)
    few = ("every=40",)
    main(Rollouts(scenario=NAME, out=tmp_path, rounds=2, streams=1, settings=few, fresh=True))
    rounds = [PolicyArtifact.load(tmp_path / f"rounds/{NAME}-{k}.npz") for k in range(3)]
    assert [one.metadata.lineage["round"] for one in rounds] == ["0", "1", "2"]
    best = PolicyArtifact.load(tmp_path / f"{NAME}.npz")
    assert best.sha256 in {one.sha256 for one in rounds}
    assert best.sha256 in capsys.readouterr().out
    start = start_policy(StreamSource(load_scenario(NAME)))
    assert best.metadata.lineage["start"] == start.sha256
    assert best.arrays["weights"].tolist() == start.arrays["weights"].tolist()


def test_a_scenario_of_ones_own_starts_at_the_hand_rule_and_goes_on_where_it_stopped(tmp_path):
    own = load_scenario("churn").model_dump(mode="json", exclude_none=True)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(own | {"name": "mine"}))
    few = ("every=100",)
    main(Rollouts(scenario=str(path), out=tmp_path, rounds=1, streams=1, settings=few))
    first = PolicyArtifact.load(tmp_path / "rounds/mine-1.npz")
    start = tmp_path / "rounds/mine-1.npz"
    found = start_policy(StreamSource(load_scenario(str(path))), start)
    assert found.sha256 == first.sha256


def test_other_kinds_cannot_be_started_from(tmp_path):
    source = StreamSource(load_scenario(NAME))
    linear = tmp_path / "linear.npz"
    PolicySearch(load_scenario("poisson_085")).artifact().save(linear)
    with pytest.raises(ValueError, match="start from a `marginal` policy"):
        start_policy(source, linear)


def test_a_setting_that_does_not_exist_is_refused_with_the_closest_name(tmp_path):
    with pytest.raises(SystemExit, match=r"unknown setting 'slow'.*did you mean 'slow_s'\?"):
        main(Rollouts(scenario=NAME, settings=("slow=3",)))
