"""Every kind of GPU in the package's table, for tests that must hold for all of them."""

import yaml

from tokenyard.perf.hardware import load_gpu, read_table

RANK_KINDS = sorted(yaml.safe_load(read_table("gpus.yaml")))
"""With the cores that run a rank of our own engine."""
STEP_TIME_KINDS = [name for name in RANK_KINDS if name.endswith("_vllm")]
"""Fitted to NVIDIA's step times."""
GPU_KINDS = [name for name in RANK_KINDS if name not in ("cpu_core", *STEP_TIME_KINDS)]
"""As the kernels of A100 and H100 and an older engine have them."""


def precisions(gpu):
    """What a kind of GPU can compute in."""
    return ("fp16",) if load_gpu(gpu).fp8_tflops is None else ("fp16", "fp8")
