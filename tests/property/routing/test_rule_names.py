"""A rule's name says the same before and after it is taken apart."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenyard.routing.policies import BASELINES, is_rule
from tokenyard.routing.policies.order import ORDERS
from tokenyard.routing.policies.rule_name import RuleName, Term

numbers = st.lists(st.floats(0, 1e6).map(lambda value: float(f"{value:g}")), max_size=2)
orders = st.builds(
    lambda base, values: Term.of(base, *values), st.sampled_from(sorted(ORDERS)), numbers
)
placements = st.builds(
    lambda base, values: Term.of(base, *values), st.sampled_from(sorted(BASELINES)), numbers
)


@given(rule=st.builds(RuleName, placements, st.none() | orders))
@example(rule=RuleName(Term.of("sed"), Term.of("boost", 1e6)))
def test_a_name_is_parsed_as_it_was_written(rule):
    assert RuleName.parse(str(rule)) == rule
    assert [*Term.parse(str(rule.placement)).values()] == rule.placement.values()


@given(text=st.text(st.characters(codec="ascii"), max_size=20) | st.text("sedjf+@:0.", max_size=9))
def test_no_text_is_lost(text):
    rule = RuleName.parse(text)
    assert str(rule) == text
    assert str(rule.ordered(None)) == str(rule.placement)


@pytest.mark.parametrize(
    "text", ["", "sed+", "+sjf", "sed@", "sed@1", "sed+sjf+edf", "sed + sjf", "sed+mine"]
)
def test_what_is_no_name_of_a_rule_is_none(text):
    assert not is_rule(text)


@pytest.mark.parametrize("number", ["x", "-1", "nan", "1:", ":1", "inf", ""])
def test_what_is_no_number_from_zero_on_is_refused(number):
    with pytest.raises(ValueError, match="is no number from 0 on"):
        Term.parse(f"sjf@{number}").values()
