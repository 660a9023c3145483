"""Many requests to one or several vLLM servers for days: how many at once, what is tried again, who is still alive.

- As many requests in flight as the server takes: the number grows with each answer, halves when the server refuses or
  runs out of time, and stays while vLLM's own queue (`vllm:num_requests_waiting`) is not empty.
- What can pass (408, 409, 429, 5xx, lost connection, an answer that is no JSON) is tried again after a jittered,
  doubling pause, `Retry-After` honoured; what cannot is set aside at once.
- A server that loses connections is left out and taken back when it answers a one-token canary; when nothing has
  arrived for a while every server gets one (`/health` stays 200 on a hung engine).

Plain HTTP through aiohttp, as speculators' own client does it: the openai client takes 2 ms of a core for each answer
(benchmarks/client_vs_speculators.py), and its retries cannot know of our other servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from eagle3_train import server as vllm
from eagle3_train.config import Generation
from eagle3_train.errors import PipelineError

_FIRST_LIMIT = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_RETRIED = frozenset({408, 409, 429})
_OVERLOADED = frozenset({429, 503})
_WATCH_S = 2.0
_CANARY_S = 30.0
# A share of the running requests that may wait in vLLM's queue without the limit being held back.
_TOLERATED_QUEUE = 0.1


class SetAside(Exception):
    """A prompt or sample that cannot be used: listed in errors.jsonl, tried again by the next run.

    Attributes:
        reason, detail: for errors.jsonl.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} {detail}".rstrip())
        self.reason, self.detail = reason, detail


class Unusable(Exception):
    """An answer that may be better the next time.

    Attributes:
        reason, detail: for errors.jsonl.
        retry_after_s: the server's own wish for the pause before the next try [s].
        retries: at most so many more tries, whatever the settings allow.
    """

    def __init__(
        self, reason: str, detail: str = "", *, retry_after_s: float | None = None, retries: int | None = None
    ):
        super().__init__(reason)
        self.reason, self.detail = reason, detail
        self.retry_after_s, self.retries = retry_after_s, retries


class Lost(Exception):
    """No server answers any more."""


@dataclass
class _Endpoint:
    server: vllm.Server
    client: Any
    version: str
    most: int
    limit: float
    in_flight: int = 0
    growing_fast: bool = True
    queue_is_long: bool = False
    down_since: float | None = None
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def has_room(self) -> bool:
        return self.down_since is None and self.in_flight < int(self.limit)

    def answered(self) -> None:
        self.last_answer = time.monotonic()
        if not self.queue_is_long:
            # Doubling a round trip until the first refusal, one more a round trip after it.
            self.limit = min(self.most, self.limit + (1 if self.growing_fast else 1 / self.limit))

    def refused(self) -> None:
        self.growing_fast = False
        self.limit = max(1.0, self.limit / 2)


class Answerer:
    """Chat completions from whichever server has room.

    Args:
        servers: they serve the same verifier.
        settings: concurrency, time-outs, retries.
    """

    def __init__(self, servers: list[vllm.Server], settings: Generation):
        self._settings = settings
        self._endpoints = [
            _Endpoint(
                server,
                session(server, settings.connect_timeout_s),
                vllm.version_of(server),
                most=settings.concurrency,
                limit=min(_FIRST_LIMIT, settings.concurrency),
            )
            for server in servers
        ]
        self._room = asyncio.Condition()
        self._random = random.Random()

    async def __aenter__(self) -> Answerer:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for endpoint in self._endpoints:
            await endpoint.client.close()

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return sum(endpoint.in_flight for endpoint in self._endpoints)

    async def run(self, workers: list[Coroutine[Any, Any, None]]) -> None:
        """Run `workers` to their end while the servers are watched.

        Raises:
            Lost: no server answers any more.
        """
        await run_watched(workers, [self._watch(endpoint) for endpoint in self._endpoints])

    async def ask(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any], *, thinking: bool, **further: Any
    ) -> tuple[dict[str, Any], vllm.Server, str]:
        """One chat completion with its token ids, the server that gave it and that server's version.

        `further` are fields of the request that are no part of the sampling.

        Raises:
            SetAside: no usable answer, after the retries that make sense.
        """
        pause, left = _FIRST_PAUSE_S, self._settings.max_retries
        while True:
            endpoint = await self._take()
            try:
                answer = await self._request(endpoint, messages, {**sampling, **further}, thinking)
                endpoint.answered()
                return answer, endpoint.server, endpoint.version
            except Unusable as problem:
                if left == 0:
                    raise SetAside(problem.reason, problem.detail) from None
                left = left - 1 if problem.retries is None else min(left, problem.retries) - 1
                wait = problem.retry_after_s or pause * self._random.uniform(0.5, 1.5)
            finally:
                await self._give(endpoint)
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _take(self) -> _Endpoint:
        async with self._room:
            await self._room.wait_for(lambda: any(endpoint.has_room for endpoint in self._endpoints))
            endpoint = min((e for e in self._endpoints if e.has_room), key=lambda e: e.in_flight / e.limit)
            endpoint.in_flight += 1
            return endpoint

    async def _give(self, endpoint: _Endpoint) -> None:
        endpoint.in_flight -= 1
        async with self._room:
            self._room.notify_all()

    async def _request(
        self, endpoint: _Endpoint, messages: list[dict[str, Any]], fields: dict[str, Any], thinking: bool
    ) -> dict[str, Any]:
        import aiohttp

        body = {"model": endpoint.server.model, "messages": messages, "return_token_ids": True, **fields}
        if not thinking:
            body["chat_template_kwargs"] = {"thinking": False}
        patience = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(patience):
                status, headers, answer = await post(
                    endpoint.client, f"{endpoint.server.base_url}/chat/completions", body
                )
        except aiohttp.ClientError as error:  # first, for a connection that took too long is a TimeoutError as well
            # If it is a server of ours that died, `_watch` says so within seconds.
            endpoint.down_since = endpoint.down_since or time.monotonic()
            raise Unusable("connection lost", str(error) or type(error).__name__) from None
        except TimeoutError:
            endpoint.refused()
            # Once more: half an hour may have been the queue's, but not twice.
            raise Unusable(f"no answer within generation.request_timeout_s ({patience:g} s)", retries=1) from None
        if status != 200:
            if status in _OVERLOADED:
                endpoint.refused()
            reason, detail = f"HTTP {status}", answer.decode("utf-8", "replace")[:500]
            if status in _RETRIED or status >= 500:
                raise Unusable(reason, detail, retry_after_s=_retry_after(headers))
            raise SetAside(reason, detail)
        try:
            content = json.loads(answer)
        except ValueError as error:
            raise Unusable("the answer is not JSON", str(error)[:500]) from None
        if not isinstance(content, dict):
            raise Unusable("the answer is not a JSON object", str(content)[:500])
        return content

    async def _watch(self, endpoint: _Endpoint) -> None:
        """Notice a server that is gone, silent or back; hold back while its queue is long."""
        silence = self._settings.silence_s
        while True:
            await asyncio.sleep(min(_WATCH_S, silence / 4))
            try:
                endpoint.server.check_alive()
            except PipelineError as death:
                raise Lost(str(death)) from None
            quiet = endpoint.in_flight > 0 and time.monotonic() - endpoint.last_answer > silence
            if endpoint.down_since is not None or quiet:
                await self._probe(endpoint)
            else:
                endpoint.queue_is_long = await asyncio.to_thread(_queue_is_long, endpoint.server)

    async def _probe(self, endpoint: _Endpoint) -> None:
        answers = await _answers_canary(endpoint, min(_CANARY_S, self._settings.silence_s))
        if answers:
            endpoint.last_answer = time.monotonic()
            endpoint.down_since = None
            async with self._room:
                self._room.notify_all()
            return
        endpoint.down_since = endpoint.down_since or time.monotonic()
        down = [e.down_since for e in self._endpoints if e.down_since is not None]
        patience = self._settings.silence_s / 2
        if len(down) == len(self._endpoints) and time.monotonic() - max(down) > patience:
            urls = ", ".join(e.server.base_url for e in self._endpoints)
            raise Lost(f"no server has answered a one-token request for {patience:g} s: {urls}")


