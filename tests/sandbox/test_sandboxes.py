"""Sessions, seeds, queues and faults of sandboxes, on real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlmath.sandbox import kernel
from rlmath.sandbox.calls import CallResult, Limits, PastCall
from rlmath.sandbox.executions import Sandbox
from rlmath.sandbox.sandboxes import ATTEMPTS, Sandboxes
from rlmath.sandbox.server_program import PRELOADED
from tests.programs import wait_for
from tests.sandbox.escapes import THREADS

ISOLATION = kernel.best_isolation()
LIMITS = Limits(
    call_cpu_seconds=1.0, wall_factor=300.0, memory_bytes=256 * 2**20, output_characters=1000
)


def make(**settings: object) -> Sandboxes:
    defaults = {"cores": 2, "limits": LIMITS, "isolation": ISOLATION, "preload": ("random",)}
    return Sandboxes(**(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    with make(preload=PRELOADED) as sandboxes:
        yield sandboxes


def call(
    sandboxes: Sandboxes, key: str, code: str, earlier: Sequence[PastCall] = (), seed: int = 1
) -> CallResult:
    sandboxes.submit(key, code, seed, earlier)
    ((finished, outcome),) = sandboxes.wait()
    assert finished == key
    return outcome


def conversation(
    sandboxes: Sandboxes, key: str, codes: Sequence[str], seed: int = 1
) -> list[CallResult]:
    """The results of a completion's calls, one after the other."""
    past: list[PastCall] = []
    results = []
    for code in codes:
        results.append(call(sandboxes, key, code, past, seed))
        past.append(results[-1].as_past_call(code))
    return results


def shown(results: Sequence[CallResult]) -> list[tuple[str, str]]:
    return [(outcome.status, outcome.text) for outcome in results]


def server_of(sandboxes: Sandboxes) -> psutil.Process:
    return psutil.Process(sandboxes.server_pid)


def children_of(sandboxes: Sandboxes) -> list[psutil.Process]:
    return server_of(sandboxes).children()


CONVERSATION = (
    "import random\nx = [random.random()]\ndef double(n): return 2 * n",
    "x.append(double(4)); raise KeyError('half done')",
    "print(len(x)); x[1]",
    "x.append(0)\nwhile True: pass",
    "class Point:\n    pass\nlen(x), round(random.random(), 6)",
    "import os; x.append(1); os._exit(0)",
    "len(x), Point.__name__, {'b', 'a', 'c'}",
)
SHOWN = [
    ("ok", ""),
    (
        "error",
        '  File "<cell 2>", line 1, in <module>\n    x.append(double(4)); raise KeyError(\'half '
        "done')\n"
        "KeyError: 'half done'\n",
    ),
    ("ok", "2\n8\n"),
]


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print(1)\n2 + 2", "ok", "1\n4\n"),
        ("x = 3", "ok", ""),
        ("None", "ok", ""),
        ("'text'", "ok", "'text'\n"),
        ("1;", "ok", ""),
        ("1 ; # hidden", "ok", ""),
        ("2 # shown;", "ok", "2\n"),
        ("'é;'", "ok", "'é;'\n"),
        ("for i in range(2): print(i)", "ok", "0\n1\n"),
        ("import sys; print('a'); print('b', file=sys.stderr); "
        "sys.stdout.buffer.write(b'c\\n');", "ok", "a\nb\nc\n"),
        ("print('a\\r\\nb\\x1b[1mc\\x07')", "ok", "a\nbc\n"),
        ("object()", "ok", "<object object at 0x...>\n"),
        ("def f():\n    g()\ndef g():\n    return [][1]\nf()", "error",
         '  File "<cell 1>", line 4, in g\n    return [][1]\nIndexError: list index out of '
         'range\n'),
        ("import json\njson.loads('{')", "error",
         '  File "<cell 1>", line 2, in <module>\n    '
         'json.loads(\'{\')\njson.decoder.JSONDecodeError: Expecting '
         "property name enclosed in double quotes: line 1 column 2 (char 1)\n"),
        ("x = (", "error",
         "  File \"<cell 1>\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"),
        ("print('before')\nraise SystemExit", "ok", "before\n"),
        ("from __future__ import annotations\nfrom dataclasses import "
        "dataclass\n@dataclass\nclass A: x: int\nA(1)",
         "ok", "A(x=1)\n"),
        ("__name__", "ok", "'__main__'\n"),
        ("print('a\\rb')", "ok", "a\nb\n"),
        ("", "ok", ""),
    ],
)  # fmt: skip
def test_a_call_shows_what_a_notebook_would(
    sandboxes: Sandboxes, code: str, status: str, text: str
) -> None:
    outcome = call(sandboxes, "shown", code)
    sandboxes.release("shown")
    assert (outcome.status, outcome.text) == (status, text)


