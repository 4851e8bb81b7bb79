"""Check everything that needs a GPU, in stages that each report and never stop the next.

    python tools/gpu_check.py [--quick] [--seconds N] [--stages machine step ...] [--wheels FOLDER]

It finds out what is installed: a stage whose packages are missing is named in the table, the others
run, each in a process of its own with a time limit. --quick takes at most ten minutes, or
--seconds; stages that found no time are named. Stages run in their order, or in that of --stages.
Without a GPU it says so, runs what the CPU can, and the table shows what is missing. --wheels:
packages for a machine without a network, installed into the output folder before the first stage.

OUTPUT then has gpu_check.json, gpu_check.md with the same as a table, and a log of every stage. It
exits with 0 where every stage that could run did, all figures are as expected and no package is
installed that cannot be imported, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal
from rlmath.workers import process_tree

REPOSITORY = Path(__file__).resolve().parents[1]
QUICK_SECONDS = 600.0
"""Time limit of everything together with --quick, where --seconds gives no other."""
IMPORT_SECONDS = 300.0
"""Time limit of a package's import."""
END_SECONDS = 30.0
"""Time limit for killed processes to end."""
PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "vllm": "vllm",
    "transformer-engine": "transformer_engine",
    "apex": "fused_weight_gradient_mlp_cuda",
    "transformers": "transformers",
    "pytest": "pytest",
    "trl": "trl",
}
"""Packages that stages need: distribution name to the module that it is imported as.

Of apex it is the kernel that adds up gradients, the one thing that it is compiled for."""


@dataclass(frozen=True)
class Stage:
    """One of the STAGES of tools/gpu_stages.py."""

    name: str
    what: str
    needs: tuple[str, ...]
    seconds: float
    """Time limit; with --quick `quick_seconds`, and it does not begin with less than half of them
    left."""
    quick_seconds: float
    on_cpu: bool = True
    """Whether the CPU can run it."""
    wants: tuple[str, ...] = ()
    """Packages that it uses where they are there."""
    variables: tuple[str, ...] = ()
    """Environment variables that it needs.

    MODEL is a chat model's folder; DATA is JSONL of question and answer."""


STAGES = (
    Stage("machine", "GPU, memory, matrix units", ("torch",), seconds=120, quick_seconds=60),
    Stage(
        "policy",
        "local layers in bfloat16 against float32 on CPU",
        ("torch", "megatron-core", "transformers"),
        seconds=300,
        quick_seconds=120,
        wants=("apex",),
    ),
    Stage(
        "transformer_engine",
        "Transformer Engine's layers against float32 on CPU",
        ("torch", "megatron-core", "transformers", "transformer-engine"),
        seconds=300,
        quick_seconds=120,
        on_cpu=False,
        wants=("apex",),
    ),
    Stage(
        "logprobs",
        "log-probs over 151,936 tokens of vocabulary",
        ("torch",),
        seconds=400,
        quick_seconds=120,
    ),
    Stage(
        "step",
        "an optimizer step, its memory beside the plan",
        ("torch", "megatron-core", "transformers"),
        seconds=600,
        quick_seconds=120,
        wants=("transformer-engine", "apex"),
    ),
    Stage(
        "packed",
        "sequences of 16,384 and 32,768 tokens, recomputation",
        ("torch", "megatron-core", "transformers"),
        seconds=900,
        quick_seconds=180,
        wants=("transformer-engine", "apex"),
    ),
    Stage(
        "engine",
        "rollout, weight sync in place, sleep and wake",
        ("torch", "megatron-core", "transformers", "vllm"),
        seconds=900,
        quick_seconds=240,
        wants=("transformer-engine",),
    ),
    Stage(
        "rollout",
        "a rollout beside LLM.generate",
        ("torch", "transformers", "vllm"),
        seconds=600,
        quick_seconds=240,
    ),
    Stage(
        "peer",
        "steps beside TRL's",
        ("torch", "megatron-core", "transformers", "vllm", "trl"),
        seconds=420,
        quick_seconds=400,
        on_cpu=False,
        wants=("transformer-engine",),
        variables=("MODEL", "DATA"),
    ),
    Stage(
        "ranks",
        "GRPO on several ranks of one GPU beside one rank",
        ("torch", "megatron-core", "transformers", "vllm"),
        seconds=1200,
        quick_seconds=240,
        wants=("transformer-engine",),
    ),
    Stage(
        "tests",
        "tests/gpu",
        ("torch", "megatron-core", "transformers", "pytest"),
        seconds=1800,
        quick_seconds=240,
        on_cpu=False,
        wants=("vllm", "transformer-engine", "apex"),
    ),
    Stage(
        "demo",
        "the demo on one rank",
        ("torch", "megatron-core", "transformers", "vllm", "transformer-engine"),
        seconds=900,
        quick_seconds=300,
        on_cpu=False,
    ),
)


