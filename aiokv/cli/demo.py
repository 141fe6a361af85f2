"""``aiokv demo``: serve a real (small) transformer from the cache and check every bit of it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiokv.cli.arguments import (
    SAVING_POLICIES,
    add_choice,
    add_count,
    add_option,
    from_arguments,
    share,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from aiokv.demo.ledger import Comparison
    from aiokv.demo.report import DemoResult, RunResult
    from aiokv.demo.runs import DemoConfig, Scenario
    from aiokv.demo.split_report import SplitResult
    from aiokv.demo.weights import ModelConfig, Weights
    from aiokv.demo.workload import ChatSizes, Workload

# Width of the table in a file or a pipe, in columns.
PLAIN_COLUMNS = 110

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_CONTROL_FAILED = 3
EXIT_INCONCLUSIVE = 4

LIVE_PORT = 8765
LIVE_CONVERSATIONS = 4  # conversations per client to choose from

TRANSPORTS = ("tcp", "nixl", "mooncake")
KILLS = ("prefill", "decode")

NOTHING_TO_KILL = "no blocks arrived after half of the requests, so no process was killed"
WRONG_BYTES = "the runs DIFFER: the cache served wrong bytes"
NOT_FINITE = "hold NaN or infinity, whose bits prove nothing; check the weights"
DEPENDS_ON_BATCH = (
    "the runs differ, but every cached block held the bytes that were computed for it: matrix "
    "products on this machine depend on the other rows of the batch"
)
NOTHING_TO_CORRUPT = "nothing was reused from the device, so nothing could be corrupted"

MORE = """
A checkout has more models and workloads: python -m tests.models.demo --help
"""

EPILOG = f"""\
The same workload runs three times: without reuse, with a device tier, and with a small device tier
and a host tier. Every row of logits and every token of the later runs must equal those of the first
run, and every cached block that a request reads must hold the bytes that were computed for it.

With --split, one server and then two processes serve the workload: a prefill process computes the
prompts and sends their blocks, a decode process receives them and computes the output tokens.

With --live, one server serves random conversations until Ctrl-C, and shows its cache in a browser.

