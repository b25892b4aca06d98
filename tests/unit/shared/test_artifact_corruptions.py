"""Whatever is in a policy file, reading it gives a policy or the one error that names the file."""

import io
import json
import os
import resource
import threading
import time
import zipfile

import numpy as np
import pytest
from sizes import scaled
from unit.serve_builders import linear_artifact, marginal_artifact, network_artifact

from tokenyard.artifact import MAX_FILE_BYTES, ArtifactError
from tokenyard.routing.artifact import PolicyArtifact, learned_policy

MOST_S = 1.0
MOST_GROWTH_KIB = 6 * MAX_FILE_BYTES >> 10
ODD_VALUES = [
    None, True, -1, 0, 1e308, 10**30, "", "x" * 5000, [], [1], [[]], {}, {"a": 1}, "NaN", "1e999",
]  # fmt: skip
ODD_TEXTS = [
    "[1]", "null", "3", '"text"', "[" * 100_000, '{"a":' * 50_000, "{", "\x00",
    '{"format_version":1}', '{"slo_response_s": Infinity}', "9" * 10_000,
]  # fmt: skip
HEADERS = [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
    "{'descr': [('a', '<f8')] * 9, 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<M8[s]', 'fortran_order': 1, 'shape': ('a',), }",
    "(" * 5000,
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 60 + "), }",
    "'''",
    "",
]


def packed(members, compression=zipfile.ZIP_DEFLATED):
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", compression) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return whole.getvalue()


def members_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(one.filename, archive.read(one)) for one in archive.infolist()]


def npy(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


def with_header(text, rest=b"\0" * 8):
    header = text.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rest


def any_bytes_changed(rng, data):
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 8))):
        changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
    return bytes(changed)


def cut_or_doubled(rng, data):
    at = int(rng.integers(len(data)))
    return data[:at] if rng.random() < 0.5 else data[:at] + data[int(rng.integers(len(data))) :]


def an_array_changed(rng, data):
    members = members_of(data)
    at = int(rng.integers(len(members)))
    name, array = members[at]
    changes = [
        lambda: any_bytes_changed(rng, array),
        lambda: cut_or_doubled(rng, array),
        lambda: with_header(str(rng.choice(HEADERS))),
        lambda: npy(rng.normal(size=tuple(rng.integers(0, 4, size=int(rng.integers(4)))))),
    ]
    members[at] = name, changes[int(rng.integers(len(changes)))]()
    if rng.random() < 0.2:
        members.pop(int(rng.integers(len(members))))
    compression = [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    return packed(members, compression[int(rng.choice(4, p=[0.7, 0.1, 0.1, 0.1]))])


def metadata_changed(rng, data):
    members = dict(members_of(data))
    text = str(np.load(io.BytesIO(members["metadata.npy"])))
    if rng.random() < 0.2:
        text = ODD_TEXTS[int(rng.integers(len(ODD_TEXTS)))]
    else:
        found = json.loads(text)
        for _ in range(int(rng.integers(1, 4))):
            key = str(rng.choice([*found, "unknown"]))
            found[key] = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
        text = json.dumps(found)
    members["metadata.npy"] = npy(np.array(text))
    return packed(members.items())


CHANGES = [any_bytes_changed, cut_or_doubled, an_array_changed, metadata_changed]


def read(data):
    """Read a policy and make it; return whether that is possible."""
    refusal, taken_s = attempt(data)
    if taken_s >= MOST_S:
        # What collects garbage meanwhile is not slow again; a file that is slow to read is.
        refusal, taken_s = attempt(data)
    assert taken_s < MOST_S
    assert refusal is None or ("x.npz" in refusal and len(refusal) < 1000)
    return refusal is None


def attempt(data):
    """Why a file is refused, None if it is not, and the seconds of this thread's CPU."""
    started_s, refusal = time.thread_time(), None
    try:
        learned_policy(PolicyArtifact.decoded(data, "x.npz"))
    except ArtifactError as error:
        refusal = str(error)
    return refusal, time.thread_time() - started_s


def test_corrupted_files_are_refused_by_name_in_time_and_in_little_memory():
    rng = np.random.default_rng(22)
    whole = [one.encoded() for one in (linear_artifact(), marginal_artifact(), network_artifact())]
    assert all(map(read, whole))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_usable, total = 0, scaled(10_000)
    for _ in range(total):
        data = whole[int(rng.integers(len(whole)))]
        for _ in range(int(rng.integers(1, 3))):
            change = CHANGES[int(rng.integers(len(CHANGES)))]
            try:
                data = change(rng, data)
            except Exception:  # What is no file any more cannot be changed as one.
                break
        num_usable += read(data)
    assert num_usable < total / 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_GROWTH_KIB


def bomb(num_bytes, declared=None):
    data = bytearray(packed([("metadata.npy", npy(np.zeros(num_bytes // 8)))]))
    if declared is not None:
        start = data.index(b"PK\x01\x02")
        data[start + 24 : start + 28] = declared.to_bytes(4, "little")
    return bytes(data)


def many_entries(count):
    return packed([(f"{i}.npy", b"") for i in range(count)], zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bomb(200 << 20), "more than"),
        (bomb(200 << 20, declared=1000), "broken"),
        (many_entries(20_000), "table of contents"),
        (npy(np.zeros(3)), "no npz file"),
        (packed([("metadata.npy", npy(np.array("[" * 1_000_000)))]), "broken"),
    ],
    ids=["large", "larger than it says", "many members", "npy", "deep"],
)
def test_a_file_that_unpacks_to_more_than_it_may_is_not_unpacked(data, reason):
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtifactError, match=reason):
        PolicyArtifact.decoded(data, "x.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_GROWTH_KIB


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    refused = []

    def load(path):
        with pytest.raises(ArtifactError) as error:
            PolicyArtifact.load(path)
        refused.append(str(error.value))

    for path in (tmp_path / "pipe.npz", tmp_path, "/dev/zero", "a\0b.npz"):
        reading = threading.Thread(target=load, args=(path,), daemon=True)
        reading.start()
        reading.join(30)
    assert len(refused) == 4


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.npz"
    with path.open("wb") as file:
        file.truncate(10 * MAX_FILE_BYTES)
    with pytest.raises(ArtifactError, match=r"large\.npz is larger than"):
        PolicyArtifact.load(path)
