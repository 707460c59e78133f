from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from motley_api import keys
from motley_operator.cache import Cache, pod_view

NOW = datetime(2026, 10, 13, 12, 0, 0, tzinfo=UTC)
KEY = ("ns", "demo")


def pod(name: str = "engine-0", *, version: int = 1, uid: str = "u1", **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": "ns",
            "name": name,
            "uid": uid,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-10-13T11:00:00Z",
            "labels": {
                keys.RUN_LABEL: "demo",
                keys.ROLE_LABEL: "sampler",
                keys.GROUP_LABEL: "g",
                keys.GPU_TYPE_LABEL: "H100",
            },
        },
        "spec": {"nodeName": "n1", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-10-13T11:00:05Z"},
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-10-13T11:01:00Z"},
            ],
            **status,
        },
    }


@pytest.fixture
def changes() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def cache(changes: list[tuple[str, str]]) -> Cache:
    return Cache(changes.append)


def test_a_pod_costs_from_the_moment_it_was_bound() -> None:
    view = pod_view(pod(), NOW)
    assert view is not None
    assert view.scheduled == datetime(2026, 10, 13, 11, 0, 5, tzinfo=UTC)
    assert (view.gpus, view.gpu_type, view.serves) == (2, "H100", True)


def test_an_older_state_never_replaces_a_newer_one(cache: Cache) -> None:
    """An answer to our own write may come before the watch's older event."""
    cache.put(pod(version=100), NOW)
    cache.put(pod(version=99, phase="Pending", conditions=[]), NOW)
    assert cache.pods(KEY)[0].ready


def test_a_change_marks_the_run_and_a_repetition_does_not(cache: Cache, changes: list[tuple[str, str]]) -> None:
    cache.put(pod(version=1), NOW)
    assert changes == [KEY]
    cache.put(pod(version=2), NOW)  # only its resourceVersion moved
    assert changes == [KEY]
    cache.put(pod(version=3, phase="Failed"), NOW)
    assert changes == [KEY, KEY]


def test_a_pod_that_went_is_remembered_with_its_end_so_that_it_is_paid_for(cache: Cache) -> None:
    cache.put(
        {"kind": "RLRun", "metadata": {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "1"}}, NOW
    )
    cache.put(pod(), NOW)
    cache.drop(pod(version=2), NOW)
    (view,) = cache.pods(KEY)
    assert (view.gone, view.finished, view.serves) == (True, NOW, False)


def test_nothing_is_remembered_of_a_run_that_is_gone_itself(cache: Cache) -> None:
    cache.put(pod(), NOW)
    cache.drop(pod(version=2), NOW)
    assert cache.pods(KEY) == ()
    assert list(cache.runs()) == []


def test_a_grave_is_forgotten_after_a_while(cache: Cache) -> None:
    cache.put(pod("a", uid="a"), NOW)
    cache.put(pod("b", uid="b"), NOW)
    cache.put(pod("c", uid="c"), NOW)
    cache.drop(pod("a", uid="a", version=2), NOW)
    cache.drop(pod("b", uid="b", version=2), NOW + timedelta(hours=1))
    assert [view.name for view in cache.pods(KEY)] == ["c", "b"]


def test_a_pod_that_was_deleted_unseen_is_found_missing_by_a_full_list(
    cache: Cache, changes: list[tuple[str, str]]
) -> None:
    """After a 410 the framework lists anew and never says what is gone."""
    cache.put(pod("ghost", uid="g"), NOW)
    cache.put(pod("alive", uid="a"), NOW)
    changes.clear()
    forgotten = cache.reconcile_with("Pod", [("ns", "alive", "a")], NOW, NOW)
    assert forgotten == 1
    assert [view.name for view in cache.pods(KEY) if view.exists] == ["alive"]
    assert changes == [KEY]


def test_an_object_younger_than_the_list_is_no_ghost(cache: Cache) -> None:
    cache.put(pod(), NOW)
    listed_before_it_was_made = datetime(2026, 10, 13, 10, 59, 0, tzinfo=UTC)
    assert cache.reconcile_with("Pod", [], listed_before_it_was_made, NOW) == 0


def test_a_late_deletion_of_an_earlier_pod_of_the_name_is_ignored(cache: Cache) -> None:
    cache.put(pod(uid="new", version=5), NOW)
    cache.drop(pod(uid="old", version=4), NOW)
    assert [view.uid for view in cache.pods(KEY)] == ["new"]


def test_a_pod_stuck_terminating_serves_nothing(cache: Cache) -> None:
    stuck = pod()
    stuck["metadata"]["deletionTimestamp"] = "2026-10-13T11:30:00Z"
    cache.put(stuck, NOW)
    (view,) = cache.pods(KEY)
    assert not view.serves
    assert view.held_until(NOW) == datetime(2026, 10, 13, 11, 30, 0, tzinfo=UTC)


def test_the_last_words_of_a_container_are_kept() -> None:
    ended = {
        "terminated": {
            "exitCode": 78,
            "message": "TasksNotFound: /tasks/train is empty\n",
            "finishedAt": "2026-10-13T11:40:00Z",
        }
    }
    view = pod_view(pod(phase="Failed", containerStatuses=[{"state": ended, "restartCount": 0}]), NOW)
    assert view is not None
    assert (view.exit_code, view.message) == (78, "TasksNotFound: /tasks/train is empty\n")
    assert view.finished == datetime(2026, 10, 13, 11, 40, 0, tzinfo=UTC)


