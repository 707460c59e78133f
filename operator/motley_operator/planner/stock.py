"""Engines that find no node: for a while they are on their way, then the GPU type is out of stock and nothing waits for it any more.

Pods of a group that is out of stock stay and ask, so that it comes back by itself when a node does.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from motley_api import keys

from motley_operator.planner.conditions import Finding
from motley_operator.planner.model import GroupView, PodView, Snapshot, format_time

STOCK_OUT = timedelta(minutes=10)  # a cluster autoscaler needs some of them


def without_node(seen: Snapshot, group: str | None = None) -> list[PodView]:
    """Engines that the scheduler has no place for; of one group, or of all."""
    return [
        pod
        for pod in seen.pods
        if pod.role == keys.ROLE_SAMPLER
        and (group is None or pod.group == group)
        and pod.unschedulable
        and not pod.node
        and pod.exists
        and pod.deletion is None
    ]


def _overdue(pod: PodView, now: datetime) -> bool:
    return pod.created is not None and now - pod.created >= STOCK_OUT


def out(seen: Snapshot, group: str, now: datetime) -> list[PodView]:
    """Engines that have waited for too long."""
    return [pod for pod in without_node(seen, group) if _overdue(pod, now)]


def coming(seen: Snapshot, now: datetime) -> bool:
    """Whether some engine may yet find its node."""
    return any(not _overdue(pod, now) for pod in without_node(seen))


def since(pods: Iterable[PodView]) -> str:
    moments = [pod.created for pod in pods if pod.created is not None]
    return format_time(min(moments)) if moments else "an unknown time"


def placed(seen: Snapshot, group: GroupView, now: datetime, looked: str) -> Finding | None:
    """Placed, where engines have no node. `looked`: what was seen of nodes."""
    waiting, overdue = without_node(seen, group.name), out(seen, group.name, now)
    if not waiting:
        return None
    if not overdue:
        return Finding(
            "Placed", "False", "Unschedulable", f"{len(waiting)} pod(s) wait: {waiting[0].unschedulable}{looked}"
        )
    text = (
        f"{len(overdue)} engine(s) have had no node since {since(overdue)}; other groups take their sessions until one comes:"
        f" {overdue[0].unschedulable}{looked}"
    )
    return Finding("Placed", "False", "StockOut", text)


def was_out(group: GroupView) -> bool:
    return any(item.type == "Placed" and item.reason == "StockOut" for item in group.status.conditions)


def news(seen: Snapshot, now: datetime, shares: str) -> list[tuple[str, str]]:
    """(what, why) of groups that went out of stock, or came back. `shares`: where new sessions go now."""
    found = []
    for group in seen.groups:
        overdue = out(seen, group.name, now)
        if overdue and not was_out(group):
            what = f"stock-out: {group.name} has no node for {len(overdue)} engine(s), its sessions go elsewhere"
            found.append((what, f"waiting since {since(overdue)}: {overdue[0].unschedulable}; shares now: {shares}"))
        elif was_out(group) and not without_node(seen, group.name):
            there = sum(
                bool(pod.node) and pod.exists and pod.deletion is None
                for pod in seen.pods
                if pod.role == keys.ROLE_SAMPLER and pod.group == group.name
            )
            what = f"stock-out over: {group.name}, its share comes back with its engines"
            found.append((what, f"{there} engine(s) have a node; shares now: {shares}"))
    return found
