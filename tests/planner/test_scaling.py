"""One owner of replicas: scaled by hand they are followed, contested they are left alone, and it is said by whom."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from motley_api import keys
from motley_api.resources.rlrun import InlineGroup
from motley_operator import manifests
from motley_operator.cache import slim
from motley_operator.measure import RunMemory
from motley_operator.planner import scaling
from motley_operator.planner.model import Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import at
from planner.test_plan import live, replicas, running, settle

HPA = "horizontal-pod-autoscaler"


def written(obj: Any, count: int, manager: str) -> dict[str, Any]:
    """As the API server holds it after another manager scaled it, and as the cache keeps it."""
    entry = {
        "manager": manager,
        "operation": "Update",
        "subresource": "scale",
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
    }
    metadata = {**obj["metadata"], "managedFields": [entry]}
    metadata.pop("replicasSetBy", None)
    return slim({**obj, "metadata": metadata, "spec": {**obj["spec"], "replicas": count}})


class Fight:
    """A run whose object (kind, name) another manager sets again and again."""

    def __init__(self, seen: Snapshot, kind: str, name: str) -> None:
        self.seen, self.key, self.memory = seen, (kind, name), RunMemory()

    def look(self, moment: float = 60) -> None:
        self.memory.notice(self.seen.children, at(moment))
        writes = {key: watched.writes for key, watched in self.memory.scaled.items() if watched.writes}
        self.seen = replace(self.seen, replicas_writes=writes)

    def set(self, count: int, manager: str = HPA) -> None:
        obj = written(self.seen.children[self.key], count, manager)
        self.seen = replace(self.seen, children={**self.seen.children, self.key: obj})

    def settle(self, moment: float) -> None:
        """The operator looks, acts, and looks again. Who applies another value owns it alone, who applies the same one shares it."""
        self.look(moment)
        before = self.seen.children[self.key]
        after = settle(self.seen, at(moment))
        obj = after.children[self.key]
        if obj["spec"]["replicas"] == before["spec"]["replicas"] and "replicasSetBy" in before["metadata"]:
            obj = {**obj, "metadata": {**obj["metadata"], "replicasSetBy": before["metadata"]["replicasSetBy"]}}
        self.seen = replace(after, children={**after.children, self.key: obj})
        self.look(moment)

    def condition(self, moment: float, group: str) -> tuple[str, str, str]:
        found = plan(self.seen, at(moment)).group_statuses[group].conditions
        item = next(one for one in found if one.type == "ScaleConflict")
        return item.status, item.reason, item.message


def test_a_deployment_that_is_scaled_by_hand_once_is_put_right() -> None:
    fight = Fight(settle(running(), at(60)), "Deployment", "h100-fp8")
    fight.look()
    fight.set(7, "kubectl")
    fight.settle(71)
    assert replicas(fight.seen)["h100-fp8"] == 1
    assert fight.condition(72, "h100-fp8")[:2] == ("False", "OneOwner")


def fought(**more: Any) -> Fight:
    """An autoscaler wants seven engines, three times within a minute."""
    fight = Fight(settle(running(**more), at(60)), "Deployment", "h100-fp8")
    fight.look()
    for number in range(3):
        fight.set(7)
        fight.settle(72 + 15 * number)
    return fight


def test_a_deployment_that_another_manager_sets_again_and_again_is_left_to_it() -> None:
    fight = fought()
    assert replicas(fight.seen)["h100-fp8"] == 7
    assert plan(fight.seen, at(110)).actions == ()
    status, reason, message = fight.condition(110, "h100-fp8")
    assert (status, reason) == ("True", "DeploymentContested")
    assert message.startswith(f"{HPA} (scale) and motley-operator both set the Deployment's spec.replicas")
    assert "scale SamplerGroup h100-fp8 instead" in message
    assert fight.condition(110, "b200-nvfp4")[0] == "False"
    # What it sets next is followed at once.
    fight.set(5)
    fight.settle(121)
    assert replicas(fight.seen)["h100-fp8"] == 5


def test_the_budget_holds_also_in_a_conflict() -> None:
    # The trainer costs 50; of the 14.15 left, the cheapest engines come first: three of 3.95
    fight = fought(spec=study.run_spec(budget={"usdPerHour": "64.15"}))
    assert replicas(fight.seen)["h100-fp8"] == 3


def test_a_conflict_outlives_a_restart_and_ends_when_the_other_one_rests() -> None:
    fight = fought()
    again = Fight(fight.seen, *fight.key)
    again.look()
    again.settle(200)
    assert again.condition(200, "h100-fp8")[:2] == ("True", "DeploymentContested")
    assert replicas(again.seen)["h100-fp8"] == 7
    later = 103 + scaling.HOLD.total_seconds()
    again.settle(later)
    assert again.condition(later, "h100-fp8")[0] == "False"
    assert replicas(again.seen)["h100-fp8"] == 1


def test_a_group_that_the_operator_sizes_is_left_to_who_scales_it_again_and_again() -> None:
    groups = (study.group("h100-fp8", replicas=1, minReplicas=0, maxReplicas=4), *running().groups[1:])
    held = {"kind": "SamplerGroup", "metadata": {"name": "h100-fp8", "uid": "u"}, "spec": {"replicas": 1}}
    fight = Fight(settle(replace(running(), groups=groups), at(60)), "SamplerGroup", "h100-fp8")
    fight.seen = replace(fight.seen, children={**fight.seen.children, fight.key: held})
    fight.look()
    for number, count in enumerate((3, 2, 6)):
        fight.set(count, "keda")
        fight.seen = replace(
            fight.seen, groups=(study.group("h100-fp8", replicas=count, minReplicas=0, maxReplicas=4),)
        )
        fight.look(70 + 15 * number)
    status, reason, message = fight.condition(110, "h100-fp8")
    assert (status, reason) == ("True", "SamplerGroupContested")
    assert message.startswith("keda (scale) and motley-operator both set spec.replicas")
    assert "take out minReplicas and maxReplicas" in message
    # Within max: four, not six
    assert replicas(settle(fight.seen, at(110)))["h100-fp8"] == 4


def test_a_group_without_bounds_is_followed_and_nobody_is_in_the_way() -> None:
    held = {"kind": "SamplerGroup", "metadata": {"name": "h100-fp8", "uid": "u"}, "spec": {"replicas": 1}}
    fight = Fight(settle(running(), at(60)), "SamplerGroup", "h100-fp8")
    fight.seen = replace(fight.seen, children={**fight.seen.children, fight.key: held})
    fight.look()
    for number, count in enumerate((3, 2, 6)):
        fight.set(count, "kubectl")
        others = [group for group in fight.seen.groups if group.name != "h100-fp8"]
        fight.seen = replace(fight.seen, groups=(study.group("h100-fp8", replicas=count), *others))
        fight.look(70 + 15 * number)
    assert fight.condition(110, "h100-fp8")[0] == "False"
    assert replicas(settle(fight.seen, at(110)))["h100-fp8"] == 6


def test_writes_far_apart_are_no_conflict() -> None:
    fight = Fight(settle(running(), at(60)), "Deployment", "h100-fp8")
    fight.look()
    apart = (scaling.WITHIN + timedelta(seconds=1)).total_seconds() / 2
    for number in range(6):
        fight.set(7)
        fight.settle(72 + apart * number)
    assert replicas(fight.seen)["h100-fp8"] == 1


def test_an_inline_group_that_was_scaled_keeps_its_replicas_until_the_run_is_edited() -> None:
    run = manifests.RunRef("ns", "study", "uid-run")

    def inline(count: int) -> InlineGroup:
        return InlineGroup.model_validate({"name": "a", "gpuType": "H100", "precision": "FP8", "replicas": count})

    made = live(manifests.inline_sampler_group(run, inline(2)))
    assert (made["spec"]["replicas"], made["metadata"]["annotations"][keys.REPLICAS_ANNOTATION]) == (2, "2")
    scaled = written(made, 5, "kubectl")
    kept = manifests.inline_sampler_group(run, inline(2), scaled)
    assert "replicas" not in kept["spec"]  # so that applying it changes nothing of theirs
    assert manifests.differs(kept, {**scaled, "metadata": {**scaled["metadata"], **kept["metadata"]}}) is False
    assert manifests.inline_sampler_group(run, inline(3), scaled)["spec"]["replicas"] == 3


def test_only_owners_of_replicas_are_kept_of_managed_fields() -> None:
    entries = [
        {"manager": "kubectl", "time": "2026-10-13T12:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": keys.FIELD_MANAGER, "time": "2026-10-13T12:00:01Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "other", "time": "2026-10-13T12:00:02Z", "fieldsV1": {"f:spec": {"f:template": {}}}},
    ]
    kept = slim({"kind": "Deployment", "metadata": {"name": "a", "managedFields": entries}})
    want = [{"manager": "kubectl", "subresource": ""}]
    assert kept["metadata"] == {"name": "a", "replicasSetBy": want}
    assert "replicasSetBy" not in slim({"kind": "Job", "metadata": {"name": "a", "managedFields": entries}})["metadata"]
