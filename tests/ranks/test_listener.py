"""Listener: the socket of a group and its private directory, which are removed."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.ranks.listener import Listener

pytestmark = pytest.mark.asyncio


async def test_private_directory_is_removed_and_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    listener = Listener(None)
    directories = []
    for _ in range(2):
        path = await listener.open(asyncio.Protocol)
        assert path.is_socket()
        assert await listener.open(asyncio.Protocol) == path, "it listens already"
        directories.append(path.parent)
        listener.close()
        listener.close()
        assert list(tmp_path.iterdir()) == []
    assert len(set(directories)) == 2


async def test_close_removes_its_own_socket_only(tmp_path):
    path = tmp_path / "ranks"
    first = Listener(path)
    await first.open(asyncio.Protocol)
    path.unlink()  # as an operator who starts another server
    second = Listener(path)
    await second.open(asyncio.Protocol)
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()
    assert tmp_path.exists()
