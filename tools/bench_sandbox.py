"""Calls of a model's code in sandboxes, against `python -c` one after the other.

    python tools/bench_sandbox.py [--quick]

A completion of its own for every call, so that each needs a sandbox that nobody has used. Prints
figures (tools/figures.py); "CPU time" is that of all processes, which another program beside does
not change much.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.sandbox.calls import Limits
from rlmath.sandbox.kernel import best_isolation
from rlmath.sandbox.sandboxes import Sandboxes
from rlmath.workers.process_tree import PAGE_BYTES
from tools.figures import print_figure

BASELINE = "python -c"
CASES = {
    "print(1)": "print(1)",
    "sympy": "import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x**3 * sympy.exp(-x), (x, 0, "
    "1))",
}
LIMITS = Limits()


def report(
    case: str,
    metric: str,
    value: float,
    unit: str,
    baseline: str | None = None,
    ratio: float | None = None,
) -> None:
    print_figure("sandbox", case, metric, value=value, unit=unit, baseline=baseline, ratio=ratio)


def program_seconds(code: str) -> float:
    """One `python -c` (seconds)."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def call_seconds(sandboxes: Sandboxes, code: str, key: str) -> float:
    """One call of a new completion, from `submit` to its result.

    A pause follows in which the next sandbox is forked."""
    started = time.perf_counter()
    sandboxes.submit(key, code, seed=1)
    ((_, outcome),) = sandboxes.wait()
    seconds = time.perf_counter() - started
    assert outcome.status == "ok", outcome
    sandboxes.release(key)
    time.sleep(0.01)
    return seconds


def burst(sandboxes: Sandboxes, code: str, count: int) -> tuple[float, float]:
    """(seconds, CPU seconds of the server and its sandboxes) of many completions at once."""
    cpu = family_cpu_seconds(sandboxes)
    started = time.perf_counter()
    submitted = 0
    while submitted < count or sandboxes.pending:
        while submitted < count and sandboxes.pending < 32:
            sandboxes.submit(f"burst {submitted}", code, seed=1)
            submitted += 1
        for key, _ in sandboxes.wait():
            sandboxes.release(key)
    return time.perf_counter() - started, family_cpu_seconds(sandboxes) - cpu


def family_cpu_seconds(sandboxes: Sandboxes) -> float:
    """CPU time of the server and of the sandboxes that it has waited for."""
    fields = (
        Path(f"/proc/{sandboxes.server_pid}/stat")
        .read_text(encoding="ascii")
        .rpartition(")")[2]
        .split()
    )
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def session_bytes(sandboxes: Sandboxes, code: str) -> float:
    """Memory that a live session has for itself, in the mean of ten (proportional set size)."""
    for number in range(10):
        sandboxes.submit(f"live {number}", code, seed=1)
        sandboxes.wait()
    children = Path(
        f"/proc/{sandboxes.server_pid}/task/{sandboxes.server_pid}/children"
    ).read_text()
    stopped = [pid for pid in children.split() if state_of(pid) == "T"]
    return statistics.mean(private_bytes(pid) for pid in stopped)


def state_of(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def private_bytes(pid: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def median_of(work: Callable[[], float], repeats: int) -> float:
    return statistics.median(work() for _ in range(repeats))


def bench_case(sandboxes: Sandboxes, name: str, code: str, quick: bool) -> None:
    """Measure one code in the sandbox and as a program of its own."""
    baseline_seconds = median_of(lambda: program_seconds(code), 5 if quick else 20)
    report(name, "python -c, p50", 1000 * baseline_seconds, unit="ms")
    count = 100 if quick else 1000
    times = sorted(call_seconds(sandboxes, code, f"{name} {number}") for number in range(count))
    for metric, seconds in (("p50", times[count // 2]), ("p99", times[count * 99 // 100])):
        report(
            name,
            metric,
            1000 * seconds,
            unit="ms",
            baseline=BASELINE,
            ratio=baseline_seconds / seconds,
        )
    seconds, cpu = burst(sandboxes, code, count)
    report(
        name,
        "one core's",
        count / seconds,
        unit="calls/s",
        baseline=BASELINE,
        ratio=baseline_seconds * count / seconds,
    )
    report(name, "CPU time of a call", 1000 * cpu / count, unit="ms")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Calls of a model's code in sandboxes, against python -c."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer calls: within a minute on two cores"
    )
    arguments = parser.parse_args(argv)
    with Sandboxes(cores=1, sessions=16, limits=LIMITS, isolation=best_isolation()) as sandboxes:
        started = time.perf_counter()
        sandboxes.await_ready()
        report("server", "start", time.perf_counter() - started, unit="s")
        for name, code in CASES.items():
            bench_case(sandboxes, name, code, arguments.quick)
        for name, code in CASES.items():
            mib = session_bytes(sandboxes, code) / 2**20
            report(f"live session, {name}", "memory of its own", mib, unit="MiB")
        resident = (
            Path(f"/proc/{sandboxes.server_pid}/statm").read_text(encoding="ascii").split()[1]
        )
        report("server", "resident", int(resident) * PAGE_BYTES / 2**20, unit="MiB")
    load, _, _ = os.getloadavg()
    report("machine", "load", load, unit="processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
