"""Finished episodes on their way to the trainer: at least once, whatever restarts.

Each lies in the spool on disk from the moment that it is finished until the trainer says that it has it for good. A worker that
starts finds what its predecessor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import aiohttp
import msgspec
import zstandard
from motley_api import records
from motley_api.records import Trajectory, TrajectoryAck

from motley_sampler.rollout.session import backoff_s

_SUFFIX = ".msgpack.zst"
_BATCH_BYTES, _BATCH_COUNT = 8 << 20, 64
_TIMEOUT_S = 60.0


class Spool:
    """Finished trajectories on disk, oldest first. Memory holds names and sizes only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part"):
            leftover.unlink()
        found = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        self._sizes: OrderedDict[str, int] = OrderedDict(
            (unquote(path.name.removesuffix(_SUFFIX)), path.stat().st_size) for path in found
        )

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def _path(self, identity: str) -> Path:
        return self._folder / f"{quote(identity, safe='')}{_SUFFIX}"

    def add(self, trajectory: Trajectory) -> None:
        data = zstandard.ZstdCompressor(level=1).compress(records.encode(trajectory))
        path = self._path(trajectory.id)
        part = path.with_suffix(".part")
        part.write_bytes(data)
        os.replace(part, path)
        self._sizes[trajectory.id] = len(data)

    def remove(self, identity: str) -> None:
        if self._sizes.pop(identity, None) is not None:
            self._path(identity).unlink(missing_ok=True)

    def next_batch(self) -> list[Trajectory]:
        """The oldest ones, as many as one request should carry."""
        batch: list[Trajectory] = []
        size = 0
        for identity, bytes_on_disk in list(self._sizes.items()):
            if batch and (len(batch) >= _BATCH_COUNT or size + bytes_on_disk > _BATCH_BYTES):
                break
            size += bytes_on_disk
            try:
                data = zstandard.ZstdDecompressor().decompress(self._path(identity).read_bytes())
                batch.append(msgspec.msgpack.decode(data, type=Trajectory))
            except (OSError, zstandard.ZstdError, msgspec.DecodeError):
                self.remove(identity)  # torn by a crash, before it could have been acknowledged
        return batch


class Delivery:
    """Sends the spool's contents until each is acknowledged."""

    def __init__(
        self,
        spool: Spool,
        client: aiohttp.ClientSession,
        trainer_url: str,
        token: str,
        *,
        acked: Callable[[TrajectoryAck], None],
        failed: Callable[[str], None],
    ) -> None:
        self.spool = spool
        self._client, self._url = client, f"{trainer_url}/v1/trajectories"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/msgpack"}
        self._acked, self._failed = acked, failed
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()

    async def add(self, trajectory: Trajectory) -> None:
        """Returns once the trajectory is on disk."""
        await asyncio.to_thread(self.spool.add, trajectory)
        self._empty.clear()
        self._wake.set()

    async def run(self) -> None:
        """Sends for ever; cancelled at the end."""
        failures = 0
        while True:
            if not len(self.spool):
                self._empty.set()
                self._wake.clear()
                await self._wake.wait()
            batch = await asyncio.to_thread(self.spool.next_batch)
            if not batch:
                continue
            error = await self._send(batch)
            if error is None:
                failures = 0
                continue
            failures += 1
            self._failed(error)
            await asyncio.sleep(backoff_s(failures))

    async def _send(self, batch: list[Trajectory]) -> str | None:
        """None when the trainer answered; else why not."""
        body = zstandard.ZstdCompressor(level=1).compress(records.encode(batch))
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._client.post(self._url, data=body, headers=self._headers, timeout=timeout) as response:
                content = await response.read()
                if response.status != 200:
                    return f"the trainer answered {response.status}: {content[:200].decode(errors='replace')}"
                ack = _decode_ack(content, response.content_type)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            return f"trainer: {error or type(error).__name__}"
        for identity in (*ack.accepted, *ack.duplicates, *ack.refused):
            self.spool.remove(identity)
        self._acked(ack)
        settled = {*ack.accepted, *ack.duplicates, *ack.refused}
        return None if settled.intersection(t.id for t in batch) else "the trainer's answer names none of what was sent"

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all is delivered, at most so long. What is left stays on disk."""
        if len(self.spool):
            self._empty.clear()
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
        return not len(self.spool)


def _decode_ack(content: bytes, content_type: str) -> TrajectoryAck:
    if "json" in content_type:
        return msgspec.json.decode(content, type=TrajectoryAck)
    return msgspec.msgpack.decode(content, type=TrajectoryAck)
