"""Gateways that are peers decide nearly as well as one: see `unit.several_pickers`."""

from sizes import is_thorough
from unit.several_pickers import Args, main


def test_peers_decide_as_one_does():
    few = {"repeats": 2} if is_thorough() else {"repeats": 1, "warm_up_s": 4.0, "duration_s": 6.0}
    one, peers, apart = main(Args(**few))
    assert [row["arm"] for row in (one, peers, apart)] == ["one", "peers", "apart"]
    assert one["delta_mean_fraction"] == one["delta_cached_fraction"] == 0
    assert 0.5 < peers["cached_fraction"] < 1
    if is_thorough():
        assert abs(peers["delta_mean_fraction"]) < 0.03
        assert abs(peers["delta_cached_fraction"]) < 0.02
        assert apart["delta_mean_fraction"] > peers["delta_mean_fraction"]
