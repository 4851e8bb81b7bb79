"""Evaluate a model on benchmarks, and compare evaluations.

python launch/evaluate.py --model PATH --benchmarks aime24,math_500 --data-dir DIR --output DIR
torchrun --nproc-per-node=N launch/evaluate.py ... [--tensor-parallel T]
python launch/evaluate.py --compare A B

PATH is a Hugging Face folder, a run's folder or a checkpoint. Completions are kept under --output: the same command
goes on where it was stopped. docs/evaluation.md explains columns, files and formulas.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.distributed.process says why, and enables it

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmath.config.help import raise_problems
from rlmath.config.schema import RANGES, TEMPLATES, RolloutConfig
from rlmath.distributed import process
from rlmath.distributed.device import environment_rank, resolve_kind
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    MISTAKE,
    SAVED_AND_STOPPED,
    write_exit_status,
)
from rlmath.evals.compare import comparison_text, read_results
from rlmath.evals.plan import Plan
from rlmath.trainer.startup import end_broken, leave_word, tell_mistake
from rlmath.trainer.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

EAGER = (
    "capture decoding in CUDA graphs; without it vLLM runs with enforce_eager, as AReaL's and RLinf's evaluations do: "
    "they saw accuracy fall with CUDA graphs, most of all above 16k tokens"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, MISTAKE for what the user must change, FAILURE for what broke."""
    given = parse(argv)
    setup_logging(environment_rank())
    try:
        if given.compare:
            print(comparison_text(*(read_results(path) for path in given.compare)))
            return 0
        plan, rollout = plan_of(given), rollout_of(given)
        stop_on_signal(plan.output)
        # Imported only now: a mistake is told before vLLM is loaded.
        from rlmath.evals.runner import Judges, evaluate

        process.settle()
        evaluate(plan, rollout, Judges(given.judges, given.judge_timeout), resolve_kind(given.device))
        leave_word(plan.output, FINISHED, "the tables are written")
        process.leave()
    except ValueError as error:
        tell_mistake(error)
        leave_word(given.output, MISTAKE, str(error))
        return MISTAKE
    except BaseException as error:
        leave_word(given.output, FAILURE, f"{type(error).__name__}: {error}")
        end_broken()
    return 0


def stop_on_signal(output: Path) -> None:
    """SIGUSR1, which Slurm sends before the time limit, ends this rank where it is: what was judged is on the disk.
    (SIGTERM is what torchrun ends the ranks with after one has failed, and says nothing of this one.)"""

    def stop(_number: int, _frame: object) -> None:
        try:
            if environment_rank() == 0:
                write_exit_status(output, SAVED_AND_STOPPED, "stopped by SIGUSR1: the same command goes on")
        finally:
            os._exit(SAVED_AND_STOPPED)

    signal.signal(signal.SIGUSR1, stop)


def plan_of(given: argparse.Namespace) -> Plan:
    """What is sampled. ValueError that lists what is wrong with it."""
    needed = {name: getattr(given, name) for name in ("model", "benchmarks", "data_dir", "output")}
    lacking = [f"--{name.replace('_', '-')}" for name, value in needed.items() if value is None]
    if lacking:
        raise ValueError(
            f"{', '.join(lacking)} must be given (or --compare A B alone); --help says what they are"
        )
    names = dict.fromkeys(name for name in given.benchmarks.split(",") if name)
    same = (
        "samples",
        "temperature",
        "top_p",
        "max_new_tokens",
        "max_prompt_tokens",
        "template",
        "seed",
        "limit",
    )
    return Plan(
        given.model,
        tuple(names),
        given.data_dir,
        given.output,
        greedy=not given.no_greedy,
        **{name: getattr(given, name) for name in same},
    )


def rollout_of(given: argparse.Namespace) -> RolloutConfig:
    """How engines are built. ValueError that lists what is wrong with it."""
    same = ("tensor_parallel", "memory_share", "cpu_kv_cache_gib", "max_num_seqs", "cuda_graphs")
    values = {name: getattr(given, name) for name in same}
    problems = [
        f"--{name.replace('_', '-')} is {values[name]}; needed: {allowed}"
        for name in same
        if (allowed := RANGES.get(f"rollout.{name}")) is not None and not allowed.holds(values[name])
    ]
    raise_problems("the engines", problems)
    return RolloutConfig(**values)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two --output folders to put side by side")
    _add_what(parser.add_argument_group("what is sampled"))
    group = parser.add_argument_group("how it is computed")
    add = group.add_argument
    add("--tensor-parallel", type=int, default=1, help="ranks of one engine; divides the ranks (default 1)")
    add("--cuda-graphs", action="store_true", help=EAGER)
    add("--memory-share", type=float, default=0.9, help="GPU: of its memory, for the engine (default 0.9)")
    add("--cpu-kv-cache-gib", type=float, default=0.5, help="CPU: KV cache of a rank, in GiB (default 0.5)")
    add(
        "--max-num-seqs", type=int, default=256, help="most sequences an engine decodes at once (default 256)"
    )
    add("--judges", type=int, default=2, help="processes that judge an engine's answers (default 2)")
    add("--judge-timeout", type=float, default=5.0, help="seconds for one answer (default 5)")
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="default auto: cuda where there is one",
    )
    return parser.parse_args(argv)


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", type=Path, help="Hugging Face folder, a run's folder (its newest model), or a checkpoint")
    add("--benchmarks", help="names of files in --data-dir, with commas between, for example aime24,math_500")
    add("--data-dir", type=Path, help="folder of NAME.jsonl, .json, .parquet, or folders NAME")
    add("--output", type=Path, help="folder for completions and tables; another one for other settings")
    add("--samples", type=int, default=32, help="samples of each problem, 0 for none (default 32)")
    add("--temperature", type=float, default=0.6, help="of the samples (default 0.6)")
    add("--top-p", type=float, default=0.95, help="of the samples (default 0.95)")
    add("--max-new-tokens", type=int, default=32768, help="longest completion (default 32768)")
    add(
        "--max-prompt-tokens", type=int, help="longer prompts count as wrong; default: all must fit the model"
    )
    add("--no-greedy", action="store_true", help="leave out the completion at temperature 0")
    add(
        "--template",
        default="auto",
        choices=TEMPLATES,
        help="as data.template, see docs/data.md (default auto)",
    )
    add("--seed", type=int, default=1, help="of samples and intervals (default 1)")
    add("--limit", type=int, help="only so many problems of each benchmark, for trying")


if __name__ == "__main__":
    sys.exit(main())
