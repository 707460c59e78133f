"""Keys, addresses and processes that a control plane is made of."""

from __future__ import annotations

import base64
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from motley_local.agent import AddressPool
from motley_local.controlplane import AddressSlot, claim_slot, free_ports, new_p256_key_pem, write_private
from motley_local.processes import Child, ChildFailedError, descendants


def test_the_signing_key_is_a_sec1_key_on_p256() -> None:
    pem = new_p256_key_pem()
    lines = pem.strip().splitlines()
    assert (lines[0], lines[-1]) == ("-----BEGIN EC PRIVATE KEY-----", "-----END EC PRIVATE KEY-----")
    der = base64.b64decode("".join(lines[1:-1]))
    # SEQUENCE of 49 bytes: version 1 (3), 32 bytes of key (34), [0] with the curve's OID of 8 bytes (12).
    assert der[:7] == bytes([0x30, 49, 2, 1, 1, 4, 32])
    assert der[39:] == bytes.fromhex("a00a06082a8648ce3d030107")
    assert new_p256_key_pem() != pem


def test_clusters_on_one_machine_take_different_ranges() -> None:
    first, first_lock = claim_slot()
    second, second_lock = claim_slot()
    assert first != second
    first_lock.close()
    again, again_lock = claim_slot()
    assert again == first
    second_lock.close()
    again_lock.close()


def test_a_slot_keeps_services_and_pods_apart() -> None:
    slot = AddressSlot(64)
    assert (slot.service_cidr, slot.kubernetes_service_ip, slot.pod_prefix) == ("127.64.0.0/16", "127.64.0.1", "127.65")


def test_pod_addresses_are_distinct_and_not_reused_at_once() -> None:
    pool = AddressPool("127.65")
    taken = [pool.take() for _ in range(600)]
    assert len(set(taken)) == 600
    assert not [ip for ip in taken if ip.endswith((".0", ".255"))]
    pool.give_back(taken[0])
    assert pool.take() not in taken


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", ports[0]))


def test_private_files_are_for_their_owner_also_when_they_replace_others(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    child = Child.spawn(
        "etcd", [sys.executable, "-S", "-c", "print('no space left'); raise SystemExit(3)"], log_path=tmp_path / "log"
    )
    child.process.wait()
    with pytest.raises(ChildFailedError, match=r"etcd ended with exit code 3; last lines of .*\n    no space left"):
        child.check()


def test_children_are_started_from_the_main_thread_only(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            Child.spawn("x", ["true"], log_path=tmp_path / "log")
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_descendants_are_followed_through_every_generation() -> None:
    assert sorted(descendants(1, {2: 1, 3: 2, 4: 3, 5: 9, 9: 0, 1: 0})) == [2, 3, 4]
    assert os.getpid() not in descendants(os.getpid(), {os.getpid(): 1})
