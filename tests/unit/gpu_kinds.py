"""Every kind of GPU in the package's table, for tests that must hold for all of them."""

import yaml

from tokenyard.perf.hardware import read_table

GPU_KINDS = sorted(yaml.safe_load(read_table("gpus.yaml")))
