"""PersistentVolumes for the class ``motley-local``: a folder of this machine for each claim. Pure planning; the agent applies it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = Mapping[str, Any]
STORAGE_CLASS = "motley-local"
PROVISIONER = "local.motley.dev/folder"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
DEFAULT_SIZE = "1Gi"


def storage_class_manifest() -> dict[str, Any]:
    """The default class. Volumes are made at once: every node is this machine."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


@dataclass(frozen=True)
class StoragePlan:
    create: tuple[dict[str, Any], ...]  # PersistentVolumes
    remove: tuple[Object, ...]  # PersistentVolumes whose claim is gone


def volume_name(claim: Object) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def plan_storage(
    claims: Iterable[Object], volumes: Iterable[Object], classes: Mapping[str, Object], root: Path
) -> StoragePlan:
    """Volumes to make for pending claims of our classes, and released ones to remove."""
    volumes = list(volumes)
    known = {volume["metadata"]["name"] for volume in volumes}
    create = []
    for claim in claims:
        storage_class = classes.get(claim["spec"].get("storageClassName") or "")
        if storage_class is None or claim["spec"].get("volumeName") or claim["metadata"].get("deletionTimestamp"):
            continue
        waits = storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"
        if waits and SELECTED_NODE not in (claim["metadata"].get("annotations") or {}):
            continue
        if volume_name(claim) not in known:
            create.append(_volume(claim, storage_class, root))
    remove = [
        volume
        for volume in volumes
        if volume["spec"].get("storageClassName") in classes
        and (volume.get("status") or {}).get("phase") == "Released"
        and volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete"
        and not volume["metadata"].get("deletionTimestamp")
        and "hostPath" in volume["spec"]
    ]
    return StoragePlan(tuple(create), tuple(remove))


def _volume(claim: Object, storage_class: Object, root: Path) -> dict[str, Any]:
    metadata, spec = claim["metadata"], claim["spec"]
    size = ((spec.get("resources") or {}).get("requests") or {}).get("storage", DEFAULT_SIZE)
    folder = f"{metadata['namespace']}_{metadata['name']}_{metadata['uid'][:8]}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": volume_name(claim),
            "annotations": {"pv.kubernetes.io/provisioned-by": storage_class["provisioner"]},
        },
        "spec": {
            "accessModes": list(spec["accessModes"]),
            "capacity": {"storage": size},
            "persistentVolumeReclaimPolicy": storage_class.get("reclaimPolicy", "Delete"),
            "storageClassName": storage_class["metadata"]["name"],
            "volumeMode": "Filesystem",
            "hostPath": {"path": str(root / folder), "type": "DirectoryOrCreate"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }


def claim_folder(claim: Object | None, volumes: Mapping[str, Object]) -> Path | None:
    """Host folder behind a claim; None until it is bound to a volume that lies on this machine."""
    if claim is None or (claim.get("status") or {}).get("phase") != "Bound":
        return None
    volume = volumes.get(claim["spec"].get("volumeName", ""))
    if volume is None:
        return None
    source = volume["spec"].get("hostPath") or volume["spec"].get("local")
    return None if source is None else Path(source["path"])
