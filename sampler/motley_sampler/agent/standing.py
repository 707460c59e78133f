"""What the agent knows of its engine, and what follows from it for those who ask. Pure: the agent changes it, adapters read it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

from motley_api.records import TURN_LATENCY_BOUNDS_S, EngineState

from motley_sampler.agent.conformance import Floats, Mode, Verdict
from motley_sampler.agent.views import Identity
from motley_sampler.engines.protocol import EngineLoad


@dataclass
class Standing:
    """advertised: what passed its canary. applied: what the engine computes with, which may be ahead of it by one verdict."""

    advertised: Identity | None = None
    folder: Path | None = None  # of `advertised`
    applied: int = -1
    proven: set[int] = field(default_factory=set)  # versions whose replies may go out
    reason: str = "Loading"  # why not ready; empty when conformant
    message: str = ""
    failures: int = 0  # in a row
    lineage: int = 0  # counts rewinds: what was drawn under another one belongs to steps that never were
    draining: bool = False
    mode: Mode = Mode.UNKNOWN
    max_abs_diff: float | None = None
    prompt_logprobs: Floats | None = None  # of the clean load of `advertised`
    turn_latency_counts: list[int] = field(default_factory=lambda: [0] * (len(TURN_LATENCY_BOUNDS_S) + 1))

    @property
    def version(self) -> int:
        return -1 if self.advertised is None else self.advertised.version

    def ready(self, stalled_s: float, hang_s: float) -> bool:
        return self.advertised is not None and not self.reason and not self.draining and stalled_s < hang_s

    def turn_took(self, seconds: float) -> None:
        """From the request's arrival to its last token."""
        self.turn_latency_counts[bisect_left(TURN_LATENCY_BOUNDS_S, seconds)] += 1

    def applying(self, version: int) -> None:
        """The engine is about to compute with `version`: until its verdict, nothing drawn from it goes out."""
        self.applied = version
        self.proven.discard(version)

    def rewinding(self, version: int) -> None:
        """The run went back: nothing is served, and nothing that was drawn so far goes out."""
        self.reason, self.message = "Rewinding", f"the run went back to version {version}"
        self.prompt_logprobs = None
        self.proven.clear()
        self.lineage += 1

    def passed(self, identity: Identity, folder: Path, verdict: Verdict) -> None:
        self.advertised, self.folder = identity, folder
        self.proven.add(identity.version)
        self.reason = self.message = ""
        self.failures = 0
        self._note(verdict)
        self.prompt_logprobs = verdict.prompt_logprobs

    def refused(self, reason: str, message: str, verdict: Verdict | None = None) -> None:
        """The engine may compute wrongly: no request until a version passes."""
        self.reason, self.message = reason, message
        self.failures += 1
        if verdict is not None:
            self._note(verdict)

    def _note(self, verdict: Verdict) -> None:
        self.mode = verdict.mode
        # JSON has no infinity; a canary that is not finite says so in its message.
        finite = verdict.max_abs_diff is not None and math.isfinite(verdict.max_abs_diff)
        self.max_abs_diff = verdict.max_abs_diff if finite else None


def engine_state(
    standing: Standing,
    load: EngineLoad,
    *,
    engine_id: str,
    group: str,
    view: str,
    url: str,
    max_sessions: int,
    stalled_s: float,
    hang_s: float,
) -> EngineState:
    """The record that goes to the router."""
    ready = standing.ready(stalled_s, hang_s)
    reason, message = standing.reason, standing.message
    if not ready and not reason:
        reason = "Draining" if standing.draining else "Hung"
        message = message or ("" if standing.draining else f"no progress of the engine for {stalled_s:.0f} s")
    return EngineState(
        id=engine_id,
        group=group,
        view=view,
        url=url,
        version=standing.version,
        ready=ready,
        draining=standing.draining,
        reason=reason,
        message=message,
        max_sessions=max_sessions,
        running=load.running,
        queued=load.queued,
        kv_used_percent=load.kv_used_percent,
        preemptions=load.preemptions,
        turns=load.turns,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        generated_tokens=load.generated_tokens,
        busy_s=round(load.busy_s, 3),
        turn_latency_counts=list(standing.turn_latency_counts),
        canary_max_abs_diff=standing.max_abs_diff,
        logprob_mode=str(standing.mode),
    )
