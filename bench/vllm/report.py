"""Tables of the results, and the comparison of outputs between servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BASELINE = "device_hits"
_COMPARED = ("repeated", "reloaded", "damaged")


def compare_outputs(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Count the prompts whose outputs differ from those after hits in vLLM's own device cache.

    Returns:
        per server and pass of its equality run: ``requests``; ``compared``, those of them whose
        hits were as long as those in the device cache; ``different``, those of them whose outputs
        differ; and ``external_hit_tokens``, without which equality says nothing about offload.
    """
    comparison: dict[str, dict[str, dict[str, int]]] = {}
    for server, kinds in results.items():
        passes = kinds.get("equality", {})
        for name in _COMPARED:
            if name in passes:
                comparison.setdefault(server, {})[name] = _compare(passes[_BASELINE], passes[name])
    return comparison


def _compare(baseline: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, int]:
    pairs = [
        (expected, digest)
        for expected, digest, expected_hit, hit in zip(
            baseline["digests"],
            one["digests"],
            baseline["cached_of_each"],
            one["cached_of_each"],
            strict=True,
        )
        if hit == expected_hit
    ]
    return {
        "requests": one["requests"],
        "compared": len(pairs),
        "different": sum(expected != digest for expected, digest in pairs),
        "external_hit_tokens": one["external_hit_tokens"],
    }


def print_tables(results: Mapping[str, Any]) -> None:
    """Print one table per load, and one of the compared outputs."""
    servers = [server for server in results if server != "comparison"]
    for kind, load in _loads(results):
        print(f"\n{kind.replace('_', ' ')}: {load.replace('_', ' ')}")
        print(
            f"{'server':14}{'requests/s':>12}{'TTFT p50 ms':>13}{'p99 ms':>10}"
            f"{'hit tokens':>12}{'external':>11}"
        )
        for server in servers:
            kinds = results[server]
            if kind in kinds:
                print(f"{server:14}{_row(kinds[kind], load)}")
    print("\noutputs that differ from those after equal hits in the device cache")
    for server, passes in results.get("comparison", {}).items():
        cells = ", ".join(
            f"{name.replace('_', ' ')} {figures['different']} of {figures['compared']} compared"
            f" (requests: {figures['requests']}, external hits: {figures['external_hit_tokens']})"
            for name, figures in passes.items()
        )
        print(f"{server:14}{cells}")
    for server in servers:
        for kind, figures in results[server].items():
            if "error" in figures:
                print(f"{server} {kind}: {figures['error']}")


def _loads(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kinds and loads that a server has figures of, in the order of their runs."""
    found = [
        (kind, name)
        for server, kinds in results.items()
        if server != "comparison"
        for kind in ("load", "small_host")
        for name, figures in kinds.get(kind, {}).items()
        if isinstance(figures, dict)
    ]
    return list(dict.fromkeys(found))


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
