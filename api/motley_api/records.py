"""Records on the wire between pods (msgpack through msgspec; JSON where a person or curl may look).

Numeric arrays travel as little-endian bytes, so that this package needs no numpy: ``np.frombuffer`` reads them.
Nothing here is ever pickled.

Legend: T = tokens of a trajectory, G = generated (trained) tokens among them, C = candidates over all G tokens.
"""

from __future__ import annotations

import enum

import msgspec

# Upper bounds of EngineState.turn_latency_counts, in seconds; one more bucket is open.
TURN_LATENCY_BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0)


class EndedBy(enum.StrEnum):
    """Why an episode stopped."""

    SUBMIT = "submit"  # the policy said that it is done
    FORMAT_ERRORS = "formatErrors"  # three replies in a row without a tool call
    MAX_TURNS = "maxTurns"
    CONTEXT = "context"  # the next turn would not fit the context length
    DEADLINE = "deadline"
    INFRASTRUCTURE = "infrastructure"  # an engine, sandbox or grader failed: never graded


class Candidates(msgspec.Struct, frozen=True):
    """The support that the sampler drew from at each generated token, ragged; or only its head.

    counts: uint16[G], number of candidates of each token; 0 stands for the one-token support {sampled token}, log-prob 0,
    of which nothing is stored. ids: uint32[C]. logprobs: float32[C], natural log of q, each non-empty support sums to 1.
    head: these are the likeliest tokens of an unfiltered sampler: they sum to less than 1, none is left out, and the
    sampled token may not be among them.
    """

    counts: bytes
    ids: bytes
    logprobs: bytes
    head: bool = False


class Turn(msgspec.Struct, frozen=True):
    """One reply of the policy. Token range [start, end) indexes Trajectory.token_ids; every token in it was generated."""

    start: int
    end: int
    start_version: int  # weights version when the reply's first token was drawn
    end_version: int
    latency_s: float  # request sent to last token, queueing and prefill included
    cached_tokens: int = 0
    tool_call: bool = True  # False: a format error


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as the trainer receives it. Its id is unique in a run and is what deduplicates redelivery."""

    id: str  # "<work id>/<sample index>"
    run: str
    work: str  # id of the Work it answers (one prompt)
    sample: int  # 0 .. samplesPerPrompt - 1
    task: str  # task folder name
    split: str = "train"  # "train" | "heldout" (evaluation: never trained on)
    group: str  # SamplerGroup name: for life
    view: str
    engine: str  # pod name; the last one, had the session to move inside its group
    token_ids: bytes  # int32[T]: prompt, replies and tool results, exactly as sent to the engine
    turns: list[Turn]
    logprobs: bytes  # float32[G], log q of each generated token, in token order, after temperature and filters
    candidates: Candidates | None  # None: the sampler drew from the whole vocabulary
    temperature: float
    top_p: float
    top_k: int  # -1: off
    reward: float | None  # None: not graded (infrastructure failure)
    ended_by: EndedBy
    started_unix_s: float
    finished_unix_s: float
    detail: str = ""  # for people: the failure's text

    @property
    def start_version(self) -> int:
        """The oldest version that any token was drawn from; staleness counts from it. -1 without turns."""
        return min((turn.start_version for turn in self.turns), default=-1)

    @property
    def end_version(self) -> int:
        return max((turn.end_version for turn in self.turns), default=-1)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for a rollout worker: run `samples` episodes of `task`."""

    id: str  # "<attempt-independent counter>", unique in a run
    task: str
    split: str = "train"
    samples: list[int]  # sample indexes wanted; fewer than samplesPerPrompt when some are already delivered
    seed: int
    min_version: int  # the oldest weights version that may serve it
    deadline_unix_s: float  # later deliveries are accepted only while the group of samples is still open


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/work on the trainer (JSON). Answer: list[Work]; an empty list means "ask again after Retry-After"."""

    worker: str
    sessions: int  # free session slots at the worker


class TrajectoryAck(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to POST /v1/trajectories (msgpack list[Trajectory], optionally zstd). Sent after the rows are durable."""

    accepted: list[str] = []
    duplicates: list[str] = []
    refused: dict[str, str] = {}  # id -> reason; never retried


