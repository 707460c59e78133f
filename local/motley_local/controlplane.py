"""etcd, API server, scheduler and controller manager on loopback, each a child process of ours.

Every start is a fresh, empty cluster: etcd's data is wiped, which is why it may run without fsync and be killed at the end.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from motley_local.binaries import ControlPlaneBinaries
from motley_local.processes import Child, ChildFailedError

READY_TIMEOUT_S = 120.0
POLL_S = 0.1
REQUEST_TIMEOUT_S = 10.0
PORT_RETRIES = 3
ADMIN_USER = "motley-local-admin"
FIRST_SLOT_OCTET = 64
LAST_SLOT_OCTET = 252
# Endpoints refuse loopback addresses, so theirs would only fail; the others have nothing to do here.
CONTROLLERS_OFF = (
    "endpoints-controller",
    "endpointslice-controller",
    "endpointslice-mirroring-controller",
    "horizontal-pod-autoscaler-controller",
    "persistentvolume-attach-detach-controller",
)


@dataclass(frozen=True)
class AddressSlot:
    """The loopback ranges of one cluster. Several clusters on one machine take different slots."""

    octet: int

    @property
    def service_cidr(self) -> str:
        return f"127.{self.octet}.0.0/16"

    @property
    def kubernetes_service_ip(self) -> str:
        """The API server's own Service: always the first address of the range."""
        return f"127.{self.octet}.0.1"

    @property
    def pod_prefix(self) -> str:
        """First two octets of every pod's address."""
        return f"127.{self.octet + 1}"


def claim_slot() -> tuple[AddressSlot, socket.socket]:
    """A free pair of loopback ranges, held until the returned socket closes (so also when we are killed).

    An abstract Unix socket is the lock because it lives in the network namespace, exactly as loopback addresses do.

    Raises:
        RuntimeError: all slots are taken.
    """
    for octet in range(FIRST_SLOT_OCTET, LAST_SLOT_OCTET + 1, 2):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0motley-local-{octet}")
        except OSError:
            lock.close()
            continue
        return AddressSlot(octet), lock
    raise RuntimeError("every loopback range is taken by a running local cluster; stop one with: motley local down")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def new_p256_key_pem() -> str:
    """A fresh P-256 private key as SEC1 PEM, for signing service account tokens.

    DER by RFC 5915: SEQUENCE { INTEGER 1, OCTET STRING d, [0] OID prime256v1 }. The public key is optional there and Go computes it.
    """
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    scalar = secrets.randbelow(order - 1) + 1
    oid = bytes.fromhex("06082a8648ce3d030107")
    body = b"\x02\x01\x01" + b"\x04\x20" + scalar.to_bytes(32, "big") + b"\xa0" + bytes([len(oid)]) + oid
    der = b"\x30" + bytes([len(body)]) + body
    return f"-----BEGIN EC PRIVATE KEY-----\n{base64.encodebytes(der).decode().strip()}\n-----END EC PRIVATE KEY-----\n"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, also while it is being written."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def kubeconfig_text(server: str, ca_pem: bytes, token: str) -> str:
    """A kubeconfig with one cluster, one user and one context, all named motley-local."""
    name = "motley-local"
    ca = base64.b64encode(ca_pem).decode()
    return str(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": ca}}],
                "users": [{"name": name, "user": {"token": token}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
                "current-context": name,
            }
        )
    )


@dataclass(frozen=True)
class Settings:
    """Everything the command lines depend on; see the four functions below."""

    folder: Path
    slot: AddressSlot
    api_port: int
    etcd_client_port: int
    etcd_peer_port: int
    full: bool
    node_monitor_grace_s: int
    more_apiserver_flags: tuple[str, ...] = ()
    client_qps: int = 100  # of controller manager and scheduler, each

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"

    @property
    def ca_path(self) -> Path:
        """The API server makes this itself: its certificate followed by the authority that signed it."""
        return self.folder / "pki" / "apiserver.crt"

    @property
    def service_account_key_path(self) -> Path:
        return self.folder / "service-account.key"

    @property
    def tokens_path(self) -> Path:
        return self.folder / "tokens.csv"

    @property
    def kubeconfig_path(self) -> Path:
        return self.folder / "kubeconfig"


