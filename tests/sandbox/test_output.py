"""Bounded output, and the seccomp program's shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from motley_sampler.sandbox.confine import seccomp_program
from motley_sampler.sandbox.output import BoundedOutput


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(2, 64))
def test_head_and_tail_are_kept_however_the_output_is_cut(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.write(piece)
    whole = b"".join(pieces)
    assert output.total_bytes == len(whole)
    assert output.dropped_bytes == max(0, len(whole) - limit)
    if len(whole) <= limit:
        assert output.text() == whole.decode(errors="replace")
    else:
        assert f"[{len(whole) - limit} bytes left out]" in output.text()


def test_a_character_cut_in_two_is_not_shown_broken() -> None:
    output = BoundedOutput(4)
    output.write("aé-éb".encode())  # 7 bytes; the kept head "a\xc3" and tail "\xa9b" each end in half an é
    assert output.text() == "a\n[3 bytes left out]\nb"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("deny_sockets", [False, True])
def test_every_jump_of_the_filter_lands_inside_it(machine: str, deny_sockets: bool) -> None:
    program = seccomp_program(machine, deny_sockets=deny_sockets)
    assert len(program) % 8 == 0
    count = len(program) // 8
    for index in range(count):
        code, if_true, if_false = program[index * 8], program[index * 8 + 2], program[index * 8 + 3]
        if code & 0x07 == 0x05:  # a jump
            assert index + 1 + max(if_true, if_false) < count
    assert program[-8] == 0x06  # and it ends with a return
