"""``aiokv store``: files of a DiskStore or a DirectoryStore, purges, and the memory of a host."""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiokv.cli import store_host
from aiokv.cli.arguments import add_count, age

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from aiokv.stores.inspection import Cleaning, Listing, Verification
    from aiokv.stores.labels import Kind

EXIT_GOOD: Final = 0
EXIT_BAD: Final = 1

READ_THREADS: Final = 4

EPILOG = """\
serve, stat, hot and warm are for shared memory; ls, verify and gc for the files of a disk or
directory store.
ls also takes the URL of a store that can list its objects, such as redis:// or s3://,
or host:// for the shared memory of a host.

ls and gc read no block, except for gc --verify; verify reads all blocks. While an engine uses a
disk store, only ls works; a directory store can be listed, verified and cleaned up at any time.

Keys are hashes with labels of the model, its weights and the salt: ls counts the blocks of each
label, and shows the names that it was given. purge of a store that engines use removes what they
have saved so far: see CacheEngine.purge.

exit status: 0 done, 1 verify found wrong blocks or damaged records, 2 bad usage, or a store that
cannot be read
"""


_LS: Final = "List the blocks of a store by file. Reads no block, and changes nothing."
_VERIFY: Final = (
    "Read every block of a store, and compare its length, key and checksum. Changes nothing."
)
_PURGE: Final = (
    "Remove all blocks of a salt from a store, for all models. Run it again after an interruption."
)
_NAMES: Final = {
    "model": ("--model", "the model"),
    "version": ("--weights-version", "the version of the weights"),
    "salt": ("--salt", "the salt"),
}
_GC: Final = (
    "Remove incomplete files, and the data of removed and quarantined blocks. Quarantined slots of "
    "a DiskStore can be used again: replace a failing disk first."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``store`` command."""
    parser = subparsers.add_parser(
        "store",
        help="list, verify or clean up the files of a store; share memory among engines",
        description="List, verify or clean up the files of a DiskStore or a DirectoryStore, or\n"
        "share the memory of a host among its engines.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("ls", help="list blocks and bytes, by file", description=_LS)
    verify = actions.add_parser("verify", help="read and check every block", description=_VERIFY)
    clean = actions.add_parser(
        "gc", help="remove files and data that no engine can use", description=_GC
    )
    purge = actions.add_parser("purge", help="remove all blocks of a salt", description=_PURGE)
    purge.add_argument("target", metavar="TARGET", help="folder or URL of the store")
    purge.add_argument("--salt", required=True, help="salt of the blocks; '' for no salt")
    purge.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    for kind, (option, name) in _NAMES.items():
        listing.add_argument(
            option,
            dest=kind,
            action="append",
            default=[],
            help=f"show the blocks of {name}; repeatable",
        )
    for kind in ("model", "version"):
        clean.add_argument(
            _NAMES[kind][0],
            dest=kind,
            help=f"also remove blocks of {_NAMES[kind][1]}; with further conditions, only blocks "
            "that meet all of them",
        )
    clean.add_argument(
        "--older-than",
        type=age,
        metavar="AGE",
        help="also remove blocks that were saved (DiskStore) or last used (DirectoryStore) longer "
        "ago than AGE, such as 7d, 12h, 30m or 90s",
    )
    clean.add_argument(
        "--verify", action="store_true", help="also read every block, and remove the wrong ones"
    )
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    store_host.add_actions(actions)
    for action in (verify, clean):
        add_count(action, "--threads", READ_THREADS, "threads that read blocks")
    for action in (listing, verify, clean):
        folder = "folder of the store" + (" or its URL" if action is listing else "")
        action.add_argument("path", metavar="PATH", help=folder)
        action.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")


def run(args: argparse.Namespace) -> int:
    """Run the action; print the result on stdout and progress on stderr.

    Returns:
        The exit status.

    Raises:
        AiokvError: see :mod:`aiokv.stores.inspection`; or an output file cannot be written.
        OSError: a file of the store cannot be read or removed.
    """
    if (action := store_host.ACTIONS.get(args.action)) is not None:
        return action(args)
    import asyncio

    from aiokv.cli.files import check_writable, write_json
    from aiokv.cli.progress import show_progress
    from aiokv.stores.inspection import open_files
    from aiokv.stores.labels import KINDS
    from aiokv.stores.purging import has_url, list_store

    check_writable(args.json)
    if args.action == "purge":
        return _purge(args)
    result: Listing | Verification | Cleaning
    status = EXIT_GOOD
    files = partial(open_files, args.path)
    if args.action == "ls":
        result = asyncio.run(list_store(args.path)) if has_url(args.path) else files().listing()
        names = {kind: getattr(args, kind) or [] for kind in KINDS}
        rows: Iterator[tuple[str, str]] = chain(_listing_rows(result), _label_rows(result, names))
    elif args.action == "verify":
        with show_progress("blocks", sys.stderr) as stages:
            result = files().verify(stages, threads=args.threads)
        rows = _verification_rows(result)
        status = EXIT_GOOD if result.is_good else EXIT_BAD
    else:
        with show_progress("blocks", sys.stderr) as stages:
            result = files().clean(
                stages,
                older_than_seconds=args.older_than,
                names={
                    kind: name for kind in KINDS if (name := getattr(args, kind, None)) is not None
                },
                verify=args.verify,
                threads=args.threads,
                dry_run=args.dry_run,
            )
        rows = _cleaning_rows(result, dry_run=args.dry_run)
    for name, value in rows:
        print(f"{name}: {value}")
    if args.json:
        write_json(args.json, result)
    return status


def _purge(args: argparse.Namespace) -> int:
    import asyncio

    from aiokv.cli.files import write_json
    from aiokv.stores.purging import purge_store

    purge = asyncio.run(purge_store(args.target, args.salt))
    print(f"{purge.kind} store: {purge.url}")
    print(f"blocks removed: {purge.removed_blocks:,}")
    if args.json:
        write_json(args.json, purge)
    return EXIT_GOOD


def _label_rows(listing: Listing, names: Mapping[Kind, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield the blocks of each label, with its name if that was given."""
    from aiokv.stores.labels import label

    known = {f"{kind}:{label(kind, name).hex()}": name for kind in names for name in names[kind]}
    for text, blocks in listing.labels.items():
        name = f"{text.partition(':')[0]} {known[text]!r}" if text in known else text
        yield name.replace(":", " "), f"{blocks:,}"


def _listing_rows(listing: Listing) -> Iterator[tuple[str, str]]:
    from aiokv.base.units import format_bytes

    yield f"{listing.kind} store", listing.path
    if listing.used_by is not None:
        yield "in use by", f"process {listing.used_by}"
    if listing.kind not in ("disk", "directory"):  # only the keys are known
        yield "blocks", f"{listing.blocks:,}"
        return
    yield "blocks", _blocks(listing.blocks, listing.block_bytes)
    yield "bytes on disk", format_bytes(listing.disk_bytes)
    if listing.oldest_seconds is not None and listing.newest_seconds is not None:
        what = "saved" if listing.kind == "disk" else "used"
        yield f"first {what}", _time(listing.oldest_seconds)
        yield f"last {what}", _time(listing.newest_seconds)
    if listing.quarantined_blocks:
        yield "quarantined slots", f"{listing.quarantined_blocks:,}"
    if listing.incomplete_files:
        yield "incomplete files", f"{listing.incomplete_files:,}"
    yield from _record_rows(listing)
    for group in listing.groups:
        text = (
            f"{_blocks(group.blocks, group.block_bytes)}, {format_bytes(group.disk_bytes)} on disk"
        )
        if group.quarantined_blocks:
            text += f", {group.quarantined_blocks:,} quarantined"
        yield group.name, text


def _verification_rows(result: Verification) -> Iterator[tuple[str, str]]:
    from aiokv.base.units import format_seconds

    yield f"{result.kind} store", result.path
    yield from _record_rows(result)
    for block in result.bad:
        slot = "" if block.slot is None else f", slot {block.slot}"
        yield "wrong", f"{block.file}{slot}, key {block.key}: {block.reason}"
    yield "read", _blocks(result.blocks, result.block_bytes)
    yield "wall-clock time", format_seconds(result.seconds)
    yield "wrong blocks", f"{len(result.bad):,}"


def _record_rows(result: Listing | Verification) -> Iterator[tuple[str, str]]:
    for damage in result.damage:
        yield "damage", damage
    for note in result.notes:
        yield "note", note


def _cleaning_rows(result: Cleaning, *, dry_run: bool) -> Iterator[tuple[str, str]]:
    from aiokv.base.units import format_bytes

    yield f"{result.kind} store", result.path
    counts = (
        ("selected blocks", result.selected_blocks),
        ("wrong blocks", result.bad_blocks),
        ("quarantined slots", result.quarantined_blocks),
        ("incomplete files", result.incomplete_files),
    )
    for name, count in counts:
        yield f"{name} {'to remove' if dry_run else 'removed'}", f"{count:,}"
    if not dry_run:
        yield "freed", format_bytes(result.freed_bytes)
    yield "blocks kept", f"{result.kept_blocks:,}"


def _blocks(count: int, num_bytes: int) -> str:
    from aiokv.base.units import format_bytes

    return f"{count:,}, {format_bytes(num_bytes)}"


def _time(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
