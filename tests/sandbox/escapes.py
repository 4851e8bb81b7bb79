"""Programs that try to leave the sandbox, outlive it or deceive the server, and how they may end.

python -m tests.sandbox.escapes        runs all and prints a line of JSON for each; needs the standard library only
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlmath.sandbox.calls import CallResult, Limits
from rlmath.sandbox.sandboxes import Sandboxes

LIMITS = Limits(
    call_cpu_seconds=0.3,
    wall_factor=300.0,  # a loop gets its CPU time on a busy machine, too
    memory_bytes=192 * 2**20,
    output_characters=1000,
    threads=8,
)
SLEEPERS_LIMITS = replace(LIMITS, wall_factor=3.0)
SECRET = "the-secret-of-the-host-7f31"
SECRET_FILE = Path(tempfile.gettempdir()) / f"rlmath-secret-{os.getpid()}"
WRITTEN = Path(tempfile.gettempdir()) / f"rlmath-written-{os.getpid()}"

AFTERWARDS = "a plain call afterwards"
DENIED = ("denied",)
OVER = ("ended",)
LATE = ("timeout",)


@dataclass(frozen=True)
class Escape:
    code: str
    statuses: tuple[str, ...] = DENIED
    text: str = ""
    """Is in the text that is shown."""
    sleeps: bool = False
    """It is ended by the clock, so it is run with a short limit of wall time."""


def syscall(*arguments: object) -> str:
    """Code that makes an x86-64 system call by its number and prints its return value and errno."""
    words = ", ".join(map(str, arguments))
    return (
        "import ctypes\nlibc = ctypes.CDLL(None, "
        f"use_errno=True)\nprint(libc.syscall({words}), ctypes.get_errno())"
    )


def denied_syscall(*arguments: object) -> Escape:
    return Escape(syscall(*arguments), ("ok",), "-1 1\n")


def on_channel(content: str) -> str:
    return f"import os, struct\nos.write(3, {content})\n"


SIGKILL_EVERYBODY = """
import fcntl, os
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(reader, 10, 9)
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
"""
I386_GETPID = """
import ctypes, mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(code)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
SWALLOWED_SIGNALS = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, lambda *_: None)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""
HARNESS_OUTPUT = """
import sys
frame = sys._getframe()
while frame is not None:
    for value in list(frame.f_locals.values()):
        if type(value).__name__ == "Session":
            value._output_characters = 10**7
    frame = frame.f_back
"""
THREADS = """
import threading, time
threading.stack_size(65536)
for _ in range(10**4):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    time.sleep(0.001)
"""
SPAWNING_MACHINE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.fork(), libc.vfork(), libc.syscall(57), libc.syscall(58), os.getpid() > 1)
"""

ESCAPES: dict[str, Escape] = {
    # files
    "read a secret": Escape(f"open({str(SECRET_FILE)!r}).read()"),
    "read passwd": Escape("open('/etc/passwd').read()"),
    "read shadow by descriptor": Escape(
        "import os; os.read(os.open('/etc/shadow', os.O_RDONLY), 99)"
    ),
    "read a home": Escape("import os; os.listdir('/root')"),
    "list the root": Escape("import os; os.listdir('/')"),
    "find files": Escape("import glob; glob.glob('/tmp/*') + glob.glob('/home/*')", ("ok",), "[]"),
    "write in tmp": Escape(f"open({str(WRITTEN)!r}, 'w').write('x')"),
    "write in shm": Escape("open('/dev/shm/rlmath-written', 'w').write('x')"),
    "temporary file": Escape("import tempfile; tempfile.NamedTemporaryFile()", ("error", "denied")),
    "write beside the library": Escape("import os; open(os.__file__ + '.x', 'w')"),
    "append to the library": Escape("import os; open(os.__file__, 'a')"),
    "truncate by a reading open": Escape(
        "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)"
    ),
    "truncate": Escape("import os; os.truncate(os.__file__, 0)"),
    "remove": Escape("import os; os.unlink(os.__file__)"),
    "rename": Escape("import os; os.rename(os.__file__, os.__file__ + 'x')"),
    "make a folder": Escape("import os; os.mkdir('/tmp/rlmath-folder')"),
    "symbolic link": Escape(f"import os; os.symlink('/etc/passwd', {str(WRITTEN)!r})"),
    "hard link": Escape(f"import os; os.link(os.__file__, {str(WRITTEN)!r})"),
    "change a mode": Escape("import os; os.chmod(os.__file__, 0o777)"),
    "change an owner": Escape("import os; os.chown(os.__file__, 0, 0)"),
    "change times": Escape("import os; os.utime(os.__file__)"),
    "extended attribute": Escape("import os; os.setxattr(os.__file__, 'user.x', b'1')"),
    "named pipe": Escape(f"import os; os.mkfifo({str(WRITTEN)!r})"),
    "change the root": Escape("import os; os.chroot('/tmp')"),
    "change the folder": Escape("import os; os.chdir('/etc')"),
    "memory file": Escape("import os; os.memfd_create('x')"),
    "shared memory": Escape(
        "from multiprocessing import shared_memory as m; m.SharedMemory(create=True, size=9)"
    ),
    "System V memory": denied_syscall(29, 0, 4096, 0o1600),
    "message queue": denied_syscall(68, 0, 0o1600),
    "openat2": denied_syscall(437, -100, "b'/etc/passwd'", "bytes(24)", 24),
    "open by handle": denied_syscall(304, -100, "bytes(64)", 0),
    "creat": denied_syscall(85, f"{str(WRITTEN)!r}.encode()", 0o600),
    "mount": denied_syscall(165, "b'none'", "b'/mnt'", "b'tmpfs'", 0, 0),
    "own memory by proc": Escape("open('/proc/self/mem', 'r+b')"),
    "own environment by proc": Escape("open('/proc/self/environ').read()"),
    "parent's environment": Escape("import os; open(f'/proc/{os.getppid()}/environ').read()"),
    "parent's descriptors": Escape("import os; os.listdir(f'/proc/{os.getppid()}/fd')"),
    "where the parent is": Escape("import os; os.readlink(f'/proc/{os.getppid()}/cwd')"),
    "a device": Escape("open('/dev/zero', 'rb')"),
    "pickled program": Escape(
        "import pickle\npickle.loads(b\"cos\\nsystem\\n(S'id > /tmp/rlmath-id'\\ntR.\")",
        ("ok",),
        "32512",
    ),
    # network
    "TCP": Escape("import socket; socket.create_connection(('127.0.0.1', 22))"),
    "UDP": Escape("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    "local socket": Escape("import socket; socket.socket(socket.AF_UNIX)"),
    "pair of sockets": Escape("import socket; socket.socketpair()"),
    "netlink": Escape("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "HTTP": Escape(
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        ("error",),
        "not permitted",
    ),
    "socket by number": denied_syscall(41, 2, 1, 0),
    "channel as a socket": Escape("import socket; socket.socket(fileno=3)"),
    "message with a descriptor": denied_syscall(46, 3, "bytes(56)", 0),
    # processes
    "fork": Escape("import os; os.fork()"),
    "fork bomb": Escape("import os\nwhile True: os.fork()"),
    "fork by ctypes": Escape(SPAWNING_MACHINE, ("ok",), "-1 -1 -1 -1 True"),
    "subprocess": Escape("import subprocess; subprocess.run(['id'])"),
    "shell": Escape("import os; os.system('id')", ("ok",), "32512"),
    "exec": Escape("import os; os.execv('/bin/sh', ['sh'])"),
    "spawn": Escape("import os; os.posix_spawn('/bin/sh', ['sh'], {})"),
    "multiprocessing": Escape(
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()"
    ),
    "pool of processes": Escape(
        "import multiprocessing; multiprocessing.Pool(2)", ("denied", "error")
    ),
    "clone": denied_syscall(56, 17, 0, 0, 0, 0),
    "clone of a namespace": denied_syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": Escape(syscall(435, "bytes(88)", 88), ("ok",), "-1 38\n"),
    "new user namespace": denied_syscall(272, 0x10000000),
    "enter a namespace": denied_syscall(308, 3, 0),
    "trace the parent": denied_syscall(101, 16, "__import__('os').getppid()", 0, 0),
    "trace itself": denied_syscall(101, 0, 0, 0, 0),
    "memory of the parent": denied_syscall(310, "__import__('os').getppid()", 0, 0, 0, 0, 0),
    "kill the parent": Escape("import os; os.kill(os.getppid(), 9)"),
    "terminate the parent": Escape("import os; os.kill(os.getppid(), 15)"),
    "kill everybody": Escape("import os; os.kill(-1, 9)"),
    "kill the group": Escape("import os; os.killpg(os.getpgrp(), 9)"),
    "kill as the machine would": Escape("import os; os.kill(os.getpid(), 9)"),
    "kill by thread": denied_syscall(
        234, "__import__('os').getpid()", "__import__('os').getpid()", 9
    ),
    "kill by a descriptor's owner": Escape(SIGKILL_EVERYBODY),
    "kill by a process descriptor": Escape("import os; os.pidfd_open(os.getppid())"),
    "kill by a timer": denied_syscall(222, 0, "bytes(64)", "bytes(8)"),
    "queue a signal": denied_syscall(129, "__import__('os').getppid()", 9, "bytes(128)"),
    "outlive the parent": denied_syscall(157, 1, 0, 0, 0, 0),
    "new limits": Escape(
        "import resource as r; r.setrlimit(r.RLIMIT_CPU, (9, 9))", ("denied", "error")
    ),
    "limits of the parent": Escape(
        "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (1, 1))"
    ),
    "priority": Escape("import os; os.nice(9)"),
    "scheduling": Escape("import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"),
    "cores": Escape("import os; os.sched_setaffinity(0, {0})"),
    "another user": Escape("import os; os.setuid(1)"),
    "capabilities": denied_syscall(126, "bytes(8)", "b'\\xff' * 24"),
    "new session": Escape("import os; os.setsid()"),
    "host name": Escape("import socket; socket.sethostname('x')"),
    "bpf": denied_syscall(321, 0, "bytes(64)", 64),
    "performance counters": denied_syscall(298, "bytes(128)", 0, -1, -1, 0),
    "io_uring": denied_syscall(425, 8, "bytes(128)"),
    "keys": denied_syscall(250, 0, -3, 1),
    "add a key": denied_syscall(248, "b'user'", "b'x'", "b'y'", 1, -3),
    "page faults": denied_syscall(323, 0),
    "kernel module": denied_syscall(175, "bytes(8)", 8, "b''"),
    "reboot": denied_syscall(169, 0xFEE1DEAD, 672274793, 0, 0),
    "another filter": denied_syscall(317, 1, 0, "bytes(16)"),
    "a call that no kernel has yet": denied_syscall(999, 0),
    "i386": Escape(I386_GETPID, OVER, "Bad system call"),
    "x32": Escape(syscall(0x40000000 + 39), OVER, "Bad system call"),
    "terminal input": Escape("import fcntl; fcntl.ioctl(0, 0x5412, b'x')"),
    "a larger pipe": Escape("import fcntl, os; fcntl.fcntl(os.pipe()[1], 1031, 2**20)"),
    # time
    "loop": Escape("while True: pass", LATE, "0.3 s of CPU time"),
    "loop that catches everything": Escape(SWALLOWED_SIGNALS, LATE),
    "loop in repr": Escape(
        "class A:\n    def __repr__(self):\n        while True: pass\nA()", LATE
    ),
    "loop in str of an error": Escape(
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", LATE
    ),
    "loop in a trace": Escape(
        "import sys\ndef trace(*_):\n    while True: pass\nsys.settrace(trace)\n(lambda: 1)()", LATE
    ),
    "loop in a destructor": Escape(
        "class A:\n    def __del__(self):\n        while True: pass\nx = A()\ndel x", LATE
    ),
    "loop of threads": Escape(
        "import threading\ndef f():\n    while True: pass\nfor _ in range(3): "
        "threading.Thread(target=f).start()\nf()",
        LATE,
    ),
    "huge power": Escape("x = 10 ** 10 ** 9", ("timeout", "memory")),
    "huge factorial": Escape("import math; math.factorial(10 ** 7) % 7", LATE),
    "catastrophic pattern": Escape("import re; re.match('(a+)+$', 'a' * 40 + 'b')", LATE),
    "sleep": Escape("import time; time.sleep(99)", LATE, "most of which it slept", sleeps=True),
    "stop itself": Escape(
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", LATE, "slept", sleeps=True
    ),
    "read the channel": Escape("import os; os.read(3, 9)", LATE, "slept", sleeps=True),
    "deadlock": Escape(
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        LATE,
        "slept",
        sleeps=True,
    ),
    "standard input": Escape("input()", ("error",), "EOFError"),
    # memory, output and threads
    "memory in one piece": Escape("x = bytearray(10 ** 9)", ("memory",), "MemoryError"),
    "memory piece by piece": Escape(  # bytes() does not write to its pages: it takes no time
        "x = []\nwhile True: x.append(bytes(10 ** 6))", ("memory",), "MemoryError"
    ),
    "memory by mmap": Escape(
        "import mmap; mmap.mmap(-1, 2 ** 30)", ("error", "memory"), "Cannot allocate memory"
    ),
    "threads": Escape(THREADS, ("ended", "error")),
    "descriptors": Escape("import os\nwhile True: os.pipe()", ("error",), "Too many open files"),
    "a gigabyte of output": Escape(
        "for _ in range(10 ** 9): print('x' * 10 ** 6)", ("timeout", "memory"), "CPU time"
    ),
    "a long text": Escape("print('x' * 10 ** 7)", ("ok",), "characters left out"),
    "a long value": Escape("'y' * 10 ** 7", ("ok",), "characters left out"),
    "a long error": Escape("raise ValueError('z' * 10 ** 6)", ("error",), "characters left out"),
    "output by the descriptor": Escape("import os; os.write(1, b'x' * 9)", ("ok",), "9\n"),
    "escape codes": Escape(
        "print('\\x1b[31mred\\x1b[0m\\x07\\x1b]0;title\\x07.')", ("ok",), "red."
    ),
    "long recursion": Escape("def f(n): return f(n + 1)\nf(0)", ("error",), "RecursionError"),
    "recursion without a limit": Escape(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1)\nf(0)",
        ("ended", "memory", "timeout"),
    ),
    "nested code": Escape("x = " + "(" * 10_000 + ")" * 10_000, ("error", "memory")),
    "a null byte": Escape("print('a\\0b')\n\0", ("error",), "null bytes"),
    "half a character": Escape("print('\ud800')", ("ok", "error")),
    # the end
    "exit": Escape("import sys; sys.exit(0)", ("ok",)),
    "exit with a status": Escape("import sys; sys.exit(3)", ("error",), "SystemExit: 3"),
    "end at once": Escape("import os; os._exit(0)", OVER, "ended its own process"),
    "abort": Escape("import os; os.abort()", OVER, "Aborted"),
    "crash": Escape("import ctypes; ctypes.string_at(0)", OVER, "Segmentation fault"),
    "alarm": Escape("import signal, time; signal.alarm(1); time.sleep(9)", (*OVER, *LATE)),
    "at exit": Escape(
        f"import atexit\natexit.register(lambda: open({str(WRITTEN)!r}, 'w'))\nraise SystemExit",
        ("ok",),
    ),
    "destructor at the end": Escape(
        f"class A:\n    def __del__(self): open({str(WRITTEN)!r}, 'w')\nimport sys\nsys.a = A()",
        ("ok",),
    ),
    # the channel and the program around the code
    "closed descriptors": Escape(
        "import os; os.closerange(0, 99)\nwhile True: pass", (*OVER, *LATE)
    ),
    "closed channel": Escape("import os; os.close(3)\nimport time; time.sleep(9)", OVER),
    "nonsense on the channel": Escape(on_channel("b'what is this?' * 99"), OVER, "channel"),
    "a huge frame": Escape(on_channel("b'\\x7f\\xff\\xff\\xff' + b'x' * 999"), OVER, "channel"),
    "a flood": Escape(
        "import os\nwhile True: os.write(3, b'\\0\\0\\0\\x20' + b'x' * 32)", OVER, "channel"
    ),
    "broken text": Escape(
        on_channel("struct.pack('>IIBQ', 15, 0, 0, 0) + b'\\xff\\xfe'"), OVER, "channel"
    ),
    "a status of its own": Escape(on_channel("struct.pack('>IIBQ', 13, 0, 9, 0)"), OVER, "channel"),
    "an answer to the next call": Escape(
        on_channel("struct.pack('>IIBQ', 13, 1, 0, 0)"), OVER, "channel"
    ),
    "two answers": Escape(on_channel("2 * struct.pack('>IIBQ', 13, 0, 0, 0)"), OVER, "channel"),
    "half an answer, then sleep": Escape(
        on_channel("b'\\0\\0'") + "import time; time.sleep(9)", LATE, sleeps=True
    ),
    "dropped characters that it made up": Escape(
        on_channel("struct.pack('>IIBQ', 13, 0, 0, 2 ** 63)"), OVER, "channel"
    ),
    "write replaced": Escape(
        "import os\nos.write = os.read = None\nprint('here')", ("ok",), "here"
    ),
    "json replaced": Escape(
        "import json\njson.dumps = json.loads = None\nprint('here')", ("ok",), "here"
    ),
    "seed replaced": Escape("import random\nrandom.seed = None\nprint('here')", ("ok",), "here"),
    "print replaced": Escape("import builtins\nbuiltins.print = None\n1 + 1", ("ok",), "2"),
    "no builtins": Escape("import builtins\nbuiltins.__dict__.clear()", ("ok", "error", "ended")),
    "length replaced": Escape(
        "import builtins\nbuiltins.len = lambda x: 10 ** 9\n'here'", ("ok", "error", "ended")
    ),
    "standard output replaced": Escape(
        "import sys\nsys.stdout = None\nprint('x')\n'here'", ("ok",), "here"
    ),
    "more output by the harness's variables": Escape(
        HARNESS_OUTPUT + "print('x' * 10 ** 5)", ("ok", "ended")
    ),
    "modules removed": Escape("import sys\nsys.modules.clear()\n'here'", ("ok", "error", "ended")),
    "a text with a length of its own": Escape(
        "class S(str):\n    def __len__(self): return -1\n    def __getitem__(self, _): return "
        "self\n"
        "import sys\nsys.stdout.write(S('x' * 10 ** 5))",
        ("ok", "error", "ended"),
    ),
    "an error that hides its traceback": Escape(
        "class E(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\nraise E", ("error",)
    ),
    "an error whose text raises": Escape(
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", ("error",)
    ),
    "a value whose text is none": Escape(
        "class A:\n    def __repr__(self): return 7\nA()", ("error",), "TypeError"
    ),
    "all subclasses": Escape(
        "import subprocess\n[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "
        "'Popen'][0]('id')"
    ),
    "all objects": Escape(
        "import gc\nfor x in gc.get_objects():\n    if type(x).__name__ == 'socket': "
        "x.detach()\nprint('here')",
        ("ok",),
        "here",
    ),
    "frozen collector": Escape(
        "import gc; gc.disable(); gc.unfreeze(); gc.collect(); print('here')", ("ok",), "here"
    ),
    "main module replaced": Escape(
        "import sys\nsys.modules['__main__'] = None\nprint('here')", ("ok",), "here"
    ),
}


def run_all(python: str) -> dict[str, CallResult]:
    """The result of every escape, each a completion of its own, and of a plain call afterwards."""
    SECRET_FILE.write_text(SECRET, encoding="utf-8")
    SECRET_FILE.chmod(0o644)
    WRITTEN.unlink(missing_ok=True)
    results: dict[str, CallResult] = {}
    try:
        for sleep, limits in ((False, LIMITS), (True, SLEEPERS_LIMITS)):
            with Sandboxes(cores=4, sessions=4, limits=limits, python=python) as sandboxes:
                for name, escape in ESCAPES.items():
                    if escape.sleeps == sleep:
                        sandboxes.submit(name, escape.code, seed=1)
                while sandboxes.pending:
                    results |= sandboxes.wait()
                sandboxes.submit(AFTERWARDS, "6 * 7", seed=1)
                results |= sandboxes.wait()
        return results
    finally:
        SECRET_FILE.unlink()


def main() -> None:
    for name, outcome in run_all(sys.executable).items():
        print(json.dumps({"name": name, **asdict(outcome)}))


if __name__ == "__main__":
    main()
