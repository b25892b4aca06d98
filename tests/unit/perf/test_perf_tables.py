import pytest
from pydantic import ValidationError
from unit.gpu_kinds import RANK_KINDS

from tokenyard.perf.hardware import Gpu, calibration_of, load_gpu, load_link, shipped_calibration
from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.models import load_llm
from tokenyard.perf.replica import make_replica

# Parameter counts as the model cards give them.
PUBLISHED_PARAMETERS = {
    "llama2_7b": 6.74e9,
    "llama2_13b": 13.0e9,
    "llama2_70b": 69.0e9,
    "llama3_8b": 8.03e9,
    "llama3_70b": 70.6e9,
    "internlm_20b": 20.1e9,
    "smollm2_135m": 134.5e6,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_a_shape_has_as_many_parameters_as_its_model_card_says(name):
    assert load_llm(name).num_parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.005)


def test_grouped_query_attention_shrinks_the_cache_and_not_the_queries():
    grouped, full = load_llm("llama2_70b"), load_llm("llama2_7b")
    assert grouped.kv_bytes_per_token("fp16") == 2 * 80 * 8 * 128 * 2
    assert full.kv_bytes_per_token("fp16") == 2 * 32 * 32 * 128 * 2


def test_fp8_halves_the_layers_and_the_cache_but_not_the_embeddings():
    llm = load_llm("llama3_8b")
    embeddings = 2 * 2 * 128256 * 4096
    assert llm.weight_bytes("fp8") - embeddings == (llm.weight_bytes("fp16") - embeddings) / 2
    assert llm.kv_bytes_per_token("fp8") == llm.kv_bytes_per_token("fp16") / 2


@pytest.mark.parametrize("name", RANK_KINDS)
def test_every_gpu_has_kernels_and_a_link(name):
    gpu = load_gpu(name)
    calibration = calibration_of(gpu)
    assert gpu.kernels in calibration.kernels
    assert load_link(gpu.link, calibration).all_reduce


def test_a_constant_without_a_source_is_refused():
    gpu = load_gpu("l4")
    sources = {key: text for key, text in gpu.sources.items() if key != "idle_w"}
    with pytest.raises(ValidationError, match="sources must name exactly"):
        Gpu.model_validate({**gpu.model_dump(), "sources": sources})


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown gpu 'a200'.*'a100_80g_sxm'"):
        load_gpu("a200")
    with pytest.raises(ValueError, match=r"unknown model 'gpt2'.*'llama2_7b'"):
        load_llm("gpt2")
    with pytest.raises(ValueError, match=r"unknown link 'rope'.*'pcie4'"):
        load_link("rope", shipped_calibration())


@pytest.mark.parametrize(
    ("ranks", "batch", "measured_s"),
    [
        (1, (256, 0, 0), 0.756),
        (1, (0, 1, 50), 0.055),
        (1, (0, 8, 400), 0.068),
        (3, (256, 0, 0), 0.340),
        (3, (0, 1, 50), 0.071),
        (3, (0, 8, 400), 0.111),
    ],
)
def test_cpu_ranks_are_as_fast_as_they_were_measured(ranks, batch, measured_s):
    """Rows behind the provenance in cpu_ranks.json, of which the worst is 22 % off."""
    replica = make_replica("cpu_core", "smollm2_135m", ranks)
    assert iteration_s(replica, *batch) == pytest.approx(measured_s, rel=0.25)
