"""The kernel's confinement of a process: Landlock, seccomp, capabilities and resource limits.

It uses ctypes.

Sources: landlock(7), seccomp(2), capabilities(7), <linux/landlock.h>, <linux/seccomp.h>,
<linux/filter.h>. All of it works for an ordinary user, and for root, who loses his capabilities.

Landlock's first version is enough, as the filter denies what newer ones add: no call that writes,
truncates, renames or links is on its list, and none that connects or signals another process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Sequence

from rlmath.sandbox.calls import ISOLATIONS
from rlmath.sandbox.system_calls import ARCHITECTURES, Architecture, Check, Rule, rules_of

MOST_OPEN_FILES = 64
SOME_PID = 0x7EDCBA98
"""Placeholder of a process's id in a filter; above any that the kernel gives."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SECCOMP_GET_ACTION_AVAIL = 2
_SECCOMP_RET_KILL_PROCESS = 0x80000000
_SECCOMP_RET_ERRNO = 0x00050000
_SECCOMP_RET_ALLOW = 0x7FFF0000
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_ACCESS_VERSION_1 = (1 << 13) - 1
_LANDLOCK_READ_FILE = 1 << 2
_LANDLOCK_READ_DIR = 1 << 3
_CAPABILITY_VERSION_3 = 0x20080522
_ADDR_NO_RANDOMIZE = 0x0040000
_EPERM = 1
_ENOSYS = 38
_LOAD_WORD = 0x20
_AND = 0x54
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_RETURN = 0x06
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16
_X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- what there is


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 where it has none or has it switched off."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, version)


def architecture() -> Architecture | None:
    """This machine's architecture, None where no filter is written for it."""
    return ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None