def test_output_is_cut_in_its_middle_and_says_so(sandboxes: Sandboxes) -> None:
    for repeats, left_out in ((1000, 0), (1001, 1), (5000, 4000), (10**6, 10**6 - 1000)):
        outcome = call(
            sandboxes,
            f"cut {repeats}",
            f"import sys; _ = sys.stdout.write('ab' * ({repeats} // 2) + 'c' * ({repeats} % 2))",
        )
        sandboxes.release(f"cut {repeats}")
        whole = "ab" * (repeats // 2) + "c" * (repeats % 2)
        notice = f"\n[... {left_out:,} characters left out ...]\n" if left_out else whole[500:500]
        assert outcome.text == whole[:500] + notice + whole[500 if not left_out else -500 :]
        assert outcome.left_out_characters == left_out


def test_code_that_is_too_long_is_not_executed(sandboxes: Sandboxes) -> None:
    outcome = call(sandboxes, "long", "#" * (LIMITS.source_characters + 1))
    assert outcome.status == "refused" and not outcome.kept
    assert outcome.text == "the code has 65,537 characters; at most 65,536 are executed\n"


# ---------------------------------------------------------------- sessions


def test_names_live_on_and_a_killed_call_leaves_nothing(sandboxes: Sandboxes) -> None:
    results = conversation(sandboxes, "names", CONVERSATION)
    assert shown(results[:3]) == SHOWN
    assert [outcome.status for outcome in results[3:]] == ["timeout", "ok", "ended", "ok"]
    assert results[4].text.startswith("(2, 0.") and results[6].text.startswith("(2, 'Point', {")
    assert [outcome.rebuilt_calls for outcome in results] == [0, 0, 0, 0, 3, 0, 4]
    assert [outcome.kept for outcome in results] == [True, True, True, False, True, False, True]


def test_a_call_with_too_many_threads_leaves_nothing_and_the_next_one_works(
    sandboxes: Sandboxes,
) -> None:
    results = conversation(sandboxes, "threads", ["x = 7", f"x = 8\n{THREADS}", "x"])
    assert [outcome.status for outcome in results] == ["ok", "ended", "ok"]
    assert "threads and was ended" in results[1].text and results[2].text == "7\n"


def test_a_session_equals_one_that_is_rebuilt_before_every_call(sandboxes: Sandboxes) -> None:
    """Sessions are rebuilt after the eviction of all others, a release, and on another server."""
    lived = conversation(sandboxes, "lived", CONVERSATION)
    past: list[PastCall] = []
    rebuilt = []
    with make(cores=1, sessions=1) as other_sandboxes:
        for number, code in enumerate(CONVERSATION):
            place = sandboxes if number % 2 else other_sandboxes
            rebuilt.append(call(place, "rebuilt", code, past))
            past.append(rebuilt[-1].as_past_call(code))
            call(other_sandboxes, "another", "1")
            sandboxes.release("rebuilt")
    assert shown(rebuilt) == shown(lived)
    assert [outcome.rebuilt_calls for outcome in rebuilt] == [0, 1, 2, 3, 3, 4, 4]


def test_rebuilding_is_not_charged(sandboxes: Sandboxes) -> None:
    code = "sum(range(4 * 10 ** 6))"
    first = call(sandboxes, "charged", code)
    sandboxes.release("charged")
    second = call(sandboxes, "charged", "1", [first.as_past_call(code)])
    assert second.rebuilt_calls == 1 and second.cpu_seconds < first.cpu_seconds / 2


def test_a_completion_has_a_limit_of_cpu_time_for_all_its_calls(sandboxes: Sandboxes) -> None:
    spent = [PastCall("x = 1", cpu_seconds=LIMITS.completion_cpu_seconds - 0.2)]
    outcome = call(sandboxes, "spent", "while True: pass", spent)
    assert outcome.status == "timeout" and outcome.text.startswith(
        "TimeoutError: the call took more than 0.2 s"
    )
    past = [*spent, outcome.as_past_call("while True: pass")]
    outcome = call(sandboxes, "spent", "x", [*past, PastCall("y", kept=False, cpu_seconds=0.2)])
    assert (
        outcome.status == "refused"
        and outcome.text == "all 30 s of CPU time for calls have been used\n"
    )


def test_a_process_that_ends_itself_is_charged_what_it_used(sandboxes: Sandboxes) -> None:
    code = "import os, time\nwhile time.process_time() < 0.3: pass\nos._exit(0)"
    assert call(sandboxes, "charged end", code).cpu_seconds >= 0.25


def test_fresh_calls_know_nothing_of_each_other() -> None:
    with make(state="fresh") as sandboxes:
        results = conversation(sandboxes, "fresh", ("x = 1; x", "x", "1 + 1"))
        assert [outcome.status for outcome in results] == ["ok", "error", "ok"]
        assert "NameError: name 'x' is not defined" in results[1].text
        wait_for(lambda: len(children_of(sandboxes)) == 3, 20.0)  # those that are forked ahead


def test_least_recently_used_sessions_are_evicted() -> None:
    seen: set[str] = set()
    with make(cores=1, sessions=2) as sandboxes:
        for key in ("a", "b", "a", "c"):
            call(sandboxes, key, "x = 0", [PastCall("x = 0")] if key in seen else [])
            seen.add(key)
        once, twice = [PastCall("x = 0")], [PastCall("x = 0")] * 2
        past = (("c", once), ("a", twice), ("b", once))
        assert [call(sandboxes, key, "x", earlier).rebuilt_calls for key, earlier in past] == [
            0,
            0,
            1,
        ]


def test_sessions_that_hold_much_memory_are_evicted() -> None:
    code = "x = bytearray(64 * 2 ** 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    with make(cores=1, sessions=9, sessions_memory_bytes=100 * 2**20) as sandboxes:
        for key in "abc":
            assert call(sandboxes, key, code).status == "ok"
        past = [PastCall(code)]
        assert [call(sandboxes, key, "len(x)", past).rebuilt_calls for key in "cb"] == [0, 1]


def test_nothing_of_a_session_runs_between_its_calls(sandboxes: Sandboxes) -> None:
    code = (
        "import threading\nn = 0\ndef f():\n    global n\n    while True: n += 1\n"
        "threading.Thread(target=f, daemon=True).start()"
    )
    call(sandboxes, "background", code)
    stopped: list[psutil.Process] = []

    def is_stopped() -> bool:
        stopped[:] = [
            child for child in children_of(sandboxes) if child.status() == psutil.STATUS_STOPPED
        ]
        return any(child.num_threads() == 2 for child in stopped)

    wait_for(is_stopped, 20.0)
    cpu_seconds = [child.cpu_times().user for child in stopped]
    conversation(sandboxes, "meanwhile", ["sum(range(10 ** 6))"] * 3)
    assert [child.cpu_times().user for child in stopped] == cpu_seconds
    sandboxes.release("background")


# ---------------------------------------------------------------- equal code, equal text


RANDOM = (
    "import random, numpy\n"
    "random.random(), random.sample(range(99), 3), numpy.random.rand(), numpy.random.permutation(5)"
)
HASHES = (
    "import sympy\nx, y = sympy.symbols('x y')\n"
    "{'x', 'y', 'z'}, hash('abc'), {x + y, x * y, x / y}, [f.__name__ for f in {len, print, sum, "
    "max, min}]"
)


def test_equal_code_shows_equal_text_in_any_sandbox_of_any_server(sandboxes: Sandboxes) -> None:
    with make(cores=1, preload=PRELOADED) as other_sandboxes:
        for code in (RANDOM, HASHES, "object(), len, [lambda: 1]"):
            texts = [
                call(place, f"{code} {n}", code).text
                for place in (sandboxes, other_sandboxes)
                for n in range(3)
            ]
            assert len(set(texts)) == 1 and "Error" not in texts[0], texts


def test_seeds_depend_on_the_completion_and_the_call(sandboxes: Sandboxes) -> None:
    calls = ["import random; random.random()"] * 3
    results = conversation(sandboxes, "seed 1", calls, seed=1)
    results_of_other_seed = conversation(sandboxes, "seed 2", calls, seed=2)
    assert len({outcome.text for outcome in (*results, *results_of_other_seed)}) == 6
    repeated_call = call(sandboxes, "again", calls[1], [PastCall("'anything else'")])
    assert repeated_call.text == results[1].text


def test_the_environment_is_made_from_nothing(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    with make(cores=1) as other_sandboxes:
        text = call(
            other_sandboxes,
            "environment",
            "import os; sorted(os.environ), os.environ['PYTHONHASHSEED'], os.getcwd()",
        ).text
    names = [
        "LANG",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PATH",
        "PYTHONHASHSEED",
        "TZ",
    ]
    assert text == f"({names}, '0', '/')\n"


def test_only_the_channel_is_open(sandboxes: Sandboxes) -> None:
    code = (
        "import os\n"
        "def kind(fd):\n"
        "    try: return oct(os.fstat(fd).st_mode >> 12)\n"
        "    except OSError: return None\n"
        "{fd: kind(fd) for fd in range(4096) if kind(fd)}"
    )
    devices, socket = "'0o2'", "'0o14'"
    expected = f"{{0: {devices}, 1: {devices}, 2: {devices}, 3: {socket}}}\n"
    assert [call(sandboxes, f"open {n}", code).text for n in range(3)] == [expected] * 3


def test_powers_are_given_up_even_where_nothing_else_is_denied() -> None:
    code = (
        "sorted(line.split()[1] for line in open('/proc/self/status') if "
        "line.startswith(('CapEff', 'NoNew')))"
    )
    with make(cores=1, isolation="none") as sandboxes:
        assert call(sandboxes, "powers", code).text == "['0000000000000000', '1']\n"


# ---------------------------------------------------------------- the queue


def test_calls_queue_for_the_cores_in_their_order() -> None:
    with make(cores=1) as sandboxes:
        for number in range(20):
            sandboxes.submit(str(number), f"print({number})", seed=1)
        assert sandboxes.pending == 20
        finished = []
        while sandboxes.pending:
            finished += sandboxes.wait()
    assert [(key, outcome.text) for key, outcome in finished] == [
        (str(n), f"{n}\n") for n in range(20)
    ]
    assert finished[-1][1].queue_seconds > finished[0][1].queue_seconds


def test_a_completion_has_one_call_at_a_time(sandboxes: Sandboxes) -> None:
    sandboxes.submit("twice", "1", seed=1)
    with pytest.raises(ValueError, match='completion "twice" has a call already'):
        sandboxes.submit("twice", "1", seed=1)
    assert [key for key, _ in sandboxes.wait()] == ["twice"]


def test_cancelled_calls_have_no_result_and_take_no_core() -> None:
    with make(cores=1) as sandboxes:
        for key in ("running", "waiting"):
            sandboxes.submit(key, WORK.format(600), seed=1)
        sandboxes.submit("last", "'here'", seed=1)
        running_sandbox(sandboxes)
        sandboxes.cancel("waiting")
        sandboxes.cancel("running")
        sandboxes.cancel("unknown")
        assert [(key, outcome.text) for key, outcome in sandboxes.wait(60.0)] == [
            ("last", "'here'\n")
        ]
        assert sandboxes.pending == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cores": 0}, "cores is 0; it must be at least 1"),
        ({"sessions": 0}, "sessions is 0"),
        ({"state": "forked"}, 'state is "forked"; it must be one of session, fresh'),
        ({"isolation": "docker"}, "must be one of landlock, preloaded, none"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    "name", ["call_cpu_seconds", "memory_bytes", "threads", "output_characters"]
)
def test_limits_must_be_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        Limits(**{name: 0})


# ---------------------------------------------------------------- faults of the infrastructure


def test_a_server_that_is_killed_is_replaced_and_its_calls_are_tried_again() -> None:
    with make() as sandboxes:
        first = call(sandboxes, "a", "x = 5")
        server_of(sandboxes).kill()
        second = call(sandboxes, "a", "x", [first.as_past_call("x = 5")])
        assert (second.status, second.text, second.rebuilt_calls) == ("ok", "5\n", 1)
        sandboxes.submit("b", "import time; time.sleep(0.1); x = 6; x", seed=1)
        wait_for(lambda: sandboxes.poll() == [] and len(children_of(sandboxes)) > 0, 20.0)
        orphans = children_of(sandboxes)
        server_of(sandboxes).kill()
        assert [outcome.text for _, outcome in sandboxes.wait()] == ["6\n"]
        wait_for(lambda: not any(orphan.is_running() for orphan in orphans), 20.0)


def test_a_server_that_dies_on_a_call_every_time_is_reported_as_lost() -> None:
    with make(cores=1) as sandboxes:
        sandboxes.submit("a", "import time; time.sleep(600)", seed=1)
        servers = set()
        finished: list = []
        while not finished:
            server = sandboxes.server_pid
            if sandboxes.fileno() >= 0 and server not in servers:
                servers.add(server)
                os.kill(server, signal.SIGKILL)
            finished = sandboxes.wait(0.1)
        ((_, outcome),) = finished
        assert outcome.is_infrastructure_fault and not outcome.kept and "has ended" in outcome.text
        assert len(servers) == ATTEMPTS
        assert call(sandboxes, "b", "1").text == "1\n"


def unread(channel: socket.socket) -> bytes:
    """What has arrived and nobody has read."""
    with contextlib.suppress(BlockingIOError):
        return channel.recv(2**16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


def test_a_result_counts_though_the_server_ends_behind_it() -> None:
    """The last attempt, in which a lost server would mean a lost call."""
    with make(cores=1) as sandboxes:
        sandboxes.submit("a", "import time; time.sleep(0.5); 6 * 7", seed=1)
        servers = [sandboxes.server_pid]

        def is_replaced() -> bool:
            assert sandboxes.poll() == []
            return sandboxes.fileno() >= 0 and sandboxes.server_pid not in servers

        while len(servers) < ATTEMPTS:
            server_of(sandboxes).kill()
            wait_for(is_replaced, 20.0)
            servers.append(sandboxes.server_pid)
        with socket.socket(fileno=os.dup(sandboxes.fileno())) as channel:
            wait_for(lambda: b"42" in unread(channel), 20.0)
        server = server_of(sandboxes)
        server.kill()
        wait_for(lambda: server.status() == psutil.STATUS_ZOMBIE, 20.0)
        assert [outcome.text for _, outcome in sandboxes.wait()] == ["42\n"]
        assert sandboxes.pending == 0 and sandboxes.poll() == []


def test_a_server_that_cannot_be_started_again_fails_calls_and_no_more(tmp_path: Path) -> None:
    """The machine has no process or descriptor for it, until it has some again."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    with make(python=str(program)) as sandboxes:
        first = call(sandboxes, "a", "x = 5")
        descriptors = len(os.listdir("/proc/self/fd"))
        program.rename(tmp_path / "away")
        server_of(sandboxes).kill()
        outcome = call(sandboxes, "b", "1")
        assert outcome.status == "lost" and "server cannot be started again" in outcome.text
        sandboxes.release("b")
        assert len(os.listdir("/proc/self/fd")) == descriptors - 1
        (tmp_path / "away").rename(program)
        assert call(sandboxes, "a", "x", [first.as_past_call("x = 5")]).text == "5\n"


def running_sandbox(sandboxes: Sandboxes) -> psutil.Process:
    """The one that executes WORK: those that wait for a call have hardly used the processor."""
    worked: list[psutil.Process] = []

    def is_there() -> bool:
        assert sandboxes.poll() == []
        children = children_of(sandboxes) if sandboxes.fileno() >= 0 else []
        worked[:] = [child for child in children if sum(child.cpu_times()[:2]) > 0.15]
        return len(worked) == 1

    wait_for(is_there, 30.0)
    return worked[0]


WORK = "import time\nwhile time.process_time() < 0.2: pass\ntime.sleep({})"


def test_a_sandbox_that_is_killed_from_outside_is_no_fault_of_the_code() -> None:
    """A killed sandbox's call is tried again, then reported, while the server lives on.

    The kernel kills like this where the machine runs out of memory."""
    with make(cores=1) as sandboxes:
        sandboxes.submit("a", WORK.format(600), seed=1)
        server = sandboxes.server_pid
        for attempt in range(ATTEMPTS):
            running_sandbox(sandboxes).kill()
            finished = sandboxes.wait(0.15 if attempt < ATTEMPTS - 1 else None)
        ((_, outcome),) = finished
        assert outcome.status == "lost" and "killed from outside" in outcome.text
        assert sandboxes.server_pid == server
        assert call(sandboxes, "a", "1").text == "1\n"


def test_a_session_that_is_killed_between_its_calls_is_rebuilt() -> None:
    with make(cores=1) as sandboxes:
        first = call(sandboxes, "a", "x = 5")
        for child in children_of(sandboxes):
            child.kill()
        second = call(sandboxes, "a", "x", [first.as_past_call("x = 5")])
        assert (second.text, second.rebuilt_calls) == ("5\n", 1)


def test_a_session_that_cannot_be_rebuilt_is_no_fault_of_the_code(sandboxes: Sandboxes) -> None:
    outcome = call(sandboxes, "broken", "1", [PastCall("import os; os._exit(0)", kept=True)])
    assert outcome.status == "lost" and "the session cannot be rebuilt" in outcome.text


def test_a_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmath.sandbox.sandboxes.SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("rlmath.sandbox.sandboxes.ANSWER_SECONDS", 0.5)
    with make(cores=1) as sandboxes:
        sandboxes.await_ready()
        server = server_of(sandboxes)
        server.suspend()
        assert call(sandboxes, "a", "1").text == "1\n"
        assert not server.is_running()


def test_starving_is_the_machines_fault_and_sleeping_the_codes() -> None:
    """A process that wants a core is not asleep, even while it has none; a stopped one is."""
    process = psutil.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sandbox = Sandbox(process.pid, None, None)  # type: ignore[arg-type]
        wait_for(lambda: process.status() == psutil.STATUS_RUNNING, 20.0)
        assert not any(sandbox.is_asleep() for _ in range(20))
        process.suspend()
        wait_for(sandbox.is_asleep, 20.0)
    finally:
        process.kill()
        process.wait()


def test_an_interpreter_that_cannot_start_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n", encoding="utf-8")
    broken.chmod(0o755)
    with (
        make(python=str(broken)) as sandboxes,
        pytest.raises(RuntimeError, match="before it was ready"),
    ):
        sandboxes.await_ready()


def test_closing_ends_every_process_also_with_calls_running() -> None:
    sandboxes = make()
    conversation(sandboxes, "a", ["1", "2"])
    sandboxes.submit("b", "import time; time.sleep(600)", seed=1)
    wait_for(lambda: sandboxes.poll() == [] and len(children_of(sandboxes)) >= 4, 20.0)
    processes = [server_of(sandboxes), *children_of(sandboxes)]
    sandboxes.close()
    wait_for(lambda: not any(process.is_running() for process in processes), 20.0)
    sandboxes.close()


# ---------------------------------------------------------------- nothing is left


@pytest.mark.parametrize("calls", [300, pytest.param(100_000, marks=pytest.mark.full)])
def test_many_calls_leave_no_process_descriptor_or_file(calls: int) -> None:
    codes = ("print(1)", "1 / 0", "import os; os._exit(0)", "x = [0] * 10 ** 5")
    with make(cores=2, sessions=4) as sandboxes:
        session_pid = int(call(sandboxes, "first", "import os; os.getpid()").text)
        sandboxes.release("first")
        server = server_of(sandboxes)

        def only_spares_live() -> bool:
            pids = [child.pid for child in children_of(sandboxes)]
            return len(pids) == 3 and session_pid not in pids

        wait_for(only_spares_live, 20.0)
        server_descriptors = server.num_fds()
        descriptors = len(os.listdir("/proc/self/fd"))
        files = os.listdir("/tmp")
        memory = server.memory_info().rss
        submitted = 0
        while submitted < calls or sandboxes.pending:
            while submitted < calls and sandboxes.pending < 16:
                sandboxes.submit(str(submitted), codes[submitted % len(codes)], seed=1)
                submitted += 1
            for key, outcome in sandboxes.wait():
                assert outcome.status in ("ok", "error", "ended")
                sandboxes.release(key)
        wait_for(lambda: len(children_of(sandboxes)) == 3, 20.0)
        # A sandbox that is being forked has two ends of its channel for a moment.
        wait_for(lambda: server.num_fds() <= server_descriptors, 20.0)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert [name for name in os.listdir("/tmp") if "rlmath" in name and name not in files] == []
        assert server.memory_info().rss < memory + 16 * 2**20
