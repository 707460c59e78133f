"""The framework's part: watches that feed the cache. The only importer of kopf.

Event handlers only. They keep no progress, write no annotation and put no finalizer anywhere, so that deletion needs no operator; what
to do is never decided here. Peering is off (a Lease decides who leads), so that no other operator can pause this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from motley_api import API_GROUP, API_VERSION, keys

from motley_operator.cache import WATCHED
from motley_operator.controller import Controller
from motley_operator.kube import RESOURCES, Credentials

CHUNK = 100  # objects of a page of a list: the most that the framework holds of a kind at once
INACTIVE_S = 70.0  # a watch without an event or a bookmark, which come every minute, is opened anew
WORKER_IDLE_S = 1.0  # the framework keeps a task for each object that changed, so long after its last change
TOKEN_LIFE = timedelta(minutes=10)  # a service account's token is read again this often


def resource(kind: str) -> tuple[str, str, str]:
    """(group, version, plural); the core group is ""."""
    prefix, plural = RESOURCES[kind]
    parts = prefix.split("/")
    return ("", parts[1], plural) if parts[0] == "api" else (parts[1], parts[2], plural)


def registry(controller: Controller, credentials: Credentials) -> kopf.OperatorRegistry:
    found = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection(credentials)

    kopf.on.login(registry=found, id="login")(login)
    for kind in WATCHED:
        kopf.on.event(*resource(kind), registry=found, id=f"watch-{kind.lower()}")(_watcher(kind, controller))
    return found


def _watcher(kind: str, controller: Controller) -> Any:
    async def seen(event: dict[str, Any], **_: Any) -> None:
        controller.last_event_s = controller.clock()
        controller.cache.heard(kind, event["object"]["metadata"]["resourceVersion"])
        obj = {**event["object"], "kind": kind}
        if event["type"] == "DELETED":
            controller.cache.drop(obj, controller.utc_now())
        else:
            controller.cache.put(obj, controller.utc_now())

    return seen


def connection(credentials: Credentials) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(
        server=credentials.server,
        ca_data=credentials.ca or None,
        insecure=credentials.insecure,
        token=credentials.bearer() or None,
        certificate_data=credentials.certificate or None,
        private_key_data=credentials.key or None,
        default_namespace=credentials.namespace,
        expiration=datetime.now(UTC) + TOKEN_LIFE if credentials.token_file else None,
    )


def operator_settings(*, namespaced: bool, started: Callable[[str], None] = lambda kind: None) -> kopf.OperatorSettings:
    """`started` is told the kind of each watch that begins, at first and again."""
    settings = kopf.OperatorSettings()
    # Names of our own, although event handlers store nothing: should one that does be added, it meets nobody else's.
    settings.persistence.finalizer = keys.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{API_GROUP}")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{API_GROUP}")
    settings.peering.name = keys.FIELD_MANAGER
    settings.posting.enabled = False
    settings.watching.chunk_size = CHUNK
    settings.watching.inactivity_timeout = INACTIVE_S
    settings.queueing.idle_timeout = WORKER_IDLE_S
    settings.scanning.disabled = namespaced
    for kind in WATCHED:
        group, _, plural = resource(kind)
        if group != API_GROUP:
            settings.watching.label_selectors[_named(group, plural)] = keys.RUN_LABEL
        # Field selectors are asked for before each list and each watch: the one word that the framework gives of them.
        settings.watching.field_selectors[_noting(group, plural, kind, started)] = ""
    return settings


def _named(group: str, plural: str) -> Any:
    return lambda found: found.group == group and found.plural == plural


def _noting(group: str, plural: str, kind: str, started: Callable[[str], None]) -> Any:
    """A selector that matches nothing, and tells when it was asked about its kind."""

    def asked(found: Any) -> bool:
        if found.group == group and found.plural == plural:
            started(kind)
        return False

    return asked


async def watch(controller: Controller, credentials: Credentials, namespace: str | None) -> None:
    """Runs until cancelled, or until a watch fails for good: then the process ends, and is started anew."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=registry(controller, credentials),
        settings=operator_settings(namespaced=namespace is not None, started=controller.watch_started),
        standalone=True,
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace is not None else (),
        identity=None,
    )


__all__ = ["API_VERSION", "operator_settings", "registry", "watch"]
