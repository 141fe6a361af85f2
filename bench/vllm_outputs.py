"""Outputs of vLLM with aiokv beside those behind vLLM's own prefix cache, at equal hits, on a GPU.

``python -m bench.vllm_outputs --save FILE`` starts vLLM with a small random Gemma 3, which has
three KV cache groups, two of them with windows, and without asynchronous scheduling: before vLLM
0.27, it frees blocks of windows before they can be saved. Each prompt is computed cold, then with a
hit. A run without aiokv has its hits in vLLM's blocks; the other runs reset vLLM's prefix cache
first and load all hits. The last run starts again with the blocks that the disk store of the run
before has.

* ``--beside-offload``: instead, run aiokv before and behind vLLM's ``OffloadingConnector`` in a
  ``MultiConnector``, with this model and with one of full attention only, which has one group. The
  first connector loads the hits; both save.
* ``--runner-v2``: instead, run without aiokv and with ``"load": "layerwise"``, for both models, in
  vLLM's model runner V2.

A run prints the number of prompts with equal tokens and log probabilities, as rounded to 5 digits,
and the blocks that aiokv has loaded. ``changed`` is a control: prompts with another first block,
whose outputs have to differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import harness

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMON: Final = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1_024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "head_dim": 64,
    "vocab_size": 4_096,
    "max_position_embeddings": 4_096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 64,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
}
MODELS["gemma3-full"] = MODELS["gemma3"] | {
    "layer_types": ["full_attention"] * 6,
    "sliding_window": None,
}
MODES: Final = ("none", "async", "layerwise", "disk", "disk, restarted")
BESIDE_OFFLOAD: Final = ("none", "before offload", "behind offload")
RUNNER_V2: Final = ("none", "layerwise")
_NUM_PROMPTS: Final = 12
_BLOCK_TOKENS: Final = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--beside-offload", action="store_true", help="run beside vLLM's OffloadingConnector"
    )
    choice.add_argument("--runner-v2", action="store_true", help="run vLLM's model runner V2")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        model, mode, folder = args.cell
        _run_cell(model, mode, Path(folder))
        return 0
    models: Sequence[str] = ("gemma3",)
    modes: Sequence[str] = MODES
    if args.beside_offload or args.runner_v2:
        models = list(MODELS)
        modes = BESIDE_OFFLOAD if args.beside_offload else RUNNER_V2
    if args.runner_v2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        later = [mode for mode in modes if mode.endswith("restarted")]  # read what others stored
        for together in ([mode for mode in modes if mode not in later], later):
            servers = [_start(model, mode, folder) for model in models for mode in together]
            codes = [server.wait() for server in servers]
            if any(codes):
                return 1
        cells = [
            cell for model in models for mode in modes for cell in _cells(model, mode, Path(folder))
        ]
    for cell in cells:
        print(json.dumps(cell))
    if args.save:
        results = {"machine": harness.machine(), "cells": cells}
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    is_equal = all(cell["equal"] == _NUM_PROMPTS for cell in cells if cell["pass"] == "warm")
    has_control = all(cell["equal"] == 0 for cell in cells if cell["pass"] == "changed")
    return 0 if is_equal and has_control else 1


def _start(model: str, mode: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a server in a process of its own."""
    command = [sys.executable, "-m", "bench.vllm_outputs", "--cell", model, mode, folder]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _cells(model: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Return the comparison of each pass of a server."""
    passes = _read(folder, model, mode)
    loaded = passes.pop("loaded_blocks")
    own = _read(folder, model, "none")
    found = []
    for name, outputs in passes.items():
        expected = own["cold" if name == "cold" and mode != "disk, restarted" else "warm"]
        pairs = list(zip(outputs, expected, strict=True))
        found.append(
            {
                "model": model,
                "mode": mode,
                "pass": name,
                "prompts": len(pairs),
                "equal": sum(a["tokens"] == b["tokens"] and a["log"] == b["log"] for a, b in pairs),
                "cached_tokens": sum(a["cached"] for a, _ in pairs),
                "own_cached_tokens": sum(b["cached"] for _, b in pairs),
                "loaded_blocks": loaded.get(name, 0),
            }
        )
    return found


def _read(folder: Path, model: str, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{model}-{mode}.json").read_text())
    return found


def _run_cell(model: str, mode: str, folder: Path) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    config = folder / model
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(_COMMON | MODELS[model]))
    server = LLM(
        model=str(config),
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=4_096,
        block_size=_BLOCK_TOKENS,
        num_gpu_blocks_override=1_500,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.1,  # memory that has to be free when one server of many starts
        enable_prefix_caching=True,
        enforce_eager=True,
        async_scheduling=False,
        **_transfer(mode, folder / f"store-{model}"),
    )
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1
    )

    def answer(prompt: list[int]) -> dict[str, Any]:
        output = server.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)[0]
        found = output.outputs[0]
        steps = zip(found.token_ids, found.logprobs, strict=True)
        return {
            "tokens": list(found.token_ids),
            "log": [round(step[token].logprob, 5) for token, step in steps],
            "cached": output.num_cached_tokens,
        }

    rng = random.Random(1)
    prompts = [
        [rng.randrange(2, 4_096) for _ in range(rng.randrange(200, 1_500))]
        for _ in range(_NUM_PROMPTS)
    ]
    passes: dict[str, Any] = {"cold": [answer(prompt) for prompt in prompts]}
    loaded = {"cold": _loaded_blocks()}
    if mode == "none":
        server.reset_prefix_cache()
        passes["warm"] = [(answer(prompt), answer(prompt))[1] for prompt in prompts]
        changed = [[5] * _BLOCK_TOKENS + prompt[_BLOCK_TOKENS:] for prompt in prompts]
        passes["changed"] = [(answer(prompt), answer(prompt))[1] for prompt in changed]
    else:
        time.sleep(1.0)  # for the saves to end
        server.reset_prefix_cache()
        passes["warm"] = [answer(prompt) for prompt in prompts]
        loaded["warm"] = _loaded_blocks() - loaded["cold"]
    passes["loaded_blocks"] = loaded
    (folder / f"{model}-{mode}.json").write_text(json.dumps(passes))


def _loaded_blocks() -> int:
    """Return the number of blocks that aiokv has loaded, if it is a connector of this process."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from aiokv.connectors.vllm import AiokvConnector

    gc.unfreeze()  # vLLM has frozen its objects
    # `isinstance` would ask weak proxies for the class of an object that may be gone.
    connectors = (one for one in gc.get_objects() if type(one) is AiokvConnector)
    return sum(
        one.engine.cache_statistics().attention.onloaded_blocks
        for one in connectors
        if one.role == KVConnectorRole.SCHEDULER
    )


def _transfer(mode: str, store: Path) -> dict[str, Any]:
    if mode == "none":
        return {}
    extra: dict[str, Any] = {"host_gib": 2, "follow_resets": False}
    if mode == "layerwise":
        extra["load"] = mode
    if mode.startswith("disk"):
        extra["stores"] = [f"disk:{store}?bytes=2GiB"]
    connector: dict[str, Any] = {
        "kv_connector": "AiokvConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if mode.endswith("offload"):
        offload = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
        }
        both = [connector, offload] if mode == "before offload" else [offload, connector]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": both},
        }
    return {"kv_transfer_config": connector}


if __name__ == "__main__":
    sys.exit(main())
