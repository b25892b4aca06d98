"""What the page is told of the last minutes."""

from serve_app.gateway.history import BIN_S, History


def test_the_last_quarter_of_an_hour_is_kept_however_seldom_something_happens():
    history = History()
    for minute in range(180):
        history.finish(60.0 * minute, 0.1, 1.0, kept=True)
    times_s = [row["time_s"] for row in history.rows()]
    assert times_s == [60.0 * minute for minute in range(165, 180)]
    for second in range(2000):
        history.finish(10_740.0 + second, 0.1, 1.0, kept=True)
    assert len(history.rows()) == 900 / BIN_S
