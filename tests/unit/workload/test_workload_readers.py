"""Readers accept three formats, and say what is wrong with a file that is none."""

import gzip
import json
from datetime import UTC, datetime

import pytest

from tokenyard.workload.readers import TraceError, find_trace, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
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
    "2023-11-16 18:17:02.0,3,8\n": "is before the row above it",
    "yesterday,3,8\n": "unparsable time 'yesterday'",
    "2023-13-45 18:17:04,3,8\n": "unparsable time '2023-13-45 18:17:04'",
    ",3,8\n": "unparsable time ''",
    "2023-11-16 18:17:04.0,3\n": "2 fields where the header has 3",
    "2023-11-16 18:17:04.0,3,8,9\n": "4 fields where the header has 3",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items())
def test_a_bad_row_names_file_line_and_reason(file_with, row, reason):
    path = file_with(AZURE + FIRST + row + SECOND)

    with pytest.raises(TraceError) as error:
        read_trace(path)

    assert str(error.value).startswith(f"{path}, line 3: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_skipped_and_counted_on_request(file_with, row):
    trace, num_skipped = read_trace(file_with(AZURE + FIRST + row + SECOND), on_bad_row="skip")

    assert num_skipped == 1
    assert trace.arrival_s.tolist() == [0, 0.052]


@pytest.mark.parametrize("nobody_knows", ["0001-01-01 00:00:00", "9999-12-31 23:59:59"])
@pytest.mark.parametrize("place", range(3))
def test_a_date_that_stands_for_none_is_a_bad_row_wherever_it_is(file_with, nobody_knows, place):
    rows = ["2023-11-16 18:17:03,1,2\n", "2023-11-16 18:17:05,3,4\n"]
    rows.insert(place, f"{nobody_knows},5,6\n")
    path = file_with(AZURE + "".join(rows))

    with pytest.raises(TraceError, match=f"line {2 + place}: unparsable time '{nobody_knows}'"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.arrival_s.tolist(), num_skipped) == ([0, 2], 1)
    assert trace.started_at == datetime(2023, 11, 16, 18, 17, 3, tzinfo=UTC)


def test_columns_of_others_may_hold_long_texts_with_line_ends_beside_a_bad_row(file_with):
    texts = ["one\nline\r\n\nafter, the other", "long " * 40_000, 'the "last"']
    rows = [f'{i},{i + 1},7,"{text.replace(chr(34), 2 * chr(34))}"' for i, text in enumerate(texts)]
    rows.insert(1, "0.5,many,7,short")
    path = file_with("\n".join(["arrival_s,context_tokens,generated_tokens,prompt", *rows]))

    with pytest.raises(TraceError, match="line 6: context tokens 'many' are no integer"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert num_skipped == 1
    assert trace.context_tokens.tolist() == [1, 2, 3]


def test_a_quote_that_is_never_closed_takes_the_lines_after_it_and_all_are_counted(file_with):
    rows = ["0,5,6,a", "1,5,6,b", '2,5,6,"c', "3,5,6,d", "4,5,6,e"]
    path = file_with("\n".join(["arrival_s,context_tokens,generated_tokens,prompt", *rows]))

    with pytest.raises(TraceError, match="line 4: unexpected end of data"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, num_skipped) == (2, 3)


def test_a_last_row_at_infinity_is_a_bad_row(file_with):
    path = file_with("arrival_s,context_tokens,generated_tokens\n0,5,6\n3,5,6\ninf,5,6\n")
    with pytest.raises(TraceError, match=r"line 4: unparsable time 'inf'"):
        read_trace(path)
    trace, num_skipped = read_trace(path, on_bad_row="skip")
    assert (trace.num_requests, num_skipped) == (2, 1)


@pytest.mark.parametrize("row", ["{", "[1]", '{"timestamp": 3, "input_length": 4}', "12"])
def test_a_bad_json_line_names_file_line_and_reason(file_with, row):
    good = '{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": []}\n'
    path = file_with(good + row + "\n")

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


@pytest.mark.parametrize(
    "data", [gzip.compress(AZURE.encode()), AZURE.encode("utf-16")], ids=["gzip", "UTF-16"]
)
def test_a_file_that_is_no_text_is_not_shown_but_named(tmp_path, data):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(data)
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
