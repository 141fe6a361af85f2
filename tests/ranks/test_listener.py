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

from aiokv.errors import ConfigError
from aiokv.ranks.rank_socket import PREFIX, RankSocket, remove_abandoned
from aiokv.wire import unix
from aiokv.wire.connection import WireLimits
from aiokv.wire.listener import Listener
from aiokv.wire.unix import claimed, listening_socket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.ranks.messages import RankConnection


def abandoned(path: Path) -> None:
    """Make a socket file without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))


def listening_at(listening: socket.socket, name: str) -> Listener[RankConnection]:
    """Return a listener that nothing is expected to connect to."""

    async def admit(*_: object) -> RankConnection:
        pytest.fail("unexpected connection")

    return Listener(listening, name, admit, lambda _: None, WireLimits())


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
    remove = unix.remove_stale

    def remove_beside_another(stale: Path) -> None:
        monkeypatch.setattr(unix, "remove_stale", remove)
        with pytest.raises(ConfigError, match="another process holds") as refused:
            listening_socket(stale, 1)
        refusals.append(refused)
        remove(stale)

    monkeypatch.setattr(unix, "remove_stale", remove_beside_another)
    with listening_socket(path, 1):
        assert len(refusals) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
        with pytest.raises(ConfigError, match="another process listens there"):
            listening_socket(path, 1)


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

    monkeypatch.setattr(unix.fcntl, "flock", lock_a_removed_file)
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
                listening_socket(path, 1)
    assert path.exists()


@pytest.mark.asyncio
async def test_closing_leaves_the_socket_of_another_owner(tmp_path):
    path = tmp_path / "s"
    listener = RankSocket(path)
    assert listener.open(listening_at) == path
    assert listener.open(listening_at) == path
    path.unlink()
    with listening_socket(path, 1) as other:
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
    listener = RankSocket(None)
    paths = []
    for _ in range(2):
        paths.append(listener.open(listening_at))
        assert stat.S_IMODE(paths[-1].parent.stat().st_mode) == 0o700
        listener.close()
        assert list(short_path.iterdir()) == []
    assert paths[0] != paths[1]


@pytest.mark.asyncio
async def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"cannot create a private directory.*TMPDIR"):
        RankSocket(None).open(listening_at)


def test_directories_of_killed_managers_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories = {name: tmp_path / f"{PREFIX}{name}" for name in ("dead", "alive", "new", "files")}
    for directory in directories.values():
        directory.mkdir(mode=0o700)
    abandoned(directories["dead"] / "ranks")
    (directories["files"] / "ranks").write_text("no socket")
    (tmp_path / f"{PREFIX}link").symlink_to(directories["dead"])
    with listening_socket(directories["alive"] / "ranks", 1):
        remove_abandoned()
    left = {entry.name.removeprefix(PREFIX) for entry in tmp_path.iterdir()}
    assert left == {"alive", "new", "files", "link"}
    assert os.listdir(directories["files"]) == ["ranks"]
