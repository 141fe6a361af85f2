"""CacheConfig.load and ``aiokv config``: keywords over variables over a file over defaults."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import aiokv
from aiokv import CacheConfig, Regions, WindowGroup, cli
from aiokv.cli.toml import toml_lines
from aiokv.config.settings import FIELDS, OTHER_VARIABLES, Settings
from aiokv.errors import ConfigError

ROOT = Path(aiokv.__file__).parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove the variables of the process that runs the tests."""
    import os

    for variable in [name for name in os.environ if name.startswith("AIOKV_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "aiokv.toml"
        path.write_text(text)
        return path

    return write_file


def test_keywords_go_before_variables_before_the_file_before_defaults(write, monkeypatch):
    path = write("device_blocks = 10\nblock_tokens = 32\nleave_tokens = 3\nhost_blocks = 7\n")
    monkeypatch.setenv("AIOKV_BLOCK_TOKENS", "64")
    monkeypatch.setenv("AIOKV_LEAVE_TOKENS", "4")
    config = CacheConfig.load(path, leave_tokens=5)
    assert (config.device_blocks, config.host_blocks) == (10, 7)
    assert (config.block_tokens, config.leave_tokens) == (64, 5)
    assert config.write_policy == "write_through"
    unaware = CacheConfig.load(str(path), env=False)
    assert (unaware.block_tokens, unaware.leave_tokens) == (32, 3)


def test_no_source_is_needed_but_device_blocks(write):
    assert CacheConfig.load(device_blocks=8) == CacheConfig(device_blocks=8)
    with pytest.raises(ConfigError, match="device_blocks is not set in the keywords"):
        CacheConfig.load()
    with pytest.raises(ConfigError, match=r"device_blocks is not set in .*aiokv\.toml"):
        CacheConfig.load(write(""))


SAMPLES = {
    "device_blocks": 12,
    "block_tokens": 8,
    "host_blocks": 3,
    "write_policy": "none",
    "low_watermark_blocks": 2,
    "eviction_policy": "lru",
    "min_onload_tokens": 4,
    "item_hits": "partial",
    "leave_tokens": 2,
    "reserve_blocks": 1,
    "miss_history_blocks": 10,
    "drain_timeout_seconds": 1.5,
    "verify": "checksum",
    "strict": True,
    "state_slots": 4,
    "host_state_slots": 2,
    "sentinel_state_slot": True,
    "windows": {"local": WindowGroup(window_tokens=5, device_blocks=4, host_blocks=1)},
    "salt_quota_blocks": 9,
    "salt_shares": {"chat": 0.25, "": 0.5},
    "admission": "cached_first",
    "max_overtake_seconds": 4.5,
    "max_running_leases": 12,
    "model": 'a "model"\n',
    "weights_version": "é",
    "store_policy": "nth_use:4",
    "store_queue_blocks": 5,
    "prefill_tokens_per_second": 1e4,
}

# A field that excludes fields of SAMPLES.
EXTERNAL = {"device_blocks": 12, "host_blocks": 3, "external_device": True}


def test_every_field_has_a_sample():
    """A field of a new type fails here until settings can parse it."""
    assert set(SAMPLES) | set(EXTERNAL) == set(FIELDS)
    defaults = CacheConfig(device_blocks=1)
    assert not [name for name in FIELDS if getattr(defaults, name) == (SAMPLES | EXTERNAL)[name]]


@pytest.mark.parametrize("samples", [SAMPLES, EXTERNAL], ids=["own", "external"])
def test_each_field_can_be_set_in_a_file_and_by_a_variable(samples, write, monkeypatch):
    expected = CacheConfig(**samples)
    path = write("\n".join(toml_lines(samples)))
    assert CacheConfig.load(path, env=False) == expected
    for name, value in samples.items():
        if name == "windows":
            value = {group: dataclasses.asdict(each) for group, each in value.items()}
        if isinstance(value, dict):
            value = json.dumps(value)
        monkeypatch.setenv(f"AIOKV_{name.upper()}", str(value))
    assert CacheConfig.load() == expected


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("false", False)]
)
def test_a_boolean_of_a_variable_has_two_spellings(text, value, monkeypatch):
    monkeypatch.setenv("AIOKV_EXTERNAL_DEVICE", text)
    assert CacheConfig.load(device_blocks=9, host_blocks=9).external_device is value


