"""Files and folders appear whole, with the user's rights, or leave what stood there before."""

import os
import stat

import pytest

from mint_jax.files import new_directory, write_file


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def rights(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole_and_has_the_users_rights(tmp_path, umask):
    target = tmp_path / "new folder" / "file"
    write_file(target, "one")
    assert rights(target) == 0o640
    write_file(target, b"two")
    assert target.read_bytes() == b"two"
    with pytest.raises(FileExistsError):
        write_file(target, "three", replace=False)
    write_file(tmp_path / "other", "ünïcode", replace=False)
    assert (tmp_path / "other").read_text(encoding="utf-8") == "ünïcode"
    assert target.read_bytes() == b"two"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_stood_there(step, tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_file(target, "old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_file(target, "new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def make(target, text, proof=""):
    with new_directory(target, proof) as staging:
        (staging / "proof").write_text(text)


def test_a_directory_appears_when_it_is_whole(tmp_path, umask):
    target = tmp_path / "outer" / "folder"
    with pytest.raises(TypeError, match="must be str"):
        make(target, 7)
    assert not list(target.parent.iterdir())
    make(target, "whole")
    assert rights(target) == 0o750
    with pytest.raises(OSError, match="not empty"):
        make(target, "another")
    assert (target / "proof").read_text() == "whole"
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty", "filled")
    assert (tmp_path / "empty" / "proof").read_text() == "filled"
