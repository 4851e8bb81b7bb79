"""The seccomp filter on both architectures and for any arguments, run by a small interpreter."""

from __future__ import annotations

import os
import re
import signal
import struct
from pathlib import Path

import pytest

from rlmath.sandbox import kernel, system_calls
from rlmath.sandbox.system_calls import ARCHITECTURES, rules_of

PID = 4321
ALLOW, KILL, NO_CALL, DENY = 0x7FFF0000, 0x80000000, 0x00050026, 0x00050001
NAMES = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


def verdict(program: bytes, number: int, *arguments: int, code: int) -> int:
    """The kernel's answer to a call, by its rules for the filter's classic BPF instructions."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    memory = struct.pack("<IIQ6Q", number, code, 0, *(word % 2**64 for word in words))
    position, accumulator = 0, 0
    while True:
        opcode, if_true, if_false, operand = struct.unpack_from("<HBBI", program, 8 * position)
        position += 1
        match opcode:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", memory, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                position += if_true if accumulator == operand else if_false
            case 0x35:
                position += if_true if accumulator >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no such instruction: {opcode:#x}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_listed_calls_pass_and_their_arguments_decide(name: str) -> None:
    machine = ARCHITECTURES[name]
    rules = rules_of(machine, PID, may_open_files=True)
    program = kernel.filter_program(rules, machine)
    numbers = {rule.name: rule.number for rule in rules}

    def of(call: str, *arguments: int) -> int:
        return verdict(program, numbers[call], *arguments, code=machine.audit_code)

    unlisted = set(range(600)) - set(numbers.values())
    assert {verdict(program, number, code=machine.audit_code) for number in unlisted} == {DENY}
    plain = [rule.number for rule in rules if not rule.checks and not rule.is_missing]
    assert len(plain) > 70
    assert {
        verdict(program, number, *[2**64 - 1] * 6, code=machine.audit_code) for number in plain
    } == {ALLOW}
    assert of("clone3") == NO_CALL
    threads = 0x3D0F00
    assert of("clone", threads) == ALLOW and of("clone", signal.SIGCHLD) == DENY
    assert of("clone", 0x4000 | 0x100 | signal.SIGCHLD) == DENY  # vfork
    assert of("openat", -100, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flag in (
        os.O_WRONLY,
        os.O_RDWR,
        os.O_CREAT,
        os.O_TRUNC,
        os.O_APPEND,
        0x400000,
        os.O_DIRECT,
    ):
        assert of("openat", -100, 0, os.O_CLOEXEC | flag) == DENY
    assert of("kill", PID, signal.SIGTERM) == ALLOW and of("kill", PID, 0) == ALLOW
    for target, number in (
        (PID, signal.SIGKILL),
        (PID - 1, signal.SIGTERM),
        (-1, signal.SIGTERM),
        (0, 15),
    ):
        assert of("kill", target, number) == DENY and of("tgkill", target, PID, number) == DENY
    assert of("tgkill", PID, PID + 1, signal.SIGABRT) == ALLOW
    assert [of("fcntl", 5, command) for command in (8, 10, 15, 1026, 1031)] == [DENY] * 5
    assert (
        of("fcntl", 5, 1) == ALLOW
        and of("ioctl", 0, 0x5401) == ALLOW
        and of("ioctl", 0, 0x5412) == DENY
    )
    assert of("prlimit64", 0, 7, 0, 0x7FFD1234) == ALLOW
    assert of("prlimit64", 0, 7, 0x7FFD1234) == DENY and of("prlimit64", 0, 7, 5 << 32) == DENY
    assert of("madvise", 0, 4096, 4) == ALLOW and of("madvise", 0, 4096, 21) == DENY


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(name: str) -> None:
    machine = ARCHITECTURES[name]
    program = kernel.filter_program(rules_of(machine, PID, may_open_files=True), machine)
    others = [
        0x40000003,
        *(other.audit_code for other in ARCHITECTURES.values() if other is not machine),
    ]
    assert {verdict(program, number, code=code) for code in others for number in range(600)} == {
        KILL
    }
    of_x32 = verdict(program, 0x40000000 + 39, code=machine.audit_code)
    assert of_x32 == (KILL if name == "x86_64" else DENY)


def test_nothing_is_opened_with_preloaded_modules_alone() -> None:
    machine = ARCHITECTURES["x86_64"]
    program = kernel.filter_program(rules_of(machine, PID, may_open_files=False), machine)
    assert [verdict(program, number, code=machine.audit_code) for number in (2, 257, 437)] == [
        DENY
    ] * 3


@pytest.mark.parametrize(("column", "name"), [*enumerate(NAMES)])
def test_numbers_are_those_of_the_kernel_headers(column: int, name: str) -> None:
    header = Path("/usr/include") / NAMES[name]
    if not header.is_file():
        pytest.skip(f"{header} is not installed")
    source = header.read_text(encoding="utf-8")
    numbers = {
        call: int(number)
        for call, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", source)
    }
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
    table = {**system_calls._PLAIN, **system_calls._CHECKED}
    ours = {call: pair[column] for call, pair in table.items() if pair[column] is not None}
    assert ours == {call: numbers.get(call) for call in ours}


def test_an_isolation_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match='isolation is "docker"; it must be one of landlock, preloaded, none'
    ):
        kernel.lacking("docker")
    assert kernel.lacking("none") is None


def test_what_a_kernel_lacks_is_said_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    problem = kernel.lacking("landlock")
    assert problem is not None and 'set it to "preloaded"' in problem
    assert kernel.lacking("preloaded") is None and kernel.best_isolation() == "preloaded"
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    problem = kernel.lacking("preloaded")
    assert (
        problem is not None
        and 'set it to "none" only for code that you trust' in problem
        and "riscv64" in problem
    )
    assert kernel.best_isolation() == "none"