@pytest.mark.parametrize("source", ["file", "variable"])
def test_a_value_that_is_no_boolean_is_refused(source, write, monkeypatch):
    path = write('external_device = "yes"\n' if source == "file" else "")
    if source == "variable":
        monkeypatch.setenv("AIOKV_EXTERNAL_DEVICE", "yes")
    with pytest.raises(ConfigError, match="external_device is 'yes'; it must be true or false"):
        CacheConfig.load(path, device_blocks=9, host_blocks=9)


@pytest.mark.parametrize("name", [name for name in FIELDS if "None" in str(FIELDS[name].type)])
def test_none_can_be_written_where_a_field_accepts_it(name, write, monkeypatch):
    path = write(f'device_blocks = 9\n{name} = "none"\n')
    assert getattr(CacheConfig.load(path), name) is None
    monkeypatch.setenv(f"AIOKV_{name.upper()}", "None")
    assert getattr(CacheConfig.load(device_blocks=9), name) is None
    value = 1 if "bool" in str(FIELDS[name].type) else 5
    monkeypatch.setenv(f"AIOKV_{name.upper()}", str(value))
    assert getattr(CacheConfig.load(path), name) == value


def test_an_infinite_timeout_can_be_written(write, monkeypatch):
    path = write("device_blocks = 9\ndrain_timeout_seconds = inf\n")
    assert CacheConfig.load(path).drain_timeout_seconds == math.inf
    monkeypatch.setenv("AIOKV_DRAIN_TIMEOUT_SECONDS", "inf")
    assert CacheConfig.load(device_blocks=9).drain_timeout_seconds == math.inf


def test_sizes_in_bytes_become_blocks_of_a_known_size(write, monkeypatch):
    path = write('device_bytes = "1GiB"\nhost_bytes = 3000\n')
    config = CacheConfig.load(path, block=1 << 20, host_bytes="2.5 GiB")
    assert (config.device_blocks, config.host_blocks) == (1024, 2560)
    monkeypatch.setenv("AIOKV_HOST_BYTES", "10MiB")
    assert CacheConfig.load(path, block=1 << 20).host_blocks == 10
    padded = CacheConfig.load(path, block=1 << 20, with_stores=True)
    assert padded.host_blocks == 10 * 2**20 // (2**20 + 4096)
    monkeypatch.setenv("AIOKV_HOST_BYTES", "0")
    assert CacheConfig.load(path, block=1 << 20).host_blocks == 0


def test_blocks_of_a_later_source_replace_bytes_of_an_earlier_one(write, monkeypatch):
    path = write('device_bytes = "1GiB"\n')
    assert CacheConfig.load(path, device_blocks=5).device_blocks == 5
    monkeypatch.setenv("AIOKV_DEVICE_BLOCKS", "6")
    assert CacheConfig.load(path).device_blocks == 6
    assert CacheConfig.load(device_bytes=4096, block=1024).device_blocks == 4
    later = Settings(write("device_blocks = 5\n"), None, {"device_bytes": 4096})
    assert later.get("device_blocks") is None


def test_tensors_give_the_bytes_of_a_block_and_the_number_of_blocks(write):
    regions = Regions(num_layers=1)
    with pytest.raises(ConfigError, match="block has no tensors"):
        CacheConfig.load(block=regions)
    regions.add("kv", layers=[np.zeros((4, 1000), np.int8)])
    config = CacheConfig.load(block=regions, host_bytes=10_240)
    assert (config.device_blocks, config.host_blocks) == (4, 10)  # a block has 1024 bytes there
    assert CacheConfig.load(block=regions, device_bytes=3_500).device_blocks == 3
    assert CacheConfig.load(block=regions, device_bytes="1GiB").device_blocks == 4
    assert CacheConfig.load(block=regions, device_blocks=2).device_blocks == 2


