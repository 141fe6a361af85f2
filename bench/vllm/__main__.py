"""Compare servers: multi-turn load from the public trace, a load without hits, equal outputs.

Each server runs in processes of its own: one is timed, in another each prompt is answered alone
and vLLM computes the same bits whatever else it runs (``VLLM_BATCH_INVARIANT``), so that outputs
can be compared. A server that fails or takes too long is reported and the others go on.

vLLM runs as by default (asynchronous scheduling, chunked prefill of up to 8,192 tokens per step,
blocks of 16 tokens, prefix cache on), except that torch.compile and FlashInfer are off and that
only decode steps run as CUDA graphs, of up to 8 requests, or of all for the loads of long answers,
so that a process starts in half a minute.
Its KV cache is made small on purpose; weights are random, of the shape of Llama 3 8B in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.vllm.cell import (
    DOCUMENT_REQUESTS,
    DOCUMENTS_TOKENS,
    HOST_HITS_TOKENS,
    LOADS,
    LONG_ANSWER_TOKENS,
    VARIED_ANSWER_TOKENS,
    Cell,
)
from bench.vllm.model import block_bytes
from bench.vllm.report import compare_outputs, print_tables
from bench.vllm.servers import BLOCK_TOKENS, SERVERS, Settings
from bench.vllm.workload import AGENT_OUTPUT_TOKENS, load_workload, save_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.vllm.workload import Workload

_STOP_SECONDS = 10.0
_LONG_LOADS = ("long_answers", "documents", "agents")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.write_workload:
        save_workload(_workload_from_trace(args), args.write_workload)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=args.scratch) as scratch:
        workload = args.workload
        if workload is None:
            workload = Path(scratch) / "workload.json"
            save_workload(_workload_from_trace(args), workload)
        results = _load_results(args.out / "results.json") if args.add else {}
        for kind in args.kinds:
            cells = [_cell(args, server, kind, workload, Path(scratch)) for server in args.servers]
            # Only what is not timed may share the GPU.
            at_once = args.at_once if kind == "equality" else 1
            with ThreadPoolExecutor(at_once) as pool:
                for cell, figures in pool.map(partial(_run_cell, args, Path(scratch)), cells):
                    known = results.setdefault(cell.server, {})
                    # With --add, other loads of the server stay.
                    known[kind] = known.get(kind, {}) | figures if args.add else figures
                    _save_results(results, args.out / "results.json")
    comparison = compare_outputs(results)
    results["comparison"] = comparison
    _save_results(results, args.out / "results.json")
    print_tables(results)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument(
        "servers",
        nargs="*",
        metavar="SERVER",
        default=list(SERVERS),
        help=f"of {', '.join(SERVERS)}; default: all",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("load", "small_host", "equality"),
        default=("load", "equality"),
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        choices=LOADS,
        default=[load for load in LOADS if load not in _LONG_LOADS],
        help=f"default: all but {', '.join(_LONG_LOADS)}, which are for --host-gib 56 and "
        "--device-blocks 12288",
    )
    parser.add_argument("--shape", default="8b", help="8b, or tiny to try the bench itself")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="default: from the trace")
    parser.add_argument(
        "--agents-trace",
        type=Path,
        metavar="FILE",
        help="trace of agents' sessions, for the load agents: as in the format of aiokv replay",
    )
    parser.add_argument("--agents", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--write-workload", type=Path, metavar="FILE", help="write it and exit")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("vllm-bench"))
    parser.add_argument("--add", action="store_true", help="keep other servers' results in DIR")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for the model and the disk")
    parser.add_argument("--device-blocks", type=int, default=4_096, help="default: %(default)s")
    parser.add_argument("--host-gib", type=float, default=36.0, help="default: %(default)s")
    parser.add_argument("--small-host-gib", type=float, default=12.0, help="default: %(default)s")
    parser.add_argument("--disk-gib", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--document-clients",
        type=int,
        nargs="*",
        choices=DOCUMENT_REQUESTS,
        default=list(DOCUMENT_REQUESTS),
        help="of the load documents; default: %(default)s",
    )
    parser.add_argument(
        "--document-rates",
        type=float,
        nargs="+",
        default=[],
        metavar="RATE",
        help="of documents: requests per second that arrive at random times; default: none",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        nargs="+",
        default=[LONG_ANSWER_TOKENS],
        metavar="N",
        help="lengths of the answers at each of --document-rates; default: %(default)s",
    )
    parser.add_argument(
        "--vary-answers", action="store_true", help="documents: 32 to 96 output tokens, not 64"
    )
    parser.add_argument("--output-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="prompts of each load; default: all")
    parser.add_argument("--limit-seconds", type=float, default=180.0, help="of each process")
    parser.add_argument("--at-once", type=int, default=1, help="equality runs that share the GPU")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--record", action="store_true", help="write the calls of connectors to DIR/*.calls"
    )
    parser.add_argument(
        "--profile", action="store_true", help="write vLLM's traces of host hits to DIR/*.trace"
    )
    parser.add_argument("--quick", action="store_true", help="few short sessions")
    args = parser.parse_args(argv)
    for server in args.servers:
        if server not in SERVERS:
            parser.error(f"unknown server {server!r}; one of {', '.join(SERVERS)}")
    return args


def _workload_from_trace(args: argparse.Namespace) -> Workload:
    from aiokv.trace.format import read_trace
    from bench.harness import find_trace
    from bench.vllm.from_trace import Sizes, agent_sessions, build_workload

    path = find_trace()
    if path is None:
        raise SystemExit("the trace is not here: set AIOKV_TRACE, or pass --workload")
    quick_sizes = Sizes(
        sessions=3,
        max_turns=4,
        min_prompt_tokens=512,
        max_prompt_tokens=2_048,
        unique_prompts=3,
        equality_sessions=2,
        equality_max_tokens=1_536,
    )
    workload = build_workload(read_trace(path), quick_sizes if args.quick else Sizes())
    if args.agents_trace is None:
        return workload
    agents = agent_sessions(read_trace(args.agents_trace))
    return msgspec.structs.replace(workload, agents=agents)


def _cell(args: argparse.Namespace, server: str, kind: str, workload: Path, scratch: Path) -> Cell:
    equality = kind == "equality"
    disk = scratch / f"disk-{server}-{kind}"
    max_prompt_tokens = max(load_workload(workload).max_prompt_tokens, HOST_HITS_TOKENS)
    if equality:
        max_prompt_tokens = max(prompt.num_tokens for prompt in load_workload(workload).equality)
    graph_sizes = (1, 2, 4, 8)
    output_tokens = args.output_tokens
    if not set(_LONG_LOADS).isdisjoint(args.loads):
        max_prompt_tokens = max(max_prompt_tokens, DOCUMENTS_TOKENS)
        output_tokens = max(output_tokens, *VARIED_ANSWER_TOKENS, *args.answer_tokens)
        if "agents" in args.loads:
            output_tokens = max(output_tokens, AGENT_OUTPUT_TOKENS)
        graph_sizes += (16, 24, 32)
    host_gib = args.small_host_gib if kind == "small_host" else args.host_gib
    return Cell(
        server=server,
        kind=kind,
        loads=("multi_turn",) if kind == "small_host" else tuple(args.loads),
        shape=args.shape,
        workload=str(workload),
        settings=Settings(
            model=str(scratch / "model"),
            block_bytes=block_bytes(args.shape, BLOCK_TOKENS),
            # The prompts whose outputs are compared need few blocks.
            device_blocks=min(1_024, args.device_blocks) if equality else args.device_blocks,
            host_gib=min(8.0, host_gib) if equality else host_gib,
            small_host_gib=min(1.0, args.small_host_gib) if equality else args.small_host_gib,
            disk=str(disk),
            disk_gib=args.disk_gib,
            max_model_tokens=max_prompt_tokens + output_tokens,
            gpu_share=min(0.9, 0.9 / args.at_once) if equality else 0.9,
            batch_invariant=equality,
            graph_sizes=() if equality or args.eager else graph_sizes,
            record=str(args.out.resolve() / f"{server}-{kind}.calls") if args.record else "",
            profile=str(args.out.resolve() / f"{server}-{kind}.trace") if args.profile else "",
        ),
        clients=args.clients,
        max_output_tokens=args.output_tokens,
        document_clients=tuple(args.document_clients),
        document_rates=tuple(args.document_rates),
        answer_tokens=tuple(args.answer_tokens),
        vary_answers=args.vary_answers,
        agents=args.agents,
        limit=args.limit,
    )


def _run_cell(args: argparse.Namespace, scratch: Path, cell: Cell) -> tuple[Cell, dict[str, Any]]:
    """Run one cell in a process of its own; return its figures, or its error."""
    name = f"{cell.server}-{cell.kind}"
    spec, result, log = scratch / f"{name}.spec", scratch / f"{name}.json", args.out / f"{name}.log"
    spec.write_bytes(msgspec.json.encode(cell))
    print(f"bench: {name} ...", file=sys.stderr, flush=True)
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm.cell", str(spec), str(result)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(args.limit_seconds)
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"not done after {args.limit_seconds} s"
        finally:
            _stop(process)
    shutil.rmtree(cell.settings.disk, ignore_errors=True)
    seconds = round(time.perf_counter() - started, 1)
    print(f"bench: {name} took {seconds} s{f': {problem}' if problem else ''}", file=sys.stderr)
    if not result.exists():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        print("\n".join(tail), file=sys.stderr, flush=True)
        return cell, {"error": problem or "no result"}
    figures: dict[str, Any] = msgspec.json.decode(result.read_bytes())
    return cell, figures | {"process_seconds": seconds}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it has started: they share a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _load_results(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def _save_results(results: dict[str, Any], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
