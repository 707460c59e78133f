"""An episode's tokens as they pile up, and the record that the trainer gets of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from motley_api.records import Candidates, Turn

from motley_sampler.rollout.reply import Reply


@dataclass
class Transcript:
    """Token ids exactly as the engine saw them; appended to, never edited."""

    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    _replies: list[Reply] = field(default_factory=list)

    def add_context(self, ids: list[int]) -> None:
        self.token_ids += ids

    def add_reply(self, reply: Reply, *, latency_s: float, tool_call: bool) -> None:
        start = len(self.token_ids)
        self.token_ids += reply.token_ids
        self._replies.append(reply)
        self.turns.append(
            Turn(
                start=start,
                end=len(self.token_ids),
                start_version=reply.start_version,
                end_version=reply.end_version,
                latency_s=latency_s,
                cached_tokens=reply.cached_tokens,
                tool_call=tool_call,
            )
        )

    def token_bytes(self) -> bytes:
        return np.array(self.token_ids, "<i4").tobytes()

    def logprob_bytes(self) -> bytes:
        return b"".join(reply.logprobs.astype("<f4").tobytes() for reply in self._replies)

    def candidates(self, *, head: bool = False) -> Candidates | None:
        """head: the replies' candidates are the likeliest ones of all. None: the replies hold none."""
        counts = [reply.counts for reply in self._replies if reply.counts is not None]
        if head and not counts:
            return None
        return Candidates(
            head=head,
            counts=b"".join(of_reply.astype("<u2").tobytes() for of_reply in counts),
            ids=b"".join(reply.candidate_ids.astype("<u4").tobytes() for reply in self._replies),
            logprobs=b"".join(reply.candidate_logprobs.astype("<f4").tobytes() for reply in self._replies),
        )
