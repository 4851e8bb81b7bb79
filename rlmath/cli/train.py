"""Programs of several ranks on this machine, without a command line of torchrun's: `rlmath train`, `sft` and `eval`.

`--ranks N` says how many; without it every GPU has one, and on CPU there are as many as the layout takes at least.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from rlmath.config.load import load_config
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MISTAKE, read_exit_status

RANKS = "--ranks"
STOP_OPTIONS = ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout=300")
"""So torchrun passes SIGUSR1 on and leaves its ranks the time to save."""
ALONE = ("-h", "--help", "--dry-run")
"""With one of these a program prints something and ends: no ranks are started."""


def train(argv: Sequence[str]) -> int:
    """Exit status of the run (`exit_codes`)."""
    return _train("grpo", argv)


def sft(argv: Sequence[str]) -> int:
    """As `train`."""
    return _train("sft", argv)


def _train(program: str, argv: Sequence[str]) -> int:
    if any(word in ALONE for word in argv):
        from rlmath.trainer import __main__ as trainer

        return trainer.main([program, *argv])
    try:
        ranks, words = take_ranks(argv)
        ranks, output = _ranks_and_output(words, ranks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    return launch(ranks, ["-m", "rlmath.trainer", program, *words], output)


def evaluate(argv: Sequence[str]) -> int:
    """Exit status of the evaluation."""
    try:
        ranks, words = take_ranks(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    if any(word in (*ALONE, "--compare") for word in words):
        from rlmath.evals.command import main

        return main(words)
    return launch(ranks or gpu_count() or 1, ["-m", "rlmath.evals", *words], None)


def take_ranks(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of --ranks, None without it, and the other words. ValueError for what is no number."""
    words, value = list(argv), None
    for place, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == RANKS:
            if not equals and place + 1 < len(words):
                text = words.pop(place + 1)
            if not text.isdecimal() or not 0 < int(text) < 2**16:
                raise ValueError(f"{RANKS} is {text!r}; needed: a number of processes, at least 1")
            value = int(text)
            del words[place]
            break
    return value, words


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ranks_and_output(words: Sequence[str], ranks: int | None) -> tuple[int, str]:
    """How many ranks the settings on a command line are started with, and the run's folder. ValueError for settings
    that cannot be read."""
    from rlmath.config.load import make_parser
    from rlmath.trainer.preflight.parallelism import least_ranks

    given = make_parser("").parse_intermixed_args(words)
    config = load_config(given.config, given.overrides)
    if ranks is None:
        on_gpu = config.run.device != "cpu"
        ranks = (gpu_count() if on_gpu else 0) or least_ranks(config)
    return ranks, config.run.output_dir


def launch(ranks: int, command: Sequence[str], output: str | None) -> int:
    """Run a program under torchrun. Exit status of the rank that failed first; of a run, what its folder `output`
    says."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are the parallelism
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # ranks say themselves why they end
    given = parse_args(["--standalone", f"--nproc-per-node={ranks}", *STOP_OPTIONS, *command])
    try:
        run(given)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else FAILURE
        return status if output is None or status == MISTAKE else read_exit_status(output).status or status
    except SignalException as stopped:
        return FAILURE if output is None else read_exit_status(output).status or 128 + stopped.sigval
    return 0
