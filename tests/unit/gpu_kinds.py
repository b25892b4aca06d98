"""Every kind of GPU in the package's table, for tests that must hold for all of them."""

import yaml

from tokenyard.perf.hardware import read_table

RANK_KINDS = sorted(yaml.safe_load(read_table("gpus.yaml")))
"""With the cores that run a rank of our own engine."""
GPU_KINDS = [name for name in RANK_KINDS if name != "cpu_core"]
