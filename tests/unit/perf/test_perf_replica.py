from dataclasses import replace

import pytest

from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.power import flop_utilisation, power_w
from tokenyard.perf.replica import make_replica


def test_what_the_weights_leave_free_holds_the_cache():
    # 70 GB usable of each GPU less 13.48 GB of weights, 512 KiB per token.
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    assert replica.kv_capacity_tokens == pytest.approx((70e9 - 13.48e9) / 2**19, rel=1e-3)


def test_more_gpus_add_their_memory_but_not_their_weights():
    one, four = (make_replica("a100_80g_sxm", "llama2_7b", tensor_parallel=t) for t in (1, 4))
    added_tokens = 3 * 70e9 / 2**19
    assert four.kv_capacity_tokens - one.kv_capacity_tokens == pytest.approx(added_tokens, rel=1e-4)
    staged = make_replica("a100_80g_sxm", "llama2_7b", pipeline_parallel=4)
    assert staged.kv_capacity_tokens == four.kv_capacity_tokens


def test_beyond_the_kv_heads_the_cache_is_copied():
    eight = make_replica("h100_sxm", "llama3_8b", tensor_parallel=8)
    sixteen = replace(eight, tensor_parallel=16, link_name="two_nodes_a100")
    assert sixteen.kv_shards == eight.kv_shards == 8
    assert sixteen.kv_capacity_tokens < 1.1 * eight.kv_capacity_tokens


def test_weights_that_do_not_fit_leave_no_room_at_all():
    replica = make_replica("a100_80g_sxm", "llama2_70b")
    assert replica.kv_capacity_tokens == 0
    assert replica.max_sequences(100, 100) == 0


def test_sequences_are_limited_by_the_cache_and_by_the_engine():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    assert replica.max_sequences(2048, 2048) == replica.kv_capacity_tokens // 3072
    assert replica.max_sequences(10, 10) == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel": 3}, "must divide the 32 heads"),
        ({"tensor_parallel": 16}, r"was not measured; choose one of \[2, 4, 8\]"),
        ({"pipeline_parallel": 33}, "from 1 to 32 layers"),
        ({"precision": "fp8"}, "has no FP8; choose precision fp16"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_replica("a100_80g_sxm", "llama2_7b", **arguments)


def test_an_idle_replica_draws_its_idle_power_and_a_saturated_one_no_more_than_its_tdp():
    replica = make_replica("h100_sxm", "llama3_8b", tensor_parallel=2)
    assert power_w(replica, 0.0, busy_fraction=0.0) == 2 * 110
    assert power_w(replica, 1.0) == 2 * 700
    assert power_w(replica, 0.1, 0.5) < power_w(replica, 0.1) < power_w(replica, 0.2)


def test_a_full_batch_spends_less_energy_per_token_than_a_single_sequence():
    replica = make_replica("h100_sxm", "llama3_8b")
    alone, together = (
        power_w(replica, flop_utilisation(replica, 0, n, 500 * n))
        * iteration_s(replica, 0, n, 500 * n)
        / n
        for n in (1, 128)
    )
    assert together < alone / 10


def test_prompts_use_the_arithmetic_that_decoding_leaves_idle():
    replica = make_replica("a100_80g_sxm", "llama2_7b")
    prompt = flop_utilisation(replica, 2048, 0, 0)
    decoding = flop_utilisation(replica, 0, 1, 1024)
    assert decoding < 0.01 < 0.4 < prompt < 1
    assert flop_utilisation(replica, 0, 0, 0) == 0
