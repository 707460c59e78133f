"""What a command may still ask of the kernel: a seccomp filter, and Landlock rules where no mount namespace hides the host.

Both work without privileges and are inherited by everything that the command starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from motley_sampler.sandbox import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that no task needs and that widen the kernel's attack surface. (x86-64, arm64) numbers.
_DENIED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
}
_UNKNOWN_TO_PROGRAMS = {"io_uring_setup": (425, 425), "clone3": (435, 435)}  # ENOSYS: programs then use the older call
_CLONE = (56, 220)
_SOCKET = (41, 198)

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT_0 = 0, 4, 16


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def seccomp_program(machine: str, *, deny_sockets: bool) -> bytes:
    """The filter as classic BPF. `deny_sockets`: no socket(2) of any family, for levels without a network namespace."""
    column = 0 if machine == "x86_64" else 1
    allow, deny = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)
    missing = _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),  # another architecture's numbers mean other calls
        _instruction(_LOAD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(0x35, 0x40000000, 0, 1), deny]  # x32 numbers: the same calls under another name
    denied = [numbers[column] for numbers in _DENIED.values() if numbers]
    if deny_sockets:
        denied.append(_SOCKET[column])
    for number in denied:
        program += [_instruction(_JUMP_EQUAL, number, 0, 1), deny]
    for numbers in _UNKNOWN_TO_PROGRAMS.values():
        program += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), missing]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE[column], 0, 3),
        _instruction(_LOAD, _OFFSET_ARGUMENT_0),
        _instruction(_JUMP_SET, kernel.CLONE_NEWUSER, 0, 1),
        deny,
        allow,
    ]
    return b"".join(program)


def install_seccomp(program: bytes) -> None:
    """Needs no_new_privs to be set."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, ctypes.addressof(header))


# Landlock access rights, linux/landlock.h.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_LAST_RIGHT_OF_ABI = {1: 12, 2: 13, 3: 14, 4: 14, 5: 15}
_READ_ONLY = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)  # + truncate, ioctl on devices
_CREATE_VERSION, _RULE_PATH_BENEATH = 1, 1


def landlock_abi() -> int:
    """Version of the running kernel's Landlock; 0 when it has none."""
    return max(
        0, kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_VERSION))
    )


def restrict_files(read_only: list[str], writable: list[str]) -> None:
    """From here on this process and its children reach only these trees of the host. Needs no_new_privs to be set."""
    abi = landlock_abi()
    if abi < 1:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock")
    handled = (1 << (_LAST_RIGHT_OF_ABI.get(abi, 15) + 1)) - 1
    # From ABI 4 TCP can be handled (no rule: none is allowed), from ABI 6 signals and abstract sockets stay inside.
    attributes = struct.pack("=QQQ", handled, 0b11, 0b11) if abi >= 6 else struct.pack("=Q", handled)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = kernel.syscall(
        kernel.LANDLOCK_CREATE_RULESET, buffer, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    try:
        for path, rights in [*((p, _READ_ONLY) for p in read_only), *((p, handled) for p in writable)]:
            _allow(ruleset, path, rights & handled)
        if kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) < 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        buffer = ctypes.create_string_buffer(rule, len(rule))
        result = kernel.syscall(
            kernel.LANDLOCK_ADD_RULE,
            ctypes.c_int(ruleset),
            ctypes.c_int(_RULE_PATH_BENEATH),
            buffer,
            ctypes.c_uint32(0),
        )
        if result < 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)
