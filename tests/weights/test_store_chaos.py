"""A store that fails, at each write in turn and in several ways, never shows a moved pointer over a broken view."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs
from motley_weights.backend import Backend, Chunk, FolderBackend, open_backend
from motley_weights.errors import ViewCorruptError
from motley_weights.store import DeltaPolicy, WeightStore


def fails(inner: Backend, path: str, content: Any) -> None:
    raise OSError("no space left on device")


def writes_half_and_fails(inner: Backend, path: str, content: Any) -> None:
    whole = content if isinstance(content, bytes) else b"".join(bytes(chunk) for chunk in content)
    inner.write(path, [whole[: len(whole) // 2]])
    raise OSError("connection reset")


def writes_half_and_says_nothing(inner: Backend, path: str, content: Any) -> None:
    whole = content if isinstance(content, bytes) else b"".join(bytes(chunk) for chunk in content)
    inner.write(path, [whole[: len(whole) // 2]])


def writes_nothing_and_says_nothing(inner: Backend, path: str, content: Any) -> None:
    pass


def loses_the_answer(inner: Backend, path: str, content: Any) -> None:
    if isinstance(content, bytes):
        inner.replace(path, content)
    else:
        inner.write(path, content)
    raise TimeoutError("no answer")


def is_consistent(
    url: str, tmp_path: Path, models: dict[int, Any], views: Sequence[str] = STANDARD_VIEWS
) -> dict[str, int | None]:
    """Every pointer names a version that pulls to exactly what was published as that version. Returns the pointers."""
    reader = WeightStore(url, "run")
    pointers: dict[str, int | None] = {}
    for view in views:
        pointers[view] = version = reader.latest(view)
        if version is not None:
            got = reader.load(reader.pull(view, version, tmp_path))
            want = codecs.encode_group(view, models[version])
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                assert torch.equal(got[name].reshape(-1).view(torch.uint8), raw), (view, version, name)
    return pointers


FAULTS = [fails, writes_half_and_fails, writes_half_and_says_nothing, writes_nothing_and_says_nothing, loses_the_answer]


VIEWS = ["bf16", "nvfp4"]


@pytest.mark.parametrize(("deltas", "fault"), [(False, fails), *((True, fault) for fault in FAULTS)])
def test_each_write_failing_in_turn(
    make_model: Any, faulty: Any, tmp_path: Path, deltas: bool, fault: Callable[..., None]
):
    def policy(name: str) -> DeltaPolicy | None:
        return DeltaPolicy(tmp_path / name / "cache", min_file_bytes=0) if deltas else None

    def run(name: str, failing: Callable[[int], bool]) -> tuple[str, Any, dict[int, Any], Any]:
        """Version 1 without faults, then version 2 while the writes for which `failing(count)` go wrong."""
        url = str(tmp_path / name / "store")
        backend = faulty(open_backend(url), lambda operation, path: None)
        store = WeightStore(url, "run", backend=backend, deltas=policy(name))
        model = make_model()
        models = {1: dict(model.tensors)}
        assert model.publish(store, 1).complete
        model.step(seed=1)
        models[2] = dict(model.tensors)
        backend.writes.clear()
        backend.failing = lambda operation, path: fault if failing(len(backend.writes) - 1) else None
        report = model.publish(store, 2)
        backend.failing = lambda operation, path: None
        return url, report, models, (store, model, backend)

    _, report, _, (_, _, backend) = run("clean", lambda count: False)
    assert report.complete
    writes = len(backend.writes)
    assert writes >= 2 * 5
    for broken in range(writes):
        url, report, models, (store, model, backend) = run(f"at-{broken}", lambda count, broken=broken: count == broken)
        pointers = is_consistent(url, tmp_path / f"at-{broken}" / "pulled", models, VIEWS)
        for view in VIEWS:
            assert pointers[view] == (1 if view in report.failed else 2), (backend.writes[broken], report)
        assert len(report.failed) <= 1  # one write belongs to one view; the others go on
        if fault is not loses_the_answer:
            assert len(report.failed) == 1, backend.writes[broken]
        # Once the store works again, so does the run.
        model.step(seed=2)
        models[3] = dict(model.tensors)
        assert model.publish(store, 3, VIEWS).complete
        assert set(is_consistent(url, tmp_path / f"at-{broken}" / "pulled", models, VIEWS).values()) == {3}


def test_a_pointer_whose_answer_was_lost_counts_as_moved(model: Any, faulty: Any, tmp_path: Path):
    backend = faulty(
        FolderBackend(tmp_path), lambda operation, path: loses_the_answer if path.endswith("latest") else None
    )
    report = model.publish(WeightStore("", "run", backend=backend), 1)
    assert report.complete
    assert set(is_consistent(str(tmp_path), tmp_path / "pulled", {1: model.tensors}).values()) == {1}


def test_a_killed_publish_leaves_the_old_version_and_can_be_repeated(model: Any, faulty: Any, tmp_path: Path):
    class Killed(BaseException):
        pass

    def dies(inner: Backend, path: str, content: Any) -> None:
        backend.remove = lambda path: None  # a dead process cleans nothing up
        raise Killed

    backend = faulty(FolderBackend(tmp_path), lambda operation, path: None)
    store = WeightStore("", "run", backend=backend)
    model.publish(store, 1)
    first = dict(model.tensors)
    model.step(seed=1)
    backend.failing = lambda operation, path: dies if path.endswith("index.json") else None
    with pytest.raises(Killed):
        model.publish(store, 2)
    assert (tmp_path / "run/views/bf16/v000002/model.safetensors").exists()
    assert store.versions("bf16") == [1]
    assert is_consistent(str(tmp_path), tmp_path / "pulled", {1: first})["bf16"] == 1

    restarted = WeightStore(str(tmp_path), "run")
    assert model.publish(restarted, 2).complete
    assert is_consistent(str(tmp_path), tmp_path / "pulled", {2: model.tensors})["bf16"] == 2


def test_a_pull_that_breaks_off_leaves_what_was_served(model: Any, url: str, tmp_path: Path, monkeypatch: Any):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    served = store.pull("nvfp4", 1, tmp_path)
    model.step(seed=1)
    model.publish(store, 2)
    whole = store._backend.read_chunks

    def breaks_off(path: str) -> Any:
        if path.endswith("model.safetensors"):
            yield b"half"
            raise ConnectionError("reset by peer")
        yield from whole(path)

    monkeypatch.setattr(store._backend, "read_chunks", breaks_off)
    with pytest.raises(ConnectionError):
        store.pull("nvfp4", 2, tmp_path)
    assert [path.name for path in (tmp_path / "nvfp4").iterdir()] == ["v000001"]
    assert store.load(served)
    monkeypatch.undo()
    store.pull("nvfp4", 2, tmp_path)


class SlowAndFailing:
    """Writes in small pieces that others may see, each after a pause, and about every tenth one goes wrong in some way."""

    def __init__(self, inner: Backend, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        content = b"".join(bytes(chunk) for chunk in chunks)
        self._go_wrong(path, content)
        for part in (3, 2, 1):
            self._inner.write(path, [content[: len(content) // part]])
            time.sleep(0.001)

    def replace(self, path: str, content: bytes) -> None:
        self._go_wrong(path, content)
        time.sleep(0.001)
        self._inner.replace(path, content)

    def _go_wrong(self, path: str, content: bytes) -> None:
        if self._random.random() < 0.03:
            # A manifest or pointer is written whole or not at all, by the contract of `replace` and of object stores.
            if path.endswith("safetensors"):
                self._inner.write(path, [content[: len(content) // 2]])
            raise OSError("connection reset")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_readers_of_a_slow_and_failing_store_never_hold_a_half_applied_view(make_model: Any, tmp_path: Path):
    """While eight versions are published over it, readers follow the pointers: every folder that they get is one version,
    exactly, and versions only grow."""
    url = str(tmp_path / "store")
    published: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    done = threading.Event()
    failures: list[str] = []
    pulled: dict[str, list[int]] = {}

    def follow(view: str) -> None:
        reader, into, seen = WeightStore(url, "run"), tmp_path / f"pulled-{view}", pulled.setdefault(view, [])
        try:
            while not done.is_set():
                version = reader.latest(view)
                if version is None or (seen and version == seen[-1]):
                    time.sleep(0.001)
                    continue
                folder = reader.pull(view, version, into)
                want = published[version][view]
                got = reader.load(folder)
                if got.keys() != want.keys() or not all(same_bytes(got[name], want[name]) for name in want):
                    failures.append(f"{view}: version {version} is a mixture")
                if seen and version < seen[-1]:
                    failures.append(f"{view}: went back from {seen[-1]} to {version}")
                seen.append(version)
        except Exception as error:
            failures.append(f"{view}: {type(error).__name__}: {error}")

    slow = SlowAndFailing(open_backend(url), seed=5)
    policy = DeltaPolicy(tmp_path / "cache", min_file_bytes=0, max_chain=3)
    store = WeightStore(url, "run", backend=slow, deltas=policy, shard_bytes=8000)
    readers = [threading.Thread(target=follow, args=(view,)) for view in VIEWS]
    for reader in readers:
        reader.start()
    model = make_model()
    failed = 0
    for version in range(1, 9):
        published[version] = {view: codecs.encode_group(view, model.tensors) for view in VIEWS}
        failed += len(model.publish(store, version, VIEWS).failed)
        model.step(seed=version)
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert 2 <= failed <= 12  # the store did fail, and was not only failing
    assert all(len(seen) >= 2 for seen in pulled.values())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def test_a_pointer_to_a_version_that_was_changed_afterwards_is_refused(model: Any, tmp_path: Path):
    """Someone else publishes over a version that is being served: its manifest is no longer the one the pointer
    names.
    """
    store = WeightStore(str(tmp_path), "run")
    model.publish(store, 1)
    pointer = (tmp_path / "run/views/bf16/latest").read_bytes()
    (tmp_path / "run/views/bf16/latest").unlink()
    model.step(seed=1)
    model.publish(store, 1, ["bf16"])
    (tmp_path / "run/views/bf16/latest").write_bytes(pointer)
    with pytest.raises(ViewCorruptError, match="differs from the manifest that latest names"):
        store.pull("bf16", 1, tmp_path / "pulled")


def test_a_torn_pointer_is_reported_and_mended_by_a_rewind(model: Any, tmp_path: Path):
    """By a store that does not replace atomically, or a disk."""
    store = WeightStore(str(tmp_path), "run")
    for version in (1, 2):
        model.publish(store, version)
    pointer = tmp_path / "run/views/bf16/latest"
    pointer.write_bytes(pointer.read_bytes()[:9])
    with pytest.raises(ViewCorruptError, match="bf16/latest: not a pointer"):
        store.latest("bf16")
    with pytest.raises(ViewCorruptError, match="bf16/latest: not a pointer"):
        model.publish(store, 3)
    store.rewind("bf16", 2)
    assert store.latest("bf16") == 2
    assert model.publish(store, 3).complete
