"""``motley local``: a Kubernetes cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from motley_local.binaries import (
    MissingBinaryError,
    ensure_control_plane,
    ensure_helm,
    ensure_kubectl,
    stderr_report,
)
from motley_local.processes import ChildFailedError, descendants, memory_mib, parent_of_each, process_start_ticks

CHECK_S = 1.0
START_TIMEOUT_S = 1800.0  # a first start may build the control plane
STOP_TIMEOUT_S = 30.0
RECORD = "cluster.json"

app = typer.Typer(
    help="A real Kubernetes control plane with virtual GPU nodes on this machine; pods run as processes. For laptops and CI.",
    no_args_is_help=True,
    add_completion=False,
)
node_app = typer.Typer(help="Take virtual nodes away and bring them back.", no_args_is_help=True)
app.add_typer(node_app, name="node")

StateOption = Annotated[
    Path, typer.Option("--state", help="Folder of the cluster's state.", envvar="MOTLEY_LOCAL_STATE")
]
DEFAULT_STATE = Path("build/local")


@dataclass(frozen=True)
class Record:
    """A running cluster, as its state folder tells of it."""

    pid: int
    start_ticks: int  # with the pid it names a process for good: pids are used again
    kubeconfig: Path

    @property
    def alive(self) -> bool:
        return process_start_ticks(self.pid) == self.start_ticks

    @classmethod
    def read(cls, state: Path) -> Record | None:
        """The cluster of a state folder, if it runs."""
        try:
            values = json.loads((state / RECORD).read_text())
            record = cls(int(values["pid"]), int(values["startTicks"]), Path(values["kubeconfig"]))
        except (OSError, ValueError, KeyError):
            return None
        return record if record.alive else None

    @staticmethod
    def write(state: Path, kubeconfig: Path) -> None:
        values = {"pid": os.getpid(), "startTicks": process_start_ticks(os.getpid()), "kubeconfig": str(kubeconfig)}
        (state / RECORD).write_text(json.dumps(values))


def _fail(message: str) -> typer.Exit:
    typer.echo(f"motley local: {message}", err=True)
    return typer.Exit(1)


def _running(state: Path) -> Record:
    record = Record.read(state.absolute())
    if record is None:
        raise _fail(f"no cluster runs in {state}; start one with: motley local up")
    return record


def _exit_on_term(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


@app.command()
def up(
    state: StateOption = DEFAULT_STATE,
    nodes: Annotated[
        Path | None, typer.Option(help="YAML file with the nodes; two of each GPU type otherwise.")
    ] = None,
    isolation: Annotated[
        str, typer.Option(help="best: namespaces where they work; none: rewrite mount paths.")
    ] = "best",
    detach: Annotated[bool, typer.Option("--detach", help="Return when it runs, and leave it running.")] = False,
) -> None:
    """Start a cluster. It is empty at every start, and gone when this command ends."""
    # Here and not above, so that the other commands start at once.
    from motley_local.cluster import LocalCluster
    from motley_local.nodes import load_nodes

    state = state.absolute()
    if Record.read(state) is not None:
        raise _fail(f"a cluster already runs in {state}; stop it with: motley local down")
    try:
        fleet = load_nodes(nodes) if nodes is not None else None
    except (OSError, ValueError) as error:
        raise _fail(str(error)) from None
    state.mkdir(parents=True, exist_ok=True)
    (state / RECORD).unlink(missing_ok=True)
    if detach:
        _up_detached(state, nodes, isolation)
        return
    signal.signal(signal.SIGTERM, _exit_on_term)
    try:
        with LocalCluster(state, fleet, isolation=isolation) as cluster:
            Record.write(state, cluster.kubeconfig_path)
            typer.echo(f"export KUBECONFIG={cluster.kubeconfig_path}")
            typer.echo(f"{len(cluster.nodes)} nodes are ready. Ctrl-C ends the cluster and its pods.", err=True)
            while True:
                time.sleep(CHECK_S)
                cluster.check()
    except (ChildFailedError, MissingBinaryError) as error:
        raise _fail(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    finally:
        (state / RECORD).unlink(missing_ok=True)


def _up_detached(state: Path, nodes: Path | None, isolation: str) -> None:
    log_path = state / "up.log"
    command = [sys.executable, "-m", "motley_local.main", "up", "--state", str(state), "--isolation", isolation]
    command += ["--nodes", str(nodes.absolute())] if nodes is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    shown = 0
    while Record.read(state) is None:
        text = log_path.read_text(errors="replace")
        typer.echo(text[shown:], err=True, nl=False)
        shown = len(text)
        if process.poll() is not None:
            raise _fail(f"the cluster did not start; see {log_path}")
        if time.monotonic() > deadline_s:
            process.terminate()
            raise _fail(f"the cluster was not ready after {START_TIMEOUT_S:.0f} s; see {log_path}")
        time.sleep(0.2)
    record = _running(state)
    typer.echo(f"export KUBECONFIG={record.kubeconfig}")


@app.command()
def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop the cluster, its pods included."""
    record = Record.read(state.absolute())
    if record is None:
        typer.echo(f"no cluster runs in {state}", err=True)
        return
    os.kill(record.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while record.alive:
        if time.monotonic() > deadline_s:
            # Everything below it dies with it: the kernel sees to that.
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        time.sleep(0.1)
    typer.echo("stopped", err=True)


@app.command()
def status(state: StateOption = DEFAULT_STATE) -> None:
    """Say whether a cluster runs, and list its nodes and pods."""
    record = _running(state)
    pids = descendants(record.pid, parent_of_each())
    typer.echo(f"export KUBECONFIG={record.kubeconfig}")
    typer.echo(f"{len(pids)} processes, {memory_mib([record.pid, *pids]):.0f} MiB resident")
    for kind in ("nodes", "pods"):
        sys.stdout.flush()
        _kubectl(record, ["get", kind, *(["-A", "-o", "wide"] if kind == "pods" else ["-L", "nvidia.com/gpu.product"])])


def _kubectl(record: Record, arguments: list[str]) -> int:
    program = ensure_kubectl(ensure_control_plane(report=stderr_report).server_minor)
    environment = {**os.environ, "KUBECONFIG": str(record.kubeconfig)}
    return subprocess.run([str(program), *arguments], env=environment, check=False).returncode


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def kubectl(context: typer.Context, state: StateOption = DEFAULT_STATE) -> None:
    """Run kubectl against the cluster: motley local kubectl -- get pods."""
    raise typer.Exit(_kubectl(_running(state), context.args))


@app.command()
def build() -> None:
    """Find or build all programs that a cluster needs, and say where they are."""
    try:
        plane = ensure_control_plane(full=True)
        found = {
            "etcd": plane.etcd,
            "kube-apiserver": plane.kube_apiserver,
            "kube-scheduler": plane.kube_scheduler,
            "kube-controller-manager": plane.kube_controller_manager,
            "kubectl": ensure_kubectl(plane.server_minor),
            "helm": ensure_helm(),
        }
    except MissingBinaryError as error:
        raise _fail(str(error)) from None
    for name, path in found.items():
        typer.echo(f"{name:<24} {path}")


@app.command()
def root() -> None:
    """Print the folder that pods of the project's images see as /opt/motley."""
    from motley_local.cluster import find_repo_root

    typer.echo(find_repo_root())


@node_app.command("kill")
def node_kill(
    name: str,
    state: StateOption = DEFAULT_STATE,
    vanish: Annotated[bool, typer.Option("--vanish", help="Also remove the Node object, as a cloud does.")] = False,
) -> None:
    """Lose a node: its processes end at once, its heartbeats stop, and nobody is told."""
    from motley_local.nodes import POWER_ANNOTATION, POWER_OFF

    record = _running(state)
    action = (
        ["delete", "node", name]
        if vanish
        else ["annotate", "--overwrite", "node", name, f"{POWER_ANNOTATION}={POWER_OFF}"]
    )
    raise typer.Exit(_kubectl(record, action))


@node_app.command("restore")
def node_restore(name: str, state: StateOption = DEFAULT_STATE) -> None:
    """Bring a lost node back."""
    from motley_local.nodes import POWER_ANNOTATION

    raise typer.Exit(_kubectl(_running(state), ["annotate", "--overwrite", "node", name, f"{POWER_ANNOTATION}-"]))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
