"""Where sweeps are kept: a folder, or whatever pyarrow or fsspec can reach."""

from __future__ import annotations

from fsspec.core import url_to_fs
from pyarrow import ArrowInvalid
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem


def open_storage(location: str) -> tuple[FileSystem | None, str]:
    """Return the file system of a folder or URI, and the path on it.

    pyarrow serves `s3://`, `gs://`, `hdfs://` and `file://` itself; other schemes (`az://`,
    `sftp://`, ...) go to the fsspec package of that scheme. S3 stores other than Amazon's are named
    by AWS_ENDPOINT_URL, on every node.

    Returns:
        The file system, None for a local folder, which Tune treats best itself; and the path.

    Raises:
        ValueError: Nobody knows the scheme, or its package is not installed.
    """
    if "://" not in location:
        return None, location
    try:
        filesystem, path = FileSystem.from_uri(location)
        return filesystem, str(path)
    except ArrowInvalid:
        # Not a scheme of pyarrow's.
        pass
    try:
        filesystem, path = url_to_fs(location)
    except (ValueError, ImportError) as error:
        raise ValueError(f"storage {location}: {error}") from None
    return PyFileSystem(FSSpecHandler(filesystem)), path
