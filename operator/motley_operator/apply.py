"""Does what a plan says, and writes status and events. The only module that changes the cluster."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from motley_api import GROUP_VERSION, keys

from motley_operator.cache import Cache
from motley_operator.kube import ApiError, Kube
from motley_operator.measure import Refusal, RunMemory, Telemetry
from motley_operator.planner.model import (
    Action,
    Apply,
    Create,
    Delete,
    EventOut,
    Patch,
    PushFleet,
    format_time,
    parse_time,
)

Json = dict[str, Any]
log = logging.getLogger("motley.operator")

# Billed dollars move every second; a status in which only they moved is written this often, and less often with many runs.
TOTALS_EVERY_S = 15.0


FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=2), timedelta(seconds=60)


class ForeignObjectError(Exception):
    """An object of that name exists and is somebody else's."""


async def act(
    actions: tuple[Action, ...],
    namespace: str,
    *,
    kube: Kube,
    telemetry: Telemetry,
    cache: Cache,
    memory: RunMemory,
    now: datetime,
) -> bool:
    """Every action in order. A refusal is remembered for the next plan and stops only what it is about; whether all went well.

    The same action is tried again after longer and longer; another one about the same object, at once.
    """
    fine = True
    subjects = {_subject(action) for action in actions}
    _forget_what_is_wanted_no_more(memory, subjects)
    for action in actions:
        subject = _subject(action)
        refused = memory.refusals.get(subject)
        if refused is not None and refused.action == action and now < refused.until:
            fine = False
            continue
        try:
            await _do(action, namespace, kube, telemetry, cache, memory, now)
            memory.errors.pop(subject, None)
            memory.refusals.pop(subject, None)
        except ForeignObjectError as error:
            memory.errors[subject] = str(error)
            memory.refusals[subject] = refused_again(refused, action, now)
            fine = False
        except ApiError as error:
            fine = False
            if error.status == 404 or "being terminated" in error.message:
                continue  # its namespace or itself goes away
            if error.status != 409:  # a conflict is looked at again, with what is there then
                memory.errors[subject] = error.message
                memory.refusals[subject] = refused_again(refused, action, now)
            log.warning(
                "event=action_refused namespace=%s kind=%s name=%s status=%d message=%r",
                namespace,
                *subject,
                error.status,
                error.message[:300],
            )
    return fine


def refused_again(before: Refusal | None, action: Action, now: datetime) -> Refusal:
    tries = before.tries + 1 if before is not None and before.action == action else 1
    return Refusal(action, tries, now + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)))


def _forget_what_is_wanted_no_more(memory: RunMemory, wanted: set[tuple[str, str]]) -> None:
    """What was refused and then edited away is no trouble any more. That the token's name is taken is known from reading it."""
    for told in (memory.errors, memory.refusals):
        for subject in [subject for subject in told if subject not in wanted and subject[0] != "Secret"]:
            del told[subject]


def _subject(action: Action) -> tuple[str, str]:
    match action:
        case Apply(manifest=manifest) | Create(manifest=manifest):
            return manifest["kind"], manifest["metadata"]["name"]
        case Patch(kind=kind, name=name) | Delete(kind=kind, name=name):
            return kind, name
        case PushFleet(role=role):
            return "Fleet", role


async def _do(
    action: Action, namespace: str, kube: Kube, telemetry: Telemetry, cache: Cache, memory: RunMemory, now: datetime
) -> None:
    kind, name = _subject(action)
    match action:
        case Apply(manifest=manifest, why=why):
            await _refuse_foreign(manifest, kube, cache, now)
            cache.wrote(await kube.apply(manifest), now)
            memory.applied(manifest)
            log.info("event=applied namespace=%s kind=%s name=%s why=%r", namespace, kind, name, why)
        case Create(manifest=manifest):
            memory.token = await create_once(manifest, kube)
            log.info("event=created namespace=%s kind=%s name=%s", namespace, kind, name)
        case Patch(body=body, why=why):
            cache.wrote(await kube.patch(kind, namespace, name, body), now)
            log.info("event=patched namespace=%s kind=%s name=%s why=%r", namespace, kind, name, why)
        case Delete(uid=uid, why=why):
            await kube.delete(kind, namespace, name, uid=uid)
            log.info("event=deleted namespace=%s kind=%s name=%s why=%r", namespace, kind, name, why)
        case PushFleet(url=url, fleet=fleet):
            if error := await telemetry.push(url, memory.token, fleet):
                log.info("event=fleet_not_pushed namespace=%s role=%s error=%r", namespace, name, error)


