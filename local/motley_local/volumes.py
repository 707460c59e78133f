"""Volumes of a pod as folders on this machine, and how ConfigMap and Secret folders change under a running container."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motley_local.podspec import ConfigError, Lookup, Mount, PodFacts, byte_data, expand, field_value, resource_value

Object = Mapping[str, Any]
DATA_LINK = "..data"


def write_atomically(folder: Path, files: Mapping[str, bytes], mode: int = 0o644) -> bool:
    """Make ``folder`` hold exactly these files (keys may hold slashes), all at once; whether anything changed.

    As kubelet does it: files lie in a hidden folder of their own, ``..data`` points to it, and each name is a link through ``..data``, so
    that one rename switches them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / DATA_LINK
    current = folder / os.readlink(link) if link.is_symlink() else None
    if current is not None and _read_tree(current) == dict(files):
        return False
    fresh = folder / f"..{secrets.token_hex(6)}"
    fresh.mkdir(mode=0o755)
    for name, data in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
    staged = folder / "..data_tmp"
    staged.unlink(missing_ok=True)
    staged.symlink_to(fresh.name)
    os.replace(staged, link)
    wanted = {name.split("/")[0] for name in files}
    for name in wanted:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"{DATA_LINK}/{name}")
    for entry in list(folder.iterdir()):
        if not entry.name.startswith("..") and entry.name not in wanted:
            entry.unlink()
    if current is not None:
        shutil.rmtree(current, ignore_errors=True)
    return True


def _read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _picked(data: Mapping[str, bytes], source: Object, what: str) -> dict[str, bytes]:
    """All keys, or the ``items`` asked for under the paths given."""
    items = source.get("items")
    if items is None:
        return dict(data)
    picked: dict[str, bytes] = {}
    for item in items:
        if item["key"] not in data:
            if source.get("optional"):
                continue
            raise ConfigError(f"{what} has no key {item['key']!r}")
        picked[item["path"]] = data[item["key"]]
    return picked


def object_files(kind: str, name: str, source: Object, namespace: str, lookup: Lookup) -> dict[str, bytes]:
    """Files of a configMap or secret volume source.

    Raises:
        ConfigError: the object or a key is missing and not optional.
    """
    found = lookup(kind, namespace, name)
    if found is None:
        if source.get("optional"):
            return {}
        raise ConfigError(f'MountVolume.SetUp failed: {kind.lower()} "{name}" not found')
    return _picked(byte_data(kind, found), source, f"{kind} {namespace}/{name}")


def downward_files(pod: Object, source: Object, facts: PodFacts) -> dict[str, bytes]:
    """Files of a downwardAPI source."""
    files: dict[str, bytes] = {}
    for item in source.get("items") or ():
        if "fieldRef" in item:
            text = field_value(pod, item["fieldRef"]["fieldPath"], facts)
        else:
            reference = item["resourceFieldRef"]
            container = next(one for one in pod["spec"]["containers"] if one["name"] == reference["containerName"])
            text = resource_value(container, reference, facts)
        files[item["path"]] = text.encode()
    return files


def projected_files(
    pod: Object, source: Object, facts: PodFacts, lookup: Lookup, tokens: Mapping[str, str]
) -> dict[str, bytes]:
    """Files of a projected volume. ``tokens`` holds the service account token of each audience, "" for the API server's."""
    namespace = pod["metadata"]["namespace"]
    files: dict[str, bytes] = {}
    for part in source.get("sources") or ():
        if "configMap" in part:
            files |= object_files("ConfigMap", part["configMap"]["name"], part["configMap"], namespace, lookup)
        elif "secret" in part:
            files |= object_files("Secret", part["secret"]["name"], part["secret"], namespace, lookup)
        elif "downwardAPI" in part:
            files |= downward_files(pod, part["downwardAPI"], facts)
        elif "serviceAccountToken" in part:
            token = part["serviceAccountToken"]
            files[token["path"]] = tokens[token.get("audience") or ""].encode()
    return files


