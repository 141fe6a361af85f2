"""A torch model behind an HTTP server with OpenAI's API: the model of ``torch_server.py``.

One import brings admission, chunked prefill, preemption, streaming, clients that leave, errors and
the live page at ``/``. ``aiokv/demo/http_server.py`` is one file, which you may copy instead.

Install: pip install '.[serve]' torch
Run:     python examples/torch_http.py 8000
Output:
    serving at http://127.0.0.1:8000/v1: Ctrl-C stops
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import torch_server

import aiokv
from aiokv.demo.http_server import ChatMessage, Row, make_app, serve


class HttpModel:
    """The model with a name and a tokenizer. A token is a byte."""

    name = "torch-example"
    vocabulary = torch_server.VOCABULARY
    end_tokens = (0,)

    def __init__(self) -> None:
        self.model = torch_server.Model()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        return self.encode("\n".join(f"{message.role}: {message.content}" for message in messages))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def step(self, rows: list[Row], layers: aiokv.LayerView) -> list[int]:
        return self.model.step([torch_server.Row(*row) for row in rows], layers)


def main(port: int) -> None:
    model = HttpModel()
    regions = aiokv.Regions(num_layers=torch_server.LAYERS)
    regions.add("kv", layers=model.model.kv)
    config = aiokv.CacheConfig(
        block_tokens=torch_server.BLOCK_TOKENS,
        device_blocks=torch_server.DEVICE_BLOCKS,
        host_blocks=4 * torch_server.DEVICE_BLOCKS,
        reserve_blocks=32,  # a block for the next token of each running request
    )
    engine = aiokv.CacheEngine(config, regions, device="cpu")
    with socket.create_server(("127.0.0.1", port)) as listener, suppress(KeyboardInterrupt):
        port = listener.getsockname()[1]
        print(f"serving at http://127.0.0.1:{port}/v1: Ctrl-C stops", flush=True)
        serve(make_app(engine, model), listener)


if __name__ == "__main__":
    main(int(sys.argv[1]))
