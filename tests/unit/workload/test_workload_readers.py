"""Readers recognise published layouts, ask for what they cannot tell, and say what is wrong."""

import gzip
import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from scripts import load_script

from tokenyard.workload.readers import TraceError, find_trace, read_trace
from tokenyard.workload.trace_options import TraceOptions

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "arrival_s,context_tokens,generated_tokens\n"
FIRST = "2023-11-16 18:17:03.9799600,4808,10\n"
SECOND = "2023-11-16 18:17:04.0319600,3180,8\n"


@pytest.fixture
def file_with(tmp_path):
    def write(text):
        path = tmp_path / "trace.txt"
        path.write_bytes(text.encode())
        return path

    return write


def test_azure_times_keep_all_seven_digits(file_with):
    trace, num_skipped = read_trace(file_with(AZURE + FIRST + SECOND))

    assert num_skipped == 0
    assert trace.arrival_s.tolist() == [0, 0.052]
    assert trace.context_tokens.tolist() == [4808, 3180]
    assert trace.started_at == datetime(2023, 11, 16, 18, 17, 3, 979960, UTC)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\N{BYTE ORDER MARK}"])
def test_one_week_files_with_offsets_and_any_line_ending_are_read(file_with, ending, mark):
    lines = [mark + AZURE.strip(), "2024-05-10 00:00:00.009930+00:00,2162,5"]
    lines.append("2024-05-10 00:00:00+00:00,4,0")
    text = ending.join([lines[0], lines[2], lines[1]])  # no line end after the last row

    trace, _ = read_trace(file_with(text))

    assert trace.arrival_s.tolist() == [0, 0.00993]
    assert trace.generated_tokens.tolist() == [0, 5]
    assert trace.started_at == datetime(2024, 5, 10, tzinfo=UTC)


def test_times_with_other_offsets_are_converted_to_utc(file_with):
    trace, _ = read_trace(file_with(AZURE + "2024-05-10 02:00:00+02:00,1,1\n"))

    assert trace.started_at == datetime(2024, 5, 10, tzinfo=UTC)


