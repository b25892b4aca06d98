"""Load of a machine and of its GPUs, as a replica publishes it."""

from __future__ import annotations

import psutil

HOST_PREFIXES = ("host_", "gpu_")
"""What names of quantities begin with."""


class HostMetrics:
    """Load of the machine and of its GPUs; NVML where there is a GPU, psutil for the rest."""

    def __init__(self) -> None:
        self._gpus = _open_gpus()
        self._network_bytes: tuple[float, float] | None = None
        psutil.cpu_percent()  # The first call only starts the measurement.

    def read(self, now_s: float) -> dict[str, float]:
        """Return what can be measured, by the name of its metric, at a time of any clock."""
        memory = psutil.virtual_memory()
        values = {
            "host_cpu_ratio": psutil.cpu_percent() / 100.0,
            "host_memory_ratio": memory.percent / 100.0,
        }
        counters = psutil.net_io_counters()
        if counters is not None:
            total = float(counters.bytes_sent + counters.bytes_recv)
            if self._network_bytes is not None and now_s > self._network_bytes[0]:
                before_s, before = self._network_bytes
                values["host_network_bytes_per_second"] = (total - before) / (now_s - before_s)
            self._network_bytes = (now_s, total)
        for index, gpu in enumerate(self._gpus):
            values |= _read_gpu(index, gpu)
        return values


def _open_gpus() -> list[object]:
    import pynvml

    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _read_gpu(index: int, gpu: object) -> dict[str, float]:
    import pynvml

    try:
        used = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        return {
            f"gpu_utilization_ratio/{index}": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100.0,
            f"gpu_memory_ratio/{index}": used.used / used.total,
            f"gpu_power_watts/{index}": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000.0,
        }
    except pynvml.NVMLError:
        return {}
