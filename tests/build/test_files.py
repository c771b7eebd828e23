from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from trtpd.build import files
from trtpd.build.files import (
    cache_dir,
    expanded,
    link_or_copy,
    link_tree,
    locked,
    staged,
    translated,
    write_whole,
)
from trtpd.errors import BuildError, InputError


def test_our_own_variable_wins_over_xdg_and_home() -> None:
    assert cache_dir({"TRTPD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/trtpd")
    assert cache_dir({}) == Path.home() / ".cache" / "trtpd"


def test_a_staged_folder_takes_its_place_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with staged(target) as new:
        (new / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_staged_folder_replaces_the_former_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with staged(target) as new:
        (new / "old").write_text("1")
    with staged(target) as new:
        (new / "new").write_text("2")
        assert (target / "old").exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_failure_leaves_the_former_folder_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with staged(target) as new:
        (new / "old").write_text("1")
    with pytest.raises(FileNotFoundError), staged(target) as new:
        (new / "new").with_name("absent").read_text()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_leftovers_of_a_dead_maker_are_swept_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / ".target.trtpd-new-1").mkdir()
    (tmp_path / ".other.trtpd-new-1").mkdir()
    with staged(tmp_path / "target"):
        assert not (tmp_path / ".target.trtpd-new-1").exists()
    assert (tmp_path / ".other.trtpd-new-1").exists()


def test_without_an_exchange_two_renames_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_kwargs: object())
    for text in ("1", "2"):
        with staged(tmp_path / "target") as new:
            (new / "a").write_text(text)
    assert (tmp_path / "target" / "a").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_lock_keeps_others_out_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path), path.open("a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not path.exists()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    removed: list[Path] = []
    real = files._still_at

    def remove_once(lock: Path, handle: int) -> bool:
        if not removed:
            removed.append(lock)
            lock.unlink()
        return real(lock, handle)

    monkeypatch.setattr(files, "_still_at", remove_once)
    with locked(path):
        assert removed
        assert path.exists()


def test_linked_files_share_their_content(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a").write_text("1")
    link_tree(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "a").samefile(tmp_path / "two" / "a")


def test_where_links_are_not_possible_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("1")

    def refuse(*_args: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "1"
    assert not (tmp_path / "a").samefile(tmp_path / "b")


def test_file_system_errors_become_one_line(tmp_path: Path) -> None:
    line = r"^build x: No such file or directory \(.*absent\); choose another place with -o$"
    with pytest.raises(BuildError, match=line), translated("build x", BuildError):
        (tmp_path / "absent").read_text()


def test_a_full_disk_also_asks_for_space() -> None:
    with pytest.raises(BuildError, match="free some space, or choose"), translated("build x", BuildError):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_written_whole_or_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    write_whole(path, b"one")
    path.chmod(0o640)
    write_whole(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o640)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for target in (path, tmp_path / "new.yaml"):
        with pytest.raises(OSError, match=re.escape(str(target))):
            write_whole(target, b"three")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_and_never_replaced() -> None:
    before = os.stat("/dev/null").st_rdev
    write_whole(Path("/dev/null"), b"gone")
    assert os.stat("/dev/null").st_rdev == before


@pytest.mark.parametrize("path", ["~no-such-user-here/x", "~no-such-user-here"])
def test_a_home_that_is_not_there_is_bad_input(path: str) -> None:
    with pytest.raises(InputError, match="no such home folder"):
        expanded(path)
