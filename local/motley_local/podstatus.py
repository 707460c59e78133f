"""A pod's status from the states of its containers, as kubelet computes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Object = Mapping[str, Any]
RestartPolicy = Literal["Always", "OnFailure", "Never"]

FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 300.0
BACKOFF_RESET_S = 600.0  # a container that ran this long starts over
OWN_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


@dataclass(frozen=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    started_at: str


@dataclass(frozen=True)
class Terminated:
    exit_code: int
    reason: str
    started_at: str
    finished_at: str
    message: str = ""
    signal: int = 0
    container_id: str = ""


State = Waiting | Running | Terminated


@dataclass
class ContainerState:
    """One container as the agent sees it now."""

    name: str
    image: str
    state: State = field(default_factory=lambda: Waiting("ContainerCreating"))
    last: Terminated | None = None
    restarts: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""
    restart_policy: str = ""  # "Always" makes an init container a sidecar


def restart_delay_s(restarts_in_a_row: int) -> float:
    """Pause before the next restart: none before the first, then 10 s doubling to 5 min."""
    if restarts_in_a_row <= 0:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(restarts_in_a_row - 1, 10), LONGEST_BACKOFF_S)


def should_restart(policy: str, exit_code: int) -> bool:
    """Whether a container that ended runs again."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _state_object(state: State | None) -> dict[str, Any]:
    match state:
        case Waiting(reason, message):
            return {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        case Running(started_at):
            return {"running": {"startedAt": started_at}}
        case Terminated():
            return {
                "terminated": {
                    "exitCode": state.exit_code,
                    "reason": state.reason,
                    "startedAt": state.started_at,
                    "finishedAt": state.finished_at,
                    **({"message": state.message} if state.message else {}),
                    **({"signal": state.signal} if state.signal else {}),
                    **({"containerID": state.container_id} if state.container_id else {}),
                }
            }
        case None:
            return {}


def _container_status(container: ContainerState) -> dict[str, Any]:
    return {
        "name": container.name,
        "image": container.image,
        "imageID": container.image,
        "containerID": container.container_id,
        "state": _state_object(container.state),
        "lastState": _state_object(container.last),
        "restartCount": container.restarts,
        "ready": container.ready,
        "started": container.started,
    }


def initialized(init: Sequence[ContainerState]) -> bool:
    """Whether every init container has done its part: ended well, or, for a sidecar, started."""
    return all(
        one.started
        if one.restart_policy == "Always"
        else isinstance(one.state, Terminated) and one.state.exit_code == 0
        for one in init
    )


def pod_phase(policy: str, init: Sequence[ContainerState], main: Sequence[ContainerState]) -> str:
    """Kubelet's getPhase: Pending, Running, Succeeded or Failed."""
    if not initialized(init) and not any(isinstance(one.state, (Running, Terminated)) for one in main):
        failed = [
            one
            for one in init
            if isinstance(one.state, Terminated) and one.state.exit_code != 0 and one.restart_policy != "Always"
        ]
        return "Failed" if failed and policy == "Never" else "Pending"
    if any(isinstance(one.state, Waiting) and one.last is None for one in main):
        return "Pending"
    if any(isinstance(one.state, Running) for one in main):
        return "Running"
    # What is left has ended; a container that waits for its restart counts as ended the way it last did.
    endings = [one.state if isinstance(one.state, Terminated) else one.last for one in main]
    codes = [one.exit_code for one in endings if one is not None]
    if policy == "Always":
        return "Running"
    if all(code == 0 for code in codes):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def _condition(kind: str, ok: bool, reason: str, message: str, previous: Sequence[Object], now: str) -> dict[str, Any]:
    status = "True" if ok else "False"
    old = next((one for one in previous if one["type"] == kind), None)
    moved = now if old is None or old["status"] != status else old.get("lastTransitionTime", now)
    condition: dict[str, Any] = {"type": kind, "status": status, "lastTransitionTime": moved, "lastProbeTime": None}
    if not ok and reason:
        condition |= {"reason": reason, "message": message}
    return condition


def pod_status(
    pod: Object,
    *,
    init: Sequence[ContainerState],
    main: Sequence[ContainerState],
    pod_ip: str,
    host_ip: str,
    start_time: str,
    now: str,
    previous: Object,
    override: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """The whole status of a pod. ``previous`` gives transition times and conditions that others own.

    ``override`` is (phase, reason, message) for a pod that ended for a reason of its own, such as a deadline.
    """
    policy = pod["spec"].get("restartPolicy", "Always")
    phase = pod_phase(policy, init, main) if override is None else override[0]
    conditions = previous.get("conditions") or ()
    done = phase in ("Succeeded", "Failed")
    unready = [one.name for one in main if not one.ready]
    unready += [one.name for one in init if one.restart_policy == "Always" and not one.ready]
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    open_gates = [
        gate for gate in gates if not any(one["type"] == gate and one["status"] == "True" for one in conditions)
    ]
    reason = "PodCompleted" if phase == "Succeeded" else "PodFailed" if phase == "Failed" else "ContainersNotReady"
    names = ", ".join(unready)
    message = "" if done else f"containers with unready status: [{names}]"
    waiting_init = [one.name for one in init if not initialized([one])]
    init_ok = not waiting_init
    own = [
        _condition("PodReadyToStartContainers", bool(pod_ip) and not done, "", "", conditions, now),
        _condition(
            "Initialized",
            init_ok,
            "ContainersNotInitialized",
            f"containers with incomplete status: [{', '.join(waiting_init)}]",
            conditions,
            now,
        ),
        _condition("Ready", not unready and not open_gates and not done, reason, message, conditions, now),
        _condition("ContainersReady", not unready and not done, reason, message, conditions, now),
        _condition("PodScheduled", True, "", "", conditions, now),
    ]
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": own + [dict(one) for one in conditions if one["type"] not in OWN_CONDITIONS],
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "startTime": start_time,
        "containerStatuses": [_container_status(one) for one in main],
        "qosClass": (pod.get("status") or {}).get("qosClass", "BestEffort"),
        "reason": override[1] if override else None,
        "message": override[2] if override else None,
    }
    if init:
        status["initContainerStatuses"] = [_container_status(one) for one in init]
    if pod_ip:
        status |= {"podIP": pod_ip, "podIPs": [{"ip": pod_ip}]}
    return status
