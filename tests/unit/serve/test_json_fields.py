"""One field of a JSON object is replaced, and the rest stays byte by byte."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app.gateway.json_fields import replace_field, set_field, spans

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("model"), inner),
    max_leaves=8,
)


@settings(max_examples=scaled(300), deadline=None)
@given(
    st.dictionaries(st.text() | st.just("model"), VALUES, max_size=6),
    st.booleans(),
    st.sampled_from([None, 0, 3]),
    st.text(),
)
def test_only_the_named_field_changes(fields, is_ascii, indent, value):
    body = json.dumps(fields, ensure_ascii=is_ascii, indent=indent).encode(errors="replace")
    known = json.loads(body)
    assert {name: got for name, got, _, _ in spans(body.decode())} == known
    changed = replace_field(body, "model", value)
    expected = known | {"model": value} if "model" in known else known
    assert json.loads(changed) == expected
    if "model" not in known:
        assert changed == body


def test_of_a_field_that_is_there_twice_both_change_and_blanks_stay():
    body = b' {\t"model" : 1 ,\n"a":{"model":2},"model":"x" } \n'
    assert replace_field(body, "model", "y") == (
        b' {\t"model" : "y" ,\n"a":{"model":2},"model":"y" } \n'
    )


@pytest.mark.parametrize("body", [b"[]", b"1", b"", b'{"a" 1}', b'{"a":1', b"{a:1}", b"\xff"])
def test_what_is_no_object_is_an_error(body):
    with pytest.raises(ValueError, match=r".+"):
        replace_field(body, "model", "x")


@settings(max_examples=scaled(300), deadline=None)
@given(
    st.dictionaries(st.text() | st.just("priority"), VALUES, max_size=6),
    st.sampled_from([None, 0, 3]),
    st.integers(),
)
def test_a_field_that_is_not_there_comes_first_and_the_rest_stays(fields, indent, value):
    body = json.dumps(fields, ensure_ascii=False, indent=indent).encode(errors="replace")
    changed = set_field(body, "priority", value)
    assert json.loads(changed) == json.loads(body) | {"priority": value}
    if "priority" not in json.loads(body):
        added = b'"priority": %d%b' % (value, b", " if json.loads(body) else b"")
        assert changed.replace(added, b"", 1) == body