def test_mooncake_lines_keep_their_prefix_hashes_and_count_milliseconds(file_with):
    rows = [
        {"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 4500, "input_length": 7319, "output_length": 490, "hash_ids": [0, 2]},
    ]

    trace, _ = read_trace(file_with("\n".join(map(json.dumps, rows))))

    assert trace.arrival_s.tolist() == [0, 3.5]
    assert trace.context_tokens.tolist() == [6758, 7319]
    assert trace.prefix_hashes == ((0, 1), (0, 2))
    assert trace.started_at is None


def test_mooncake_lines_may_have_no_hashes(file_with):
    row = {"timestamp": 1000, "input_length": 5, "output_length": 6}
    trace, _ = read_trace(file_with(f"{json.dumps(row)}\n{json.dumps({**row, 'hash_ids': None})}"))
    assert trace.prefix_hashes == ((), ())


def test_plain_files_may_order_columns_as_they_like_and_have_more_of_them(file_with):
    text = "user,generated_tokens,arrival_s,context_tokens\nann,7,100.5,30\nbob,8,101.75,31\n"

    trace, _ = read_trace(file_with(text))

    assert trace.arrival_s.tolist() == [0, 1.25]
    assert trace.context_tokens.tolist() == [30, 31]
    assert trace.generated_tokens.tolist() == [7, 8]


BAD_ROWS = {
    "2023-11-16 18:17:04.0,-3,8\n": "negative context tokens -3",
    "2023-11-16 18:17:04.0,3,-8\n": "negative generated tokens -8",
    "2023-11-16 18:17:04.0,3.5,8\n": "context tokens '3.5' are no integer",
    "2023-11-16 18:17:04.0,many,8\n": "context tokens 'many' are no integer",
    "2023-11-16 18:17:04.0,,8\n": "context tokens '' are no integer",
    "2023-11-16 18:17:04.0,99999999999999999999,8\n": "beyond any prompt",
    "2023-11-16 18:17:04.0,9999999999999999,8\n": "beyond any prompt",
    "2022-11-16 18:17:04.0,3,8\n": "is 31,536,0",
    "yesterday,3,8\n": "unparsable time 'yesterday'",
    "2023-13-45 18:17:04,3,8\n": "unparsable time '2023-13-45 18:17:04'",
    ",3,8\n": "unparsable time ''",
    "2023-11-16 18:17:04.0,3\n": "2 fields where the header has 3",
    "2023-11-16 18:17:04.0,3,8,9\n": "4 fields where the header has 3",
}


def beside(row, num_good=100):
    """A file in which a bad row follows the first of many good ones."""
    good = [f"2023-11-16 18:17:{3 + 0.25 * i:09.6f},4808,10\n" for i in range(num_good)]
    return AZURE + good[0] + row + "".join(good[1:])


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items())
def test_a_bad_row_names_file_line_and_reason(file_with, row, reason):
    path = file_with(beside(row))

    with pytest.raises(TraceError) as error:
        read_trace(path)

    assert str(error.value).startswith(f"{path}, line 3: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_skipped_and_counted_on_request(file_with, row):
    trace, num_skipped = read_trace(file_with(beside(row)), on_bad_row="skip")

    assert num_skipped == 1
    assert trace.arrival_s.tolist() == [0.25 * i for i in range(100)]


def test_more_than_one_bad_row_in_a_hundred_are_not_left_out(file_with):
    text = beside("yesterday,3,8\n" * 2, 197)
    assert read_trace(file_with(beside("yesterday,3,8\n" * 2, 198)), on_bad_row="skip")[1] == 2
    with pytest.raises(TraceError, match=r"line 3: unparsable time 'yesterday'; 2 of 199 rows"):
        read_trace(file_with(text), on_bad_row="skip")


@pytest.mark.parametrize("nobody_knows", ["0001-01-01 00:00:00", "9999-12-31 23:59:59"])
@pytest.mark.parametrize("place", range(3))
def test_a_date_that_stands_for_none_is_a_bad_row_wherever_it_is(file_with, nobody_knows, place):
    rows = [f"2023-11-16 18:17:{i % 60:02},1,2\n" for i in range(3, 103)]
    rows = sorted(rows)
    rows.insert(50 * place, f"{nobody_knows},5,6\n")
    path = file_with(AZURE + "".join(rows))

    with pytest.raises(TraceError, match=f"line {2 + 50 * place}: unparsable .*'{nobody_knows}'"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, num_skipped) == (100, 1)
    assert trace.started_at == datetime(2023, 11, 16, 18, 17, tzinfo=UTC)


def test_columns_of_others_may_hold_long_texts_with_line_ends_beside_a_bad_row(file_with):
    texts = ["one\nline\r\n\nafter, the other", "long " * 40_000, *['the "last"'] * 98]
    rows = [f'{i},{i + 1},7,"{text.replace(chr(34), 2 * chr(34))}"' for i, text in enumerate(texts)]
    rows.insert(1, "0.5,many,7,short")
    path = file_with("\n".join(["arrival_s,context_tokens,generated_tokens,prompt", *rows]))

    with pytest.raises(TraceError, match="line 6: context tokens 'many' are no integer"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert num_skipped == 1
    assert trace.context_tokens.tolist() == list(range(1, 101))


def test_a_quote_that_is_never_closed_takes_the_lines_after_it_and_all_are_counted(file_with):
    rows = [*(f"{i},5,6,a" for i in range(297)), '297,5,6,"c', "298,5,6,d", "299,5,6,e"]
    path = file_with("\n".join(["arrival_s,context_tokens,generated_tokens,prompt", *rows]))

    with pytest.raises(TraceError, match="line 299: unexpected end of data"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, num_skipped) == (297, 3)


def test_a_last_row_at_infinity_is_a_bad_row(file_with):
    path = file_with(PLAIN + "".join(f"{i},5,6\n" for i in range(99)) + "inf,5,6\n")
    with pytest.raises(TraceError, match=r"line 101: unparsable time 'inf'"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, num_skipped) == (99, 1)


@pytest.mark.parametrize("row", ["{", "[1]", '{"timestamp": 3, "input_length": 4}', "12"])
def test_a_bad_json_line_names_file_line_and_reason(file_with, row):
    good = '{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": []}\n'
    path = file_with(good + row + "\n" + 98 * good)

    with pytest.raises(TraceError, match=r"line 2: (not a JSON object|missing column output_len)"):
        read_trace(path)
    assert read_trace(path, on_bad_row="skip")[1] == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: the file is empty"),
        (AZURE, "line 2: the file has a header and no request"),
        ("TIMESTAMP,ContextTokens\n" + FIRST, "line 1: missing column GeneratedTokens"),
        ("context_tokens,generated_tokens\n1,2\n", "line 1: missing column arrival_s"),
        (FIRST + SECOND, "line 1: unknown header"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_a_file_without_header_column_or_request_is_refused(file_with, text, reason, on_bad_row):
    with pytest.raises(TraceError, match=reason):
        read_trace(file_with(text), on_bad_row)


def test_a_file_that_is_no_text_is_not_shown_but_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode("utf-16"))
    with pytest.raises(TraceError, match="line 1: this is no text in UTF-8; unpack or convert it"):
        read_trace(path)


def test_skipping_every_row_is_an_error_and_not_an_empty_trace(file_with):
    with pytest.raises(TraceError, match="line 2: negative context"):
        read_trace(file_with(AZURE + "2023-11-16 18:17:04.0,-3,8\n"), on_bad_row="skip")


def test_bytes_that_are_no_text_name_their_line(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode() + FIRST.encode() + b"\xff\xfe,1,2\n")

    with pytest.raises(TraceError, match="line 3: unparsable time"):
        read_trace(path)


ROWS = [(0.75 * i + 0.125 * (i % 3), 40 * i + 20, i + 1) for i in range(100)]
"""Seconds, prompts and answers of 100 requests in 74.25 s."""
STAMPS = {
    "dates": lambda time_s: str(datetime(2024, 5, 10, tzinfo=UTC) + timedelta(seconds=time_s)),
    "s": lambda time_s: time_s,
    "ms": lambda time_s: round(1e3 * time_s),
    "us": lambda time_s: round(1e6 * time_s),
    "ns": lambda time_s: round(1e9 * time_s),
}  # fmt: skip
SINCE_1970_S = 1_715_299_200


def as_csv(header, stamp=STAMPS["s"], rows=ROWS):
    names = header.split(",")
    lines = [header]
    for time_s, prompt, answer in rows:
        values = dict(zip(COLUMNS[header], (stamp(time_s), prompt, answer), strict=True))
        lines.append(",".join(str(values.get(name, "x")) for name in names))
    return "\n".join(lines) + "\n"


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
LATER = BURSTGPT.replace("Model", "Session ID,Elapsed time,Model")
COLUMNS = {
    PLAIN.strip(): ("arrival_s", "context_tokens", "generated_tokens"),
    AZURE.strip(): ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    BURSTGPT: ("Timestamp", "Request tokens", "Response tokens"),
    LATER: ("Timestamp", "Request tokens", "Response tokens"),
}


def as_json(stamp, block_tokens=None, **more):
    """Lines in which every prompt begins with the same block."""
    lines = []
    for index, (time_s, prompt, answer) in enumerate(ROWS):
        record = {"timestamp": stamp(time_s), "input_length": prompt, "output_length": answer}
        if block_tokens:
            own = range(1, math.ceil(prompt / block_tokens))
            record["hash_ids"] = [0, *(1000 * index + i for i in own)]
        lines.append(json.dumps(more | record))
    return "\n".join(lines) + "\n"


CHAT = {"chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1}
RECOGNISED = {
    "plain": (as_csv(PLAIN.strip()), "layout plain, times in s,", None),
    "Azure 2024": (as_csv(AZURE.strip(), STAMPS["dates"]), "layout Azure, dates,", None),
    "BurstGPT": (as_csv(BURSTGPT), "layout BurstGPT, times in s,", None),
    "BurstGPT with sessions": (as_csv(LATER), "layout BurstGPT, times in s,", None),
    "Bailian": (as_json(STAMPS["s"], 16, **CHAT), "layout Bailian, times in s, blocks of 16", 16),
    "Mooncake": (as_json(STAMPS["ms"], 512), "layout Mooncake, times in ms, blocks of 512", 512),
    "Mooncake, s": (as_json(STAMPS["s"], 512), "layout Mooncake, times in s, blocks of 512", 512),
    "Mooncake, dates": (as_json(STAMPS["dates"], 512), "layout Mooncake, dates, blocks of", 512),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", RECOGNISED)
def test_layouts_are_recognised_with_their_units_and_blocks(tmp_path, case, packed):
    text, words, block_tokens = RECOGNISED[case]
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    told = []

    trace, _ = read_trace(path, tell=told.append)

    assert trace.arrival_s.tolist() == pytest.approx([time_s for time_s, *_ in ROWS])
    assert trace.context_tokens.tolist() == [prompt for _, prompt, _ in ROWS]
    assert trace.generated_tokens.tolist() == [answer for *_, answer in ROWS]
    assert trace.prefix_block_tokens == block_tokens
    [line] = told
    assert line.startswith(f"trace {path}: {words}")
    assert line.endswith(", rows: 100, span: 74.25 s")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("header", [PLAIN.strip(), AZURE.strip()])
def test_numbers_since_1970_tell_their_unit_themselves(file_with, unit, header):
    text = as_csv(header, lambda time_s: STAMPS[unit](SINCE_1970_S + time_s))
    trace, _ = read_trace(file_with(text))
    assert trace.arrival_s.tolist() == pytest.approx([time_s for time_s, *_ in ROWS], abs=1e-5)
    assert trace.started_at == datetime.fromtimestamp(SINCE_1970_S, UTC)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (as_csv(AZURE.strip()), "s"),
        (as_csv(PLAIN.strip(), STAMPS["ms"]), "ms"),
        (as_csv(PLAIN.strip(), STAMPS["us"]), "us"),
        (as_csv(BURSTGPT, STAMPS["ms"]), "ms"),
        (as_json(STAMPS["ms"], 16, **CHAT), "ms"),
        (as_json(lambda time_s: int(time_s) + 0.25, 512).replace(".25,", ","), "s"),
        (as_json(STAMPS["ns"], 512), "ns"),
        (as_json(STAMPS["ms"]), "ms"),
    ],
)
def test_a_unit_that_nothing_tells_or_the_rate_speaks_against_is_asked_for(file_with, text, unit):
    path = file_with(text)
    with pytest.raises(TraceError, match=r"tells the unit of .*: give --time-unit s\|ms\|us\|ns$"):
        read_trace(path)
    trace, _ = read_trace(path, time_unit=unit)
    assert trace.duration_s == pytest.approx(74.25, abs=1)


UNSIZED = as_json(STAMPS["s"], 64)
NAMES = ("timestamp", "input_length", "output_length")
for name, other in zip(NAMES, COLUMNS[PLAIN.strip()], strict=True):
    UNSIZED = UNSIZED.replace(name, other)


@pytest.mark.parametrize(
    ("text", "block_tokens", "reason"),
    [
        (as_json(STAMPS["ms"], 16), 16, "line 1: 2 blocks of 512 tokens are more than the 20 tok"),
        (as_json(STAMPS["ms"], 1024), 1024, "of 100 prompts have fewer hash ids than blocks"),
        (as_json(STAMPS["s"], 512, **CHAT), 512, "of 100 prompts have fewer hash ids than blocks"),
        (UNSIZED, 64, "line 1: nothing tells how many tokens a hash id stands for"),
    ],
)
def test_blocks_that_do_not_fit_the_prompts_are_asked_for(file_with, text, block_tokens, reason):
    path = file_with(text)
    with pytest.raises(TraceError, match=f"{reason}.*: give --block-tokens N"):
        read_trace(path)
    trace, _ = read_trace(path, block_tokens=block_tokens)
    assert trace.prefix_block_tokens == block_tokens
    assert len(trace.prefix_hashes[-1]) == math.ceil(3980 / block_tokens)


def test_requests_that_failed_are_left_out_of_burstgpt_with_a_count_and_are_not_bad(file_with):
    rows = [(time_s, prompt, 0 if i % 10 == 3 else 5) for i, (time_s, prompt, _) in enumerate(ROWS)]
    told = []
    trace, bad = read_trace(file_with(as_csv(BURSTGPT, rows=rows)), tell=told.append)
    assert (trace.num_requests, bad) == (90, 0)
    assert "rows: 90," in told[0]
    assert "failed, without an answer, left out: 10" in told[0]
    trace, _ = read_trace(file_with(as_csv(PLAIN.strip(), rows=rows)))
    assert trace.num_requests == 100, "elsewhere an answer may be empty"


@pytest.mark.parametrize(
    ("order", "moved"),
    [
        ([1, 0, *range(2, 100)], 1),
        ([*range(99, -1, -1)], 99),
        ([*range(50, 100), *range(50)], 50),
        ([i ^ 1 for i in range(100)], 50),
    ],
)
def test_rows_out_of_order_are_sorted_and_counted(file_with, order, moved):
    told = []
    path = file_with(as_csv(PLAIN.strip(), rows=[ROWS[i] for i in order]))
    trace, bad = read_trace(path, tell=told.append)
    assert trace.context_tokens.tolist() == [prompt for _, prompt, _ in ROWS]
    assert bad == 0
    assert told[0].endswith(f"; out of order, now sorted: {moved}")


@pytest.mark.parametrize("stamp", ["s", "dates"])
@pytest.mark.parametrize("off_s", [365 * 86_400, -365 * 86_400, 3600])
@pytest.mark.parametrize("place", [0, 3, 97])
def test_one_clock_that_is_off_makes_one_bad_row(file_with, place, off_s, stamp):
    rows = list(ROWS)
    rows[place] = (rows[place][0] + off_s, 7, 7)
    header = (PLAIN if stamp == "s" else AZURE).strip()
    path = file_with(as_csv(header, STAMPS[stamp], rows))
    with pytest.raises(TraceError, match=f"line {2 + place}: time .* s away from those of the"):
        read_trace(path)
    trace, bad = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, bad) == (99, 1)
    assert 7 not in trace.context_tokens.tolist()


LONG = "x" * 16_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps([{"id": "q", "conversations": [{"value": LONG}]}]), "a JSON list is no trace"),
        (json.dumps({"backend": "vllm", "ttfts": [0.1], "itls": [[0.1]]}), "of a benchmark"),
        (json.dumps({"ttfts": [0.1], "errors": [LONG]}, indent=1), "of a benchmark"),
        (json.dumps({"resourceSpans": [{"scopeSpans": [LONG]}]}), "line 1: not an object with res"),
        (json.dumps({"messages": [{"role": "user", "content": LONG}]}), "of conversations is"),
        (json.dumps({LONG[:30] + str(i): i for i in range(500)}), "this JSON is no trace"),
        (f"{LONG},1,2\n", "unknown header"),
        (f"arrival_s,{LONG}\n0,1\n", "missing column context_tokens"),
        (PLAIN + f"{LONG},1,2\n", "unparsable time"),
        (PLAIN + "nobody knows,1,2\n" * 20, "line 2: unparsable time 'nobody knows'"),
        (as_csv(PLAIN.strip()) + "-1e300,1,2\n", "line 102: time '-1e300' is .* s away"),
        (PLAIN + f"0,{LONG},2\n", "are no integer"),
        (PLAIN + f"0,{'9' * 16_000},2\n", "beyond any prompt"),
        (as_json(STAMPS["ms"]) + f'{{"a": "{LONG}"\n', "line 101: not a JSON object with"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_named_and_quoted_in_part(file_with, text, reason):
    with pytest.raises(TraceError, match=reason) as error:
        read_trace(file_with(text), time_unit="ms")
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("text", [as_csv(PLAIN.strip()), as_json(STAMPS["s"], 16, **CHAT)])
def test_a_file_that_was_packed_and_cut_is_refused(tmp_path, text):
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(text.encode())[:-40])
    with pytest.raises(TraceError, match="packed by gzip is broken: Compressed file ended"):
        read_trace(path)


