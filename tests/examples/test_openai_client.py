"""OpenAI's own client with `aiokv serve`: models, completions, a streamed chat, errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from aiokv.testing.loops import PATIENCE_SECONDS

openai = pytest.importorskip("openai", reason="openai is not installed: make test-vllm")
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def address():
    command = [sys.executable, "-m", "aiokv", "serve", "--port", "0", "--device-blocks", "128"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "running on" in line)
            yield re.search(r"http://\S+", line)[0]
        finally:
            process.kill()


@pytest.fixture
def client(address):
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", timeout=PATIENCE_SECONDS, max_retries=0
    ) as client:
        yield client


def test_completion_of_the_listed_model(client):
    (model,) = client.models.list()
    answer = client.completions.create(model=model.id, prompt="hello", max_tokens=4)
    assert answer.model == model.id
    assert answer.created >= model.created
    assert len(answer.choices[0].text) == answer.usage.completion_tokens == 4


def test_streamed_chat_is_the_whole_chat(client):
    options = {"model": "aiokv-demo", "messages": MESSAGES, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**options).choices[0].message
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole.role == chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.content
    assert chunks[-1].usage.completion_tokens == 8


def test_errors_are_those_of_the_client(client):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as raised:
        create(model="other", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="1 to 1792 tokens in total") as raised:
        create(model="aiokv-demo", messages=MESSAGES, max_tokens=10_000)
    assert raised.value.code == "context_length_exceeded"
