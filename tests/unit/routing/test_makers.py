"""Rules by their makers' names: each means a rule that exists, here and in docs/rules.md."""

import re
from pathlib import Path

import pytest

from tokenyard.routing.own_traffic import Choice
from tokenyard.routing.policies import BASELINES, is_rule
from tokenyard.routing.policies.makers import MAKERS_NAMES, rule_of
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario

RULES = Path(__file__).parents[3] / "docs" / "rules.md"
ROUTERS = (
    "vllm-router", "sglang", "smg", "llm-d", "dynamo", "aibrix", "ray", "production-stack",
    "llumnix", "nginx", "envoy", "haproxy",
)  # fmt: skip


@pytest.mark.parametrize("name", MAKERS_NAMES)
def test_a_makers_name_means_a_rule_that_exists(name):
    assert is_rule(MAKERS_NAMES[name])
    assert MAKERS_NAMES[name] in BASELINES
    assert not is_rule(name), "a name of ours would be hidden"
    assert PROBLEM.candidate(load_scenario("multi_turn_prefix"), name).name == MAKERS_NAMES[name]


def test_every_router_is_known_by_its_name_alone_whatever_its_case_and_spaces():
    assert set(ROUTERS) <= set(MAKERS_NAMES)
    assert rule_of("  vLLM-router   Cache_Aware ") == "vllm_cache_aware"
    assert rule_of("marginal_delay+sjf@60") == "marginal_delay+sjf@60"
    assert Choice.named("nginx least_conn").name == "least_connections"


def test_a_name_that_nobody_knows_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"nginx ip_hash is no rule.*nginx least_conn, nginx"):
        Choice.named("nginx ip_hash")
    with pytest.raises(ValueError, match=r"unknown policy 'nginx ip_hash'.*haproxy leastconn"):
        PROBLEM.candidate(load_scenario("poisson_085"), "nginx ip_hash")


def test_the_table_of_the_documentation_has_the_same_names():
    table = RULES.read_text().partition("## By their makers' names")[2].partition("\n## ")[0]
    told = {
        name: rule
        for names, rule in re.findall(r"^\| (`.*`) \| `(\w+)` \|$", table, re.M)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert told == dict(MAKERS_NAMES)
