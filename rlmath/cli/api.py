"""The public names of `rlmath`: judge an answer, read settings, train, read what a run has written.

    from rlmath import load_config, train, verify

    verify(r"so it is \\boxed{1/2}", "0.5").correct
    data = {"train_path": "train.jsonl"}
    config = load_config("configs/demo.yaml", model={"path": "base"}, data=data, run={...})
    run = train(config)
    run.metrics()[-1]["task_reward"]

They import neither torch nor vLLM into the process that calls them: a run has processes of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlmath.answers.verifier import TASKS, Rules, Verdict
from rlmath.config.help import as_yaml_word, section_classes, unknown_key_text
from rlmath.config.load import config_as_yaml
from rlmath.config.load import load_config as load_files
from rlmath.config.run_files import EXPORT_FOLDER, SUMMARY_FILE, adapter_alone
from rlmath.config.schema import Config
from rlmath.distributed.fault_tolerance.exit_codes import FINISHED, MISTAKE, read_exit_status
from rlmath.distributed.process import end_with_parent
from rlmath.telemetry.metrics_writer import read_metrics
from rlmath.telemetry.samples import read_samples, sample_files
from rlmath.workers.worker_pool import WorkerPool

VERIFY_SECONDS = 5.0
"""Time limit of one answer."""


def verify(
    answer: str,
    reference: str | Sequence[str],
    task: str = TASKS[0],
    answer_from: str = "boxed",
    question: str = "",
) -> Verdict:
    r"""Whether a model's text gives the right answer.

    The answer is that of its last \boxed{}, or the whole text where it has none.

    `reference` is one answer or several of which each is right, with or without a box. The
    comparison runs in a worker process with a time limit of VERIFY_SECONDS, as in training: hostile
    text costs no more than that. `answer_from` is as `reward.answer_from`. Beside a value may stand
    words and units of the reference or the `question`: 7 apples is right for 7 where the question
    has apples. Raises ValueError for an unknown `task` or `answer_from`, and for what is no text.
    """
    references = (reference,) if isinstance(reference, str) else reference
    texts = (answer, question, *references) if isinstance(references, Sequence) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"verify({answer!r:.60}, {reference!r:.60}); needed: a text, and a text or a list of "
            "texts, such as "
            'verify("3", "3")'
        )
    if answer_from == "boxed" and "\\boxed" not in answer and "\\fbox" not in answer:
        answer = f"\\boxed{{{answer}}}"
    boxed = tuple(text if "\\boxed" in text else f"\\boxed{{{text}}}" for text in references)
    return _pool(answer_from).submit(answer, boxed, task, question=question).result()


@cache
def _pool(answer_from: str) -> WorkerPool:
    """One for each way to find the answer; they end with this process."""
    pool = WorkerPool(1, VERIFY_SECONDS, rules=Rules(answer_from))
    atexit.register(pool.close)
    return pool


def load_config(*files: str | Path, **sections: Mapping[str, Any]) -> Config:
    """Settings of the files, in their order, then of the sections; later ones win.

    >>> config = load_config(run={"output_dir": "o"}, model={"path": "m"}, data={"train_path": "t"})
    >>> config.model.path, config.run.output_dir
    ('m', 'o')

    Files that rlmath ships are found by names such as configs/demo.yaml. Raises ValueError that
    lists all mistakes.
    """
    return load_files(
        [Path(file) for file in files], list(_overrides(sections)), source="load_config"
    )


def _overrides(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for section, values in sections.items():
        if section not in section_classes():
            raise ValueError(f"load_config: {unknown_key_text(section)}")
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{section}={values!r}; needed: a mapping, such as {section}={{'key': value}}"
            )
        for key, value in values.items():
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            word = (
                json.dumps(list(plain)) if isinstance(plain, (list, tuple)) else as_yaml_word(plain)
            )
            yield f"{section}.{key}={word}"


@dataclass(frozen=True)
class Run:
    """A training run's folder, finished or not."""

    folder: Path

    def metrics(self) -> list[dict[str, float]]:
        """A row for each step: "step" and every metric's value."""
        return read_metrics(str(self.folder))

    def samples(self) -> list[dict[str, Any]]:
        """A row for each sampled completion that the run has kept.

        It has "step", "prompt", "solutions" and what the file has of the completion; what cannot be
        read is left out."""
        files = sample_files(self.folder).items()
        groups = ((step, group) for step, path in files for _, group in read_samples(path))
        return [
            {"step": step} | {**group, **completion}
            for step, group in groups
            if not isinstance(group, ValueError)
            for completion in group.pop("completions")
        ]

    def summary(self) -> dict[str, Any]:
        """Steps, seconds and layout of a run that has ended; empty before."""
        path = self.folder / SUMMARY_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the trained model, which is there when the run has finished.

        ValueError of a run with save.merged=false, whose folder has adapters alone."""
        model = self.folder / EXPORT_FOLDER
        if (adapter := adapter_alone(model)) is not None:
            raise ValueError(
                f"{model} has no model, only its adapters (save.merged=false). Give PEFT "
                f"{adapter}, or make the model: "
                f"rlmath convert to-hf --checkpoint {self.folder} --output DIR"
            )
        return model


def train(
    config: Config, ranks: int | None = None, program: str = "grpo", *, oversubscribe: bool = False
) -> Run:
    """Train in processes of their own, and print what they print.

    `ranks`, `oversubscribe`: as `rlmath train --ranks` and `--oversubscribe`; `program`: "grpo" or
    "sft". A run that was stopped before is resumed.

    Raises ValueError for a mistake in the settings, RuntimeError for a run that failed. An
    interrupt stops the run, which saves a checkpoint.
    """
    name = {"grpo": "train", "sft": "sft"}.get(program)
    if name is None:
        raise ValueError(f'program is {program!r}; needed: "grpo" or "sft"')
    with tempfile.TemporaryDirectory(prefix="rlmath-") as place:
        file = Path(place) / "config.yaml"
        file.write_text(config_as_yaml(config), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "rlmath.cli.main", name, "--config", str(file)]
        command += [] if ranks is None else ["--ranks", str(ranks)]
        status, printed = _run([*command, *["--oversubscribe"] * oversubscribe])
    if status == FINISHED:
        return Run(Path(config.run.output_dir))
    message = (
        read_exit_status(config.run.output_dir).message if status != MISTAKE else "\n".join(printed)
    )
    raise (ValueError if status == MISTAKE else RuntimeError)(
        f"the run ended with status {status}: {message}"
    )


def _run(command: Sequence[str]) -> tuple[int, list[str]]:
    """Exit status and last lines; the lines are printed as they come, in a notebook too.

    The program is in a group of its own, so that an interrupt reaches it once, and ends with this
    process."""
    last: list[str] = []
    own_pid = os.getpid()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
        preexec_fn=lambda: end_with_parent(own_pid),
    )
    assert process.stdout is not None
    try:
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    last = [*last[-19:], line.rstrip("\n")]
                return process.wait(), last
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    finally:
        process.terminate()
        process.wait()
