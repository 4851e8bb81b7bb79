"""The system calls that a sandbox may make: those of an interpreter that computes.

A list of what is allowed, not of what is denied: a call that a newer kernel adds is denied. Numbers
are from <asm/unistd_64.h> and <asm-generic/unistd.h>.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

_ALL = 0xFFFFFFFF
_CLONE_OF_A_THREAD = 0x00010000 | 0x00000800 | 0x00000100
"""CLONE_THREAD, CLONE_SIGHAND, CLONE_VM."""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. F_SETOWN with
F_SETSIG would send any signal to any process, F_SETPIPE_SZ would take memory that is nobody's."""
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0x400000
"""Flags of open(2); the last is O_TMPFILE. Landlock before its third version lets O_RDONLY |
O_TRUNC pass."""
_SLOW = os.O_DIRECT
"""A flag to read the disk every time: code that waits for it would look as if the machine were
at fault."""
_PAGING_OUT = (20, 21)
"""MADV_COLD, MADV_PAGEOUT: as above."""

_PLAIN: Mapping[str, tuple[int | None, int | None]] = {
    # files and descriptors
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    # waiting
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "restart_syscall": (219, 128),
    # memory
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "membarrier": (324, 283),
    # threads
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "arch_prctl": (158, None),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "getpriority": (140, 141),
    "getcpu": (309, 168),
    # its own signals and timers
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    # who and when
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "times": (100, 153),
    "time": (201, None),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "getrandom": (318, 278),
    # the end
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""Numbers on x86-64 and on aarch64, None where an architecture does not have the call."""

_CHECKED: Mapping[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "madvise": (28, 233),
    "prlimit64": (302, 261),
}


@dataclass(frozen=True)
class Architecture:
    """A machine's numbers."""

    column: int
    """Its column in the tables above."""
    audit_code: int
    """AUDIT_ARCH_... of <linux/audit.h>."""
    seccomp: int
    """The number of seccomp(2)."""
    has_x32: bool
    """Whether calls of another kind have the same architecture and a bit of their own in their
    number."""


ARCHITECTURES = {
    "x86_64": Architecture(column=0, audit_code=0xC000003E, seccomp=317, has_x32=True),
    "aarch64": Architecture(column=1, audit_code=0xC00000B7, seccomp=277, has_x32=False),
}


@dataclass(frozen=True)
class Check:
    """A condition on an argument: its lower or upper 32 bits, masked, are one of the numbers."""

    argument: int
    numbers: tuple[int, ...]
    mask: int = _ALL
    upper_half: bool = False
    excludes: bool = False
    """Whether the argument must be none of the numbers instead."""


@dataclass(frozen=True)
class Rule:
    """An allowed system call, if its arguments pass all checks."""

    name: str
    number: int
    checks: tuple[Check, ...] = field(default=())
    is_missing: bool = False
    """Whether the call answers ENOSYS, as on a kernel that does not have it: callers then use an
    older one."""


def rules_of(machine: Architecture, pid: int, may_open_files: bool) -> list[Rule]:
    """The rules of a process with this id.

    With `may_open_files` it opens files for reading where Landlock lets it."""
    to_itself = Check(argument=0, numbers=(pid,))
    checks = {
        "open": (Check(argument=1, numbers=(0,), mask=_WRITING | _SLOW),),
        "openat": (Check(argument=2, numbers=(0,), mask=_WRITING | _SLOW),),
        "madvise": (Check(argument=2, numbers=_PAGING_OUT, excludes=True),),
        "clone": (Check(argument=0, numbers=(_CLONE_OF_A_THREAD,), mask=_CLONE_OF_A_THREAD),),
        "clone3": (),
        "fcntl": (Check(argument=1, numbers=_FCNTL_COMMANDS),),
        "ioctl": (Check(argument=1, numbers=_IOCTL_COMMANDS),),
        # Not SIGKILL: a process that we did not kill was killed by the kernel, for want of memory.
        "kill": (to_itself, Check(argument=1, numbers=(signal.SIGKILL,), excludes=True)),
        "tgkill": (to_itself, Check(argument=2, numbers=(signal.SIGKILL,), excludes=True)),
        # It reads its limits and sets none: the pointer to new ones is null.
        "prlimit64": (
            Check(argument=2, numbers=(0,)),
            Check(argument=2, numbers=(0,), upper_half=True),
        ),
    }
    if not may_open_files:
        del checks["open"], checks["openat"]
    rules = []
    for name, numbers in {**_PLAIN, **_CHECKED}.items():
        number = numbers[machine.column]
        if number is None or (name in _CHECKED and name not in checks):
            continue
        rules.append(Rule(name, number, checks.get(name, ()), is_missing=name == "clone3"))
    return rules
