"""One process at a time owns the path of a socket, and no file remains on disk."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiokv import ConfigError
from aiokv.ranks import channel as channels
from aiokv.ranks.channel import claimed, listen
from aiokv.ranks.listener import PREFIX, Listener, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Iterator


def abandoned(path: Path) -> None:
    """Make a socket file without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a directory whose sockets have a path of less than 108 bytes, as Linux wants."""
    with tempfile.TemporaryDirectory(prefix="aiokv-") as name:
        yield Path(name)


def test_a_second_owner_between_probe_and_bind_is_refused(tmp_path, monkeypatch):
    """Both owners find no listener: only the first removes the stale socket and binds."""
    path = tmp_path / "s"
    abandoned(path)
    refusals = []
    remove = channels.remove_stale

    def remove_beside_another(stale: Path) -> None:
        monkeypatch.setattr(channels, "remove_stale", remove)
        with pytest.raises(ConfigError, match="another process holds") as refused:
            listen(stale)
        refusals.append(refused)
        remove(stale)

    monkeypatch.setattr(channels, "remove_stale", remove_beside_another)
    with listen(path):
        assert len(refusals) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
        with pytest.raises(ConfigError, match="another process listens there"):
            listen(path)


def test_lock_on_a_removed_lock_file_is_taken_again(tmp_path, monkeypatch):
    path = tmp_path / "s"
    lock = tmp_path / "s.lock"
    flock = fcntl.flock
    others: list[int] = []

    def lock_a_removed_file(descriptor: int, operation: int) -> None:
        if not others:  # its owner is done: the opened file was removed and replaced
            others.append(descriptor)
            lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(channels.fcntl, "flock", lock_a_removed_file)
    with claimed(path):
        assert lock.exists()
        with pytest.raises(ConfigError), claimed(path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_listener_with_a_full_backlog_counts_as_alive(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(path))
            with pytest.raises(ConfigError, match="another process listens there"):
                listen(path)
    assert path.exists()


@pytest.mark.asyncio
async def test_closing_leaves_the_socket_of_another_owner(tmp_path):
    path = tmp_path / "s"
    listener = Listener(path)
    assert await listener.open(lambda: pytest.fail("unexpected connection")) == path
    assert await listener.open(lambda: pytest.fail("unexpected connection")) == path
    path.unlink()
    with listen(path) as other:
        listener.close()
        assert path.lstat().st_ino
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
            rank.connect(str(path))
            other.accept()[0].close()
    listener.close()


@pytest.mark.asyncio
async def test_a_private_socket_is_in_a_new_directory_per_opening(short_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / f"{PREFIX}of_a_killed_manager").mkdir(mode=0o700)
    abandoned(short_path / f"{PREFIX}of_a_killed_manager" / "ranks")
    listener = Listener(None)
    paths = []
    for _ in range(2):
        paths.append(await listener.open(lambda: pytest.fail("unexpected connection")))
        assert stat.S_IMODE(paths[-1].parent.stat().st_mode) == 0o700
        listener.close()
        assert list(short_path.iterdir()) == []
    assert paths[0] != paths[1]


@pytest.mark.asyncio
async def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"cannot create a private directory.*TMPDIR"):
        await Listener(None).open(lambda: pytest.fail("unexpected connection"))


def test_directories_of_killed_managers_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories = {name: tmp_path / f"{PREFIX}{name}" for name in ("dead", "alive", "new", "files")}
    for directory in directories.values():
        directory.mkdir(mode=0o700)
    abandoned(directories["dead"] / "ranks")
    (directories["files"] / "ranks").write_text("no socket")
    (tmp_path / f"{PREFIX}link").symlink_to(directories["dead"])
    with listen(directories["alive"] / "ranks"):
        remove_abandoned()
    left = {entry.name.removeprefix(PREFIX) for entry in tmp_path.iterdir()}
    assert left == {"alive", "new", "files", "link"}
    assert os.listdir(directories["files"]) == ["ranks"]
