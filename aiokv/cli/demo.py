"""``aiokv demo``: serve a real (small) transformer from the cache and check every bit of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiokv.cli.arguments import SAVING_POLICIES, at_least, share

if TYPE_CHECKING:
    from rich.console import Console

    from aiokv.demo.model import ModelConfig
    from aiokv.demo.report import DemoResult
    from aiokv.demo.runs import DemoConfig
    from aiokv.demo.weights import Weights
    from aiokv.demo.workload import Workload

# Room for the table in a file or a pipe.
PLAIN_COLUMNS = 110

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_CONTROL_FAILED = 3
EXIT_INCONCLUSIVE = 4

DEVICES = ("cpu", "cuda")
FRAMEWORKS = ("numpy", "paddle")
ATTENTIONS = ("gqa", "mla")
KV_FORMATS = ("float32", "bfloat16", "int8", "fp8")

NOTHING_TO_CORRUPT = "nothing was reused from the device, so nothing could be corrupted"

EPILOG = """\
The same workload runs three times: with nothing reused, with a device tier, and with a small device
tier over a host tier. Every row of logits and every token of the later runs must equal the first's,
and every cached block that a request reads must hold the bytes that were computed for it.

exit status: 0 equal, 1 the cache served wrong bytes (with --corrupt: the control worked),
2 bad usage, 3 --corrupt was not detected, 4 inconclusive: the logits are not finite, or they differ
although every cached block held the right bytes
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``demo`` command."""
    parser = subparsers.add_parser(
        "demo",
        help="serve a small transformer from the cache and check every bit",
        description="Serve a real (small) transformer from the cache and check every bit of it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = parser.add_argument_group("workload")
    _add_count(work, "--conversations", 24, "conversations, all there from the start")
    _add_count(work, "--turns", 4, "turns of each")
    _add_count(work, "--system-prompts", 4, "different system prompts")
    _add_count(work, "--system-tokens", 128, "tokens of a system prompt")
    _add_count(work, "--user-tokens", 48, "mean tokens of a user's turn")
    _add_count(work, "--answer-tokens", 16, "tokens generated in a turn")
    work.add_argument(
        "--images",
        type=at_least(0),
        default=0,
        metavar="N",
        help="different images, one at the beginning of each conversation (default: none)",
    )
    work.add_argument(
        "--trace", type=Path, metavar="FILE", help="serve this Mooncake trace, scaled down, instead"
    )
    _add_count(work, "--requests", 96, "requests of the trace")
    _add_count(work, "--context-tokens", 512, "longest request of the trace, after scaling")
    work.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="of the workload (default: 0)"
    )
    cache = parser.add_argument_group("cache")
    _add_count(cache, "--block-tokens", 16, "tokens of a block")
    _add_count(cache, "--device-blocks", 1024, "device blocks of the first two runs")
    _add_count(cache, "--pressure-blocks", 128, "device blocks of the run with a host tier")
    _add_count(cache, "--host-blocks", 1024, "host blocks of that run")
    cache.add_argument(
        "--write-policy",
        choices=SAVING_POLICIES,
        default=SAVING_POLICIES[0],
        help="when blocks of that run get their host copy (default: %(default)s)",
    )
    serving = parser.add_argument_group("serving")
    _add_count(serving, "--max-running", 8, "requests in the batch")
    _add_count(serving, "--chunk-tokens", 32, "prompt tokens of a step")
    serving.add_argument(
        "--disconnect",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="cancel this share of the requests of the later runs at a random instant while they "
        "are computed, and send them again (default: 0)",
    )
    model = parser.add_argument_group("model")
    _add_count(model, "--layers", 4, "transformer layers")
    _add_count(model, "--hidden", 128, "hidden size")
    _add_count(model, "--heads", 4, "attention heads")
    _add_count(model, "--kv-heads", 2, "key and value heads of gqa")
    model.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="gqa",
        help="grouped-query attention, or multi-head latent attention, which caches one latent a "
        "token and needs --framework paddle (default: gqa)",
    )
    model.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a local Llama or Qwen checkpoint (config.json, *.safetensors) instead of these sizes",
    )
    model.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        default="numpy",
        help="what computes it (default: numpy)",
    )
    model.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where it is computed and cached; cuda takes CuPy for numpy (default: cpu)",
    )
    model.add_argument(
        "--kv-format",
        choices=KV_FORMATS,
        default="float32",
        help="of the cached keys and values, or latents; int8 and fp8 add regions of scales, and "
        "all but float32 need --framework paddle (default: float32)",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="corrupt one cached block of the last run: the check must fail (exit status 1)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status.

    Raises:
        UsageError: sizes contradict each other, or a file cannot be read or written.
    """
    from rich.console import Console

    from aiokv.cli.running import run_async
    from aiokv.demo.models import load_model
    from aiokv.demo.progress import BarProgress, LineProgress
    from aiokv.demo.report import print_table
    from aiokv.demo.runs import run_demo
    from aiokv.errors import UsageError

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"cannot write {args.json}: its folder does not exist")
    if args.json is not None and args.json.is_dir():
        raise UsageError(f"cannot write {args.json}: it is a folder")
    model_config, weights = _weights(args)
    workload, config = _workload(args, model_config.vocab), _config(args)
    config.check_fits(workload)
    model = load_model(
        args.framework,
        model_config,
        weights,
        max_context_tokens=workload.max_context_tokens,
        kv_format=args.kv_format,
        device=args.device,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    progress = BarProgress(console) if console.is_terminal else LineProgress(console)
    with progress:
        result = run_async(run_demo(model, workload, config, progress))
    print_table(console, result)
    if args.json is not None:
        result.write(args.json)
    return _verdict(console, result, control=args.corrupt)


def _verdict(console: Console, result: DemoResult, *, control: bool) -> int:
    """Print what the comparison means; returns the exit status."""
    corrupted = ", ".join(run.corrupted for run in result.runs if run.corrupted)
    _print_differences(console, result)
    if not result.blocks_equal:
        if corrupted:
            console.print(
                f"the negative control worked: the corruption of {corrupted} was detected"
            )
        else:
            console.print("the runs DIFFER: the cache served wrong bytes")
        return EXIT_DIFFERENT
    if control:
        console.print("the negative control FAILED: ", end="")
        missed = f"the corruption of {corrupted} was not detected"
        console.print(missed if corrupted else NOTHING_TO_CORRUPT)
        return EXIT_CONTROL_FAILED
    if result.rows_not_finite:
        console.print(
            f"INCONCLUSIVE: {result.rows_not_finite:,} rows of logits of the run without a cache "
            "hold NaN or infinity, whose bits prove nothing; check the weights"
        )
        return EXIT_INCONCLUSIVE
    if not result.equal:
        console.print(
            "INCONCLUSIVE: the runs differ, but every cached block held the bytes that were "
            "computed for it: products of this machine depend on the rows beside them"
        )
        return EXIT_INCONCLUSIVE
    if disconnections := sum(run.disconnections for run in result.runs):
        console.print(
            f"{disconnections:,} requests were cancelled while they were computed, and sent again"
        )
    console.print(
        "every row of logits and every token are equal in all runs, and every cached block held "
        "the bytes that were computed for it"
    )
    return EXIT_EQUAL


def _print_differences(console: Console, result: DemoResult) -> None:
    for run in result.runs:
        if run.compared is None or run.compared.equal:
            continue
        if run.compared.first_difference:
            console.print(f"{run.label}: first difference at {run.compared.first_difference}")
        if run.compared.first_wrong_block:
            console.print(f"{run.label}: first wrong bytes in {run.compared.first_wrong_block}")


def _workload(args: argparse.Namespace, vocab: int) -> Workload:
    from aiokv.demo.workload import ChatSizes, chat_workload, trace_workload

    if args.trace is not None:
        return trace_workload(
            args.trace,
            requests=args.requests,
            block_tokens=args.block_tokens,
            max_context_tokens=args.context_tokens,
            vocab=vocab,
            seed=args.seed,
        )
    sizes = ChatSizes(
        conversations=args.conversations,
        turns=args.turns,
        system_prompts=args.system_prompts,
        system_tokens=args.system_tokens,
        user_tokens=args.user_tokens,
        answer_tokens=args.answer_tokens,
        images=args.images,
    )
    return chat_workload(sizes, vocab=vocab, seed=args.seed)


def _weights(args: argparse.Namespace) -> tuple[ModelConfig, Weights[Any]]:
    from aiokv.demo import grouped, latent
    from aiokv.demo.checkpoint import read_checkpoint
    from aiokv.errors import UsageError

    if args.checkpoint is not None:
        if args.attention != "gqa":
            raise UsageError(
                f"checkpoints have grouped-query attention, not {args.attention}",
                hint="leave --checkpoint or --attention away",
            )
        return read_checkpoint(args.checkpoint)
    sizes = {"layers": args.layers, "hidden": args.hidden, "heads": args.heads}
    sizes["ffn"] = args.hidden * 11 // 4
    if args.attention == "mla":
        latent_config = latent.LatentConfig(**sizes)
        return latent_config, latent.random_weights(latent_config)
    config = grouped.GroupedConfig(**sizes, kv_heads=args.kv_heads)
    return config, grouped.random_weights(config)


def _config(args: argparse.Namespace) -> DemoConfig:
    from aiokv.demo.runs import DemoConfig

    return DemoConfig(
        block_tokens=args.block_tokens,
        device_blocks=args.device_blocks,
        pressure_blocks=args.pressure_blocks,
        host_blocks=args.host_blocks,
        max_running=args.max_running,
        chunk_tokens=args.chunk_tokens,
        corrupt=args.corrupt,
        disconnect=args.disconnect,
        seed=args.seed,
        write_policy=args.write_policy,
    )


def _add_count(group: argparse._ArgumentGroup, flag: str, default: int, text: str) -> None:
    group.add_argument(
        flag, type=at_least(1), default=default, metavar="N", help=f"{text} (default: %(default)s)"
    )
