"""A program that serves prompts with SGLang on the CPU, and writes the answers as JSON.

``python -m tests.connectors.sglang.server DIRECTORY MODEL LAYOUT STORE ROUND...`` serves the
prompts once per round with a random model: ``llama``, or ``gemma4``, which has sliding windows.

The rounds ``computed`` and ``again`` have the same prompts; ``half`` and ``half_again`` have the
first half of each prompt; ``changed`` has another token in each prompt. ``flushed`` first empties
the device and host caches, after the store has all pages. ``damaged`` also does this, and changes a
byte of every second file of the store. So does ``wrong``, whose loaded windows are wrong instead.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.connectors.sglang.cpu import CpuEngine
from tests.connectors.sglang.storage import VARIABLE, wrong_file
from tests.stores.servers import wait_until

PAGE = 16  # tokens
PROMPTS = 3
PAGES = 10  # full pages per prompt
LENGTH = PAGES * PAGE + 5
VOCABULARY = 500
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": SIZES | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
        "rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "gemma4": SIZES | {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                        "full_attention"],
        "sliding_window": 2 * PAGE, "global_head_dim": 16, "swa_head_dim": 32,
        "swa_v_head_dim": 32, "swa_num_key_value_heads": 4, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
    },
}  # fmt: skip


def started(directory: Path, name: str, layout: str, store: str) -> CpuEngine:
    """Start a server with the configuration of the guide."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name]))
    extra = {
        "backend_name": "aiokv",
        "module_path": "tests.connectors.sglang.storage",
        "class_name": "RecordedAiokv",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        "aiokv": {"model": "random@1", "stores": [store]},
    }
    return CpuEngine(
        model_path=str(model),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        grammar_backend="none",
        attention_backend="intel_amx",  # CpuEngine has another one under this name
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=2048,
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_ratio=2,
        hicache_mem_layout=layout,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
    )


def prompts(name: str) -> list[list[int]]:
    """Return the prompts of a round."""
    draw = random.Random(7)
    many = [[draw.randrange(10, VOCABULARY) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    if name == "changed":
        for tokens in many:
            tokens[draw.randrange(LENGTH - PAGE)] = 3
    return [tokens[: LENGTH // 2] for tokens in many] if name.startswith("half") else many


def answer(engine: CpuEngine, tokens: list[int]) -> dict[str, Any]:
    """Return the output of a prompt, and the number of cached tokens by tier."""
    output: Any = engine.generate(
        input_ids=tokens,
        sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        return_logprob=True,
    )
    found = output["meta_info"]["cached_tokens_details"] or {}
    return {
        "tokens": [token for _, token, _ in output["meta_info"]["output_token_logprobs"]],
        "logprobs": [number for number, _, _ in output["meta_info"]["output_token_logprobs"]],
        "cached": {tier: found.get(tier, 0) for tier in ("device", "host", "storage")},
    }


def damage(directory: Path) -> None:
    """Change a byte of every second page in a directory store."""
    files = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1024
    )
    for path in files[::2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def main() -> None:
    """Serve the rounds that the command line names."""
    directory, model, layout, store, *rounds = sys.argv[1:]
    record = Path(directory) / "saved"
    record.touch()
    os.environ[VARIABLE] = str(record)
    engine = started(Path(directory), model, layout, store)
    answers = {}
    for name in rounds:
        if name in ("flushed", "damaged", "wrong"):
            wait_until(lambda: record.stat().st_size >= PROMPTS * PAGES)
            if name == "damaged":
                damage(Path(directory) / "store")
            if name == "wrong":
                wrong_file(record).touch()
            wait_until(lambda: engine.flush_cache().success)  # refused while pages move
        answers[name] = [answer(engine, tokens) for tokens in prompts(name)]
        wrong_file(record).unlink(missing_ok=True)
    (Path(directory) / "answers.json").write_text(json.dumps(answers))
    engine.shutdown()


if __name__ == "__main__":  # the processes of the server import this module
    main()