# Reasons of an engine that computes or reports something else than its view says; its tokens are refused.
NOT_CONFORMANT = frozenset({"LoadFailed", "VersionMismatch", "CanaryFailed", "SupportMismatch", "ModeMismatch"})


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler agent says of its engine: PUT /v1/engines/<id> on the router every second, and GET /motley/status.

    A router that restarted relearns the fleet from these. An engine unheard of for `engine_timeout_s` gets no new sessions.
    """

    id: str  # pod name
    group: str
    view: str
    url: str  # http://<pod ip>:<port>
    version: int  # advertised weights version; -1 before the first one passed its canary
    ready: bool  # conformant, applied, not draining
    draining: bool = False
    reason: str = ""  # CamelCase, when not ready: Loading, Draining, Hung, one of NOT_CONFORMANT, ...
    message: str = ""
    max_sessions: int = 1
    running: int = 0
    queued: int = 0
    kv_used_percent: int = 0
    preemptions: int = 0
    # Cumulative since the engine started.
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0  # seconds with at least one request running
    # Turns by how long they took, from request to last token, queueing and prefill included: one count for each bucket of
    # TURN_LATENCY_BOUNDS_S and one for slower ones; empty before the first.
    turn_latency_counts: list[int] = []
    # Conformance of the version in `version`: canary KL and largest log-prob difference against a clean load of the view.
    canary_max_abs_diff: float | None = None
    logprob_mode: str = "Unknown"  # AfterFilter | AfterTemperature | BeforeTemperature | Unknown


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """One group's part of the fleet as the operator decided it."""

    name: str
    view: str
    capacity_sessions: int  # ready engines x sessions per engine, declared or measured
    share_milli: int  # of new sessions; all shares sum to 1000 or to 0; 0 = no new sessions
    quarantined: bool = False  # its samples are refused by the trainer, too
    sessions_per_engine: int = 0  # most that one engine is given, as measured; 0: what the engine says itself


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """fleet.json, and PUT /v1/fleet on router and trainer: which groups there are and their shares."""

    generation: int  # grows with every change
    groups: list[GroupShare]
    paused: bool = False  # guard or suspend: no new work, no new sessions


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions (JSON)."""

    session: str  # the trajectory id
    min_version: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A session's place. Its holder sends turns straight to `url`, and renews with PUT /v1/sessions/<session> (this record):
    a restarted router relearns it from that. The answer to a renewal is the lease, with another engine of the same group when
    the old one left, or 404 when the group has none: then the session failed (infrastructure)."""

    session: str
    group: str
    view: str
    engine: str
    url: str
    ttl_s: float = 30.0


class GroupSessions(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    active: int
    capacity_sessions: int
    share_milli: int
    engines_ready: int
    engines: int


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/status on the router (JSON)."""

    fleet_generation: int
    sessions_active: int
    sessions_total: int
    groups: list[GroupSessions]
    engines: list[EngineState]


class Ratio(msgspec.Struct, frozen=True):
    """A mean that can still be averaged: sum over numerator and denominator first, divide last."""

    num: float = 0.0
    den: float = 0.0


class GroupStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one group contributed to one optimizer step."""

    name: str
    view: str
    samples: int = 0  # trained on
    discarded: int = 0  # delivered, not trained on: stale, quarantined, infrastructure, no contrast
    stale: int = 0  # of discarded: older than staleness.maxSteps
    infrastructure_failures: int = 0
    format_error_ends: int = 0
    turns: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0  # weight 0 under MIS, or dropped
    dropped_tokens: int = 0  # non-finite log-prob and the like
    reward: Ratio = Ratio()
    kl: Ratio = Ratio()  # KL(q||p) per trained token, nats; exact over recorded supports
    out_of_range: Ratio = Ratio()  # share of tokens whose raw ratio is outside the range
    entropy: Ratio = Ratio()
    ess: Ratio = Ratio()  # (sum w)^2 / (n sum w^2): numerator and denominator
    lag: Ratio = Ratio()  # steps between the sample's start version and the step's
    turn_latency_s: Ratio = Ratio()
    version: int = -1  # newest start version among its samples


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the run's ledger: <store>/<run>/ledger/step-000010.json. Also GET /v1/steps?after=N on the trainer (JSON)."""

    run: str
    step: int  # optimizer steps done after this one: 1, 2, ...; it published weights version `step`
    attempt: int
    started_unix_s: float
    finished_unix_s: float
    wait_s: float  # waited for samples
    train_s: float
    publish_s: float
    skipped: bool = False  # non-finite gradient: weights stayed
    reward: Ratio
    kl: Ratio
    out_of_range: Ratio
    entropy: Ratio
    tail_ratio: Ratio = Ratio()
    grad_norm: float
    loss: float
    lag: Ratio
    format_error_ends: Ratio = Ratio()
    groups: list[GroupStep]
    # Further names as users of Miles know them, over all and split ("ois", "ois/group/h100-fp8", "ois/view/fp8", "ois/lag/0-1"): means
    # over the "trained_tokens" of their split.
    metrics: dict[str, float] = {}


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    tasks: int
    pass_at_1: Ratio


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/status on the trainer (JSON)."""

    run: str
    attempt: int
    steps_total: int
    step: int  # newest finished step
    weights_version: int  # newest version published in every view
    durable_version: int  # newest version that a checkpoint covers
    buffered: int  # trajectories waiting
    outstanding: int  # episodes handed out, not delivered
    finished: bool = False
    last: StepRecord | None = None
    evaluation: EvaluationRecord | None = None
    fleet_generation: int = -1  # of the newest Fleet heard; the operator puts a newer one until it is
    condition: str = ""  # CamelCase when something is wrong: NonFiniteGradient, StoreUnavailable, ...
    message: str = ""


def encode(record: object) -> bytes:
    return msgspec.msgpack.encode(record)


def encode_json(record: object) -> bytes:
    return msgspec.json.encode(record)
