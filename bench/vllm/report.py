"""Tables of the results, and the comparison of outputs between servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BASELINE = "none"
_LOADS = ("multi_turn", "one_client", "no_hits")
_PASSES = ("computed", "reloaded", "device_hits", "damaged")


def compare_outputs(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Count the prompts whose outputs differ from those that the server without offload computed.

    Returns:
        per server and pass of its equality run: ``requests``, ``different``, and
        ``external_hit_tokens``, without which equality says nothing about offload.
    """
    baseline = results.get(BASELINE, {}).get("equality", {}).get("computed")
    if baseline is None:
        return {}
    comparison: dict[str, dict[str, dict[str, int]]] = {}
    for server, kinds in results.items():
        passes = kinds.get("equality", {})
        for name in _PASSES:
            if name in passes:
                comparison.setdefault(server, {})[name] = {
                    "requests": passes[name]["requests"],
                    "different": _different(baseline["digests"], passes[name]["digests"]),
                    "external_hit_tokens": passes[name]["external_hit_tokens"],
                }
    return comparison


def _different(expected: Sequence[str], digests: Sequence[str]) -> int:
    return sum(one != other for one, other in zip(expected, digests, strict=True))


def print_tables(results: Mapping[str, Any]) -> None:
    """Print one table per load, and one of the compared outputs."""
    servers = [server for server in results if server != "comparison"]
    for load in _LOADS:
        print(f"\n{load.replace('_', ' ')}")
        print(
            f"{'server':14}{'requests/s':>12}{'TTFT p50 ms':>13}{'p99 ms':>10}"
            f"{'hit tokens':>12}{'external':>11}"
        )
        for server in servers:
            kinds = results[server]
            if "load" in kinds:
                print(f"{server:14}{_row(kinds['load'], load)}")
    print("\noutputs that differ from those computed without offload, one prompt at a time")
    for server, passes in results.get("comparison", {}).items():
        cells = ", ".join(
            f"{name.replace('_', ' ')} {figures['different']} of {figures['requests']}"
            f" (external hits: {figures['external_hit_tokens']} tokens)"
            for name, figures in passes.items()
        )
        print(f"{server:14}{cells}")
    for server in servers:
        for kind, figures in results[server].items():
            if "error" in figures:
                print(f"{server} {kind}: {figures['error']}")


def _row(figures: Mapping[str, Any], load: str) -> str:
    if load not in figures:
        return f"{figures.get('error', 'no result'):>12}"
    one = figures[load]
    share = one["cached_tokens"] / one["prompt_tokens"]
    external = one["external_hit_tokens"] / one["prompt_tokens"]
    return (
        f"{one['requests_per_second']:12.2f}{one['first_token_ms']['p50']:13.1f}"
        f"{one['first_token_ms']['p99']:10.1f}{share:12.1%}{external:11.1%}"
    )