def etcd_flags(settings: Settings) -> list[str]:
    client = f"http://127.0.0.1:{settings.etcd_client_port}"
    peer = f"http://127.0.0.1:{settings.etcd_peer_port}"
    return [
        f"--data-dir={settings.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_flags(settings: Settings) -> list[str]:
    flags = [
        f"--etcd-servers=http://127.0.0.1:{settings.etcd_client_port}",
        "--bind-address=127.0.0.1",
        # Without it the server looks for a default route, which a machine without network does not have.
        "--advertise-address=127.0.0.1",
        # Endpoints refuse loopback addresses; pods are told the server's address through their environment instead.
        "--endpoint-reconciler-type=none",
        f"--secure-port={settings.api_port}",
        f"--cert-dir={settings.folder / 'pki'}",
        f"--token-auth-file={settings.tokens_path}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={settings.service_account_key_path}",
        f"--service-account-signing-key-file={settings.service_account_key_path}",
        f"--service-cluster-ip-range={settings.slot.service_cidr}",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        "--enable-priority-and-fairness=false",
        "--profiling=false",
        # A lost node should be noticed while someone is watching, not after five minutes.
        "--default-not-ready-toleration-seconds=5",
        "--default-unreachable-toleration-seconds=5",
    ]
    if not settings.full:
        # No controller makes the default ServiceAccount there, and pods could not be created.
        flags.append("--disable-admission-plugins=ServiceAccount")
    return [*flags, *settings.more_apiserver_flags]


def scheduler_flags(settings: Settings) -> list[str]:
    return [
        f"--kubeconfig={settings.kubeconfig_path}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
        f"--kube-api-qps={settings.client_qps}",
        f"--kube-api-burst={2 * settings.client_qps}",
    ]


def controller_manager_flags(settings: Settings) -> list[str]:
    return [
        f"--kubeconfig={settings.kubeconfig_path}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
        f"--service-account-private-key-file={settings.service_account_key_path}",
        f"--root-ca-file={settings.ca_path}",
        f"--controllers=*,{','.join(f'-{name}' for name in CONTROLLERS_OFF)}",
        f"--kube-api-qps={settings.client_qps}",
        f"--kube-api-burst={2 * settings.client_qps}",
        # On a busy machine each request waits its turn, so that many have to be under way at once.
        *(f"--concurrent-{kind}-syncs=32" for kind in ("deployment", "replicaset", "job", "gc")),
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={settings.node_monitor_grace_s}s",
        "--node-eviction-rate=10",
    ]


class ControlPlane:
    """A control plane that runs from ``start`` to ``stop``; a context manager. Start it from the main thread."""

    def __init__(
        self,
        folder: Path,
        binaries: ControlPlaneBinaries,
        *,
        node_monitor_grace_s: int = 12,
        more_apiserver_flags: Sequence[str] = (),
        client_qps: int = 100,
    ) -> None:
        self.folder = folder.absolute()
        self.node_monitor_grace_s = node_monitor_grace_s
        self.more_apiserver_flags = tuple(more_apiserver_flags)
        self.client_qps = client_qps
        self.binaries = binaries
        self.children: list[Child] = []
        self.settings: Settings | None = None
        self.token = secrets.token_urlsafe(32)
        self._slot_lock: socket.socket | None = None
        self._connection: http.client.HTTPSConnection | None = None

    @property
    def full(self) -> bool:
        return self.binaries.kube_scheduler is not None

    @property
    def running(self) -> Settings:
        """The settings it runs with.

        Raises:
            RuntimeError: it has not been started.
        """
        if self.settings is None:
            raise RuntimeError("the control plane is not started")
        return self.settings

    @property
    def kubeconfig_path(self) -> Path:
        return self.running.kubeconfig_path

    @property
    def server(self) -> str:
        return self.running.server

    @property
    def slot(self) -> AddressSlot:
        return self.running.slot

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all parts and wait until the API server answers.

        Raises:
            ChildFailedError: a part ended or did not become ready in time; with its last log lines.
        """
        slot, self._slot_lock = claim_slot()
        try:
            for attempt in range(1, PORT_RETRIES + 1):
                try:
                    self._start_once(slot)
                    return
                except ChildFailedError as error:
                    # Another program may have taken a port between our look and the bind.
                    if "address already in use" not in str(error) or attempt == PORT_RETRIES:
                        raise
                    self._drop_connection()
                    self._stop_children()
        except BaseException:
            self.stop()
            raise

    def _start_once(self, slot: AddressSlot) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        self.folder.chmod(0o700)
        (self.folder / "etcd").mkdir(mode=0o700)
        api_port, client_port, peer_port = free_ports(3)
        settings = Settings(
            self.folder,
            slot,
            api_port,
            client_port,
            peer_port,
            self.full,
            self.node_monitor_grace_s,
            self.more_apiserver_flags,
            self.client_qps,
        )
        self.settings = settings
        write_private(settings.service_account_key_path, new_p256_key_pem())
        write_private(settings.tokens_path, f'{self.token},{ADMIN_USER},1,"system:masters"\n')
        self._spawn("etcd", self.binaries.etcd, etcd_flags(settings))
        self._spawn("kube-apiserver", self.binaries.kube_apiserver, apiserver_flags(settings))
        self._wait("the API server's certificate", settings.ca_path.exists)
        self._wait("the API server", lambda: self.get("/readyz") is not None)
        write_private(
            settings.kubeconfig_path, kubeconfig_text(settings.server, settings.ca_path.read_bytes(), self.token)
        )
        if self.binaries.kube_scheduler is not None and self.binaries.kube_controller_manager is not None:
            self._spawn("kube-scheduler", self.binaries.kube_scheduler, scheduler_flags(settings))
            self._spawn(
                "kube-controller-manager", self.binaries.kube_controller_manager, controller_manager_flags(settings)
            )
            self._wait(
                "the controller manager (default ServiceAccount)",
                lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default") is not None,
            )
        else:
            self._wait("the default namespace", lambda: self.get("/api/v1/namespaces/default") is not None)

    def _spawn(self, name: str, program: Path, flags: Sequence[str]) -> None:
        log_path = self.folder / "logs" / f"{name}.log"
        self.children.append(Child.spawn(name, [str(program), *flags], log_path=log_path))

    def check(self) -> None:
        """Raise ChildFailedError when a part has ended."""
        for child in self.children:
            child.check()

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            self.check()
            if time.monotonic() > deadline_s:
                tails = "\n".join(f"{child.name}: {child.log_tail()}" for child in self.children)
                raise ChildFailedError(f"{what} was not ready after {READY_TIMEOUT_S:.0f} s\n{tails}")
            time.sleep(POLL_S)

    def get(self, path: str) -> Any | None:
        """Answer to a GET, parsed where it is JSON; None when the server does not answer 200."""
        status, answer = self.request("GET", path)
        return answer if status == HTTPStatus.OK else None

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """One request as administrator: HTTP status and answer, parsed where it is JSON. Status 0: no server answered."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        try:
            if self._connection is None:
                context = ssl.create_default_context(cafile=str(self.running.ca_path))
                self._connection = http.client.HTTPSConnection(
                    "127.0.0.1", self.running.api_port, timeout=REQUEST_TIMEOUT_S, context=context
                )
            self._connection.request(method, path, data, headers)
            response = self._connection.getresponse()
            text = response.read().decode()
            is_json = (response.headers.get("Content-Type") or "").startswith("application/json")
        except (http.client.HTTPException, OSError):
            self._drop_connection()
            return 0, None
        return response.status, json.loads(text) if is_json else text

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with KUBECONFIG pointing here."""
        return {**base, "KUBECONFIG": str(self.kubeconfig_path)}

    def stop(self) -> None:
        """End every part. Its data is thrown away at the next start, so nothing needs time to flush."""
        self._drop_connection()
        self._stop_children()
        if self._slot_lock is not None:
            self._slot_lock.close()
            self._slot_lock = None

    def _stop_children(self) -> None:
        while self.children:
            self.children.pop().stop(grace_s=0)
