"""The HTTP server of the demo: answers as without a cache, clients that leave, errors, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn

import aiokv
from aiokv.cli import main
from aiokv.demo import http_server
from aiokv.demo.batch import Batch, Part
from aiokv.demo.byte_model import ByteModel
from aiokv.demo.transformer import NumpyTransformer
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.worker.views import LayerView
from tests.harness.patience import PROGRAM_SECONDS

SIZES = GroupedConfig(vocab=256, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64)
BLOCK_TOKENS = 8
DEVICE_BLOCKS = 64


@pytest.fixture(scope="module")
def model():
    return NumpyTransformer(SIZES, random_weights(SIZES), max_context_tokens=512)


@asynccontextmanager
async def serving(model):
    """Serve ``model`` in this loop; yield its engine and a client."""
    cache = model.new_cache(DEVICE_BLOCKS, BLOCK_TOKENS)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, host_blocks=256
    )
    engine = aiokv.CacheEngine(config, cache.regions(), model.new_device())
    app = http_server.make_app(engine, ByteModel(model, cache))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, limits=limits
        ) as client:
            yield SimpleNamespace(engine=engine, client=client, app=app)
    finally:  # also when a test fails: uvloop waits for the server when it closes
        server.should_exit = True
        await task
    assert engine.statistics().leases == 0
    assert engine.statistics().waiting == 0


def answer_without_cache(model, prompt, max_tokens):
    """Return the text of a greedy continuation, with every position computed for it alone."""
    cache = model.new_cache(DEVICE_BLOCKS, BLOCK_TOKENS)
    table = np.arange(DEVICE_BLOCKS, dtype=np.int32)
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + max_tokens:
        batch = Batch.of([Part(tokens, computed, len(tokens) - computed, table)])
        computed = len(tokens)
        tokens.append(int(np.argmax(model.forward(batch, cache)[-1])))
    return "".join(map(chr, tokens[len(prompt) :]))


async def complete(client, prompt, max_tokens, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"][0]["text"]
    return "".join(event["choices"][0]["text"] for event in events(response.text))


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def until(condition):
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  (a server has no event for it)
            await asyncio.sleep(0.002)


@pytest.mark.loop("uvloop")
@pytest.mark.asyncio
async def test_answers_to_200_clients_are_those_without_a_cache(model, monkeypatch):
    monkeypatch.setattr(http_server, "CAPACITY_WAIT_SECONDS", PATIENCE_SECONDS)
    async with serving(model) as served:
        preempted, preempt = [], aiokv.Lease.preempt
        monkeypatch.setattr(
            aiokv.Lease,
            "preempt",
            lambda lease, **options: preempted.append(1) or preempt(lease, **options),
        )
        rng = random.Random(1)
        systems = [[rng.randrange(256) for _ in range(48)] for _ in range(3)]
        prompts = [systems[n % 3] + [rng.randrange(256) for _ in range(n)] for n in range(1, 25)]

        async def leave(prompt, seconds):
            stream = {"prompt": prompt, "max_tokens": 16, "stream": True}
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(seconds),
                    served.client.stream("POST", "/v1/completions", json=stream) as response,
                ):
                    await response.aread()

        staying, leaving = {}, []
        async with asyncio.TaskGroup() as clients:
            for number in range(200):
                prompt = prompts[number % len(prompts)]
                if number % 3 == 0:
                    leaving.append(clients.create_task(leave(prompt, rng.uniform(0, 1.0))))
                else:
                    stream = bool(rng.randrange(2))
                    asked = complete(served.client, prompt, 16, stream=stream)
                    staying[clients.create_task(asked)] = tuple(prompt)
        assert len(leaving) == 67
        expected = {tuple(prompt): answer_without_cache(model, prompt, 16) for prompt in prompts}
        assert [task.result() for task in staying] == [expected[p] for p in staying.values()]
        await until(lambda: served.engine.statistics().leases == 0)
        found = served.engine.statistics()
        assert found.hit_device_tokens > 0
        assert found.hit_host_tokens > 0
        assert preempted
        assert found.attention.device.free + found.attention.device.cached == DEVICE_BLOCKS


@pytest.mark.asyncio
async def test_a_stream_has_the_tokens_of_the_whole_answer_and_the_usage(model):
    async with serving(model) as served:
        prompt = list(range(40))
        whole = await complete(served.client, prompt, 6)
        response = await served.client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 6, "stream": True}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        found = events(response.text)
        assert "".join(event["choices"][0]["text"] for event in found) == whole
        assert [event["usage"] for event in found[:-1]] == [None] * 6
        assert found[-1]["usage"] == {
            "prompt_tokens": 40,
            "completion_tokens": 6,
            "total_tokens": 46,
            "prompt_tokens_details": {"cached_tokens": 32},  # of 40, the last block is computed
        }
        assert found[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.asyncio
async def test_the_next_turn_of_a_conversation_hits_the_generated_tokens(model):
    async with serving(model) as served:
        prompt = list(range(40))
        text = await complete(served.client, prompt, 16)
        body = {"prompt": [*prompt, *map(ord, text), 1], "max_tokens": 1}
        answer = (await served.client.post("/v1/completions", json=body)).json()
    # The last generated token was never an input of the model, so 55 positions are computed.
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


@pytest.mark.asyncio
async def test_the_label_of_a_header_is_that_of_the_release(model, monkeypatch):
    labels, release = [], aiokv.Lease.release
    monkeypatch.setattr(
        aiokv.Lease,
        "release",
        lambda lease, **given: labels.append(given.get("returns")) or release(lease, **given),
    )
    async with serving(model) as served:
        body = {"prompt": "a" * 20, "max_tokens": 2}
        for label, status in (("tool_use", 200), ("a" * 64, 200), ("a" * 65, 400)):
            headers = {"X-Aiokv-Returns": label}
            response = await served.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status
        assert "has 65 characters; at most 64" in response.text
        assert [label for label in labels if label] == ["tool_use", "a" * 64]


@pytest.mark.asyncio
async def test_requests_of_another_salt_share_nothing(model):
    async with serving(model) as served:
        body = {"prompt": list(range(40)), "max_tokens": 1}
        await served.client.post("/v1/completions", json=body)
        other = await served.client.post("/v1/completions", json=body | {"cache_salt": "b"})
        assert other.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "truncated"),
        (b'{"prompt": "\xff"}', "UTF-8|start byte"),  # msgspec 0.23, and before
        ('{"prompt": [256]}', "<= 255"),
        ('{"prompt": "a", "max_tokens": 0}', ">= 1"),
        ('{"prompt": ""}', "1 to 512 tokens in total"),
        ('{"prompt": "a", "max_tokens": 512}', "1 to 512 tokens in total"),
        ("{}", "missing required field `prompt`"),
    ],
)
@pytest.mark.asyncio
async def test_a_bad_request_gets_status_400(model, body, message):
    async with serving(model) as served:
        response = await served.client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert re.search(message, response.json()["error"]["message"])


@pytest.mark.asyncio
async def test_answers_have_the_fields_of_openais_api(model):
    async with serving(model) as served:
        (entry,) = (await served.client.get("/v1/models")).json()["data"]
        assert (entry["id"], entry["object"]) == ("aiokv-demo", "model")
        body = {"model": entry["id"], "prompt": "hello", "max_tokens": 4}
        answer = (await served.client.post("/v1/completions", json=body)).json()
        expected = answer_without_cache(model, b"hello", 4)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == entry["id"]
    assert answer["created"] >= entry["created"]
    choice = {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [choice]


@pytest.mark.asyncio
async def test_a_chat_streams_the_content_of_the_whole_answer(model):
    body = {
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 6,
    }
    expected = answer_without_cache(model, b"system: be short\nuser: hi\nassistant: ", 6)
    async with serving(model) as served:
        whole = (await served.client.post("/v1/chat/completions", json=body)).json()
        streamed = await served.client.post("/v1/chat/completions", json=body | {"stream": True})
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
    found = events(streamed.text)
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in found]
    assert "".join(delta["content"] for delta in deltas) == expected
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * 6
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * 6 + ["length"]


@pytest.mark.asyncio
async def test_an_answer_without_max_tokens_has_the_room_that_is_left(model):
    body = {"messages": [{"role": "user", "content": "x" * 400}]}
    async with serving(model) as served:
        answer = (await served.client.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == DEVICE_BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_an_end_token_ends_the_answer_and_is_not_a_part_of_it(model, monkeypatch, stream):
    text = answer_without_cache(model, b"hello", 16)
    end = next(n for n in range(1, 16) if text[n] not in text[:n])
    monkeypatch.setattr(ByteModel, "end_tokens", {ord(text[end])})
    async with serving(model) as served:
        body = {"prompt": "hello", "max_tokens": 16, "stream": stream}
        response = await served.client.post("/v1/completions", json=body)
        found = events(response.text) if stream else [response.json()]
        assert "".join(event["choices"][0]["text"] for event in found) == text[:end]
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
        assert found[-1]["usage"]["completion_tokens"] == end + 1


def test_text_of_a_character_of_several_tokens_comes_when_it_is_complete():
    model = SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))
    text = http_server.Text(model)
    pieces = [text.add(token) for token in "aé€".encode()]
    assert pieces == ["a", "", "é", "", "", "€"]
    assert (text.add(0xC3), text.rest()) == ("", "\N{REPLACEMENT CHARACTER}")


def test_text_keeps_the_spaces_that_a_tokenizer_drops_at_the_beginning():
    words = ["Hello", " big", " world"]
    model = SimpleNamespace(decode=lambda tokens: "".join(words[t] for t in tokens).lstrip())
    text = http_server.Text(model)
    assert [text.add(token) for token in range(3)] == words


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "'gpt' does not exist"),
        ("POST", "/v1/completions", {"prompt": "a", "n": 2}, 400, "2"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "length >= 1"),
        ("POST", "/v1/chat/completions", {"prompt": "a"}, 400, "`messages`"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("POST", "/v1/embeddings", {}, 404, "Not Found"),
    ],
)
@pytest.mark.asyncio
async def test_errors_have_the_form_of_openais_api(model, method, path, body, status, message):
    async with serving(model) as served:
        response = await served.client.request(method, path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert error["code"] == ("model_not_found" if "gpt" in message else None)


@pytest.mark.asyncio
async def test_the_root_leads_to_the_live_page(model):
    async with serving(model) as served:
        response = await served.client.get("/", follow_redirects=True)
        assert response.status_code == 200
        assert response.url.path == "/aiokv/"
        assert "<html" in response.text


@asynccontextmanager
async def all_blocks_held(engine):
    async with engine.match([9] * 10, owner="holder") as lease:
        await lease.allocate(DEVICE_BLOCKS * BLOCK_TOKENS)
        yield


@pytest.mark.asyncio
async def test_a_request_without_capacity_gets_status_503(model, monkeypatch):
    async with serving(model) as served:
        monkeypatch.setattr(http_server, "CAPACITY_WAIT_SECONDS", 0.05)
        async with all_blocks_held(served.engine):
            response = await served.client.post("/v1/completions", json={"prompt": "hello"})
        assert response.status_code == 503
        assert "0.05" in response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_a_client_that_leaves_the_waiting_line_frees_its_place(model):
    async with serving(model) as served, all_blocks_held(served.engine):
        asked = asyncio.create_task(complete(served.client, "hello", 1))
        await until(lambda: served.engine.statistics().waiting == 1)
        asked.cancel()
        await until(lambda: served.engine.statistics().waiting == 0)
        assert served.engine.statistics().leases == 1


@pytest.mark.asyncio
async def test_an_error_of_the_model_fails_the_requests_of_its_step_only(model, monkeypatch):
    async with serving(model) as served:

        def fail(*args):
            raise ArithmeticError("a failure of the model")

        with monkeypatch.context() as patch:
            patch.setattr(NumpyTransformer, "forward", fail)
            response = await served.client.post("/v1/completions", json={"prompt": "hello"})
        assert response.status_code == 500
        expected = answer_without_cache(model, b"hello", 4)
        assert await complete(served.client, "hello", 4) == expected


@pytest.mark.asyncio
async def test_failed_step_is_logged_once_and_each_client_gets_json(model, monkeypatch, caplog):
    errors = []

    class Noted(http_server.StepError):
        def __init__(self, message):
            super().__init__(message)
            errors.append(self)

    monkeypatch.setattr(http_server, "StepError", Noted)
    async with serving(model) as served:
        forward = NumpyTransformer.forward

        def fail_when_full(self, rows, *args):
            if len(rows.spans) == 6:
                raise ArithmeticError("a failure of the model")
            return forward(self, rows, *args)

        monkeypatch.setattr(NumpyTransformer, "forward", fail_when_full)
        responses = await asyncio.gather(
            *(
                served.client.post(
                    "/v1/completions",
                    json={"prompt": [n, 7], "max_tokens": 100, "stream": n % 2 == 0},
                )
                for n in range(6)
            )
        )
    for number, response in enumerate(responses):
        if number % 2:
            assert response.status_code == 500
            problem = response.json()
        else:  # its status was sent with the first token
            problem = events(response.text)[-1]
        message = "the step failed; see the log of the server"
        error = {"message": message, "type": "server_error", "param": None, "code": None}
        assert problem == {"error": error}
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == "a step of 6 requests failed"
    assert record.exc_info[0] is ArithmeticError
    assert len(errors) == len(set(map(id, errors))) == 6


@pytest.mark.asyncio
async def test_a_failure_outside_the_model_does_not_end_the_loop_of_steps(model, monkeypatch):
    async with serving(model) as served:

        def fail(*args):
            raise aiokv.errors.BrokenEngineError("a failure of the engine")

        for name in ("advance", "step"):
            with monkeypatch.context() as patch:
                patch.setattr(served.engine, name, fail)
                body = {"prompt": "hello", "max_tokens": 4}
                response = await served.client.post("/v1/completions", json=body)
            assert response.status_code == 500
        expected = answer_without_cache(model, b"hello", 4)
        assert await complete(served.client, "hello", 4) == expected


@pytest.mark.asyncio
async def test_a_client_that_leaves_after_a_failed_onload_fails_no_other_request(
    model, monkeypatch
):
    async with serving(model) as served:
        forward, wait_all = NumpyTransformer.forward, LayerView.wait_all
        failed, left = [], []

        def fail_once(self, rows, *args):
            if len(rows.spans) == 2 and not failed:
                failed.append(True)
                raise aiokv.errors.TransferError("an onload failed")
            return forward(self, rows, *args)

        async def leave_during_the_wait(self):
            if not left:
                left.append(leaving.cancel())
                await until(lambda: served.engine.statistics().leases == 1)
            await wait_all(self)

        monkeypatch.setattr(NumpyTransformer, "forward", fail_once)
        monkeypatch.setattr(LayerView, "wait_all", leave_during_the_wait)
        leaving = asyncio.create_task(complete(served.client, "hello", 400))
        await until(lambda: served.engine.statistics().leases == 1)
        answer = await complete(served.client, "world", 8)
        assert left
        assert answer == answer_without_cache(model, b"world", 8)


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_gives_its_blocks_back(model, monkeypatch):
    monkeypatch.setattr(http_server, "SEND_SECONDS", 0.05)
    async with serving(model) as served:
        app = served.app
        sent = []

        async def send(message):
            sent.append(message["type"])
            if len(sent) == 3:
                await asyncio.Event().wait()

        bodies = [b'{"prompt": "hello", "max_tokens": 16, "stream": true}']

        async def receive():
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        async with asyncio.timeout(PATIENCE_SECONDS):
            await app(scope, receive, send)
        assert sent == ["http.response.start", "http.response.body", "http.response.body"]
        assert served.engine.statistics().leases == 0


@pytest.mark.asyncio
async def test_a_body_that_is_too_large_gets_status_413(model, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 1000)
    async with serving(model) as served:
        response = await served.client.post("/v1/completions", content=b" " * 1001)
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "the body has more than 1,000 bytes"


def address_of(process):
    """Return the address of `aiokv serve`, which it prints when it listens."""
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            return found[1]
    pytest.fail("the server has not started")


def test_sigterm_waits_for_the_answers_in_flight():
    command = [sys.executable, "-m", "aiokv", "serve", "--port", "0", "--device-blocks", "128"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = address_of(process)
            body = {"prompt": "hello", "max_tokens": 200, "stream": True}
            with httpx.stream(
                "POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_SECONDS
            ) as response:
                received = response.iter_text()
                text = next(received)
                process.send_signal(signal.SIGTERM)
                text += "".join(received)
            assert len(events(text)) == 201
            process.stderr.read()
            assert process.wait(timeout=PROGRAM_SECONDS) == 0
        finally:
            process.kill()


def test_answers_that_outlast_the_grace_end_with_an_error():
    command = [sys.executable, "-m", "aiokv", "serve", "--port", "0", "--grace", "0"]
    body = {"prompt": "hello", "max_tokens": 15_000}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = address_of(process)
            url = f"{address}/v1/completions"
            with (
                ThreadPoolExecutor(1) as thread,
                httpx.stream(
                    "POST", url, json=body | {"stream": True}, timeout=PATIENCE_SECONDS
                ) as response,
            ):
                received = response.iter_text()
                text = next(received)
                whole = thread.submit(httpx.post, url, json=body, timeout=PATIENCE_SECONDS)
                while httpx.get(f"{address}/aiokv/dump").text.count("cmpl-") < 2:
                    assert not whole.done()
                process.send_signal(signal.SIGTERM)
                text += "".join(received)
                assert whole.result().status_code == 503
            assert events(text)[-1]["error"]["message"] == "the server has shut down"
            assert "Traceback" not in process.stderr.read()
            assert process.wait(timeout=PROGRAM_SECONDS) == 0
        finally:
            process.kill()


def test_sigterm_does_not_wait_for_streams_of_events():
    command = [sys.executable, "-m", "aiokv", "serve", "--port", "0", "--grace", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = address_of(process)
            with httpx.stream(
                "GET", f"{address}/aiokv/events", timeout=PATIENCE_SECONDS
            ) as response:
                assert response.status_code == 200
                process.send_signal(signal.SIGTERM)
                assert "AllBlocksCleared" not in "".join(response.iter_text())
            process.stderr.read()
            assert process.wait(timeout=PROGRAM_SECONDS) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port is 70000; it must be a port, from 0 to 65535"),
        (["--host", "192.0.2.1"], "port 0 of 192.0.2.1 cannot be bound"),
    ],
)
def test_serve_refuses_an_address_that_it_cannot_bind(flags, message, capsys):
    assert main(["serve", "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


def test_serve_refuses_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port: port {port} of 127.0.0.1 cannot be bound" in capsys.readouterr().err


def test_the_file_to_copy_is_short():
    assert len(Path(http_server.__file__).read_text().splitlines()) <= 600
