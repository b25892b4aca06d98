"""Tokens that come one by one, as text that never has to be taken back."""

import asyncio
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from transformers import AutoTokenizer
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.cluster import Limits
from serve_app.engines.base import Chunk
from serve_app.engines.models import find_model
from serve_app.engines.texts import read_texts
from serve_app.engines.tokenizer import Detokenizer, HuggingFaceTokenizer, StopFinder
from serve_app.http.generation_reader import GenerationReader
from serve_app.http.reasons import BadRequest
from serve_app.ray_serve.replica import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pieces(text, seed):
    rng, start = random.Random(seed), 0
    while start < len(text):
        end = start + rng.randint(1, 4)
        yield text[start:end]
        start = end


@settings(max_examples=scaled(60))
@given(text=st.text(max_size=20), seed=st.integers(0, 100))
def test_text_in_pieces_is_the_text_whatever_bytes_its_characters_take(tokenizer, text, seed):
    detokenizer = Detokenizer(tokenizer)
    got = [detokenizer.push(some) for some in pieces(tokenizer.encode(text), seed)]
    assert "".join([*got, detokenizer.finish()]) == tokenizer.decode(tokenizer.encode(text))


def test_the_short_way_to_tokens_and_back_is_that_of_transformers():
    ours = load_tokenizer("default")
    theirs = ours._tokenizer
    for text in ("Hello, world! <|im_start|>  two  spaces , 12345", "é€ \u2028 漢字 \n\n", ""):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Ho"}]
    chat = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode_chat(messages) == theirs.encode(chat, add_special_tokens=False)


def test_the_short_way_to_a_tokenizer_is_that_of_transformers_and_needs_no_torch():
    folder = str(find_model("default"))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = HuggingFaceTokenizer(folder)._tokenizer
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template
    code = (
        "import sys; from serve_app.engines.tokenizer import HuggingFaceTokenizer;"
        f"HuggingFaceTokenizer({folder!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_character_is_held_back_until_all_its_bytes_are_there(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([one]) for one in tokenizer.encode("é€")] == ["", "é", "", "", "€"]


def test_a_character_that_never_ends_is_given_up_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("€")[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 100),
)
def test_a_stop_string_cuts_wherever_pieces_end(text, stops, seed):
    finder = StopFinder(stops)
    got = ""
    for piece in pieces(text, seed):
        got += finder.push(piece)
        if finder.found:
            break
    got += finder.finish()
    starts = [text.find(stop) for stop in stops if stop in text]
    assert finder.found == bool(starts)
    # With several stop strings the one that is complete first cuts.
    assert text.startswith(got)
    if len(stops) <= 1:
        assert got == (text[: starts[0]] if starts else text)


def test_what_may_begin_a_stop_string_is_held_back_and_given_when_it_does_not():
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ("one E", "N", "x", " EN")] == ["one ", "", "ENx", " "]
    assert finder.finish() == "EN"


def read(tokenizer, chunks, stop=()):
    async def everything():
        async def stream():
            for chunk in chunks:
                yield chunk

        return [chunk async for chunk in read_texts(stream(), tokenizer, stop)]

    return asyncio.run(everything())


def test_a_stop_string_over_several_chunks_ends_the_answer_and_counts_its_tokens(tokenizer):
    ids = tokenizer.encode("Hello END more")
    chunks = read(tokenizer, [Chunk((one,)) for one in ids], ("END",))
    assert "".join(chunk.text for chunk in chunks) == "Hello "
    assert (chunks[-1].finish_reason, chunks[-1].num_tokens) == ("stop", 9)


def test_an_answer_that_ends_by_itself_gives_what_was_held_back(tokenizer):
    ids = tokenizer.encode("abcE")
    chunks = read(tokenizer, [Chunk(tuple(ids[:2])), Chunk(tuple(ids[2:]), "length")], ("END",))
    assert "".join(chunk.text for chunk in chunks) == "abcE"
    assert chunks[-1].finish_reason == "length"


def test_an_engine_that_ends_without_a_reason_has_failed(tokenizer):
    with pytest.raises(RuntimeError, match="without a reason"):
        read(tokenizer, [Chunk((1,))])


def test_a_conversation_follows_the_models_template(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<user>hi\n<assistant>"


def test_a_conversation_that_the_models_template_refuses_is_a_bad_request(tmp_path):
    tokenizer = HuggingFaceTokenizer(save_tiny_tokenizer(tmp_path))
    tokenizer._tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}hi"
    )
    reader = GenerationReader(tokenizer, "m", Limits(), 100)

    def read(role):
        body = {"model": "m", "messages": [{"role": role, "content": "hi"}]}
        return asyncio.run(reader.read("/v1/chat/completions", body))

    assert len(read("user").token_ids) == 2
    with pytest.raises(BadRequest, match="refuses them: System role not supported"):
        read("system")


def test_a_folder_without_tokenizer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        HuggingFaceTokenizer(str(tmp_path))