@dataclass
class Outcome:
    """What became of a stage."""

    stage: str
    what: str
    status: str
    """"ran", "failed", "stopped" at its time limit, "no time", or "not run" for what is missing."""
    reason: str = ""
    seconds: float = 0.0
    without: list[str] = field(default_factory=list)
    """Packages that the stage would have used."""
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        unexpected = any(figure["holds"] is False for figure in self.figures)
        return self.status == "not run" or (self.status == "ran" and not unexpected)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    started = time.monotonic()
    escape_terminal()
    arguments = parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, lambda number, _: sys.exit(128 + number)
        )  # so that `run` kills its stage
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    paths = [str(REPOSITORY)]
    if arguments.wheels is not None:
        paths.append(install(arguments.wheels, output / "packages"))
    environment["PYTHONPATH"] = os.pathsep.join(
        [*paths, *filter(None, [environment.get("PYTHONPATH")])]
    )
    by_name = {stage.name: stage for stage in STAGES}
    stages = [by_name[name] for name in arguments.stages or by_name]
    used = {name for stage in stages for name in (*stage.needs, *stage.wants)}
    machine = look(environment, [name for name in PACKAGES if name in used])
    tell_machine(machine)
    outcomes = []
    for stage in stages:
        seconds_left = arguments.seconds - (time.monotonic() - started)
        outcomes.append(
            check(
                stage,
                machine,
                arguments.quick,
                left=seconds_left,
                output=output,
                environment=environment,
            )
        )
        write(output, machine, outcomes, arguments.quick)
    print(
        f"\n{output / 'gpu_check.md'} has the table, {output / 'gpu_check.json'} the same as JSON."
    )
    unexpected = [outcome.stage for outcome in outcomes if not outcome.is_good]
    if unexpected:
        print(f"Not as expected: {', '.join(unexpected)}. Their logs are in {output}.")
    if machine.broken:
        print(f"Installed, but cannot be imported: {', '.join(machine.broken)}.")
    return 1 if unexpected or machine.broken else 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models, at most ten minutes")
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "outputs" / "gpu_check",
        help="folder (default outputs/gpu_check)",
    )
    parser.add_argument(
        "--seconds", type=float, help="of everything together (600 with --quick, else any)"
    )
    parser.add_argument(
        "--stages", nargs="+", choices=[stage.name for stage in STAGES], help="default: all"
    )
    parser.add_argument(
        "--wheels", type=Path, help="folder of wheels to install first, without a network"
    )
    arguments = parser.parse_args(argv)
    if arguments.seconds is None:
        arguments.seconds = QUICK_SECONDS if arguments.quick else float("inf")
    if arguments.wheels is not None and not list(arguments.wheels.glob("*.whl")):
        parser.error(
            f"--wheels {arguments.wheels} has no *.whl; name the folder that holds the wheels"
        )
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output {arguments.output} is a file; name a folder")
    return arguments


def install(wheels: Path, packages: Path) -> str:
    """The wheels unpacked into a folder, which hides what the environment has of the same name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--upgrade",
    ]
    command += ["--target", str(packages), *map(str, sorted(wheels.glob("*.whl")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the wheels in {wheels} cannot be installed:\n{done.stderr[-2000:]}")
    return str(packages)


# ---------------------------------------------------------------- what is there

LOOK = """
import importlib, importlib.metadata, importlib.util, json, sys
name, module = sys.argv[1:]
try:
    version = importlib.metadata.version(name)
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps({"version": version}), flush=True)
if importlib.util.find_spec(module.partition(".")[0]):
    try:
        import torch  # brings the libraries that compiled extensions of it need
    except Exception:
        pass
found = importlib.import_module(module)
told = {"version": version or str(getattr(found, "__version__", "installed")), "imported": True}
if name == "torch":
    gpus = range(found.cuda.device_count() if found.cuda.is_available() else 0)
    told |= {"cuda": found.version.cuda, "gpus": [found.cuda.get_device_name(gpu) for gpu in gpus]}
