"""The whole local cluster: control plane and agent, started and stopped together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from motley_local.agent import AgentConfig
from motley_local.binaries import (
    KUBERNETES_VERSION,
    ControlPlaneBinaries,
    ensure_control_plane,
    ensure_helm,
    ensure_kubectl,
    stderr_report,
)
from motley_local.controlplane import POLL_S, READY_TIMEOUT_S, ControlPlane
from motley_local.nodes import NodeSpec, default_nodes, monitor_grace_s
from motley_local.processes import Child, ChildFailedError, descendants, memory_mib, parent_of_each

AGENT_STOP_GRACE_S = 15.0
NODE_TIMEOUT_S = 0.3  # to register one node, on a machine at its limit


def find_repo_root(start: Path = Path(__file__)) -> Path:
    """The folder that stands for /opt/motley in pods: the repository around this file, else the folder that holds the packages."""
    for folder in start.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return start.resolve().parents[1]


@dataclass(frozen=True)
class Memory:
    """Resident memory now, MiB; a page that processes share is divided among them."""

    control_plane_mib: float
    agent_mib: float
    pods_mib: float

    @property
    def total_mib(self) -> float:
        return self.control_plane_mib + self.agent_mib + self.pods_mib


class LocalCluster:
    """Control plane, virtual nodes and their pods, from ``start`` to ``stop``; a context manager. Start it from the main thread.

    Nothing outlives it: a clean stop ends pods gracefully; when this process is killed, the kernel ends the rest.
    """

    def __init__(
        self,
        state_dir: Path,
        nodes: Sequence[NodeSpec] | None = None,
        *,
        repo_root: Path | None = None,
        isolation: str = "best",
        node_grace_s: int | None = None,
        more_apiserver_flags: Sequence[str] = (),
        client_qps: int = 100,
        report: Callable[[str], None] = stderr_report,
    ) -> None:
        self.state_dir = state_dir.absolute()
        self.nodes = tuple(default_nodes() if nodes is None else nodes)
        self.repo_root = (repo_root or find_repo_root()).absolute()
        self.isolation = isolation
        # How long the node controller waits for a heartbeat. A laptop at its limit must not lose its nodes.
        self.node_grace_s = node_grace_s or monitor_grace_s(len(self.nodes))
        self.more_apiserver_flags, self.client_qps = tuple(more_apiserver_flags), client_qps
        self.report = report
        self.plane: ControlPlane | None = None
        self._binaries: ControlPlaneBinaries | None = None
        self._agent: Child | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def kubeconfig_path(self) -> Path:
        return self.state_dir / "control-plane" / "kubeconfig"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with KUBECONFIG pointing here."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig_path)}

    @property
    def kubectl_path(self) -> Path:
        return ensure_kubectl(self.binaries.server_minor, self.report)

    @property
    def helm_path(self) -> Path:
        return ensure_helm(self.report)

    @property
    def binaries(self) -> ControlPlaneBinaries:
        if self._binaries is None:
            self._binaries = ensure_control_plane(full=True, report=self.report)
        return self._binaries

    def start(self) -> None:
        """Start everything and wait until all nodes are registered.

        Raises:
            MissingBinaryError: the control plane's programs can be neither found nor built.
            ChildFailedError: a part did not start; with its last log lines.
        """
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            plane = ControlPlane(
                self.state_dir / "control-plane",
                self.binaries,
                node_monitor_grace_s=self.node_grace_s,
                more_apiserver_flags=self.more_apiserver_flags,
                client_qps=self.client_qps,
            )
            self.plane = plane
            plane.start()
            self._start_agent(plane)
        except BaseException:
            self.stop()
            raise

    def _start_agent(self, plane: ControlPlane) -> None:
        folder = self.state_dir / "agent"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        settings = plane.running
        config = AgentConfig(
            kubeconfig=str(settings.kubeconfig_path),
            state_dir=str(folder),
            certificate=str(settings.ca_path),
            key=str(settings.ca_path.with_suffix(".key")),
            slot_octet=settings.slot.octet,
            repo_root=str(self.repo_root),
            server_version=f"v1.{self.binaries.server_minor}.{KUBERNETES_VERSION.rpartition('.')[2]}",
            nodes=self.nodes,
            isolation=self.isolation,
        )
        config_path = folder / "config.json"
        config_path.write_text(config.to_json())
        packages = os.pathsep.join(path for path in sys.path if path)
        self._agent = Child.spawn(
            "agent",
            [sys.executable, "-m", "motley_local.agent", str(config_path)],
            log_path=self.state_dir / "agent.log",
            env={**os.environ, "PYTHONPATH": packages},
            # Not SIGKILL: the agent ends the pods first.
            death_signal=signal.SIGTERM,
        )
        ready = folder / "agent.ready"
        limit_s = READY_TIMEOUT_S + NODE_TIMEOUT_S * len(self.nodes)
        deadline_s = time.monotonic() + limit_s
        while not ready.exists():
            self.check()
            if time.monotonic() > deadline_s:
                raise ChildFailedError(f"the agent was not ready after {limit_s:.0f} s; {self._agent.log_tail()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise ChildFailedError when a part of the cluster has ended."""
        if self.plane is not None:
            self.plane.check()
        if self._agent is not None:
            self._agent.check()

    def memory(self) -> Memory:
        """Resident memory of everything under the cluster, right now."""
        if self.plane is None or self._agent is None:
            raise RuntimeError("the cluster is not started")
        agent_pid = self._agent.process.pid
        return Memory(
            control_plane_mib=memory_mib([child.process.pid for child in self.plane.children]),
            agent_mib=memory_mib([agent_pid]),
            pods_mib=memory_mib(descendants(agent_pid, parent_of_each())),
        )

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl against this cluster.

        Raises:
            RuntimeError: ``check`` is set and kubectl failed; with what it printed.
        """
        done = subprocess.run(
            [str(self.kubectl_path), *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done

    def stop(self) -> None:
        """End pods, agent and control plane. May be called again."""
        if self._agent is not None:
            self._agent.stop(grace_s=AGENT_STOP_GRACE_S)
            self._agent = None
        if self.plane is not None:
            self.plane.stop()
