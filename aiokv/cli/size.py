"""``aiokv size --model config.json --gpu-memory 80GiB``: the blocks and conversations that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.units import format_bytes
from aiokv.cli.arguments import (
    add_count,
    add_json,
    add_option,
    from_arguments,
    positive_share,
    positive_size_bytes,
    size_bytes,
)
from aiokv.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from aiokv.model.shape import ModelShape
    from aiokv.model.sizing import CacheSizes, Memory

EPILOG = """\
--model takes the path of a config.json of Hugging Face, the path of its folder, or the name of a
model in the local cache of Hugging Face; nothing is downloaded. The weights are subtracted from the
GPU memory: those of --weights, or the *.safetensors files beside the config.json.

Sizes have units: 80GiB, 1.5TB, 512MiB. Bytes and blocks are those of one rank; --host-memory is
that of all ranks together. With a write policy other than none, host memory also holds blocks that
are in GPU memory. Put the printed TOML in a file for CacheConfig.load(file=...).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``size`` command."""
    parser = subparsers.add_parser(
        "size",
        help="compute the blocks and conversations that fit in memory",
        description="Compute the bytes per token and per block, and the blocks that fit in memory.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="config.json, its folder, or ORG/NAME")
    add(
        "--gpu-memory",
        type=positive_size_bytes,
        metavar="SIZE",
        help="memory of one GPU; without it, only the bytes per token and block are computed",
    )
    text = "share of the GPU memory for weights and KV; the rest is for activations"
    add_option(parser, "--gpu-memory-utilization", positive_share, 0.9, text, "X", dest="gpu_share")
    add("--weights", type=size_bytes, metavar="SIZE", help="bytes of the weights of all ranks")
    add(
        "--host-memory",
        type=size_bytes,
        default=0,
        metavar="SIZE",
        help="host memory for KV, of all ranks together (default: none)",
    )
    add_count(parser, "--tensor-parallel", 1, "number of ranks, each with one GPU")
    text = "dtype of KV: auto (that of the model), bfloat16, fp8, fp8_ds_mla, ..."
    add_option(parser, "--kv-dtype", str, "auto", text, "DTYPE")
    add_count(parser, "--block-tokens", 16, "tokens per block")
    add_count(parser, "--tokens", 8192, "tokens of one conversation")
    add_count(parser, "--step-tokens", 2048, "tokens per step, for models with sliding windows")
    add("--with-stores", action="store_true", help="the engine has stores below the host tier")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the sizes on stdout, then a configuration with them.

    Returns:
        The exit status.

    Raises:
        ConfigError: the model cannot be sized, or the memory is too small for it.
        UsageError: the output file cannot be written.
    """
    from aiokv.cli.files import check_writable, print_json
    from aiokv.cli.rows import print_rows
    from aiokv.cli.toml import toml_lines
    from aiokv.model.sizing import cache_sizes

    check_writable(args.json)
    shape, memory = _inputs(args)
    if memory is None:
        return _print_shape(args, shape)
    sizes = cache_sizes(shape, memory)
    sizes.check()
    if args.json is not None:
        print_json(args.json, sizes)
        return 0
    print_rows(f"cache of {sizes.model}", list(_rows(sizes)))
    print('\n# aiokv.toml, for CacheConfig.load(file="aiokv.toml"), the same on each rank')
    print("\n".join(toml_lines(sizes.settings())))
    return 0


def _inputs(args: argparse.Namespace) -> tuple[ModelShape, Memory | None]:
    """Return the model, and the memory; None without ``--gpu-memory``.

    Raises:
        ConfigError: the model cannot be sized.
        UsageError: an option needs ``--gpu-memory``.
    """
    from aiokv.model.config import config_path
    from aiokv.model.shape import ModelShape
    from aiokv.model.sizing import Memory, weight_bytes

    path = config_path(args.model)
    shape = ModelShape.from_config(path)
    if args.gpu_memory is None:
        for flag, is_set in {"--host-memory": args.host_memory, "--weights": args.weights}.items():
            if is_set:
                raise UsageError(f"{flag} needs --gpu-memory", hint="--gpu-memory 80GiB")
        return shape, None
    weights = weight_bytes(path.parent) if args.weights is None else args.weights
    return shape, from_arguments(
        Memory,
        args,
        gpu_bytes=args.gpu_memory,
        weight_bytes=weights or 0,
        host_bytes=args.host_memory,
        conversation_tokens=args.tokens,
    )