def has_filters() -> bool:
    """Whether a seccomp filter can be made for this machine."""
    machine = architecture()
    if machine is None:
        return False
    action = ctypes.c_uint32(_SECCOMP_RET_KILL_PROCESS)
    return _libc.syscall(machine.seccomp, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def lacking(isolation: str) -> str | None:
    """A sentence on what this machine lacks for an isolation and what to set; None if nothing.

    ValueError for a word that is no isolation."""
    if isolation not in ISOLATIONS:
        raise ValueError(f'isolation is "{isolation}"; it must be one of {", ".join(ISOLATIONS)}')
    if isolation == "none":
        return None
    if not has_filters():
        return (
            f'isolation "{isolation}" needs seccomp filters on x86-64 or aarch64, which this '
            "machine does not have "
            f'({platform.system()} {platform.machine()}); set it to "none" only for code that you '
            "trust"
        )
    if isolation == "landlock" and not landlock_version():
        return (
            'isolation "landlock" needs a kernel with Landlock (5.13 or newer, "landlock" in its '
            "list of security "
            'modules), which this machine does not have; set it to "preloaded", with which code '
            "opens no file"
        )
    return None


def best_isolation() -> str:
    """The first isolation that this machine does not lack."""
    return next(isolation for isolation in ISOLATIONS if lacking(isolation) is None)


# ---------------------------------------------------------------- Landlock


def readable_paths() -> list[str]:
    """Folders and files that the interpreter and its libraries are in, and time zones."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    standard_library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    time_zones = ["/usr/share/zoneinfo", "/etc/localtime"]
    paths = {
        os.path.realpath(path) for path in [*libraries, *prefixes, *standard_library, *time_zones]
    }
    return sorted(path for path in paths if os.path.exists(path) and path != "/")


def make_ruleset(paths: Sequence[str]) -> int:
    """A descriptor of Landlock rules that deny all but reading files and folders beneath `paths`.

    OSError where the kernel refuses."""
    handled = struct.pack("Q", _LANDLOCK_ACCESS_VERSION_1)
    ruleset = _checked(
        _libc.syscall(_LANDLOCK_CREATE_RULESET, handled, len(handled), 0), "landlock"
    )
    for path in paths:
        access = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, parent)
        added = _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(parent)
        _checked(added, f"landlock rule for {path}")
    return ruleset


# ---------------------------------------------------------------- the filter


def filter_program(rules: Sequence[Rule], machine: Architecture) -> bytes:
    """Instructions of a seccomp filter that allows what the rules say, and nothing else.

    Calls of another architecture (i386, x32) end the process; other calls raise PermissionError.
    """
    is_ours = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_EQUAL, machine.audit_code, if_true=1),
        _instruction(_RETURN, _SECCOMP_RET_KILL_PROCESS),
        _instruction(_LOAD_WORD, _NUMBER_OFFSET),
    ]
    if machine.has_x32:
        is_ours += [
            _instruction(_JUMP_GREATER_EQUAL, _X32_BIT, if_false=1),
            _instruction(_RETURN, _SECCOMP_RET_KILL_PROCESS),
        ]
    parts = [*is_ours]
    for rule in rules:
        block = [part for check in rule.checks for part in _check_instructions(check)]
        verdict = _SECCOMP_RET_ERRNO | _ENOSYS if rule.is_missing else _SECCOMP_RET_ALLOW
        block.append(_instruction(_RETURN, verdict))
        parts += [_instruction(_JUMP_EQUAL, rule.number, if_false=len(block)), *block]
    parts.append(_instruction(_RETURN, _SECCOMP_RET_ERRNO | _EPERM))
    return b"".join(parts)


def _check_instructions(check: Check) -> list[bytes]:
    """Instructions that deny unless an argument passes a check.

    The masked half of the argument must be one of the check's numbers, or none of them."""
    offset = _ARGUMENTS_OFFSET + 8 * check.argument + (4 if check.upper_half else 0)
    deny = _instruction(_RETURN, _SECCOMP_RET_ERRNO | _EPERM)
    parts = [_instruction(_LOAD_WORD, offset), _instruction(_AND, check.mask)]
    count = len(check.numbers)
    for index, number in enumerate(check.numbers):
        comparisons_left = count - 1 - index
        # The denial comes after the comparisons. Where a match denies, each comparison has its own,
        # which only other numbers jump over.
        if check.excludes:
            parts += [_instruction(_JUMP_EQUAL, number, if_false=1), deny]
        else:
            parts.append(_instruction(_JUMP_EQUAL, number, if_true=comparisons_left + 1))
    return parts if check.excludes else [*parts, deny]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


# ---------------------------------------------------------------- this process


def fix_addresses() -> bool:
    """Whether this process must be executed anew to have the same addresses every time.

    False where it has them, or where the kernel refuses (some containers): then sets of the
    libraries' classes and functions, which have no hash of their own, have another order in every
    server."""
    current = _libc.personality(0xFFFFFFFF)
    if current < 0 or current & _ADDR_NO_RANDOMIZE:
        return False
    return _libc.personality(current | _ADDR_NO_RANDOMIZE) >= 0


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, which may have happened already."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """Root keeps his name and loses his powers, for good."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def set_resource_limits(address_space_bytes: int, cpu_seconds: float) -> None:
    """The kernel's own limits of this process; those of a call's time are watched by the server."""
    whole_seconds = int(cpu_seconds) + 1
    limits = {
        resource.RLIMIT_AS: address_space_bytes,
        resource.RLIMIT_CPU: whole_seconds,
        resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def make_filter(isolation: str) -> bytes | None:
    """The filter of an isolation, made once; a process puts its id in place of SOME_PID.

    None where it has none."""
    machine = architecture()
    if isolation == "none" or machine is None:
        return None
    return filter_program(
        rules_of(machine, SOME_PID, may_open_files=isolation == "landlock"), machine
    )


def confine(ruleset: int | None, instructions: bytes | None) -> None:
    """Give up everything that Landlock's rules and a filter of `make_filter` deny, for good.

    Needs `no_new_privs`. OSError where the kernel refuses."""
    if ruleset is not None:
        _checked(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)
    if instructions is None:
        return
    instructions = instructions.replace(struct.pack("I", SOME_PID), struct.pack("I", os.getpid()))
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    installed = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _checked(installed, "prctl(PR_SET_SECCOMP)")


def _checked(returned: int, name: str) -> int:
    """A system call's result; OSError where it failed."""
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return returned
