"""vLLM with host memory and a store: a second server finds the KV that the first one computed.

With a disk, the second server is the first one after a restart. A store such as Redis has both at
the same time. For your own server, take the options that ``Server`` passes to ``vllm serve``.

Install: pip install '.[cuda13,redis]' vllm
Run:     python examples/vllm_stores.py Qwen/Qwen3-0.6B 'disk:/var/tmp/aiokv/{dp}-{rank}?bytes=4GiB'
         python examples/vllm_stores.py Qwen/Qwen3-0.6B redis://127.0.0.1:6379
Output:
    server 1: 0 of 801 prompt tokens were cached
    server 2: 800 of 801 prompt tokens were cached, and the answer is the same
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from typing import Any, Self

PROMPT = [100 + n % 400 for n in range(801)]  # token ids; a text does, too


class Server:
    """``vllm serve`` as a context: ready when it is entered, ended when it is left."""

    def __init__(self, model: str, store: str, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        transfer = {
            "kv_connector": "AiokvConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_gib": 1, "stores": [store]},
        }
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]  # vllm serve
        self.command += ["--model", model, "--port", str(self.port)]
        self.command += ["--enable-prompt-tokens-details", "--shutdown-timeout", "60"]
        self.command += ["--kv-transfer-config", json.dumps(transfer), *options]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self.command)
        while True:
            try:
                self.request("/health")
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("the server has not started: see its log")
                time.sleep(1.0)
            else:
                return self

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGINT)  # as Ctrl-C; saves what is not saved yet
        self.process.wait()

    def request(self, path: str, body: object = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600.0) as answer:
            content: bytes = answer.read()
        return content

    def ask(self) -> tuple[int, list[int]]:
        """Return the number of cached prompt tokens, and the generated tokens."""
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer: Any = json.loads(self.request("/v1/completions", body))
        details = answer["usage"]["prompt_tokens_details"]  # None for a first prompt
        return (details or {}).get("cached_tokens", 0), answer["choices"][0]["token_ids"]


def main(model: str, store: str, *options: str) -> None:
    with ExitStack() as servers:
        cached, first = servers.enter_context(Server(model, store, [*options])).ask()
        print(f"server 1: {cached} of {len(PROMPT)} prompt tokens were cached", flush=True)
        if store.startswith("disk:"):
            servers.close()  # one server at a time uses a disk
        cached, second = servers.enter_context(Server(model, store, [*options])).ask()
        same = "and the answer is the same" if second == first else "BUT THE ANSWER DIFFERS"
        print(f"server 2: {cached} of {len(PROMPT)} prompt tokens were cached, {same}")


if __name__ == "__main__":
    main(*sys.argv[1:])
