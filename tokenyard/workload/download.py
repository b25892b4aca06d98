"""Download the published traces: where they are, how they are checked, and resuming."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

_AZURE_2023 = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/AzureLLMInferenceTrace_"
)
_AZURE_2024 = (
    "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/",
    "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024/",
)
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"

_CHUNK_BYTES = 1 << 14  # what a broken connection may cost
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)  # between two pieces of the answer, and to connect


@dataclass(frozen=True)
class Source:
    """Where a published file is, and what is known to check it by."""

    urls: tuple[str, ...]
    """Addresses of the same file, the publisher's own first."""
    sha256: str | None = None
    """Checksum; None where none is known."""
    num_requests: int | None = None
    """Requests in the file; None where no number is known."""


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "azure_code": Source(
            (_AZURE_2023 + "code.csv",),
            sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            num_requests=8819,
        ),
        "azure_conv": Source((_AZURE_2023 + "conv.csv",), num_requests=19_366),
        "azure_code_1week": Source(
            tuple(base + "AzureLLMInferenceTrace_code_1week.csv" for base in _AZURE_2024)
        ),
        "azure_conv_1week": Source(
            tuple(base + "AzureLLMInferenceTrace_conv_1week.csv" for base in _AZURE_2024)
        ),
        "mooncake_conversation": Source((_MOONCAKE + "conversation_trace.jsonl",)),
        "mooncake_toolagent": Source((_MOONCAKE + "toolagent_trace.jsonl",)),
        "mooncake_synthetic": Source((_MOONCAKE + "synthetic_trace.jsonl",)),
    }
)
"""Sources by the names of `tokenyard.workload.paths.TRACE_FILES`, which holds the licences.

The publishers give no checksums; the one here was taken from a copy of the published file."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there, and the bytes of the whole file where that is known."""


class DownloadError(Exception):
    """A file could not be fetched or is not what was published; the text is one sentence."""


def fetch(source: Source, target: Path, on_progress: Progress = lambda done, total: None) -> str:
    """Fetch a file unless it is there already, and check it.

    What arrives is kept in `target` with `.part` appended until it is complete and checked, so
    that an interrupted download goes on where it stopped and nobody reads half a trace. It starts
    over where the file has changed since, or its server does not tell.

    Returns:
        What the file was checked against, in words.

    Raises:
        DownloadError: No address answered, the connection broke, or the file is not the
            published one, in which case what was downloaded is removed.
    """
    if target.is_file():
        return verify(source, target) or "nothing; it was there, and no checksum is published"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    _download_from_any(source.urls, part, on_progress)
    try:
        checked = verify(source, part)
    except DownloadError:
        part.unlink()
        raise
    finally:
        _version_of(part).unlink()
    part.rename(target)
    return checked or "size announced by the server; no checksum published"


def verify(source: Source, path: Path) -> str | None:
    """Check a file's checksum or number of requests; return which, or None if neither is known.

    Raises:
        DownloadError: The file differs.
    """
    if source.sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            raise DownloadError(f"{path} has sha256 {digest}, expected {source.sha256}")
        return "sha256"
    if source.num_requests is not None:
        with path.open("rb") as file:
            num_requests = sum(1 for line in file if line.strip()) - 1
        if num_requests != source.num_requests:
            raise DownloadError(
                f"{path} has {num_requests} requests, expected {source.num_requests}"
            )
        return "number of requests; no checksum published"
    return None


def _download_from_any(urls: tuple[str, ...], part: Path, on_progress: Progress) -> None:
    failures = []
    for url in urls:
        try:
            return _download(url, part, on_progress)
        except DownloadError as error:
            failures.append(str(error))
    raise DownloadError("; ".join(failures))


def _download(url: str, part: Path, on_progress: Progress) -> None:
    """Append the missing bytes to `part`, or start over if the server cannot resume."""
    kept = _version_of(part)
    version = kept.read_text(encoding="utf-8") if kept.is_file() else ""
    start = part.stat().st_size if version and part.is_file() else 0
    # With compression, ranges would not count the file's own bytes.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        with httpx.stream(
            "GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True
        ) as response:
            if start and response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return _finish_or_restart(response, url, part, on_progress)
            if not response.is_success:
                raise DownloadError(f"{url} answered HTTP {response.status_code}")
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            total = _total_bytes(response, start if resumed else 0)
            with part.open("ab" if resumed else "wb") as file:
                if not resumed:
                    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
                    kept.write_text(tag or "", encoding="utf-8")
                for chunk in response.iter_bytes(_CHUNK_BYTES):
                    file.write(chunk)
                    on_progress(file.tell(), total)
    except httpx.HTTPError as error:
        raise DownloadError(_in_one_sentence(url, error)) from error
    if total is not None and part.stat().st_size != total:
        raise DownloadError(f"{url} ended after {part.stat().st_size} of {total} bytes; run again")


def _version_of(part: Path) -> Path:
    """Holds the entity tag or date by which a server knows the file that `part` is the start of."""
    return part.with_name(part.name + ".version")


def _finish_or_restart(
    response: httpx.Response, url: str, part: Path, on_progress: Progress
) -> None:
    """Nothing is left to send: `part` is either complete, or no part of this file at all."""
    if response.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
        return
    part.unlink()
    _download(url, part, on_progress)


def _total_bytes(response: httpx.Response, start: int) -> int | None:
    """Return the size of the whole file, where the server says it."""
    whole = re.search(r"/(\d+)$", response.headers.get("Content-Range", ""))
    if whole:
        return int(whole[1])
    length = response.headers.get("Content-Length")
    return start + int(length) if length else None


def _in_one_sentence(url: str, error: httpx.HTTPError) -> str:
    host = url.split("/")[2]
    if isinstance(error, httpx.TimeoutException):
        return f"{host} did not answer in time; run again to go on where it stopped"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"the connection to {host} broke; run again to go on where it stopped"
    return f"cannot reach {host}: is there a network? ({type(error).__name__})"
