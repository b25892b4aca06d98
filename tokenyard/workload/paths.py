"""Where trace files lie, and what the published ones are called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

TimeUnit = Literal["s", "ms", "us", "ns"]
OnBadRow = Literal["raise", "skip"]

TRACE_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "azure_code": ("AzureLLMInferenceTrace_code.csv",),
        "azure_conv": (
            "AzureLLMInferenceTrace_conv.csv",
            "AzureLLMInferenceTrace_conv_first60.csv",
        ),
        "azure_code_1week": ("AzureLLMInferenceTrace_code_1week.csv",),
        "azure_conv_1week": ("AzureLLMInferenceTrace_conv_1week.csv",),
        "mooncake_conversation": ("conversation_trace.jsonl",),
        "mooncake_toolagent": ("toolagent_trace.jsonl",),
        "mooncake_synthetic": ("synthetic_trace.jsonl",),
    }
)
"""File names of the published traces by our name for them, the preferred one first.

Azure: github.com/Azure/AzurePublicDataset, CC-BY 4.0, Patel et al., Splitwise, ISCA 2024 (the
one-week files: Stojkovic et al., DynamoLLM, HPCA 2025). The file ending in `first60` is the
leading part of the conversation trace: 11,619 of its 19,366 requests.
Mooncake: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""


def data_folders() -> tuple[Path, ...]:
    """Return the folders searched for traces: $TOKENYARD_DATA, or ./data and ~/.cache/tokenyard."""
    configured = os.environ.get("TOKENYARD_DATA")
    if configured:
        return (Path(configured),)
    return (Path("data"), Path.home() / ".cache" / "tokenyard")


def find_trace(name: str) -> Path | None:
    """Return the file of the published trace `name`, or None where no folder has it.

    Raises:
        ValueError: `name` is no key of `TRACE_FILES`.
    """
    if name not in TRACE_FILES:
        raise ValueError(f"unknown trace {name!r}; choose one of {sorted(TRACE_FILES)}")
    candidates = (folder / file for file in TRACE_FILES[name] for folder in data_folders())
    return next((path for path in candidates if path.is_file()), None)
