"""A server in the form of vLLM's OpenAI API that costs next to nothing: every answer is made before it is asked for.

    python -m benchmarks.fake_vllm serve QUESTIONS.jsonl     prints its base URL, then serves until it is killed
    python -m benchmarks.fake_vllm ceiling URL QUESTIONS.jsonl CONNECTIONS   what a client without any work reaches

QUESTIONS.jsonl: {"prompt"} rows. An answer comes 5 ms after its request, with the thinking, the text and the token ids
of the tiny verifier's own tokenizer and chat template. `GET /stats` tells how many answers were given since the last
`GET /stats`, and the seconds from the first request to the last answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

ANSWER_AFTER_S = 0.005
MODEL = "models/tiny-kimi-k2.5"
STEPS = 7  # of thinking; about 256 tokens
_METRICS = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"


def questions(path: Path) -> list[str]:
    """The `prompt` of every row."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


class Answers:
    """The whole HTTP response to each question."""

    def __init__(self, asked: list[str]):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._close, self._end = self._tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
        # A hundred different traces: real ones differ, and none may look like a loop.
        traces = [self._trace(random.Random(number)) for number in range(100)]
        self.by_question = {
            question: self._response(question, *traces[place % len(traces)]) for place, question in enumerate(asked)
        }

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _trace(self, draw: random.Random) -> tuple[str, str, list[int]]:
        thinking = " ".join(
            f"Step {step}: I add {draw.randrange(1000)} and {draw.randrange(1000)}. That gives {draw.randrange(1000)}."
            for step in range(1, STEPS + 1)
        )
        text = f"The answer is {draw.randrange(10**6)}, for {thinking[:100]}"
        return thinking, text, [*self._ids(thinking), self._close, *self._ids(text), self._end]

    def _response(self, question: str, thinking: str, text: str, ids: list[int]) -> bytes:
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        asked_ids = self._ids(rendered)
        message = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": thinking,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
        }
        return response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": {
                    "prompt_tokens": len(asked_ids),
                    "total_tokens": len(asked_ids) + len(ids),
                    "completion_tokens": len(ids),
                    "prompt_tokens_details": None,
                },
                "prompt_logprobs": None,
                "prompt_token_ids": asked_ids,
                "kv_transfer_params": None,
            }
        )


def response(content: Any, kind: str = "application/json") -> bytes:
    """A whole HTTP response."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class _Messages(asyncio.Protocol):
    """HTTP messages with a Content-Length, one after the other on a connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            place = head.lower().find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self.message(head, body)

    def message(self, head: bytes, body: bytes) -> None:
        raise NotImplementedError


class _Server(_Messages):
    """One connection to the server."""

    answers: dict[str, bytes]
    count = 0
    first = last = 0.0

    def message(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/v1/chat/completions":
            answer = self.answers[json.loads(body)["messages"][-1]["content"]]
            _Server.first = _Server.first or time.monotonic()
            asyncio.get_running_loop().call_later(ANSWER_AFTER_S, self._answer, answer)
        elif path == b"/stats":
            self.transport.write(response({"answers": self.count, "seconds": self.last - self.first}))
            _Server.count, _Server.first, _Server.last = 0, 0.0, 0.0
        elif path == b"/metrics":
            self.transport.write(response(_METRICS, "text/plain"))
        elif path == b"/version":
            self.transport.write(response({"version": "0.32.0"}))
        elif path == b"/v1/models":
            self.transport.write(response({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:  # the canary
            choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
            self.transport.write(
                response({"id": "c", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]})
            )

    def _answer(self, answer: bytes) -> None:
        _Server.count += 1
        _Server.last = time.monotonic()
        self.transport.write(answer)


async def serve(asked: list[str]) -> None:
    """Serve until killed."""
    _Server.answers = Answers(asked).by_question
    listener = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    await listener.serve_forever()


class _Client(_Messages):
    """A connection that sends the next prepared request as soon as it has an answer, and looks at nothing."""

    def __init__(self, requests: list[bytes], done: asyncio.Future[None], state: dict[str, int]):
        super().__init__()
        self._requests, self._done, self._state = requests, done, state

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._next()

    def _next(self) -> None:
        if self._requests:
            self.transport.write(self._requests.pop())

    def message(self, head: bytes, body: bytes) -> None:  # noqa: ARG002
        self._state["left"] -= 1
        if self._state["left"] == 0:
            self._done.set_result(None)
        self._next()


async def ceiling(url: str, asked: list[str], connections: int) -> float:
    """Answers a second with nothing in the way but the socket."""
    port = int(url.rpartition(":")[2])
    requests = []
    for question in asked:
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": question}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        requests.append(head + body)
    loop = asyncio.get_running_loop()
    done, state = loop.create_future(), {"left": len(requests)}
    started = time.monotonic()
    for _ in range(connections):
        await loop.create_connection(lambda: _Client(requests, done, state), "127.0.0.1", port)
    await done
    return len(asked) / (time.monotonic() - started)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        uvloop.run(serve(questions(Path(sys.argv[2]))))
    else:
        print(uvloop.run(ceiling(sys.argv[2], questions(Path(sys.argv[3])), int(sys.argv[4]))))
