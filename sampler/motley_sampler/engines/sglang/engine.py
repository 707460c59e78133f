"""SGLang's server as a child process, and its endpoints behind `protocol.Engine`.

Not tried on a GPU by the project's own tests: there the server runs on a CPU. A weights update pauses in place, loads from disk
and goes on, so that requests in flight survive and SGLang reports their spans. SGLang keeps its radix cache over such an update;
prefixes are kept apart by putting the version into each request's extra_key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from motley_sampler.engines.protocol import BadRequest, EngineError, EngineLoad, Json, Unavailable

log = logging.getLogger("motley.sampler")

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork

STAND_INS = Path(__file__).parent / "cpu"
POLL_S = 1.0  # of the server's loads
PROBE_EVERY_S = 10.0  # without a reply, a token is asked for: loads come from shared memory and prove nothing
PROBE_TIMEOUT_S = 30.0  # SGLang itself gives a health check 20 s
STOP_GRACE_S = 20.0


class Labels:
    """Version spans for replies that SGLang sends without: parts of a stream before the last, and what was aborted in its queue.

    A token counts as of the newest version that it may be of: one that is not proven yet is held back until it is.
    """

    def __init__(self, version: int) -> None:
        self._spans: list[tuple[int, int, int]] = [(version, 0, 0)]

    def put_on(self, reply: Json, version: int) -> None:
        """version: that the server computes with, or is about to, when the reply arrives."""
        meta, count = reply["meta_info"], len(reply.get("output_ids") or ())
        newest, start, end = self._spans[-1]
        if version == newest:
            self._spans[-1] = (newest, start, count)
        elif end == start:  # nothing came of the version before
            self._spans[-1] = (version, start, count)
        else:
            self._spans.append((version, end, count))
        if "weight_versions" not in meta:
            meta["weight_versions"] = [{"version": str(v), "start": a, "end": b} for v, a, b in self._spans]


class SglangEngine:
    """One server. `arguments(folder, version)` renders its command line."""

    def __init__(
        self,
        python: str,
        arguments: Callable[[Path, int], Sequence[str]],
        url: str,
        *,
        cpu: bool = False,
        start_timeout_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._python, self._arguments, self._url = python, arguments, url
        self._cpu, self._start_timeout_s, self._clock, self._env = cpu, start_timeout_s, clock, env
        self._process: asyncio.subprocess.Process | None = None
        self._client: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self._load = EngineLoad()
        self._info: Json = {}
        self._version = -1
        self._progress_at = clock()
        self._failure: str | None = None
        self._paused = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self, folder: Path, version: int) -> None:
        """Starts the server, or a new one where an earlier start failed, and waits until it answers."""
        await self._end_process()
        environment = dict(self._env)
        if self._cpu:
            path = os.pathsep.join(filter(None, (str(STAND_INS), environment.get("PYTHONPATH", ""))))
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}
        command = [self._python, "-m", "sglang.launch_server", *self._arguments(folder, version)]
        # A process group of its own: its schedulers and tokenizers go with it. Should we be killed, it is, too: on a node whose
        # pods are plain processes nobody else would end it.
        self._process = await asyncio.create_subprocess_exec(
            *command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._client = self._client or aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            json_serialize=lambda content: msgspec.json.encode(content).decode(),
        )
        await self._until_it_answers()
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        server = await self._ask("GET", "/server_info")
        self._info = {
            "model_path": str(folder),
            "model_type": config.get("model_type"),
            "is_generation": True,
            "vocab_size": config["vocab_size"],
            "context_length": server.get("context_length") or config["max_position_embeddings"],
            "max_running_requests": server.get("max_running_requests"),
            "max_total_num_tokens": server.get("max_total_num_tokens"),
        }
        self._version = version
        self._progressed()
        self._watching = self._watching or asyncio.create_task(self._watch())

    async def update(self, folder: Path, version: int) -> None:
        await self._ask("POST", "/pause_generation", {"mode": "in_place"})
        # Before the load: a request that comes meanwhile is computed with the new weights, and must find no old prefix. (One
        # that SGLang itself holds queued at this moment keeps its old key; max_running leaves room so that none is.)
        self._version = version
        try:
            answer = await self._ask(
                "POST",
                "/update_weights_from_disk",
                {"model_path": str(folder), "weight_version": str(version), "flush_cache": False},
            )
            if not answer.get("success"):
                raise EngineError(f"update_weights_from_disk: {answer.get('message')}")
            self._info["model_path"] = str(folder)
        finally:
            await self._ask("POST", "/continue_generation", {})

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
                if number is signal.SIGTERM:
                    continue  # its children may outlive it: the second signal ends those
                return

    async def _until_it_answers(self) -> None:
        deadline = self._clock() + self._start_timeout_s
        while self._clock() < deadline:
            if self._process is None or self._process.returncode is not None:
                raise EngineError(
                    f"sglang ended while starting, with code {self._process and self._process.returncode}"
                )
            with contextlib.suppress(EngineError):
                await self._ask("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
                return
            await asyncio.sleep(POLL_S)
        raise EngineError(f"sglang did not answer within {self._start_timeout_s:.0f} s")

    async def _watch(self) -> None:
        """Reads the server's load, and makes sure that its scheduler still turns."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._process is not None and self._process.returncode is not None:
                self._failure = f"sglang ended with code {self._process.returncode}"
                return
            with contextlib.suppress(EngineError):
                found = await self._ask("GET", "/v1/loads", timeout_s=PROBE_TIMEOUT_S)
                self._note(found.get("loads") or [])
                if self._paused:
                    self._progressed()  # on request: it stands still, and is well
                elif self.stalled_s() >= PROBE_EVERY_S:
                    await self._ask("GET", "/health_generate", timeout_s=PROBE_TIMEOUT_S)
                    self._progressed()

    def _progressed(self) -> None:
        self._progress_at = self._clock()

    def _note(self, ranks: list[Json]) -> None:
        running = sum(rank.get("num_running_reqs", 0) for rank in ranks)
        queued = sum(rank.get("num_waiting_reqs", 0) for rank in ranks)
        usage = max((rank.get("token_usage", 0.0) for rank in ranks), default=0.0)
        busy_s = self._load.busy_s + (POLL_S if running else 0.0)
        self._load = msgspec.structs.replace(
            self._load, running=running, queued=queued, kv_used_percent=round(100 * usage), busy_s=busy_s
        )

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        labels = Labels(self._version)
        found: Json | list[Json] = await self._ask("POST", "/generate", self._outgoing(body))
        self._progressed()
        replies: list[Json] = found if isinstance(found, list) else [found]
        for reply in replies:
            labels.put_on(reply, self._version)
            if counted:
                self._count(reply["meta_info"])
        return found

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        async with self._open("POST", "/generate", {**self._outgoing(body), "stream": True}) as answer:
            last: Json = {}
            labels = Labels(self._version)
            async for line in _lines(answer.content.iter_any()):
                data = line.strip().removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                last = msgspec.json.decode(data)
                self._progressed()
                if "error" in last:
                    raise EngineError(str(last["error"].get("message")))
                labels.put_on(last, self._version)
                yield last
            if last:
                self._count(last["meta_info"])

    def _outgoing(self, body: Json) -> Json:
        """Prefixes of one version only: SGLang's cache outlives an update."""
        key = body.get("extra_key")
        if key is not None and not isinstance(key, str):
            raise BadRequest(f"extra_key must be a string, got {type(key).__name__}")
        return {**body, "extra_key": f"v{self._version}/{key or ''}"}

    def _count(self, meta: Json) -> None:
        load = self._load
        self._load = msgspec.structs.replace(
            load,
            turns=load.turns + 1,
            # A request that was aborted in SGLang's queue has no counts.
            prompt_tokens=load.prompt_tokens + meta.get("prompt_tokens", 0),
            cached_tokens=load.cached_tokens + meta.get("cached_tokens", 0),
            generated_tokens=load.generated_tokens + meta.get("completion_tokens", 0),
            preemptions=load.preemptions + meta.get("num_retractions", 0),
        )

    async def abort(self, rid: str, *, everything: bool = False) -> None:
        await self._ask("POST", "/abort_request", {"rid": rid, "abort_all": everything})

    async def pause(self) -> None:
        await self._ask("POST", "/pause_generation", {"mode": "in_place"})
        self._paused = True

    async def resume(self) -> None:
        await self._ask("POST", "/continue_generation", {})
        self._paused = False

    async def flush_cache(self) -> None:
        await self._ask("POST", "/flush_cache", {})

    async def close_session(self, session: str) -> None:
        """SGLang's radix cache evicts by use; there is nothing to tell it."""

    def load(self) -> EngineLoad:
        return self._load

    def model_info(self) -> Json:
        if not self._info:
            raise Unavailable("sglang has not started")
        return {**self._info, "weight_version": str(self._version)}

    def stalled_s(self) -> float:
        return max(0.0, self._clock() - self._progress_at)

    def failed(self) -> str | None:
        return self._failure

    # --- the wire -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Json | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A checked answer. Raises BadRequest for a 400, Unavailable when nothing answers, EngineError otherwise."""
        if self._client is None:
            raise Unavailable("sglang has not started")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._client.request(method, self._url + path, json=body, timeout=timeout) as answer:
                if answer.status >= 400:
                    message = _message(await answer.read())
                    raise (BadRequest if answer.status in (400, 422) else EngineError)(message)
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"sglang does not answer: {type(error).__name__}: {error}") from error

    async def _ask(self, method: str, path: str, body: Json | None = None, timeout_s: float | None = None) -> Any:
        async with self._open(method, path, body, timeout_s) as answer:
            data = await answer.read()
        try:
            return msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError:
            return {}


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines of any length: a part of a stream holds all candidates so far, which soon is more than the reader's own limit."""
    kept = bytearray()
    async for data in pieces:
        whole, newline, rest = data.rpartition(b"\n")
        if not newline:
            kept += data
            continue
        kept += whole
        for line in kept.split(b"\n"):
            yield bytes(line)
        kept = bytearray(rest)
    if kept:
        yield bytes(kept)


def _die_with_parent() -> None:
    """In the child, before it becomes the server. SGLang's own children follow their parent in the same way."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _message(data: bytes) -> str:
    """The text of an error, in either of SGLang's shapes."""
    with contextlib.suppress(msgspec.DecodeError):
        content = msgspec.json.decode(data)
        if isinstance(content, dict):
            error = content.get("error", content)
            return str(error.get("message", error) if isinstance(error, dict) else error)
    return data.decode(errors="replace")[:500]