def session(server: vllm.Server, connect_timeout_s: float) -> Any:
    """A client of `server`. Not openai's: it takes 2 ms of a core for each answer, this a fifth of one."""
    import aiohttp

    url = urllib.parse.urlsplit(server.base_url)
    # Looked up once: aiohttp's own trust_env asks a thread about it for every request.
    bypassed = urllib.request.proxy_bypass(url.netloc.rpartition("@")[2])
    return aiohttp.ClientSession(
        # Shorter than the 5 s after which vLLM closes an idle connection, perhaps under a request.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        headers={"Authorization": f"Bearer {vllm.api_key()}"},
        proxy=None if bypassed else urllib.request.getproxies().get(url.scheme),
    )


async def post(client: Any, url: str, body: dict[str, Any]) -> tuple[int, Any, bytes]:
    """Status, headers and body of the answer."""
    async with client.post(url, json=body) as answer:
        return answer.status, answer.headers, await answer.read()


async def _answers_canary(endpoint: _Endpoint, patience_s: float) -> bool:
    import aiohttp

    canary = {"model": endpoint.server.model, "prompt": [0], "max_tokens": 1, "temperature": 0}
    try:
        async with asyncio.timeout(patience_s):
            status, _, _ = await post(endpoint.client, f"{endpoint.server.base_url}/completions", canary)
    except (aiohttp.ClientError, TimeoutError):
        return False
    return bool(status == 200)


def _queue_is_long(server: vllm.Server) -> bool:
    """Whether vLLM keeps more than a few requests waiting; False for a server that does not say."""
    figures = {"vllm:num_requests_waiting": 0.0, "vllm:num_requests_running": 0.0}
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{server.root_url}/metrics", timeout=5) as a:
        for line in a.read().decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in figures:
                figures[name] += float(line.rpartition(" ")[2])
    waiting, running = figures.values()
    return waiting > 2 + _TOLERATED_QUEUE * running


def _retry_after(headers: Any) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, float(headers.get("retry-after")))
    return None


def _report_unless_stopped(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A signal may end a task that a library made and nobody waits for; it ends the stage as well, which says so itself.
    if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
        loop.default_exception_handler(context)


async def run_watched(workers: list[Coroutine[Any, Any, None]], watchers: list[Coroutine[Any, Any, None]]) -> None:
    """Run `workers` to their end, and stop them all as soon as one of them or of the `watchers` fails."""
    asyncio.get_running_loop().set_exception_handler(_report_unless_stopped)
    watching = [asyncio.create_task(watcher) for watcher in watchers]
    working = [asyncio.create_task(worker) for worker in workers]
    try:
        pending: set[asyncio.Task[None]] = set(working)
        while pending:
            done, _ = await asyncio.wait({*watching, *pending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
    finally:
        for task in (*watching, *working):
            task.cancel()
        await asyncio.gather(*watching, *working, return_exceptions=True)


async def watch_server(server: vllm.Server, workers: list[Coroutine[Any, Any, None]]) -> None:
    """Run `workers` to their end, and stop them all as soon as one fails or a server of ours dies."""

    async def watch() -> None:
        while True:
            server.check_alive()
            await asyncio.sleep(_WATCH_S)

    await run_watched(workers, [watch()])
