"""Mounted files that change at once, volumes for claims, and logs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from motley_local.logs import rotate, tail_offset
from motley_local.podspec import ConfigError, PodFacts
from motley_local.storage import SELECTED_NODE, STORAGE_CLASS, claim_folder, plan_storage, storage_class_manifest
from motley_local.volumes import container_mounts, projected_files, token_requests, write_atomically


def test_files_change_together_and_removed_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    assert write_atomically(folder, {"a": b"1", "sub/b": b"1", "old": b"x"})
    assert not write_atomically(folder, {"a": b"1", "sub/b": b"1", "old": b"x"})
    assert write_atomically(folder, {"a": b"2", "sub/b": b"2"})
    assert (folder / "a").read_bytes() == (folder / "sub" / "b").read_bytes() == b"2"
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("..")) == ["a", "sub"]
    # The version before is not kept: one data folder and the link to it.
    assert len([path for path in folder.iterdir() if path.name.startswith("..")]) == 2


def test_a_reader_never_sees_half_of_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    write_atomically(folder, {"a": b"0", "b": b"0"})
    stop = threading.Event()
    torn: list[tuple[bytes, bytes]] = []

    def read() -> None:
        while not stop.is_set():
            try:
                data = os.open(folder / "..data", os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            try:
                pair = tuple(os.read(os.open(name, os.O_RDONLY, dir_fd=data), 10) for name in ("a", "b"))
            except FileNotFoundError:
                continue  # this version went away meanwhile: a reader tries again
            finally:
                os.close(data)
            if pair[0] != pair[1]:
                torn.append((pair[0], pair[1]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        text = str(number).encode()
        write_atomically(folder, {"a": text, "b": text})
    stop.set()
    reader.join()
    assert torn == []


def test_a_projected_volume_gathers_token_certificate_and_namespace() -> None:
    pod = {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"containers": []}}
    source = {
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        ]
    }
    pod["spec"]["volumes"] = [{"name": "access", "projected": source}]  # type: ignore[index]
    assert token_requests(pod) == {"": 3607}
    facts = PodFacts("127.65.0.1", "127.0.0.1", {})
    files = projected_files(pod, source, facts, lambda *_: {"data": {"ca.crt": "PEM", "more": "x"}}, {"": "jwt"})
    assert files == {"token": b"jwt", "ca.crt": b"PEM", "namespace": b"ns"}


def test_mounts_of_api_objects_are_read_only_and_sub_paths_cannot_escape(tmp_path: Path) -> None:
    folders = {"config": tmp_path / "c", "scratch": tmp_path / "s"}
    for folder in folders.values():
        folder.mkdir()
    mounts = [{"name": "config", "mountPath": "/c"}, {"name": "scratch", "mountPath": "/s", "subPathExpr": "$(ID)/x"}]
    made = container_mounts({"volumeMounts": mounts}, folders, frozenset({"config"}), {"ID": "7"})
    assert [(mount.target, mount.readonly) for mount in made] == [("/c", True), ("/s", False)]
    assert (tmp_path / "s" / "7" / "x").is_dir()
    for path in ("../up", "/abs"):
        bad = {"volumeMounts": [{"name": "scratch", "mountPath": "/s", "subPath": path}]}
        with pytest.raises(ConfigError, match=r"must be a relative path without '\.\.'"):
            container_mounts(bad, folders, frozenset(), {})


def claim(name: str, **more: Any) -> dict[str, Any]:
    spec = {"storageClassName": STORAGE_CLASS, "accessModes": ["ReadWriteMany"], **more.pop("spec", {})}
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", **more}, "spec": spec}


def test_a_claim_gets_a_folder_once_and_a_class_may_wait_for_a_node(tmp_path: Path) -> None:
    classes = {STORAGE_CLASS: storage_class_manifest()}
    plan = plan_storage([claim("a"), claim("foreign", spec={"storageClassName": "ebs"})], [], classes, tmp_path)
    (volume,) = plan.create
    assert volume["spec"]["claimRef"]["name"] == "a"
    assert plan_storage([claim("a")], [volume], classes, tmp_path).create == ()
    waits = {STORAGE_CLASS: storage_class_manifest() | {"volumeBindingMode": "WaitForFirstConsumer"}}
    assert plan_storage([claim("a")], [], waits, tmp_path).create == ()
    assert len(plan_storage([claim("a", annotations={SELECTED_NODE: "n"})], [], waits, tmp_path).create) == 1


def test_released_volumes_are_removed_only_when_their_policy_says_so(tmp_path: Path) -> None:
    classes = {STORAGE_CLASS: storage_class_manifest()}
    (volume,) = plan_storage([claim("a")], [], classes, tmp_path).create
    released = {**volume, "status": {"phase": "Released"}}
    assert plan_storage([], [{**volume, "status": {"phase": "Bound"}}], classes, tmp_path).remove == ()
    assert plan_storage([], [released], classes, tmp_path).remove == (released,)
    kept = {**released, "spec": {**released["spec"], "persistentVolumeReclaimPolicy": "Retain"}}
    assert plan_storage([], [kept], classes, tmp_path).remove == ()


def test_a_claim_has_a_folder_only_once_it_is_bound() -> None:
    volumes = {"v": {"spec": {"hostPath": {"path": "/x"}}}}
    bound = claim("a", spec={"volumeName": "v"}) | {"status": {"phase": "Bound"}}
    assert claim_folder(bound, volumes) == Path("/x")
    assert claim_folder(claim("a"), volumes) is None
    assert claim_folder(None, volumes) is None


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\r", b"\n")), st.integers(0, 6))
def test_the_tail_is_the_last_lines_whatever_the_log(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, lines: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "tail.log"
    path.write_bytes(data)
    have = data[tail_offset(path, lines) :]
    # A newline ends a line and begins none; what follows the last newline is a line of its own.
    ended = data.removesuffix(b"\n").split(b"\n") if data else []
    want = b"\n".join(ended[-lines:] if lines else []) + (b"\n" if data.endswith(b"\n") and lines else b"")
    assert have == want


def test_a_long_log_is_cut_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not rotate(path, max_bytes=100)
        writer.write(b"y")
        assert rotate(path, max_bytes=100)
        writer.write(b"after")
    assert path.read_bytes() == b"after"
    assert path.with_suffix(".old").read_bytes() == b"x" * 100 + b"y"
