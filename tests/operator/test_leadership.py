from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from motley_api import keys
from motley_operator.kube import ApiError
from motley_operator.leadership import Leadership, Terms, claim

NOW = datetime(2026, 10, 13, 12, 0, 0, tzinfo=UTC)


def lease(holder: str, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": keys.LEASE_NAME, "namespace": "ns", "resourceVersion": "1"},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": 15,
            "renewTime": "t0",
            "leaseTransitions": 2,
            **spec,
        },
    }


def claimed(live: dict[str, Any] | None, *, takeover: bool = False) -> dict[str, Any] | None:
    return claim(live, "me", namespace="ns", name=keys.LEASE_NAME, terms=Terms(), now=NOW, takeover=takeover)


def test_a_free_lease_is_taken_and_the_change_is_counted() -> None:
    found = claimed(lease(""))
    assert found is not None
    assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("me", 3)


def test_another_holder_in_time_is_left_alone() -> None:
    assert claimed(lease("other")) is None


def test_a_renewal_keeps_when_it_was_acquired() -> None:
    found = claimed(lease("me", acquireTime="long ago"))
    assert found is not None
    assert (found["spec"]["acquireTime"], found["spec"]["leaseTransitions"]) == ("long ago", 2)


class Store:
    """One Lease with the API server's precondition; just enough of the client for Leadership, which is tested on the real one too."""

    def __init__(self) -> None:
        self.live: dict[str, Any] | None = None
        self.version = 0
        self.down = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.down:
            raise OSError("no route")
        return self.live

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.live is not None:
            raise ApiError(409, "AlreadyExists", "")
        return self._put(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        assert self.live is not None
        if manifest["metadata"].get("resourceVersion") != self.live["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "")
        return self._put(manifest)

    def _put(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.live = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.version)}}
        return self.live


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def candidate(store: Store, clock: Clock, name: str) -> Leadership:
    return Leadership(store, namespace="ns", identity=name, clock=clock)  # type: ignore[arg-type]


async def test_only_one_of_two_leads_and_the_other_takes_over_when_it_is_silent() -> None:
    store, clock = Store(), Clock()
    first, second = candidate(store, clock, "first"), candidate(store, clock, "second")
    await first.step()
    await second.step()
    assert (first.is_leader, second.is_leader) == (True, False)
    clock.now_s += 14.0  # less than the lease's 15 s since second saw it
    await second.step()
    assert not second.is_leader
    assert not first.is_leader  # it could not renew for 12 s: it stopped before anybody may take over
    clock.now_s += 1.5
    await second.step()
    assert second.is_leader
    await first.step()
    assert not first.is_leader


async def test_a_holder_that_renews_is_never_taken_over() -> None:
    store, clock = Store(), Clock()
    first, second = candidate(store, clock, "first"), candidate(store, clock, "second")
    await first.step()
    for _ in range(20):
        clock.now_s += 5.0
        await first.step()
        await second.step()
        assert (first.is_leader, second.is_leader) == (True, False)


async def test_without_the_api_server_leading_ends_in_time() -> None:
    store, clock = Store(), Clock()
    leader = candidate(store, clock, "first")
    await leader.step()
    store.down = True
    clock.now_s += Terms().duration_s - Terms().margin_s - 0.1
    assert leader.is_leader
    clock.now_s += 0.2
    assert not leader.is_leader


async def test_who_leaves_in_order_lets_the_next_one_lead_at_once() -> None:
    store, clock = Store(), Clock()
    first, second = candidate(store, clock, "first"), candidate(store, clock, "second")
    await first.step()
    await first.release()
    await second.step()
    assert second.is_leader
    assert not first.is_leader
