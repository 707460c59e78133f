"""What is done about an action that the API server refuses: told, tried again ever later, and forgotten when it is not wanted any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from motley_operator.apply import LONGEST_WAIT, act
from motley_operator.cache import Cache
from motley_operator.kube import ApiError
from motley_operator.measure import RunMemory
from motley_operator.planner.model import Action, Apply
from planner.study import at

GROUP = ("SamplerGroup", "r-h100")


class Server:
    """Refuses to apply as long as it is told to."""

    def __init__(self) -> None:
        self.refuses, self.asked = True, 0

    async def get(self, kind: str, namespace: str, name: str) -> None:
        return None

    async def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.refuses:
            raise ApiError(422, "Invalid", "gpuType is immutable")
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "1", "uid": "u", "generation": 1}}


def group(gpu_type: str) -> Apply:
    metadata = {"name": "r-h100", "namespace": "ns", "ownerReferences": []}
    return Apply({"kind": "SamplerGroup", "metadata": metadata, "spec": {"gpuType": gpu_type, "runRef": {"name": "r"}}})


class Look:
    """Acts on plans, one look after another."""

    def __init__(self) -> None:
        self.server, self.memory, self.cache = Server(), RunMemory(), Cache(lambda key: None)

    async def __call__(self, seconds: float, *actions: Action) -> int:
        """How often the server was asked."""
        before = self.server.asked
        self.fine = await act(
            actions,
            "ns",
            kube=self.server,  # type: ignore[arg-type]
            telemetry=None,  # type: ignore[arg-type]
            cache=self.cache,
            memory=self.memory,
            now=at(seconds),
        )
        return self.server.asked - before


@pytest.fixture
def look() -> Look:
    return Look()


async def test_a_refused_action_is_tried_again_ever_later_and_told_meanwhile(look: Look) -> None:
    tried = [second for second in range(600) if await look(second, group("B200"))]
    # after 2, 4, 8, 16, 32 and then 60 seconds
    assert tried == [0, 2, 6, 14, 30, *range(62, 600, 60)]
    assert not look.fine
    assert look.memory.errors == {GROUP: "gpuType is immutable"}
    assert LONGEST_WAIT.total_seconds() == 60


async def test_another_action_about_the_same_object_is_tried_at_once(look: Look) -> None:
    assert await look(0, group("B200")) == 1
    assert await look(1, group("B200")) == 0
    look.server.refuses = False
    assert await look(1.5, group("H200")) == 1
    assert (look.fine, look.memory.errors) == (True, {})


async def test_what_was_refused_and_then_edited_away_is_forgotten(look: Look) -> None:
    await look(0, group("B200"))
    look.memory.errors["Secret", "r-token"] = "exists and is not this run's"
    await look(1)
    assert look.memory.errors == {("Secret", "r-token"): "exists and is not this run's"}
    assert await look(1.5, group("B200")) == 1  # and when it comes again, it is news


async def test_an_object_that_another_run_made_is_left_to_it(look: Look) -> None:
    """The cache knows it, under the other run."""
    theirs = group("B200").manifest
    owner = {"uid": "theirs", "kind": "RLRun", "name": "other"}
    metadata = {"name": "r-h100", "namespace": "ns", "resourceVersion": "1", "uid": "u", "ownerReferences": [owner]}
    look.cache.put({**theirs, "metadata": metadata}, at(0))
    assert await look(0, group("B200")) == 0
    assert look.memory.errors == {GROUP: "exists and is not this run's: rename one of them, or delete it"}
    look.server.refuses = False
    joins = Apply({"kind": "SamplerGroup", "metadata": {**metadata, "ownerReferences": [{"uid": "ours"}]}})
    assert await look(1, joins) == 1  # one that only gets an owner beside its author's