print(json.dumps(told), flush=True)
"""


@dataclass(frozen=True)
class Found:
    """Facts about the machine and the environment."""

    packages: Mapping[str, str | None]
    """Versions; None: it cannot be imported."""
    reasons: Mapping[str, str]
    """Why not."""
    gpus: Sequence[str]
    cuda: str | None
    broken: Sequence[str] = ()
    """Packages that are installed and cannot be imported."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def look(environment: Mapping[str, str], names: Sequence[str] = tuple(PACKAGES)) -> Found:
    """Import packages, torch among them, each in its own process, which a broken one may end."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = dict(
            zip(names, pool.map(lambda name: look_at(name, environment), names), strict=True)
        )
    return Found(
        packages={
            name: answer["version"] if "imported" in answer else None
            for name, answer in answers.items()
        },
        reasons={
            name: answer["reason"] for name, answer in answers.items() if "imported" not in answer
        },
        gpus=answers["torch"].get("gpus", []),
        cuda=answers["torch"].get("cuda"),
        broken=[
            name
            for name, answer in answers.items()
            if "imported" not in answer and answer.get("version")
        ],
    )


def look_at(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The last line of LOOK, and the "reason" why it did not get to its end."""
    command = [sys.executable, "-c", LOOK, name, PACKAGES[name]]
    try:
        process = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"version": "unknown", "reason": f"not imported after {IMPORT_SECONDS:.0f} s"}
    answer: dict[str, Any] = {}
    for line in process.stdout.splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            answer = row if isinstance(row, dict) and "version" in row else answer
    if "imported" in answer:
        return answer
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()] or [
        "without a message"
    ]
    return (
        {"version": None}
        | answer
        | {"reason": lines[-1][:200] if process.returncode > 0 else ended_with(process.returncode)}
    )


def tell_machine(machine: Found) -> None:
    print(f"Python {platform.python_version()}, CUDA of torch: {machine.cuda or 'none'}")
    print("GPUs: " + (", ".join(machine.gpus) or "none; what the CPU can run is run"))
    for name, version in machine.packages.items():
        print(f"  {name:<20} {version or 'missing: ' + machine.reasons.get(name, '')}"[:79])
    print(flush=True)


# ---------------------------------------------------------------- a stage


def check(
    stage: Stage,
    machine: Found,
    quick: bool,
    left: float,
    output: Path,
    environment: Mapping[str, str],
) -> Outcome:
    """Run a stage, or say why not."""
    missing = [name for name in stage.needs if machine.packages[name] is None]
    missing += [f"the variable {name}" for name in stage.variables if name not in environment]
    without = [name for name in stage.wants if machine.packages[name] is None]
    outcome = Outcome(stage.name, stage.what, "not run", without=without)
    if machine.device == "cpu" and not stage.on_cpu:
        outcome.reason = "needs a GPU"
    elif missing:
        outcome.reason = f"needs {', '.join(missing)}"
    elif left < stage.quick_seconds / 2:
        outcome.status = "no time"
        outcome.reason = f"{max(left, 0):.0f} s are left"
    else:
        limit = min(stage.quick_seconds if quick else stage.seconds, left)
        run(outcome, machine.device, quick, limit=limit, output=output, environment=environment)
    tell_outcome(outcome)
    return outcome


def run(
    outcome: Outcome,
    device: str,
    quick: bool,
    limit: float,
    output: Path,
    environment: Mapping[str, str],
) -> None:
    """The stage in its own process; at its limit, and after it, all that it started is killed."""
    print(f"{outcome.stage}: {outcome.what} ...", flush=True)
    log = output / f"{outcome.stage}.log"
    command = [sys.executable, str(REPOSITORY / "tools" / "gpu_stages.py"), outcome.stage]
    command += ["--device", device, "--folder", str(output), *(["--quick"] if quick else [])]
    started = time.monotonic()
    figures = output / f"{outcome.stage}.jsonl"
    process_tree.adopt_orphans()
    earlier_children = set(children())
    with open(log, "wb") as errors, open(figures, "wb") as lines:
        running = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=lines,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = running.wait(limit)
            outcome.status = "ran" if status == 0 else "failed"
            outcome.reason = "" if status == 0 else f"{ended_with(status)}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            outcome.status = "stopped"
            outcome.reason = f"after its limit of {limit:.0f} s"
        finally:
            kill_all_but(earlier_children)
            running.poll()
    outcome.seconds = round(time.monotonic() - started, 1)
    outcome.figures = read_figures(figures)


