"""The agent's loop: look at the view's pointer, pull, apply, prove, advertise; and the way out, by drain or by giving up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from motley_api import keys
from motley_api.records import EngineState
from motley_weights.errors import WeightsError

from motley_sampler.agent import conformance
from motley_sampler.agent.conformance import Oracle, Tolerance, Verdict
from motley_sampler.agent.retirement import Retirement
from motley_sampler.agent.sessions import SessionBook
from motley_sampler.agent.settings import Settings
from motley_sampler.agent.standing import Standing, engine_state
from motley_sampler.agent.views import Identity, Move, ViewSource, decide
from motley_sampler.engines.protocol import BadRequest, Engine, EngineError, Json, Unavailable

log = logging.getLogger("motley.sampler")

EXIT_OK = 0


async def _nothing() -> None:
    pass


class Agent:
    """One engine, one view. `run` returns the process's exit code."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        source: ViewSource,
        oracle: Callable[[Path], Oracle],
        tolerance: Tolerance,
        *,
        clock: Callable[[], float] = time.monotonic,
        nonce: Callable[[], str] = lambda: secrets.token_hex(4),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.engine, self._source = settings, engine, source
        self._oracle, self._tolerance = oracle, tolerance
        self._clock, self._nonce = clock, nonce
        self._retirement = Retirement(settings.scratch, settings.max_ends, settings.ends_window_s, wall_clock)
        self.standing = Standing()
        self.sessions = SessionBook()
        self.in_flight = 0  # /generate calls that have not been answered
        self._started = False
        self._verdicts = asyncio.Condition()
        self._leaving = asyncio.Event()
        self._drain_until = 0.0
        self._applying = asyncio.Lock()
        self._store_trouble = ""

    # --- what others see ------------------------------------------------------------------------------------------

    def state(self) -> EngineState:
        settings = self.settings
        return engine_state(
            self.standing,
            self.engine.load(),
            engine_id=settings.engine_id,
            group=settings.group,
            view=settings.view,
            url=settings.url,
            max_sessions=settings.spec.sessions_per_engine,
            stalled_s=self.stalled_s(),
            hang_s=settings.hang_s,
        )

    def stalled_s(self) -> float:
        """An engine that has not started cannot hang."""
        return self.engine.stalled_s() if self._started else 0.0

    def alive(self) -> bool:
        return self.stalled_s() < self.settings.hang_s and self.engine.failed() is None

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self, goodbye: Callable[[], Awaitable[None]] = _nothing) -> int:
        """Until it drained, gave up, or the engine failed. `goodbye` is said while the engine still runs: a turn that is cut
        off then finds its session moved already."""
        try:
            if self._retirement.due():
                return await self._retire()
            looking: asyncio.Task[None] | None = None
            while not self._leaving.is_set():
                if (failure := self.engine.failed()) is not None:
                    log.error("event=engine_failed ends=%d reason=%r", self._retirement.gave_up(), failure)
                    self.standing.reason, self.standing.message = "EngineFailed", failure
                    return keys.EXIT_GAVE_UP
                looking = await self._look_unless_leaving()
                standing = self.standing
                if standing.failures >= self.settings.max_failures:
                    ends = self._retirement.gave_up()
                    log.error("event=gave_up ends=%d reason=%s message=%r", ends, standing.reason, standing.message)
                    return keys.EXIT_GAVE_UP
                await self._pause(self.settings.retry_s if self.standing.failures else self.settings.poll_s)
            await self._drain(looking)
            return EXIT_OK
        finally:
            try:
                await goodbye()
            finally:
                await self.engine.stop()

    async def _retire(self) -> int:
        """Says so for as long as the pod is there; loads nothing."""
        settings = self.settings
        self.standing.reason = "Retired"
        minutes = f"{settings.ends_window_s / 60:.0f} minutes"
        self.standing.message = f"ended {settings.max_ends} times within {minutes}: not started again in this pod"
        log.error("event=retired message=%r", self.standing.message)
        await self._leaving.wait()
        return EXIT_OK

    async def look(self) -> None:
        """One look at the pointer, and all that follows from it."""
        try:
            pointed = await asyncio.to_thread(self._source.pointed)
        except (WeightsError, OSError) as error:
            self._say_store_trouble(f"{type(error).__name__}: {error}")
            return
        self._say_store_trouble("")
        move = decide(self.standing.advertised, pointed)
        # A failed version is loaded again even when the pointer still names what was advertised before.
        if pointed is None or (move is Move.STAY and not self.standing.failures):
            return
        async with self._applying:
            await self._bring(pointed, move)

    async def _bring(self, pointed: Identity, move: Move) -> None:
        standing = self.standing
        if move is Move.REWIND:
            log.warning("event=rewind served=%d pointed=%d", standing.version, pointed.version)
            standing.rewinding(pointed.version)
            await self._void()
        try:
            folder, identity = await asyncio.to_thread(self._source.pull, pointed.version, fresh=standing.failures > 0)
            await asyncio.to_thread(self._source.check, folder, like=standing.folder)
        except (WeightsError, OSError) as error:
            self._say_store_trouble(f"{type(error).__name__}: {error}")
            return
        await self._apply(folder, identity)

    async def _void(self) -> None:
        """What is under way is ended now, and who waits for a verdict hears of it."""
        async with self._verdicts:
            self._verdicts.notify_all()
        with contextlib.suppress(EngineError):  # an engine that cannot be asked draws nothing
            await self.engine.abort("", everything=True)

    async def apply_folder(self, folder: Path, version: int) -> Verdict:
        """A view folder that someone else put here (POST /update_weights_from_disk), under the same proof."""
        if version < self.standing.version:
            raise BadRequest(f"weight_version must be at least the served {self.standing.version}, got {version}")
        try:
            await asyncio.to_thread(self._source.check, folder, like=self.standing.folder)
        except (WeightsError, OSError) as error:
            raise BadRequest(f"model_path: {error}") from error
        async with self._applying:
            return await self._apply(folder, Identity(version, ""))

    async def _apply(self, folder: Path, identity: Identity) -> Verdict:
        """Load, prove, advertise. Nothing drawn from the version goes out before its verdict."""
        standing, version = self.standing, identity.version
        standing.applying(version)
        try:
            if self._started:
                await self.engine.update(folder, version)
            else:
                await self.engine.start(folder, version)
                self._started = True
            verdict = await conformance.run(
                self.engine,
                self._oracle(folder),
                version=version,
                nonce=self._nonce(),
                tolerance=self._tolerance,
                previous=standing.prompt_logprobs if version != standing.version else None,
            )
        except (EngineError, WeightsError, OSError) as error:
            verdict = Verdict("LoadFailed", str(error), None, conformance.Mode.UNKNOWN)
        if verdict.passed:
            standing.passed(identity, folder, verdict)
            log.info("event=advertised version=%d canary_max_abs_diff=%.6f", version, verdict.max_abs_diff or 0.0)
            await asyncio.to_thread(self._source.prune, folder, self.settings.keep_versions)
        else:
            standing.refused(verdict.reason, verdict.message, verdict)
            log.error(
                "event=refused version=%d reason=%s failures=%d message=%r",
                version,
                verdict.reason,
                standing.failures,
                verdict.message,
            )
        async with self._verdicts:
            self._verdicts.notify_all()
        return verdict

    def _say_store_trouble(self, trouble: str) -> None:
        """Once per change; what is served goes on being served."""
        if trouble != self._store_trouble:
            log.warning("event=store_trouble message=%r", trouble) if trouble else log.info("event=store_well")
            self._store_trouble = trouble
            if self.standing.reason in ("", "Loading", "Rewinding"):  # else the message says why it is not ready
                self.standing.message = trouble

    # --- requests -------------------------------------------------------------------------------------------------

    def admit(self, session: str, min_version: int) -> int | None:
        """None: go on. Else the served version, which is too old (409). Raises Unavailable when not serving (503)."""
        standing = self.standing
        if standing.draining and not (session and self.sessions.knows(session)):
            raise Unavailable("Draining: no new sessions here")
        if standing.advertised is None or standing.reason:
            raise Unavailable(f"{standing.reason or 'Loading'}: {standing.message}".rstrip(": "))
        if not self.alive():
            raise Unavailable("Hung: the engine makes no progress")
        if min_version > standing.version:
            return standing.version
        self.sessions.touch(session, self._clock())
        return None

    def admit_again(self, session: str) -> None:
        """A turn ended: the session was heard of just now, however long the turn took."""
        if session and self.sessions.knows(session):
            self.sessions.touch(session, self._clock())

    async def close_session(self, session: str) -> None:
        self.sessions.forget(session)
        if self._started:
            await self.engine.close_session(session)

    async def release(self, reply: Json, lineage: int) -> Json:
        """The reply, once every version in it is proven. lineage: the standing's when the request was admitted.

        Raises Unavailable when a version was found wrong, or the run has gone back since: the tokens are void.
        """
        standing, meta = self.standing, reply["meta_info"]
        versions = {int(span["version"]) for span in meta["weight_versions"]}
        if not reply["output_ids"] and (meta["finish_reason"] or {}).get("type") == "abort":
            return self._stamp(reply, versions)  # nothing was computed

        def settled() -> bool:
            to_come = {standing.applied}  # the only version that may still be proven
            return bool(versions <= standing.proven or standing.reason or versions - standing.proven - to_come)

        async with self._verdicts:
            await self._verdicts.wait_for(lambda: settled() or lineage != standing.lineage)
        if lineage != standing.lineage:
            raise Unavailable("Rewound: the run went back while these tokens were drawn: they are void")
        if not versions <= standing.proven:
            raise Unavailable(f"{standing.reason or 'VersionMismatch'}: tokens drawn from an unproven version are void")
        return self._stamp(reply, versions)

    def _stamp(self, reply: Json, versions: set[int]) -> Json:
        spans = reply["meta_info"]["weight_versions"]
        reply["meta_info"] |= {
            "start_version": int(spans[0]["version"]),
            "end_version": int(spans[-1]["version"]),
            "group": self.settings.group,
            "view": self.settings.view,
            "engine": self.settings.engine_id,
        }
        return reply

    # --- the way out ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Start to drain. Idempotent."""
        if not self.standing.draining:
            self._drain_until = self._clock() + self.settings.spec.drain_seconds
            log.info("event=draining seconds=%d", self.settings.spec.drain_seconds)
        self.standing.draining = True
        self._leaving.set()

    async def _drain(self, looking: asyncio.Task[None] | None) -> None:
        """Known sessions go on until each was idle for session_idle_s, or drainSeconds are over. New weights still come, if
        they come in time: a pull may take longer than anyone waits."""
        try:
            while (left_s := self._drain_until - self._clock()) > 0:
                busy = self.in_flight or self.sessions.active(self._clock(), self.settings.session_idle_s)
                if not busy or self.engine.failed() is not None:
                    break
                if looking is None:
                    looking = asyncio.create_task(self.look())
                await asyncio.wait([looking], timeout=min(self.settings.poll_s, left_s))
                if looking.done():
                    looking.result()
                    looking = None
                    await asyncio.sleep(min(self.settings.poll_s, left_s))
        finally:
            if looking is not None:
                looking.cancel()
        log.info("event=drained in_flight=%d", self.in_flight)

    async def _look_unless_leaving(self) -> asyncio.Task[None] | None:
        """One look; when the agent is told to leave meanwhile, the look that goes on."""
        looking, leaving = asyncio.create_task(self.look()), asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([looking, leaving], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            looking.cancel()
            raise
        finally:
            leaving.cancel()
        if not looking.done():
            return looking
        looking.result()
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._leaving.wait(), seconds)
        except TimeoutError:
            return