def _print_shape(args: argparse.Namespace, shape: ModelShape) -> int:
    """Print the bytes per token and block, of each group of layers."""
    from aiokv.cli.files import print_json
    from aiokv.cli.rows import print_rows

    per_rank = {"kv_dtype": args.kv_dtype, "tensor_parallel": args.tensor_parallel}
    groups: tuple[str | None, ...] = (None, *shape.windows)
    found = {
        group or "full": {
            "token_bytes": shape.bytes_per_token(**per_rank, group=group),
            "block_bytes": shape.bytes_per_block(args.block_tokens, **per_rank, group=group),
        }
        for group in groups
    }
    state_bytes = shape.state_slot_bytes(tensor_parallel=args.tensor_parallel)
    if args.json is not None:
        print_json(args.json, {"groups": found, "state_slot_bytes": state_bytes})
        return 0
    rows = [
        ("model", f"{shape.name}, {shape.attention}, {shape.full_layers} layers of full attention"),
        ("dtype of KV", shape.resolved_kv_dtype(args.kv_dtype)),
    ]
    for group, sizes in found.items():
        layers = "" if group == "full" else f", layers of {group}"
        rows.append((f"bytes per token{layers}", _exact(sizes["token_bytes"])))
        rows.append((f"bytes per block{layers}", _exact(sizes["block_bytes"])))
    if state_bytes:
        rows.append(("recurrent state per sequence", _exact(state_bytes)))
    rows += [("note", note) for note in shape.notes]
    print_rows(shape.name, rows)
    return 0


def _rows(sizes: CacheSizes) -> Iterator[tuple[str, str]]:
    memory = sizes.memory
    per_rank = "" if memory.tensor_parallel == 1 else " per rank"
    yield "model", f"{sizes.model}, {sizes.attention}, {sizes.layers} layers of full attention"
    yield "dtype of KV", sizes.kv_dtype
    yield f"bytes per token{per_rank}", _exact(sizes.token_bytes)
    yield f"bytes per block{per_rank}", f"{_exact(sizes.block_bytes)}, {memory.block_tokens} tokens"
    for group in sizes.windows:
        text = f"{group.layers} layers, {_exact(group.block_bytes)} per block{per_rank}"
        text += f"; {group.conversation_blocks:,} blocks per conversation"
        yield f"window of {group.window_tokens:,} tokens", text
    if sizes.state_slot_bytes:
        yield f"recurrent state per sequence{per_rank}", _exact(sizes.state_slot_bytes)
    weights = (
        f"less {format_bytes(memory.weight_bytes)} of weights"
        if memory.weight_bytes
        else "weights not subtracted: pass --weights"
    )
    share = f"{memory.gpu_share:.0%} of {format_bytes(memory.gpu_bytes)}"
    yield f"GPU memory for KV{per_rank}", f"{format_bytes(sizes.kv_bytes)} ({share}, {weights})"
    yield "device blocks", f"{sizes.device_blocks:,}, {_tokens(sizes, sizes.device_blocks)}"
    name = f"conversations of {memory.conversation_tokens:,} tokens"
    yield f"{name} in GPU memory", f"{sizes.device_conversations:,}"
    if memory.host_bytes:
        yield "host blocks", f"{sizes.host_blocks:,}, {_tokens(sizes, sizes.host_blocks)}"
        yield f"{name} in host memory", f"{sizes.host_conversations:,}"
    for note in sizes.notes:
        yield "note", note


def _tokens(sizes: CacheSizes, blocks: int) -> str:
    return f"{blocks * sizes.memory.block_tokens:,} tokens"


def _exact(num_bytes: int) -> str:
    return f"{num_bytes:,} ({format_bytes(num_bytes)})"