def token_requests(pod: Object) -> dict[str, int]:
    """Audience -> seconds of life, for every service account token that the pod's volumes ask for."""
    wanted: dict[str, int] = {}
    for volume in pod["spec"].get("volumes") or ():
        for part in (volume.get("projected") or {}).get("sources") or ():
            if "serviceAccountToken" in part:
                token = part["serviceAccountToken"]
                wanted[token.get("audience") or ""] = int(token.get("expirationSeconds") or 3600)
    return wanted


def text_files(
    pod: Object, volume: Object, facts: PodFacts, lookup: Lookup, tokens: Mapping[str, str]
) -> tuple[dict[str, bytes], int] | None:
    """Files and their mode, for a volume whose content the API server holds; None for a volume that is a plain folder."""
    namespace = pod["metadata"]["namespace"]
    if source := volume.get("configMap"):
        return object_files("ConfigMap", source["name"], source, namespace, lookup), source.get("defaultMode", 0o644)
    if source := volume.get("secret"):
        return object_files("Secret", source["secretName"], source, namespace, lookup), source.get("defaultMode", 0o644)
    if "downwardAPI" in volume:
        return downward_files(pod, volume["downwardAPI"], facts), 0o644
    if "projected" in volume:
        return projected_files(pod, volume["projected"], facts, lookup, tokens), 0o644
    return None


def plain_folder(volume: Object, claim_path: Path | None, folder: Path) -> Path:
    """Host folder (or file) behind an emptyDir, hostPath or claim; made when it may be.

    Raises:
        ConfigError: a hostPath is not of its declared type, or the kind of volume is not supported.
    """
    if "emptyDir" in volume:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        return folder
    if "persistentVolumeClaim" in volume and claim_path is not None:
        claim_path.mkdir(parents=True, exist_ok=True)
        return claim_path
    if "hostPath" in volume:
        return _host_path(volume["name"], volume["hostPath"])
    kinds = [key for key in volume if key != "name"]
    raise ConfigError(f"volume {volume['name']!r}: {', '.join(kinds)} is not supported by the local cluster")


def _host_path(name: str, source: Object) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    fits = {
        "Directory": path.is_dir(),
        "DirectoryOrCreate": path.is_dir(),
        "File": path.is_file(),
        "Socket": path.is_socket(),
    }
    if not fits.get(kind, path.exists()):
        raise ConfigError(f"volume {name!r}: hostPath type check failed: {path} is not {kind or 'there'}")
    return path


def container_mounts(
    container: Object, folders: Mapping[str, Path], text_volumes: frozenset[str], env: Mapping[str, str]
) -> list[Mount]:
    """Bind mounts of a container, in the order declared; sub-paths of plain folders are made when missing.

    Raises:
        ConfigError: a mount names a volume or a sub-path that is not there.
    """
    mounts: list[Mount] = []
    for declared in container.get("volumeMounts") or ():
        name = declared["name"]
        if name not in folders:
            raise ConfigError(f"volumeMounts: no volume named {name!r} in the pod")
        source = folders[name]
        sub_path = expand(declared["subPathExpr"], env) if declared.get("subPathExpr") else declared.get("subPath", "")
        if sub_path:
            if ".." in Path(sub_path).parts or Path(sub_path).is_absolute():
                raise ConfigError(f"volumeMounts.subPath must be a relative path without '..', got {sub_path!r}")
            source = source / sub_path
            if not source.exists():
                if name in text_volumes:
                    raise ConfigError(f"volumeMounts.subPath: volume {name!r} has no {sub_path!r}")
                source.mkdir(parents=True)
            source = source.resolve()
        # A volume from the API server is never written to by a container, whatever the mount says.
        readonly = bool(declared.get("readOnly")) or name in text_volumes
        mounts.append(Mount(str(source), declared["mountPath"], readonly))
    return mounts
