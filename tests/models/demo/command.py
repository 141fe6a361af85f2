"""``python -m tests.models.demo``: ``aiokv demo`` with more models, devices and workloads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiokv import cli
from aiokv.cli import demo
from aiokv.cli.arguments import add_choice, add_count
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.demo.workload import chat_workload
from aiokv.errors import UsageError
from tests.models.demo import latent
from tests.models.demo.checkpoint import read_checkpoint
from tests.models.demo.images import with_images
from tests.models.demo.loading import load_model
from tests.models.demo.trace import trace_workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from aiokv.demo.runs import Scenario
    from aiokv.demo.weights import ModelConfig, Weights
    from aiokv.demo.workload import Workload

PROGRAM = "python -m tests.models.demo"
DEVICES = ("cpu", "cuda")
FRAMEWORKS = ("numpy", "paddle")
ATTENTIONS = ("gqa", "mla")
KV_FORMATS = ("float32", "bfloat16", "int8", "fp8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; see ``aiokv.cli.main``."""
    return cli.main(argv, _make_parser)


def _make_parser() -> cli.Parser:
    parser = cli.new_parser(
        PROGRAM,
        "aiokv demo with more models, devices and workloads.",
        demo.EPILOG.replace(demo.MORE, ""),
    )
    demo.add_arguments(parser)
    work = parser.add_argument_group("workloads of the repository")
    add_count(
        work,
        "--images",
        0,
        "number of different images; each conversation begins with one of them",
        minimum=0,
    )
    work.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="serve this Mooncake trace, scaled down, instead of conversations",
    )
    add_count(work, "--requests", 96, "with --trace: number of requests")
    add_count(
        work, "--context-tokens", 512, "with --trace: longest request in tokens, after scaling"
    )
    model = parser.add_argument_group("models of the repository")
    model.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder of a Llama or Qwen checkpoint (config.json, *.safetensors), which replaces "
        "the sizes",
    )
    add_choice(
        model,
        "--attention",
        ATTENTIONS,
        "gqa: grouped-query attention; mla: multi-head latent attention, which caches one latent "
        "per token and needs --framework paddle",
    )
    add_choice(model, "--framework", FRAMEWORKS, "library that computes the model")
    add_choice(
        model, "--device", DEVICES, "device of the model and its cache; with cuda, numpy uses CuPy"
    )
    add_choice(
        model,
        "--kv-format",
        KV_FORMATS,
        "data type of the cached keys and values, or latents; int8 and fp8 add regions of scales, "
        "and all types but float32 need --framework paddle",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo and return the exit status.

    Raises:
        UsageError: options contradict each other, or a file cannot be read or written.
    """
    return demo.run_scenario(args, make_scenario)


def make_scenario(args: argparse.Namespace) -> Scenario:
    """Return the model and the workload of the options."""
    config, weights = _weights(args)
    model = partial(load_model, args.framework, kv_format=args.kv_format, device=args.device)
    return demo.scenario_with(args, model, config, weights, _workload(args, config.vocab))


def _workload(args: argparse.Namespace, vocab: int) -> Workload:
    if args.trace is not None:
        return trace_workload(
            args.trace,
            requests=args.requests,
            block_tokens=args.block_tokens,
            max_context_tokens=args.context_tokens,
            vocab=vocab,
            seed=args.seed,
        )
    sizes = demo.chat_sizes(args)
    workload = chat_workload(sizes, vocab=vocab, seed=args.seed)
    return with_images(workload, args.images, sizes) if args.images else workload


def _weights(args: argparse.Namespace) -> tuple[ModelConfig, Weights]:
    if args.checkpoint is not None:
        if args.attention != ATTENTIONS[0]:
            raise UsageError(
                f"checkpoints have grouped-query attention, not {args.attention}",
                hint="leave out --checkpoint or --attention",
            )
        return read_checkpoint(args.checkpoint)
    sizes = demo.layer_sizes(args)
    if args.attention != ATTENTIONS[0]:
        mla = latent.LatentConfig(**sizes)
        return mla, latent.random_weights(mla)
    grouped = GroupedConfig(**sizes, kv_heads=args.kv_heads)
    return grouped, random_weights(grouped)
