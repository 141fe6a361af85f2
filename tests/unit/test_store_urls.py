"""Stores from URLs and from the environment."""

from __future__ import annotations

import pytest

from aiokv import stores
from aiokv.errors import ConfigError
from aiokv.stores import RedisStore, S3Store, StoreUse, stores_from, stores_from_environment
from aiokv.testing import ScriptedStore


def test_url_options_of_the_use_are_separated_from_those_of_the_store(tmp_path):
    of_use = "save=false&read=1&deadline=2.5&lookup_deadline=0.1&retry=3"
    url = f"directory:{tmp_path}?bytes=1GiB&{of_use}"
    (use,) = stores_from([url])
    assert use.store.kind == "directory"
    assert (use.read, use.save) == (True, False)
    assert (use.deadline_seconds, use.lookup_seconds, use.retry_seconds) == (2.5, 0.1, 3.0)


def test_stores_and_uses_are_taken_as_they_are():
    store = ScriptedStore()
    use = StoreUse(store, save=False)
    assert stores_from([use]) == [use]
    assert stores_from([store]) == [StoreUse(store)]
    assert stores_from([]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("disk:/x", "must be a sequence"),
        (5, "must be a sequence"),
        (["ftp://host/x"], "'ftp'.*'disk'.*'redis'.*'mooncake'.*'s3'.*'directory'"),
        (["/x"], "scheme ''"),
        (["directory:/x?save=maybe"], "save.*'maybe'.*true or false"),
        (["directory:/x?deadline=soon"], "deadline.*'soon'.*seconds"),
        (["directory:/x?deadline=-1"], "deadline_seconds is -1.0"),
        (["directory:/x?deadline=1&deadline=2"], "deadline.*given twice"),
        (["directory://mnt/kv"], "'directory://mnt/kv' has a host.*directory:/mnt"),
        (["disk://nvme/kv?bytes=1GiB"], "'disk://nvme/kv' has a host.*disk:/nvme/kv"),
        (["disk:?bytes=1GiB"], "'disk:' has no path.*disk:/nvme/kv"),
        (["disk:/nvme/kv"], "'disk:/nvme/kv' has no bytes.*bytes=400GiB"),
        (["redis://[::1"], "malformed"),
        (["directory:/x?speed=9"], "'speed'.*unknown"),
        ([None], "must be a Store"),
    ],
)
def test_wrong_urls_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        stores_from(given)


def test_errors_do_not_show_the_password_of_a_url():
    with pytest.raises(ConfigError) as caught:
        stores_from(["redys://user:secret@host/0"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["", None, 3, "/nvme\0/kv", b"/nvme/kv"])
def test_wrong_paths_are_refused(path):
    with pytest.raises(ConfigError, match=r"path is .*; it must be the path of a folder"):
        stores.DiskStore(path, bytes="1GiB")
    with pytest.raises(ConfigError, match=r"path is .*; it must be the path of a folder"):
        stores.DirectoryStore(path)


def test_stores_of_the_environment_are_separated_by_spaces(monkeypatch, tmp_path):
    monkeypatch.delenv("AIOKV_STORES", raising=False)
    assert stores_from_environment() == []
    monkeypatch.setenv("AIOKV_STORES", f" directory:{tmp_path}/a  directory:{tmp_path}/b?read=no ")
    first, second = stores_from_environment()
    assert (first.read, second.read) == (True, False)


def test_unknown_names_of_the_package_are_attribute_errors():
    with pytest.raises(AttributeError, match="TapeStore"):
        stores.TapeStore  # noqa: B018


@pytest.mark.parametrize("kind", [RedisStore, S3Store])
@pytest.mark.parametrize("url", [None, 7, b"redis://:secret@host"])
def test_url_that_is_no_text_is_refused_without_showing_it(kind, url):
    with pytest.raises(
        ConfigError, match=f"url is of type {type(url).__name__}; it must"
    ) as caught:
        kind(url)
    assert "secret" not in str(caught.value)


def test_lookups_have_a_default_deadline_per_kind_of_store(tmp_path):
    urls = [f"disk:{tmp_path}?bytes=1GiB", f"directory:{tmp_path}", "s3://bucket"]
    assert [use.lookup_seconds for use in stores_from(urls)] == [0.25, 0.5, 1.0]
