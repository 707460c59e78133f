"""Where a run is in its life, and whether it should hold pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from motley_api import keys
from motley_api.records import StepRecord
from motley_api.resources.rlrun import GuardStatus, Totals

from motley_operator import manifests, names
from motley_operator.planner.model import Object, PodView, Snapshot


class State(StrEnum):
    """Reasons of the condition Succeeded."""

    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    BUDGET_SPENT = "BudgetSpent"
    COMPLETED = "Completed"
    FAILED = "Failed"
    INVALID = "InvalidConfiguration"


# The trainer saves, and every pod goes: what does not train does not cost. All of these go on from the last checkpoint.
RESTING = frozenset({State.SUSPENDED, State.BUDGET_SPENT, State.PAUSED})
STOPPED = RESTING | {State.COMPLETED, State.FAILED, State.INVALID}
LONG_AGO = datetime.min.replace(tzinfo=UTC)
ENDED = frozenset({State.COMPLETED, State.FAILED, State.INVALID})


@dataclass(frozen=True)
class Life:
    state: State
    message: str

    @property
    def stopped(self) -> bool:
        """No pod is wanted."""
        return self.state in STOPPED

    @property
    def ended(self) -> bool:
        """Nothing will be trained any more, unless the spec changes."""
        return self.state in ENDED

    @property
    def resting(self) -> bool:
        return self.state in RESTING


def job_condition(job: Object | None, kind: str) -> dict[str, Any] | None:
    conditions = (job or {}).get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind and item["status"] == "True"), None)


def to_extend(seen: Snapshot) -> bool:
    """The Job is complete, and spec.steps grew since it was made: another one goes on from the last checkpoint."""
    job = seen.child("Job", names.trainer(seen.name))
    if job is None or job_condition(job, "Complete") is None:
        return False
    made_for = job["metadata"].get("annotations", {}).get(keys.STEPS_ANNOTATION, "")
    return made_for.isdigit() and int(made_for) < seen.spec.steps


def edited_since_start(seen: Snapshot) -> tuple[str, ...]:
    """Parts of the spec that the gang reads at its start and that changed since its Job was made. A Job of an operator that did
    not note them yet was made from the spec as it is."""
    job = seen.child("Job", names.trainer(seen.name))
    noted = (job or {}).get("metadata", {}).get("annotations", {}).get(keys.START_ANNOTATION)
    if not noted:
        return ()
    before = dict(part.split("=", 1) for part in noted.split(",") if "=" in part)
    now = manifests.trainer_reads(seen.spec)
    # A part that only one side knows comes from another version of the operator, not from a person.
    return tuple(sorted(name for name in now.keys() & before.keys() if now[name] != before[name]))


def gang_pods(seen: Snapshot) -> tuple[PodView, ...]:
    """The trainer's pods that have not ended."""
    return tuple(pod for pod in seen.pods if pod.role == keys.ROLE_TRAINER and pod.exists and pod.finished is None)


def judged_again(seen: Snapshot, lineage: Sequence[StepRecord]) -> GuardStatus | None:
    """What the guard holds to; of a run that was taken back, the steps from there on are news to it, whatever it had freed before."""
    held, back = seen.status.guard, seen.spec.checkpoint.rewind_to_step
    if held is None or back is None or not lineage:
        return held
    newest = lineage[-1]
    began = min(record.step for record in lineage if record.attempt == newest.attempt)
    if began > back + 1 or newest.step >= held.since_step:
        return held
    return held.model_copy(update={"since_step": began - 1})


def restarts_gang(seen: Snapshot, life: Life) -> tuple[str, ...]:
    """What makes the gang that runs now save, leave and start again; empty once it has been asked to."""
    job = seen.child("Job", names.trainer(seen.name))
    ended = job_condition(job, "Complete") or job_condition(job, "Failed")
    if job is None or ended or life.stopped or job.get("spec", {}).get("suspend", False):
        return ()
    return edited_since_start(seen)


def to_retry(seen: Snapshot) -> bool:
    """The Job failed, and a person asks for another try: by an edit of what it failed with, or by suspending the run and resuming it."""
    job = seen.child("Job", names.trainer(seen.name))
    return job_condition(job, "Failed") is not None and (seen.spec.suspend or bool(edited_since_start(seen)))


def invalid_configuration(seen: Snapshot, role: str | None = None) -> str:
    """Last words of a pod that ended because it can never work as configured; "" when there is none."""
    found = [
        pod
        for pod in seen.pods
        if pod.exit_code == keys.EXIT_CONFIG
        and (role is None or pod.role == role)
        and (not pod.gone or role == keys.ROLE_TRAINER)
    ]
    if not found:
        return ""
    newest = max(found, key=lambda pod: (pod.finished or pod.created or LONG_AGO, pod.name))
    return f"{newest.role} pod {newest.name}: {last_words(newest)}"


def last_words(pod: PodView) -> str:
    """The last line that a pod wrote: what says why, by the contract of EXIT_CONFIG; its log is before it."""
    lines = pod.message.strip().splitlines()
    return lines[-1] if lines else "no message"


def judge(seen: Snapshot, totals: Totals, *, guard_paused: bool, guard_message: str) -> Life:
    job = seen.child("Job", names.trainer(seen.name))
    succeeded = next((item for item in seen.status.conditions if item.type == "Succeeded"), None)
    done = seen.trainer is not None and seen.trainer.finished and seen.trainer.step >= seen.spec.steps
    if not to_extend(seen):
        if job_condition(job, "Complete") or done:
            return Life(State.COMPLETED, f"all {seen.spec.steps} steps are done")
        if job is None and succeeded is not None and succeeded.status == "True":
            return Life(State.COMPLETED, succeeded.message)
    if (failed := job_condition(job, "Failed")) and not to_retry(seen):
        if words := invalid_configuration(seen, keys.ROLE_TRAINER):
            return Life(State.INVALID, words)
        if succeeded is not None and succeeded.status == "False" and succeeded.reason in (State.FAILED, State.INVALID):
            return Life(State(succeeded.reason), succeeded.message)  # the pod that said why is gone by now
        return Life(State.FAILED, _failure(seen, failed))
    if seen.spec.suspend:
        return Life(State.SUSPENDED, "spec.suspend is true; set it to false to go on from the last checkpoint")
    if seen.spec.budget.usd_total is not None and totals.billed_usd is not None:
        cap = Decimal(seen.spec.budget.usd_total)
        if Decimal(totals.billed_usd) >= cap:
            return Life(
                State.BUDGET_SPENT,
                f"the run has cost ${totals.billed_usd} of budget.usdTotal ${cap}; raise it to go on from the last checkpoint",
            )
    if guard_paused:
        return Life(State.PAUSED, f"paused by the guard: {guard_message}; edit spec to go on from the last checkpoint")
    step = seen.trainer.step if seen.trainer is not None else seen.status.step or 0
    if step == 0:
        return Life(State.STARTING, "no step is done yet")
    return Life(State.RUNNING, f"step {step} of {seen.spec.steps}")


def _failure(seen: Snapshot, failed: dict[str, Any]) -> str:
    ended = [pod for pod in seen.pods if pod.role == keys.ROLE_TRAINER and pod.finished is not None and pod.exit_code]
    last = max(ended, key=lambda pod: (pod.finished, pod.name), default=None)
    words = f"; pod {last.name} ended with {last.exit_code}: {last.message.strip()}" if last is not None else ""
    return f"the trainer's Job failed: {failed.get('reason', '')}: {failed.get('message', '')}{words}"
