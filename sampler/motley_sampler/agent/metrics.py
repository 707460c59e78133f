"""/metrics in Prometheus' text format, from one EngineState: a dozen lines need no client library."""

from __future__ import annotations

from itertools import accumulate

from motley_api.records import TURN_LATENCY_BOUNDS_S, EngineState

_GAUGES = (
    ("motley_engine_ready", "1 when conformant, applied and not draining", lambda s: int(s.ready)),
    ("motley_engine_draining", "1 while it finishes its sessions", lambda s: int(s.draining)),
    ("motley_engine_weights_version", "advertised weights version, -1 before the first", lambda s: s.version),
    ("motley_engine_running_requests", "sequences being decoded", lambda s: s.running),
    ("motley_engine_queued_requests", "sequences waiting for a slot", lambda s: s.queued),
    ("motley_engine_kv_used_percent", "KV cache positions of running requests", lambda s: s.kv_used_percent),
    ("motley_engine_max_sessions", "declared sessions of an engine", lambda s: s.max_sessions),
)
_COUNTERS = (
    ("motley_engine_turns_total", "replies", lambda s: s.turns),
    ("motley_engine_prompt_tokens_total", "prompt tokens", lambda s: s.prompt_tokens),
    ("motley_engine_cached_tokens_total", "prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    ("motley_engine_generated_tokens_total", "generated tokens", lambda s: s.generated_tokens),
    ("motley_engine_preemptions_total", "running sequences set back for want of KV cache", lambda s: s.preemptions),
    ("motley_engine_busy_seconds_total", "seconds with at least one request running", lambda s: s.busy_s),
)


def render(state: EngineState) -> str:
    labels = f'{{engine="{state.id}",group="{state.group}",view="{state.view}"}}'
    lines = []
    for kind, series in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, text, value in series:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{labels} {value(state)}"]
    if state.canary_max_abs_diff is not None:
        name = "motley_engine_canary_max_abs_diff_nats"
        lines += [f"# HELP {name} largest log-prob difference to a clean load", f"# TYPE {name} gauge"]
        lines.append(f"{name}{labels} {state.canary_max_abs_diff}")
    lines += _latencies(state)
    return "\n".join(lines) + "\n"


def _latencies(state: EngineState) -> list[str]:
    """A histogram without its sum, which nobody keeps."""
    name = "motley_engine_turn_latency_seconds"
    edges = (*(str(bound) for bound in TURN_LATENCY_BOUNDS_S), "+Inf")
    lines = [f"# HELP {name} turns by time from request to last token", f"# TYPE {name} histogram"]
    same = f'engine="{state.id}",group="{state.group}",view="{state.view}"'
    counts = list(accumulate(state.turn_latency_counts or [0] * len(edges)))
    lines += [f'{name}_bucket{{{same},le="{edge}"}} {count}' for edge, count in zip(edges, counts, strict=True)]
    return [*lines, f"{name}_count{{{same}}} {counts[-1]}"]
