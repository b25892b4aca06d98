"""The fast and the careful way of reading a file agree."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.workload import readers

rows = st.lists(
    st.tuples(st.integers(0, 10**8), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1
)


@settings(max_examples=scaled(50))
@given(rows, st.booleans())
def test_both_ways_of_reading_give_the_same_trace(rows, azure):
    rows = sorted(rows)
    layout = next(one for one in readers._LAYOUTS if one.name == ("Azure" if azure else "plain"))
    header = list(layout[1:4])
    start = np.datetime64("2024-05-10T00:00:00", "ns")
    times = [start + 100 * t if azure else t / 1e4 for t, _, _ in rows]
    lines = [f"{t},{c},{g}" for t, (_, c, g) in zip(times, rows, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        path.write_text("\n".join([",".join(header), *lines]))
        found = readers._read_clean_csv(path, layout, header, "s")
        with path.open(encoding="utf-8", newline="") as file:
            careful_rows = list(readers._csv_rows(file, layout, header))
        careful, num_skipped, _ = readers._from_rows(path, careful_rows, layout, "s", "raise")

    assert found is not None
    fast, *_ = found
    assert num_skipped == 0
    assert fast.started_at == careful.started_at
    for name in ("arrival_s", "context_tokens", "generated_tokens"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(careful, name))
