"""In which order the ranks of an engine of ours take up what waits."""

from types import SimpleNamespace

import pytest

from serve_app.engines.sharded.messages import RequestNames

rank = pytest.importorskip("serve_app.engines.sharded.rank")


def test_ranks_take_up_the_lowest_key_and_what_was_pushed_out_goes_back_to_its_place():
    scheduler, names = rank.OrderScheduler.__new__(rank.OrderScheduler), RequestNames()
    scheduler._cancellation_lock = SimpleNamespace()
    scheduler.reset()
    long, short, equal = (
        names.new(one, key) for one, key in zip("abc", (9.0, 5.0, 5.0), strict=True)
    )
    for name in (long, short, equal):
        scheduler.add_waiting_request(SimpleNamespace(request_id=name, _true_initial_tokens=0))
    assert list(scheduler.waiting_requests_order) == [short, equal, long]
    scheduler._cleanup_waiting_queue({short})
    scheduler.add_waiting_request(SimpleNamespace(request_id=short, _true_initial_tokens=7))
    assert list(scheduler.waiting_requests_order) == [equal, short, long]
    assert scheduler.num_preemptions == 1
    assert set(scheduler.waiting_requests) == {long, short, equal}
