"""Leadership by a coordination.k8s.io Lease: of all replicas only its holder changes the cluster.

Time on a holder's clock only: a candidate waits until it has itself seen the same renewal for the lease's whole duration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from motley_api import keys

from motley_operator.kube import ApiError, Kube

Json = dict[str, Any]
log = logging.getLogger("motley.operator")


@dataclass(frozen=True)
class Terms:
    """Seconds. A holder that could not renew stops leading `duration - margin` after its last renewal."""

    duration_s: int = 15
    renew_s: float = 5.0
    retry_s: float = 2.0
    margin_s: float = 3.0


def micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def claim(
    live: Json | None, me: str, *, namespace: str, name: str, terms: Terms, now: datetime, takeover: bool
) -> Json | None:
    """The Lease to write so that `me` holds it, or None while another holder is in time. Pure."""
    spec = (live or {}).get("spec", {})
    holder = spec.get("holderIdentity") or ""
    if holder not in ("", me) and not takeover:
        return None
    changed = holder != me
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {**((live or {}).get("metadata") or {}), "name": name, "namespace": namespace},
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": terms.duration_s,
            "acquireTime": micro_time(now) if changed else spec.get("acquireTime", micro_time(now)),
            "renewTime": micro_time(now),
            "leaseTransitions": int(spec.get("leaseTransitions", 0)) + (1 if changed and live is not None else 0),
        },
    }


class Leadership:
    """Holds, renews and gives back the lease. `is_leader` never outlives the last renewal by the lease's duration."""

    def __init__(
        self, kube: Kube, *, namespace: str, identity: str, clock: Callable[[], float], terms: Terms | None = None
    ) -> None:
        self._kube, self._namespace, self._me, self._clock = kube, namespace, identity, clock
        self.terms = terms or Terms()
        self._renewed_s: float | None = None
        self._seen: tuple[str, str] | None = None  # holder, renewTime
        self._seen_since_s = 0.0
        self.last_contact_s = clock()

    @property
    def is_leader(self) -> bool:
        return (
            self._renewed_s is not None
            and self._clock() - self._renewed_s < self.terms.duration_s - self.terms.margin_s
        )

    async def step(self) -> None:
        """Acquire or renew once."""
        started = self._clock()
        live = await self._kube.get("Lease", self._namespace, keys.LEASE_NAME)
        spec = (live or {}).get("spec", {})
        seen = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if seen != self._seen:
            self._seen, self._seen_since_s = seen, started
        stale = started - self._seen_since_s >= (spec.get("leaseDurationSeconds") or self.terms.duration_s)
        wanted = claim(
            live,
            self._me,
            namespace=self._namespace,
            name=keys.LEASE_NAME,
            terms=self.terms,
            now=datetime.now(UTC),
            takeover=stale,
        )
        self.last_contact_s = self._clock()
        if wanted is None:
            self._renewed_s = None
            return
        was = self.is_leader
        try:
            await (self._kube.create(wanted) if live is None else self._kube.replace(wanted))
        except ApiError as error:
            if error.status != 409:
                raise
            self._renewed_s = None  # another one was faster
            return
        self._renewed_s = started
        if not was:
            log.info("event=leading identity=%s", self._me)

    async def run(self) -> None:
        while True:
            try:
                await self.step()
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("event=lease_failed error=%r", str(error))
            await asyncio.sleep(self.terms.renew_s if self.is_leader else self.terms.retry_s)

    async def release(self) -> None:
        """So that the next one need not wait."""
        if self._renewed_s is None:
            return
        self._renewed_s = None
        try:
            live = await self._kube.get("Lease", self._namespace, keys.LEASE_NAME)
            if live is not None and live["spec"].get("holderIdentity") == self._me:
                await self._kube.replace({**live, "spec": {**live["spec"], "holderIdentity": ""}})
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("event=lease_not_released error=%r", str(error))
