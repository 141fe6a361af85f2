"""The torch model behind HTTP: answers as without a cache, and an end by Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx
import pytest

from aiokv.testing.loops import PATIENCE_SECONDS
from tests.examples.files import EXAMPLES, header_of, loaded
from tests.harness.patience import PROGRAM_SECONDS

pytest.importorskip("torch", reason="torch is not installed: make test-vllm")
PATH = EXAMPLES / "torch_http.py"


def test_answers_over_http_are_those_of_the_model_without_a_cache():
    module = loaded("torch_server")
    prompts = [[*range(1, 200), client] for client in range(4)]
    with subprocess.Popen(
        [sys.executable, PATH, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert re.sub(r":\d+/", ":8000/", line).rstrip() == header_of(PATH).output
            address = re.search(r"http://\S+v1", line)[0]
            with httpx.Client(timeout=PATIENCE_SECONDS) as client:
                for prompt in prompts:
                    answer = module.answer_without_cache(module.Model(), prompt, 12)
                    expected = answer[: answer.index(0)] if 0 in answer else answer
                    body = {"model": "torch-example", "prompt": prompt, "max_tokens": 12}
                    found = client.post(f"{address}/completions", json=body).json()
                    text = bytes(expected).decode(errors="replace")
                    assert found["choices"][0]["text"] == text
                cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == 192  # the whole blocks that the prompts have in common
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=PROGRAM_SECONDS)
            assert (process.returncode, "Traceback" in log) == (0, False), log
        finally:
            process.kill()