@pytest.mark.parametrize("name", ["evaluate", "train", "fit_workload", "replay"])
def test_every_command_that_takes_a_trace_says_what_it_recognised(file_with, name, capsys):
    args = load_script(f"pipelines/{name}.py").Args
    path = file_with(as_csv(AZURE.strip(), STAMPS["us"]))
    options = {"time_unit": "us", "block_tokens": 16, "on_bad_row": "skip"}
    reading = TraceOptions(**options)
    asked = args(reading=reading).reading if name == "train" else args(**options)
    trace, _ = asked.read(path)
    assert trace.duration_s == pytest.approx(74.25)
    assert capsys.readouterr().err == (
        f"trace {path}: layout Azure, times in us, rows: 100, span: 74.25 s\n"
    )


def test_the_configured_folder_is_searched_for_published_traces(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENYARD_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    assert find_trace("azure_conv") is None
    partial = tmp_path / "AzureLLMInferenceTrace_conv_first60.csv"
    partial.touch()
    assert find_trace("azure_conv") == partial
    whole = tmp_path / "home" / ".cache" / "tokenyard" / "AzureLLMInferenceTrace_conv.csv"
    whole.parent.mkdir(parents=True)
    whole.touch()
    assert find_trace("azure_conv") == partial
    monkeypatch.delenv("TOKENYARD_DATA")
    assert find_trace("azure_conv") == whole


def test_an_unknown_trace_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="azure_code"):
        find_trace("azure")
