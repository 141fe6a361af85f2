"""ByteModel: the demo's transformer as a model of the HTTP server. A token is a byte."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aiokv.demo.batch import Batch, Part

if TYPE_CHECKING:
    from aiokv import LayerView
    from aiokv.demo.http_server import ChatMessage, Row
    from aiokv.demo.transformer import NumpyCache, NumpyTransformer


class ByteModel:
    """See :class:`aiokv.demo.http_server.Model`."""

    name = "aiokv-demo"
    vocabulary = 256
    end_tokens = ()

    def __init__(self, model: NumpyTransformer, cache: NumpyCache) -> None:
        self._model, self._cache = model, cache

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        turns = [f"{message.role}: {message.content}\n" for message in messages]
        return self.encode("".join([*turns, "assistant: "]))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("latin-1")

    def step(self, rows: list[Row], layers: LayerView) -> list[int]:
        parts = [Part(tokens, first, len(tokens) - first, table) for tokens, first, table in rows]
        batch = Batch.of(parts)
        wait = partial(layers.gpu_wait, stream=self._model.stream)  # before each layer
        logits = self._model.forward(batch, self._cache, wait)
        layers.raise_for_error()  # before the outputs are used
        return [int(np.argmax(logits[span.stop - 1])) for span in batch.spans]
