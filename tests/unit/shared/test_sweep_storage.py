"""Where sweeps are kept: folders, and stores behind URIs."""

import pytest
from pyarrow.fs import FileType, LocalFileSystem, PyFileSystem, S3FileSystem

from tune_configs.tuner import open_storage


def test_a_folder_is_left_to_tune():
    assert open_storage("/mnt/shared/runs") == (None, "/mnt/shared/runs")


def test_pyarrow_serves_the_schemes_it_knows(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    filesystem, path = open_storage("s3://bucket/runs?region=us-east-1")
    assert isinstance(filesystem, S3FileSystem)
    assert path == "bucket/runs"
    filesystem, path = open_storage(f"file://{tmp_path}")
    assert isinstance(filesystem, LocalFileSystem)
    assert path == str(tmp_path)


def test_fsspec_serves_the_others():
    filesystem, path = open_storage("memory://runs/mine")
    assert isinstance(filesystem, PyFileSystem)
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/file") as file:
        file.write(b"kept")
    again, _ = open_storage("memory://runs/mine")
    assert again.get_file_info(f"{path}/file").type is FileType.File


def test_a_scheme_that_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match="storage nowhere://a"):
        open_storage("nowhere://a/b")