def test_a_file_can_be_named_by_a_variable(write, monkeypatch):
    monkeypatch.setenv("AIOKV_CONFIG", str(write("device_blocks = 77\n")))
    assert CacheConfig.load().device_blocks == 77
    with pytest.raises(ConfigError, match="not set"):
        CacheConfig.load(env=False)
    monkeypatch.setenv("AIOKV_CONFIG", "")
    with pytest.raises(ConfigError, match="not set"):
        CacheConfig.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device_blocks = 1\n\nbloc_tokens = 3\n", r"line 3: bloc_tokens is unknown.*block_tokens"),
        ("zzz = 1\n", r"line 1: zzz is unknown.*known names: device_blocks"),
        ("stores = []\n", r"line 1: stores is unknown.*CacheEngine\(\.\.\., stores="),
        ("# a\ndevice_blocks = 0\n", r"line 2: device_blocks is 0; it must be between 1"),
        ("device_blocks = 1.0\n", r"line 1: device_blocks is 1\.0; it must be an integer"),
        ("device_blocks = true\n", "line 1: device_blocks is True; it must be an integer"),
        (
            'device_blocks = "40GiB"\n',
            r"line 1: device_blocks is '40GiB'.*\(hint: device_bytes = '40GiB' gives",
        ),
        ('device_blocks = 1\nmodel = ["a",\n"b"]\n', "line 2: model is .*must be a string"),
        ('device_blocks = 1\nmodel = """\na\n"""\nverify = 3\n', "line 5: verify is 3"),
        ('device_blocks = 1\nverify = "x"\n', "line 2: verify is 'x'; it must be one of 'off'"),
        ('device_blocks = 1\n"write_policy" = "x"\n', "line 2: write_policy is 'x'"),
        ("device_blocks = 1\ndrain_timeout_seconds = nan\n", "line 2: drain_timeout_seconds"),
        ('drain_timeout_seconds = "5"\n', "line 1: drain_timeout_seconds is '5'.* a number"),
        ('host_bytes = "40GX"\n', r"line 1: host_bytes is '40GX'; it must be a size.*400GiB"),
        ("host_bytes = -1\n", "line 1: host_bytes is -1; it must be at least 0"),
        ("host_bytes = 1.5\n", r"line 1: host_bytes is 1\.5; it must be an integer"),
        ("device_blocks = 1\nhost_bytes = 5\n", "line 2: host_bytes is 5, but the bytes of a"),
        (
            "device_blocks = 1\ndevice_bytes = 5\n",
            r"line 2: device_bytes and device_blocks \(.*line 1\) are both set",
        ),
        (
            "device_blocks = 4\nreserve_blocks = 4\n",
            r"reserve_blocks \(4\) must be below .*device_blocks: .*line 1; reserve_.*line 2",
        ),
        ("windows = 3\n", r"line 1: windows is 3; it must be a table"),
        ("[windows]\nlocal = 3\n", r"line 2: windows\.local is 3; it must be a table"),
        (
            "[windows.local]\nwindow_tokens = 3\ndevice_block = 3\n",
            r"line 3: windows\.local\.device_block is unknown.*did you mean 'device_blocks'",
        ),
        (
            "[windows.local]\nwindow_tokens = 3\ndevice_blocks = 0\n",
            r"line 3: windows\.local: device_blocks is 0",
        ),
        ("a = 1\n[windows.local]\nwindow_tokens = 3\n", r"line 1: a is unknown"),
        ("[windows.local]\nwindow_tokens = 3\n", r"line 1: windows\.local: .*'device_blocks'"),
        (
            "device_blocks = 3\n[windows.local]\nwindow_tokens=3\ndevice_blocks=3\nhost_blocks=3\n",
            r"windows\['local'\] has host_blocks=3",
        ),
        ("device_blocks = \n", r"is not TOML: Invalid value \(at line 1, column"),
        ("device_blocks = 1\ndevice_blocks = 2\n", "is not TOML: .*at line 2"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_with_its_line(text, message, write):
    path = write(text)
    with pytest.raises(ConfigError, match=message) as caught:
        CacheConfig.load(path, env=False)
    assert str(path) in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml: No such file"):
        CacheConfig.load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        CacheConfig.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml is not UTF-8"):
        CacheConfig.load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("AIOKV_DEVICE_BLOKS", "3", r"AIOKV_DEVICE_BLOKS is unknown.*'AIOKV_DEVICE_BLOCKS'\?"),
        ("AIOKV_HOST_BLOCKS", "x", "AIOKV_HOST_BLOCKS: host_blocks is 'x'; it must be an integer"),
        ("AIOKV_HOST_BLOCKS", "1.5", "AIOKV_HOST_BLOCKS: host_blocks is '1.5'; .*an integer"),
        ("AIOKV_HOST_BLOCKS", "none", "AIOKV_HOST_BLOCKS: host_blocks is 'none'"),
        ("AIOKV_HOST_BLOCKS", "40GiB", r"AIOKV_HOST_BLOCKS: .*host_bytes = '40GiB'"),
        ("AIOKV_HOST_BLOCKS", "-1", "AIOKV_HOST_BLOCKS: host_blocks is -1"),
        ("AIOKV_HOST_BYTES", "40", "AIOKV_HOST_BYTES: host_bytes is 40, but the bytes of a block"),
        ("AIOKV_HOST_BYTES", "x", "AIOKV_HOST_BYTES: host_bytes is 'x'; it must be a size"),
        ("AIOKV_DRAIN_TIMEOUT_SECONDS", "soon", "is 'soon'; it must be a number"),
        ("AIOKV_VERIFY", "always", "AIOKV_VERIFY: verify is 'always'; it must be one of"),
        ("AIOKV_WINDOWS", "{", r"AIOKV_WINDOWS: windows is not JSON.*window_tokens"),
        ("AIOKV_WINDOWS", "[1]", r"AIOKV_WINDOWS: windows is \[1\]; it must be a table"),
        ("AIOKV_WINDOWS", '{"a": {"x": 1}}', r"AIOKV_WINDOWS: windows\.a\.x is unknown"),
        (
            "AIOKV_WINDOWS",
            '{"a": {"window_tokens": 1, "device_blocks": "8"}}',
            r"AIOKV_WINDOWS: windows\.a: device_blocks is '8'",
        ),
    ],
)
def test_what_is_wrong_in_a_variable_is_refused_with_its_name(variable, text, message, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=message):
        CacheConfig.load(device_blocks=8)
    assert CacheConfig.load(device_blocks=8, env=False)