def children() -> list[int]:
    return process_tree.children_by_parent().get(os.getpid(), [])


def kill_all_but(others: set[int]) -> None:
    """Kill the children of this process, except `others`, and their descendants.

    These become its own children, because ranks have sessions of their own. What the kernel does
    not end, in a driver for example, is left after END_SECONDS."""
    deadline = time.monotonic() + END_SECONDS
    while remaining := [pid for pid in children() if pid not in others]:
        if time.monotonic() > deadline:
            print(f"These processes do not end: {', '.join(map(str, remaining))}", flush=True)
            return
        process_tree.kill_trees(remaining, process_tree.children_by_parent())
        for pid in remaining:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(process_tree.SWEEP_PAUSE_SECONDS)


def ended_with(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(
        (line.strip()[:200] for line in reversed(lines) if line.strip()), "without a message"
    )


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Lines that are figures; libraries may print others."""
    figures = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and {"what", "value", "unit", "expected", "holds"} <= row.keys()
            ):
                figures.append(row)
    return figures


def tell_outcome(outcome: Outcome) -> None:
    text = f"{outcome.stage}: {outcome.status}"
    text += f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
    print(text + (f", {outcome.reason}" if outcome.reason else ""))
    for figure in outcome.figures:
        mark = "  !" if figure["holds"] is False else "   "
        expected = f"  ({figure['expected']})" if figure["expected"] else ""
        print(f"{mark} {figure['what']}: {figure['value']} {figure['unit']}{expected}")
    sys.stdout.flush()


# ---------------------------------------------------------------- the files


def write(output: Path, machine: Found, outcomes: Sequence[Outcome], quick: bool) -> None:
    """Write the results after every stage, so that they are there whatever comes next."""
    everything = {
        "python": platform.python_version(),
        "quick": quick,
        **asdict(machine),
        "stages": [asdict(outcome) for outcome in outcomes],
    }
    (output / "gpu_check.json").write_text(
        json.dumps(everything, indent=1) + "\n", encoding="utf-8"
    )
    (output / "gpu_check.md").write_text(
        "\n".join(table(machine, outcomes)) + "\n", encoding="utf-8"
    )


def table(machine: Found, outcomes: Sequence[Outcome]) -> list[str]:
    """The figures as a table in Markdown; what did not run has blanks."""
    versions = ", ".join(
        f"{name} {version}" for name, version in machine.packages.items() if version
    )
    missing = ", ".join(name for name, version in machine.packages.items() if version is None)
    lines = [
        "# GPU check",
        "",
        f"GPUs: {', '.join(machine.gpus) or 'none'}. CUDA of torch: {machine.cuda or 'none'}. "
        f"Installed: {versions}. "
        f"Missing: {missing or 'nothing'}. "
        f"Installed, but cannot be imported: {', '.join(machine.broken) or 'nothing'}.",
        "",
        "| stage | figure | value | expected | as expected |",
        "|---|---|---|---|---|",
    ]
    marks = {True: "yes", False: "**no**", None: ""}
    for outcome in outcomes:
        has_begun = outcome.status not in ("not run", "no time")
        status = f"{outcome.status}, {outcome.seconds:.0f} s" if has_begun else outcome.status
        without = f"; without {', '.join(outcome.without)}" if outcome.without else ""
        reason = f": {outcome.reason}" if outcome.reason else ""
        as_expected = "" if outcome.status == "not run" else marks[outcome.is_good]
        lines.append(
            row(
                stage=outcome.stage,
                figure=f"{outcome.what} ({status}{reason}{without})",
                as_expected=as_expected,
            )
        )
        for figure in outcome.figures:
            value = f"{figure['value']} {figure['unit']}".strip()
            lines.append(
                row(
                    figure=figure["what"],
                    value=value,
                    expected=figure["expected"],
                    as_expected=marks[figure["holds"]],
                )
            )
    return lines


def row(
    stage: str = "", figure: str = "", value: str = "", expected: str = "", as_expected: str = ""
) -> str:
    cells = [stage, figure, value, expected, as_expected]
    return (
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    )


if __name__ == "__main__":
    sys.exit(main())