def test_a_crash_before_a_restart_still_shows_its_exit_code() -> None:
    before = {"terminated": {"exitCode": 1, "message": "boom"}}
    statuses = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": before, "restartCount": 3}]
    view = pod_view(pod(containerStatuses=statuses), NOW)
    assert view is not None
    assert (view.exit_code, view.waiting, view.restarts) == (1, "CrashLoopBackOff", 3)


@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated"])
def test_a_pod_without_a_node_carries_the_schedulers_words(reason: str) -> None:
    refused = {
        "type": "PodScheduled",
        "status": "False",
        "reason": reason,
        "message": "0/3 nodes are available",
    }
    waiting = pod(phase="Pending", conditions=[refused])
    del waiting["spec"]["nodeName"]
    view = pod_view(waiting, NOW)
    assert view is not None
    assert view.unschedulable == "0/3 nodes are available"
    assert view.scheduled is None


def test_a_pod_of_nobody_is_none_of_ours() -> None:
    other = pod()
    other["metadata"]["labels"] = {}
    assert pod_view(other, NOW) is None


def config(name: str, version: int) -> dict[str, Any]:
    return {
        "kind": "ConfigMap",
        "metadata": {
            "namespace": "ns",
            "name": name,
            "uid": name,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-10-13T11:00:00Z",
            "labels": {keys.RUN_LABEL: "demo"},
            "managedFields": [{"manager": "motley-operator", "fieldsV1": {"f:data": {}}}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        },
        "data": {"key": "value of " + "many"},
    }


def test_what_we_wrote_and_no_watch_has_shown_is_the_silence_of_that_watch(cache: Cache) -> None:
    """Paused, or dead while its connection stands: nothing else would tell."""
    cache.heard("ConfigMap", "98")
    cache.wrote(config("a", 99), NOW)
    later = NOW + timedelta(seconds=40)
    assert cache.silence(later) == {"ConfigMap": timedelta(seconds=40)}
    cache.wrote(config("a", 120), later)
    assert cache.silence(later) == {"ConfigMap": timedelta(seconds=40)}  # it counts from the first
    cache.heard("ConfigMap", "100")
    assert cache.silence(later) == {}


def test_a_watch_that_began_anew_owes_nothing_of_before(cache: Cache) -> None:
    cache.wrote(config("a", 99), NOW)
    cache.reconcile_with("ConfigMap", [], NOW, NOW)
    assert cache.silence(NOW) == {}


def test_a_write_that_changed_nothing_is_owed_by_nobody(cache: Cache) -> None:
    cache.heard("ConfigMap", "99")
    cache.wrote(config("a", 99), NOW)
    assert cache.silence(NOW) == {}


def test_resource_versions_are_numbers_not_words(cache: Cache) -> None:
    cache.heard("ConfigMap", "1000")
    cache.wrote(config("a", 999), NOW)
    assert cache.silence(NOW) == {}


def test_each_change_gives_a_run_another_number_and_a_run_that_came_again_an_own_one(cache: Cache) -> None:
    cache.put(pod(version=1), NOW)
    first = cache.version(KEY)
    cache.put(pod(version=2), NOW)  # only its resourceVersion moved
    assert cache.version(KEY) == first
    cache.put(pod(version=3, phase="Failed"), NOW)
    second = cache.version(KEY)
    cache.drop(pod(version=4), NOW)
    assert cache.version(KEY) == 0
    cache.put(pod(version=5, uid="u2"), NOW)
    assert len({first, second, cache.version(KEY), 0}) == 4


def test_nothing_that_nobody_reads_is_kept_and_what_repeats_is_kept_once(cache: Cache) -> None:
    cache.put(config("a", 1), NOW)
    cache.put(config("b", 2), NOW)
    one, other = cache.of_run(KEY, "ConfigMap")
    assert set(one["metadata"]) == {"namespace", "name", "uid", "resourceVersion", "creationTimestamp", "labels"}
    assert one["data"]["key"] is other["data"]["key"]


def test_churn_leaves_nothing_behind(cache: Cache) -> None:
    run = {"namespace": "ns", "name": "demo", "uid": "r", "creationTimestamp": "2026-10-13T11:00:00Z"}
    for turn in range(3):
        version = 10 * turn
        cache.put({"kind": "RLRun", "metadata": {**run, "resourceVersion": str(version + 1)}}, NOW)
        cache.wrote(config("a", version + 2), NOW)
        cache.heard("ConfigMap", str(version + 2))
        cache.put(pod(version=version + 3, uid=f"u{turn}"), NOW)
        cache.drop(pod(version=version + 4, uid=f"u{turn}"), NOW)
        cache.drop(config("a", version + 5), NOW)
        cache.drop({"kind": "RLRun", "metadata": {**run, "resourceVersion": str(version + 6)}}, NOW)
    held = {name: value for name, value in vars(cache).items() if isinstance(value, dict) and name != "_heard"}
    assert held == {"_objects": {}, "_pods": {}, "_runs": {}, "_gone": {}, "_versions": {}, "_unheard": {}}