@pytest.mark.parametrize(
    "variable",
    [
        "AIOKV_SERVICE_HOST",
        "AIOKV_SERVICE_PORT_HTTP",
        "AIOKV_PORT",
        "AIOKV_PORT_8000_TCP_ADDR",
        "AIOKV_PREFILL_SERVICE_PORT",
        "AIOKV_PREFILL_PORT_8000_TCP",
    ],
)
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(variable, monkeypatch):
    monkeypatch.setenv(variable, "tcp://10.0.0.1:8000")
    assert CacheConfig.load(device_blocks=8).device_blocks == 8


def test_variables_of_other_parts_are_known():
    """Each variable that the repository reads is a setting or listed."""
    text = "\n".join(
        path.read_text()
        for folder in ("aiokv", "tests", "bench")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "test_settings.py"
    )
    read = set(re.findall(r"environ[^\n]{0,30}[\"'](AIOKV_[A-Z_]+)", text))
    read |= set(re.findall(r"VARIABLE: Final = \"(AIOKV_[A-Z_]+)", text))
    assert {"AIOKV_STORES", "AIOKV_IO", "AIOKV_CONFIG"} <= read
    assert read <= OTHER_VARIABLES | {f"AIOKV_{name.upper()}" for name in FIELDS}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"device_block": 3}, r"CacheConfig\.load: device_block is unknown.*'device_blocks'\?"),
        ({"device_blocks": "8"}, "device_blocks is '8'"),
        ({"device_bytes": "8x", "block": 4}, "device_bytes is '8x'; it must be a size"),
        ({"device_bytes": 8, "block": 0}, "block is 0; it must be at least 1"),
        ({"device_bytes": 8, "block": 9}, "device_bytes is 8; it must be at least 9"),
        ({"device_blocks": 8, "env": 1}, "env is 1"),
        ({"device_blocks": 8, "with_stores": "yes"}, "with_stores is 'yes'"),
    ],
)
def test_wrong_keywords_are_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig.load(**keywords)