With --store, the later two runs are two processes, one after the other, which share only the store.
{MORE}
exit status: 0 all runs are equal, 1 the cache served wrong bytes (with --corrupt: the corruption
was detected), 2 bad usage, 3 the corruption of --corrupt was not detected, 4 inconclusive: the
logits are not finite, or they differ although every cached block held the right bytes
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``demo`` command."""
    parser = subparsers.add_parser(
        "demo",
        help="serve a small transformer from the cache and check every bit",
        description="Serve a real (small) transformer from the cache and check every bit of it.",
        epilog=EPILOG,
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo."""
    work = parser.add_argument_group("workload")
    add_count(work, "--conversations", 24, "number of conversations; all begin at the start")
    add_count(work, "--turns", 4, "turns per conversation")
    add_count(work, "--system-prompts", 4, "number of different system prompts")
    add_count(work, "--system-tokens", 128, "tokens per system prompt")
    add_count(work, "--user-tokens", 48, "mean tokens per user turn")
    add_count(work, "--answer-tokens", 16, "generated tokens per turn")
    add_count(work, "--seed", 0, "seed of the workload", minimum=0)
    cache = parser.add_argument_group("cache")
    add_count(cache, "--block-tokens", 16, "tokens per block")
    add_count(cache, "--device-blocks", 1024, "device blocks of the first two runs")
    add_count(cache, "--pressure-blocks", 128, "device blocks of the run with a host tier")
    add_count(cache, "--host-blocks", 1024, "host blocks of the run with a host tier")
    text = "when the run with a host tier copies blocks to host memory"
    add_choice(cache, "--write-policy", SAVING_POLICIES, text)
    cache.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="serve with a store below the host tier, such as disk:PATH or redis://HOST, in two "
        "processes, one after the other: the second one reuses the blocks that the first one has "
        "saved",
    )
    serving = parser.add_argument_group("serving")
    add_count(serving, "--max-running", 8, "maximum number of requests per batch")
    add_count(serving, "--chunk-tokens", 32, "maximum number of prompt tokens per step")
    add_option(
        serving,
        "--disconnect",
        share,
        0.0,
        "in the later runs, cancel this share of the requests at a random time during their "
        "computation, and send them again",
        "SHARE",
    )
    model = parser.add_argument_group("model")
    add_count(model, "--layers", 4, "number of transformer layers")
    add_count(model, "--hidden", 128, "hidden size")
    add_count(model, "--heads", 4, "number of attention heads")
    add_count(model, "--kv-heads", 2, "number of key and value heads")
    split = parser.add_argument_group("prefill and decode")
    split.add_argument(
        "--split",
        action="store_true",
        help="serve with a prefill process and a decode process, and compare with one server",
    )
    text = "with --split: moves the blocks between the processes"
    add_choice(split, "--transport", TRANSPORTS, text)
    split.add_argument(
        "--kill",
        choices=KILLS,
        help="with --split: kill this process while blocks arrive, after half of the requests",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="corrupt one cached block of the last run: the check must fail (exit status 1)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--live",
        type=int,
        nargs="?",
        const=LIVE_PORT,
        metavar="PORT",
        help="serve the conversations in a loop until Ctrl-C, with the live page of the cache on "
        f"this port of 127.0.0.1 (default: {LIVE_PORT}; 0 for any free port)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and return the exit status; arguments and errors of :func:`run_scenario`."""
    return run_scenario(args, make_scenario)


def run_scenario(
    args: argparse.Namespace, scenario_of: Callable[[argparse.Namespace], Scenario]
) -> int:
    """Run the demo with a model and a workload, and return the exit status.

    Args:
        args: options of :func:`add_arguments`.
        scenario_of: function of a module that returns the model and the workload of the options;
            called in each process of the demo.

    Raises:
        UsageError: sizes contradict each other, or a file cannot be read or written.
    """
    from rich.console import Console

    from aiokv.cli.files import check_writable, write_json
    from aiokv.cli.progress import show_progress
    from aiokv.cli.running import run_async
    from aiokv.demo.report import print_table
    from aiokv.demo.runs import run_demo
    from aiokv.demo.split import SplitConfig, run_split_demo
    from aiokv.demo.split_report import SplitResult, print_split_table

    _check_split(args)
    if args.live is not None:
        return _run_live(args, scenario_of)
    check_writable(args.json)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    scenario, config = partial(scenario_of, args), _config(args)
    with show_progress("requests", sys.stdout, prefix="") as stages:
        if args.split:
            options = from_arguments(SplitConfig, args)
            result: DemoResult | SplitResult = run_async(
                run_split_demo(scenario, config, options, stages)
            )
        else:
            result = run_async(run_demo(scenario, config, stages))
    if args.json is not None:
        write_json(args.json, result)
    if isinstance(result, SplitResult):
        print_split_table(console, result)
        return _split_verdict(console, result, kill=args.kill)
    print_table(console, result)
    return _verdict(console, result, control=args.corrupt)


def _run_live(
    args: argparse.Namespace, scenario_of: Callable[[argparse.Namespace], Scenario]
) -> int:
    """Serve with the live page until a signal arrives.

    Raises:
        ConfigError: uvicorn is not installed.
        UsageError: an option contradicts ``--live``, or the port is out of range or in use.
    """
    from aiokv.cli.listening import listen
    from aiokv.cli.running import run_async
    from aiokv.errors import ConfigError

    try:
        from aiokv.demo.live import run_live
    except ImportError as error:
        raise ConfigError(
            f"aiokv demo --live needs the package {error.name}", hint="pip install 'aiokv[serve]'"
        ) from None

    clients = args.conversations
    args.conversations *= LIVE_CONVERSATIONS
    scenario = scenario_of(args)
    with listen("--live", "127.0.0.1", args.live) as listener:
        port = listener.getsockname()[1]
        print(f"the live page is http://127.0.0.1:{port}/; press Ctrl-C to stop", flush=True)
        run_async(run_live(scenario, _config(args), clients=clients, listener=listener))
    return 0


def _verdict(console: Console, result: DemoResult, *, control: bool) -> int:
    """Print the result of the comparison and return the exit status."""
    corrupted = ", ".join(run.corrupted for run in result.runs if run.corrupted)
    compared = [(run.label, run.compared) for run in result.runs if run.compared is not None]
    _print_differences(console, compared)
    if control and result.blocks_equal:
        console.print("the negative control FAILED: ", end="")
        missed = f"the corruption of {corrupted} was not detected"
        console.print(missed if corrupted else NOTHING_TO_CORRUPT)
        return EXIT_CONTROL_FAILED
    worked = f"the negative control worked: the corruption of {corrupted} was detected"
    wrong = worked if corrupted else WRONG_BYTES
    status = _judge(console, compared, result.runs[0], "without a cache", wrong)
    if status != EXIT_EQUAL:
        return status
    if disconnections := sum(run.disconnections for run in result.runs):
        console.print(
            f"{disconnections:,} requests were cancelled while they were computed, and sent again"
        )
    console.print(
        "every row of logits and every token are equal in all runs, and every cached block held "
        "the bytes that were computed for it"
    )
    return EXIT_EQUAL


def _split_verdict(console: Console, result: SplitResult, *, kill: str | None) -> int:
    """Print the result of the split run and return the exit status."""
    compared = [("prefill and decode", result.compared)]
    _print_differences(console, compared)
    status = _judge(console, compared, result.one_server, "on one server", WRONG_BYTES)
    if status != EXIT_EQUAL:
        return status
    if kill is not None and result.killed is None:
        return _inconclusive(console, NOTHING_TO_KILL)
    if result.killed is not None:
        console.print(result.killed.describe(result))
    console.print(
        "every row of logits and every token are equal to those of one server, and every cached or "
        "received block held the bytes that were computed for it"
    )
    return EXIT_EQUAL


def _print_differences(console: Console, compared: Sequence[tuple[str, Comparison]]) -> None:
    for label, found in compared:
        if found.first_difference:
            console.print(f"{label}: first difference at {found.first_difference}")
        if found.first_wrong_block:
            console.print(f"{label}: first wrong bytes in {found.first_wrong_block}")


def _judge(
    console: Console,
    compared: Sequence[tuple[str, Comparison]],
    reference: RunResult,
    where: str,
    wrong: str,
) -> int:
    """Return the exit status for the differences of runs from a reference; print the reason.

    Args:
        console: prints.
        compared: name and comparison of each run.
        reference: the run that the others were compared with.
        where: place of the reference, for the text.
        wrong: text for a block with wrong bytes.
    """
    if any(found.blocks_wrong for _, found in compared):
        console.print(wrong)
        return EXIT_DIFFERENT
    if reference.rows_not_finite:
        rows = f"{reference.rows_not_finite:,} rows of logits of the run {where}"
        return _inconclusive(console, f"{rows} {NOT_FINITE}")
    if not all(found.equal for _, found in compared):
        return _inconclusive(console, DEPENDS_ON_BATCH)
    return EXIT_EQUAL


def _inconclusive(console: Console, reason: str) -> int:
    console.print(f"INCONCLUSIVE: {reason}")
    return EXIT_INCONCLUSIVE


def _check_split(args: argparse.Namespace) -> None:
    """Check that the options of ``--split`` and ``--live`` are used together.

    Raises:
        UsageError: they are not.
    """
    from aiokv.errors import UsageError

    excluded = {
        "split": ("store", "corrupt", "disconnect") if args.split else (),
        "live": ("split", "corrupt", "json") if args.live is not None else (),
    }
    for option, others in excluded.items():
        for other in others:
            if getattr(args, other):
                raise UsageError(f"--{option} and --{other} cannot be used together")
    if not args.split and (args.kill is not None or args.transport != TRANSPORTS[0]):
        option = "--transport" if args.kill is None else "--kill"
        raise UsageError(f"{option} is given without --split", hint="add --split")


def make_scenario(args: argparse.Namespace) -> Scenario:
    """Return a random numpy model and conversations of the sizes of the options."""
    from aiokv.demo.transformer import NumpyTransformer
    from aiokv.demo.weights import GroupedConfig, random_weights
    from aiokv.demo.workload import chat_workload

    config = GroupedConfig(**layer_sizes(args), kv_heads=args.kv_heads)
    weights = random_weights(config)
    workload = chat_workload(chat_sizes(args), vocab=config.vocab, seed=args.seed)
    return scenario_with(args, NumpyTransformer, config, weights, workload)


def scenario_with(
    args: argparse.Namespace,
    model: Callable[..., Any],
    config: ModelConfig,
    weights: Weights,
    workload: Workload,
) -> Scenario:
    """Return a scenario whose model has the positions that the workload needs.

    Args:
        args: options of the demo.
        model: class of the model.
        config: sizes of the model.
        weights: weights of the model.
        workload: the requests.

    Raises:
        ConfigError: a conversation does not fit into the device blocks.
    """
    from aiokv.demo.runs import Scenario

    _config(args).check_fits(workload)
    made = model(config, weights, max_context_tokens=workload.max_context_tokens)
    return Scenario(made, workload, weights.version)


def layer_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of a model with any attention."""
    ffn = args.hidden * 11 // 4
    return {"layers": args.layers, "hidden": args.hidden, "heads": args.heads, "ffn": ffn}


def chat_sizes(args: argparse.Namespace) -> ChatSizes:
    """Return the sizes of the conversations."""
    from aiokv.demo.workload import ChatSizes

    return from_arguments(ChatSizes, args)


def _checked_url(store: str) -> str:
    """Return the URL of a store that the demo requires, of at most 1 GiB if it is a disk store
    without a size.

    Raises:
        ConfigError: the URL is wrong.
    """
    from aiokv.stores import stores_from

    if not store:
        return ""
    defaults = {"required=": "true"}
    if store.startswith("disk:"):
        defaults["bytes="] = "1GiB"
    for name, value in defaults.items():
        if name not in store:
            store += ("&" if "?" in store else "?") + name + value
    stores_from([store])
    return store


def _config(args: argparse.Namespace) -> DemoConfig:
    from aiokv.demo.runs import DemoConfig
    from aiokv.demo.serving import ServingConfig

    serving = from_arguments(ServingConfig, args)
    return from_arguments(DemoConfig, args, store=_checked_url(args.store), serving=serving)