async def _refuse_foreign(manifest: Mapping[str, Any], kube: Kube, cache: Cache, now: datetime) -> None:
    """An object of that name may be another run's, which the cache knows, or nobody's: the watch shows only what carries our labels."""
    metadata = manifest["metadata"]
    if "uid" in metadata:
        return  # a group of its own author, which only gets an owner
    live = cache.get(manifest["kind"], metadata["namespace"], metadata["name"])
    known = live is not None
    if live is None:
        live = await kube.get(manifest["kind"], metadata["namespace"], metadata["name"])
    if live is None:
        return
    ours = {owner["uid"] for owner in metadata["ownerReferences"]}
    if not ours & {owner["uid"] for owner in live["metadata"].get("ownerReferences", [])}:
        raise ForeignObjectError("exists and is not this run's: rename one of them, or delete it")
    if not known:
        cache.put(live, now)


async def create_once(secret: Mapping[str, Any], kube: Kube) -> str:
    """The run's token: the one made now, or the one that is there already. Never changed."""
    try:
        await kube.create(secret)
    except ApiError as error:
        if error.status != 409:
            raise
    metadata = secret["metadata"]
    return await read_token(kube, metadata["namespace"], metadata["name"], metadata["ownerReferences"][0]["uid"])


async def read_token(kube: Kube, namespace: str, name: str, run_uid: str) -> str:
    """ "" when there is no such Secret. Raises ForeignObjectError when it is not the run's."""
    import base64

    live = await kube.get("Secret", namespace, name)
    if live is None:
        return ""
    if run_uid not in {owner["uid"] for owner in live["metadata"].get("ownerReferences", [])}:
        raise ForeignObjectError("exists and is not this run's: rename one of them, or delete it")
    return base64.b64decode(live.get("data", {}).get(keys.SECRET_TOKEN_KEY, "")).decode()


def status_due(live: Json, wanted: Json, totals_every_s: float = TOTALS_EVERY_S) -> bool:
    """Whether a status has to be written: it differs, and in more than running totals unless those are old."""
    if live == wanted:
        return False
    if {key: value for key, value in live.items() if key != "totals"} != {
        key: value for key, value in wanted.items() if key != "totals"
    }:
        return True
    before, after = (parse_time(side.get("totals", {}).get("accountedUntil")) for side in (live, wanted))
    return before is None or after is None or after == before or (after - before).total_seconds() >= totals_every_s


async def write_status(
    kind: str,
    live: Json,
    wanted: Json,
    *,
    kube: Kube,
    cache: Cache,
    now: datetime,
    totals_every_s: float = TOTALS_EVERY_S,
) -> bool:
    """Server-side apply on /status, against the state that it was computed from: a stale one is refused with 409.

    Conditions of other writers are merged by type. Whether it was written.
    """
    metadata = live["metadata"]
    if not status_due(live.get("status") or {}, wanted, totals_every_s):
        return False
    manifest = {
        "apiVersion": GROUP_VERSION,
        "kind": kind,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "status": wanted,
    }
    try:
        cache.wrote(await kube.apply(manifest, subresource="status"), now)
    except ApiError as error:
        if error.status != 404:  # it went meanwhile; the watch will say so
            raise
        return False
    return True


async def post_event(event: EventOut, namespace: str, *, kube: Kube, now: datetime) -> None:
    """One Event object for each thing that is said; saying it again raises its count."""
    digest = hashlib.sha256(f"{event.kind}/{event.uid}/{event.reason}/{event.message}".encode()).hexdigest()[:12]
    name, time = f"{event.name}.{digest}", format_time(now)
    body: Json = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {
            "apiVersion": GROUP_VERSION,
            "kind": event.kind,
            "name": event.name,
            "namespace": namespace,
            "uid": event.uid,
        },
        "type": event.type,
        "reason": event.reason[:128],
        "message": event.message[:1000],
        "count": 1,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "reportingComponent": keys.FIELD_MANAGER,
        "reportingInstance": keys.FIELD_MANAGER,
        "source": {"component": keys.FIELD_MANAGER},
    }
    try:
        await kube.create(body)
    except ApiError as error:
        if error.status == 409:
            live = await kube.get("Event", namespace, name)
            if live is not None:
                await kube.patch(
                    "Event", namespace, name, {"count": int(live.get("count", 1)) + 1, "lastTimestamp": time}
                )
        elif error.status not in (403, 404):  # the namespace goes away, or events are not allowed: they are only told
            raise
