"""``aiokv config [--file F]``: the settings of a cache, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiokv.cli.arguments import add_json, positive_size_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from aiokv.config.settings import Setting, Settings

EPILOG = """\
A setting comes from the first of these sources that has it: the variable AIOKV_ and its name in
capitals, such as AIOKV_HOST_BYTES=40GiB; the TOML file of --file, else of AIOKV_CONFIG; its
default. The output is a TOML file with the source of each setting in a comment.

exit status: 0 the settings are valid, 2 they are invalid; the message names the line or variable
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``config`` command."""
    parser = subparsers.add_parser(
        "config",
        help="print the settings of a cache and their sources",
        description="Print the settings that CacheConfig.load finds, and the source of each.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--file", type=Path, metavar="FILE.toml", help="file to read")
    add("--no-env", dest="env", action="store_false", help="read no environment variables")
    add(
        "--block-bytes",
        type=positive_size_bytes,
        metavar="SIZE",
        help="bytes of one block, to convert device_bytes and host_bytes to blocks",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the settings on stdout.

    Returns:
        The exit status.

    Raises:
        ConfigError: the settings are not valid.
        UsageError: the output file cannot be written.
    """
    import os

    from aiokv.cli.files import check_writable, print_json
    from aiokv.config.cache_config import CacheConfig
    from aiokv.config.settings import Settings

    check_writable(args.json)
    settings = Settings(args.file, os.environ if args.env else None)
    if args.block_bytes is not None:
        settings.resolve(args.block_bytes)
    found = dict(_settings(settings))
    if "device_blocks" in found and not {"device_bytes", "host_bytes"} & set(found):
        settings.config(CacheConfig)  # refuses values that contradict each other
    if args.json is not None:
        rows = {
            name: {"value": setting.value, "source": setting.source}
            for name, setting in found.items()
        }
        print_json(args.json, rows)
        return 0
    for line in _lines(found):
        print(line)
    return 0


def _settings(settings: Settings) -> Iterator[tuple[str, Setting]]:
    """Yield all settings: sizes in bytes only where they are set."""
    from aiokv.config.settings import BLOCKS_OF, NAMES

    replaced = {blocks for size, blocks in BLOCKS_OF.items() if settings.get(size) is not None}
    for name in NAMES:
        setting = settings.get(name)
        if setting is not None and name not in replaced:
            yield name, setting


def _lines(found: dict[str, Setting]) -> Iterator[str]:
    from aiokv.cli.toml import toml_lines

    if not {"device_blocks", "device_bytes"} & set(found):
        yield "# device_blocks is required and not set; aiokv size computes it"
    plain: dict[str, Any] = {
        name: "none" if setting.value is None else setting.value
        for name, setting in found.items()
        if not isinstance(setting.value, Mapping)
    }
    texts = dict(zip(plain, toml_lines(plain), strict=True))
    width = max(map(len, texts.values()))
    for name, text in texts.items():
        yield f"{text:<{width}}  # {found[name].source}"
    for name, setting in found.items():
        if isinstance(setting.value, Mapping) and setting.value:
            yield f"# {name}: {setting.source}"
            yield from toml_lines({name: setting.value})
