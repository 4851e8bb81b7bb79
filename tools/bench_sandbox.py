"""Calls of a model's code in sandboxes, against `python -c` one after the other.

Where bubblewrap is installed and can make its namespaces, against `bwrap ... python -c`, too.

    python tools/bench_sandbox.py [--quick | --demo STEPS]

A completion of its own for every call, so that each needs a sandbox that nobody has used. Prints
figures (tools/figures.py); "CPU time" is that of all processes, which another program beside does
not change much. With --demo only one: the share of a demo's rollouts (`rlmath demo --algorithm
tools`, on one rank) in which the engine had nothing to do but wait for calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.sandbox.calls import Limits
from rlmath.sandbox.kernel import best_isolation
from rlmath.sandbox.sandboxes import Sandboxes
from rlmath.telemetry.metrics_writer import read_metrics
from rlmath.workers.process_tree import PAGE_BYTES
from tools.figures import print_figure

BASELINE = "python -c"
BUBBLEWRAP = "bwrap python -c"
IN_BUBBLEWRAP = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
)
"""A sandbox of namespaces: no network, no other processes, nothing to write."""
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


def program_seconds(code: str, launcher: Sequence[str] = ()) -> float:
    """One `python -c`, started by `launcher` (seconds)."""
    command = [*launcher, sys.executable, "-c", code]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def has_bubblewrap() -> bool:
    """Whether bubblewrap is installed and may make namespaces here; says why where it may not."""
    if shutil.which(IN_BUBBLEWRAP[0]) is None:
        print("bubblewrap is not installed: no figures beside it", file=sys.stderr)
        return False
    trial = subprocess.run([*IN_BUBBLEWRAP, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        print(f"bubblewrap does not work here: {trial.stderr.strip()}", file=sys.stderr)
    return trial.returncode == 0


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


def bench_case(
    sandboxes: Sandboxes, name: str, code: str, quick: bool, with_bubblewrap: bool
) -> None:
    """Measure one code in the sandbox and as a program of its own."""
    repeats = 5 if quick else 20
    baseline_seconds = median_of(lambda: program_seconds(code), repeats)
    report(name, "python -c, p50", 1000 * baseline_seconds, unit="ms")
    if with_bubblewrap:
        seconds = median_of(lambda: program_seconds(code, IN_BUBBLEWRAP), repeats)
        report(
            name,
            f"{BUBBLEWRAP}, p50",
            1000 * seconds,
            unit="ms",
            baseline=BASELINE,
            ratio=baseline_seconds / seconds,
        )
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


def bench_demo(folder: Path, steps: int) -> None:
    """Train the demo's model for so many steps, which cannot multiply and learns to call.

    Reports the share of the rollouts that waits for calls, with what it is made of."""
    arguments = demo.parse(["--algorithm", demo.TOOLS, "--ranks", "1", "--output", str(folder)])
    demo.fill_layout(arguments, gpus=0)
    folder.mkdir()
    words = [*demo.training_words(folder, arguments), f"run.total_steps={steps}"]
    command = [*demo.RLMATH, "train", "--ranks", "1", *words]
    with redirect_stdout(sys.stderr):
        demo.make_base(folder, arguments.seed, demo.TOOLS)
        demo.run(f"Training, {steps} steps", command, demo.one_thread())
    rows = read_metrics(str(folder / "run"))
    seconds = sum(row["seconds/rollout"] for row in rows)
    waiting = sum(row["seconds/rollout"] * row["tools/wait_share"] for row in rows)
    calls = [row["n_seqs"] * row["tools/calls_per_completion"] for row in rows]
    call_seconds = sum(
        count * row.get("tools/wait_s", 0.0) for count, row in zip(calls, rows, strict=True)
    )
    mean_milliseconds = 1000 * call_seconds / max(1.0, sum(calls))
    report(
        f"the demo's rollouts, {steps} steps: {seconds:.1f} s, {sum(calls):.0f} calls of "
        f"{mean_milliseconds:.0f} ms",
        "share that waits for calls",
        waiting / seconds,
        unit="share",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Calls of a model's code in sandboxes, against python -c."
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--quick", action="store_true", help="fewer calls: within a minute on two cores"
    )
    kinds.add_argument("--demo", type=int, metavar="STEPS", help="of a demo with tools: minutes")
    arguments = parser.parse_args(argv)
    if arguments.demo is not None:
        with tempfile.TemporaryDirectory() as place:
            bench_demo(Path(place) / "demo", arguments.demo)
        return 0
    with_bubblewrap = has_bubblewrap()
    with Sandboxes(cores=1, sessions=16, limits=LIMITS, isolation=best_isolation()) as sandboxes:
        started = time.perf_counter()
        sandboxes.await_ready()
        report("server", "start", time.perf_counter() - started, unit="s")
        for name, code in CASES.items():
            bench_case(
                sandboxes,
                name,
                code,
                quick=arguments.quick,
                with_bubblewrap=with_bubblewrap,
            )
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
