"""The store on S3: a real server over HTTP (moto's) that fails where a test says so."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs
from motley_weights.backend import open_backend
from motley_weights.store import DeltaPolicy, WeightStore

pytest.importorskip("s3fs", reason="needs the extra s3")
serving = pytest.importorskip("werkzeug.serving", reason="needs the extra test")
moto_app = pytest.importorskip("moto.moto_server.werkzeug_app", reason="needs the extra test")

type Wsgi = Callable[[dict[str, Any], Any], Any]


class Server:
    """moto behind a door that can refuse: `fault(method, path)` gives a WSGI application to answer instead, or None."""

    def __init__(self) -> None:
        self.app: Wsgi = moto_app.DomainDispatcherApplication(moto_app.create_backend_app)
        self.fault: Callable[[str, str], Wsgi | None] = lambda method, path: None
        self.bucket = f"weights-{uuid.uuid4().hex[:12]}"  # moto's buckets outlive its server
        self.seen: list[tuple[str, str]] = []
        quiet = type("Quiet", (serving.WSGIRequestHandler,), {"log": lambda self, kind, message, *args: None})
        self._server = serving.make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=quiet)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        return (self.fault(method, path) or self.app)(environ, start_response)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- ways to fail ---------------------------------------------------------------------------------------------

    @staticmethod
    def refuses(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>AccessDenied</Code><Message>quota</Message></Error>"]

    def loses_the_answer(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        list(self.app(environ, lambda status, headers, error=None: None))
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>AccessDenied</Code><Message>lost</Message></Error>"]

    def cuts_the_body(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        """The headers of the whole answer, and half of it."""
        told: list[Any] = []
        body = b"".join(self.app(environ, lambda status, headers, error=None: told.extend((status, headers))))
        start_response(told[0], told[1])
        yield body[: len(body) // 2]
        raise ConnectionAbortedError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    started = Server()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{started.port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # a failure is a failure
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 << 20})  # the least that S3 allows
    file_system = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(file_system, "retries", 1)
    file_system.clear_instance_cache()
    fsspec.filesystem("s3").mkdir(started.bucket)
    yield started
    file_system.clear_instance_cache()
    started.stop()


@pytest.fixture
def s3_url(server: Server) -> str:
    return f"s3://{server.bucket}/store"


def assert_pulls(url: str, view: str, version: int, into: Path, tensors: dict[str, torch.Tensor]) -> None:
    reader = WeightStore(url, "run")
    got, want = reader.load(reader.pull(view, version, into)), codecs.encode_group(view, tensors)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_anchors_deltas_pointers_and_pruning(server: Server, s3_url: str, make_model: Any, tmp_path: Path):
    model = make_model()
    store = WeightStore(s3_url, "run", deltas=DeltaPolicy(tmp_path / "cache", min_file_bytes=0))
    for version in range(1, 4):
        assert model.publish(store, version).complete
        last = dict(model.tensors)
        model.step(seed=version)
    reader = WeightStore(s3_url, "run")
    assert reader.views() == sorted(STANDARD_VIEWS)
    for view in STANDARD_VIEWS:
        assert reader.latest(view) == 3
        assert reader.versions(view) == [1, 2, 3]
        assert reader.manifest(view, 3).chain == 2
        assert_pulls(s3_url, view, 3, tmp_path / "pulled", last)
        store.rewind(view, 2)
        assert reader.latest(view) == 2
    assert store.prune(keep=1) == {view: [] for view in STANDARD_VIEWS}  # 2 is a delta against 1
    assert model.publish(store, 3, ["bf16"]).complete
    assert store.prune(keep=1)["bf16"] == [1, 2]
    assert reader.versions("bf16") == [3]


def test_large_files_go_up_in_parts(server: Server, s3_url: str):
    backend = open_backend(s3_url)
    content = torch.randint(0, 256, (11 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chunks = [memoryview(part.numpy()) for part in content.split(3 << 20)]
    backend.write("large", chunks)
    assert len([path for method, path in server.seen if method == "PUT" and path.endswith("large")]) >= 2
    assert backend.size("large") == 11 << 20
    assert b"".join(backend.read_chunks("large")) == content.numpy().tobytes()


@pytest.mark.parametrize("fault", ["refuses", "loses_the_answer"])
def test_each_put_failing_in_turn(server: Server, s3_url: str, make_model: Any, tmp_path: Path, fault: str):
    def publish(name: str, broken: int) -> tuple[int, Any, dict[int, dict[str, torch.Tensor]], Any, Any]:
        """Version 1, then version 2 while PUT number `broken` fails. (PUTs of version 2, report, ...)."""
        model, url = make_model(), f"{s3_url}/{name}"
        store = WeightStore(url, "run", deltas=DeltaPolicy(tmp_path / name / "cache", min_file_bytes=0))
        model.publish(store, 1, ["fp8"])
        models = {1: dict(model.tensors)}
        model.step(seed=1)
        models[2] = dict(model.tensors)
        count = 0

        def fail(method: str, path: str) -> Wsgi | None:
            nonlocal count
            count += method == "PUT"
            return getattr(server, fault) if method == "PUT" and count - 1 == broken else None

        server.fault = fail
        report = model.publish(store, 2, ["fp8"])
        server.fault = lambda method, path: None
        return count, report, models, store, model

    puts, report, _, _, _ = publish("clean", -1)
    assert report.complete
    assert puts == 6  # the delta, config, tokenizer, index, manifest, pointer
    for broken in range(puts):
        _, report, models, store, model = publish(f"at-{broken}", broken)
        want = 1 if report.failed else 2
        assert WeightStore(f"{s3_url}/at-{broken}", "run").latest("fp8") == want
        if fault == "refuses" or broken < puts - 1:
            assert want == 1, broken  # only a pointer that did move counts as moved
        assert_pulls(f"{s3_url}/at-{broken}", "fp8", want, tmp_path / f"at-{broken}" / "pulled", models[want])
        assert model.publish(store, 3, ["fp8"]).complete
        assert_pulls(f"{s3_url}/at-{broken}", "fp8", 3, tmp_path / f"at-{broken}" / "pulled", models[2])


def test_a_body_cut_short_leaves_what_was_served(server: Server, s3_url: str, model: Any, tmp_path: Path):
    store = WeightStore(s3_url, "run")
    model.publish(store, 1, ["nvfp4"])
    first = dict(model.tensors)
    reader = WeightStore(s3_url, "run")
    reader.pull("nvfp4", 1, tmp_path)
    model.step(seed=1)
    model.publish(store, 2, ["nvfp4"])
    server.fault = lambda method, path: (
        server.cuts_the_body if method == "GET" and path.endswith("model.safetensors") else None
    )
    with pytest.raises(OSError, match=r"model\.safetensors"):
        reader.pull("nvfp4", 2, tmp_path)
    assert [path.name for path in (tmp_path / "nvfp4").iterdir()] == ["v000001"]
    assert_pulls(s3_url, "nvfp4", 1, tmp_path, first)
    server.fault = lambda method, path: None
    assert_pulls(s3_url, "nvfp4", 2, tmp_path, dict(model.tensors))


def test_a_server_that_is_away_is_an_os_error_and_not_an_empty_store(server: Server, s3_url: str, model: Any):
    store = WeightStore(s3_url, "run")
    model.publish(store, 1, ["bf16"])
    server.stop()
    try:
        for ask in (lambda: store.latest("bf16"), lambda: store.versions("bf16"), lambda: model.publish(store, 2)):
            with pytest.raises(OSError) as caught:  # noqa: PT011  (a FileNotFoundError would be one too)
                ask()
            assert not isinstance(caught.value, FileNotFoundError)
    finally:
        server._server.server_close()
        server.stop = lambda: None  # type: ignore[method-assign]