def test_an_error_of_a_keyword_is_not_blamed_on_the_file(write):
    path = write("host_blocks = 3\n")
    with pytest.raises(ConfigError, match=r"^device_blocks is 0"):
        CacheConfig.load(path, device_blocks=0)


def test_config_prints_each_value_with_its_source(write, monkeypatch, capsys):
    path = write(
        'device_blocks = 10\n\nhost_bytes = "1GiB"\n[windows.local]\nwindow_tokens = 4\n'
        "device_blocks = 3\n"
    )
    monkeypatch.setenv("AIOKV_MODEL", "llama")
    assert cli.main(["config", "--file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^device_blocks = 10 +# {path}, line 1$", printed, re.MULTILINE)
    assert re.search(rf"^host_bytes = 1073741824 +# {path}, line 3$", printed, re.MULTILINE)
    assert re.search(r'^model = "llama" +# AIOKV_MODEL$', printed, re.MULTILINE)
    assert re.search(r"^block_tokens = 16 +# default$", printed, re.MULTILINE)
    assert f"# windows: {path}, line 4\n[windows.local]\n" in printed
    again = path.with_name("again.toml")
    again.write_text(printed)
    monkeypatch.delenv("AIOKV_MODEL")
    assert CacheConfig.load(again, block=2**20) == CacheConfig.load(
        path, block=2**20, model="llama"
    )


def test_config_converts_bytes_when_it_knows_the_size_of_a_block(write, capsys):
    path = write('device_bytes = "10MiB"\n')
    arguments = ["config", "--file", str(path), "--block-bytes", "2MiB"]
    assert cli.main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["device_blocks"] == {
        "value": 5,
        "source": f"device_bytes of {path}, line 1",
    }
    assert printed["low_watermark_blocks"] == {"value": None, "source": "default"}


def test_config_refuses_blocks_without_bytes(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["config", "--block-bytes", "0"])
    assert "--block-bytes: '0' is not a size above 0, such as" in capsys.readouterr().err


def test_config_without_settings_says_what_is_missing(monkeypatch, capsys):
    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# device_blocks is required and not set")
    assert set(tomllib.loads(printed)) == set(FIELDS) - {"device_blocks", "windows", "salt_shares"}
    monkeypatch.setenv("AIOKV_BLOCK_TOKENS", "x")
    assert cli.main(["config", "--no-env"]) == 0
    assert cli.main(["config"]) == 2
    assert "AIOKV_BLOCK_TOKENS: block_tokens is 'x'" in capsys.readouterr().err


def test_config_refuses_values_that_contradict_each_other(write, capsys):
    path = write("device_blocks = 4\nreserve_blocks = 5\n")
    assert cli.main(["config", "--file", str(path)]) == 2
    assert "reserve_blocks (5) must be below device_blocks (4)" in capsys.readouterr().err


def test_settings_of_a_group_can_be_objects():
    group = WindowGroup(window_tokens=4, device_blocks=3)
    assert CacheConfig.load(device_blocks=8, windows={"a": group}).windows == {"a": group}
    setting = Settings(overrides={"windows": {"a": {"window_tokens": 4, "device_blocks": 3}}}).get(
        "windows"
    )
    assert setting is not None
    assert setting.value == {"a": group}


def test_only_a_size_in_place_of_blocks_is_hinted_at():
    for text, hint in (("40GiB", "device_bytes = '40GiB' gives a size in bytes"), ("abc", "")):
        with pytest.raises(ConfigError, match="must be an integer") as caught:
            Settings(environ={"AIOKV_DEVICE_BLOCKS": text})
        assert caught.value.hint == hint


def test_a_size_of_hundreds_of_digits_is_refused():
    with pytest.raises(ConfigError, match="it must be a size in bytes"):
        Settings(environ={"AIOKV_DEVICE_BYTES": "9" * 400})
