"""Validation: accuracy on files of its own while a run trains.

A validation belongs to the weights that it was sampled with: that of step N, which stands in
`validation.jsonl` and TensorBoard at step N, is made at the beginning of step N+1, where the
engines have these weights anyway; that of step 0 is made before training, the last one after it,
with a switch of memory of its own. `metrics.jsonl` has only the `seconds/validation` of the step
that it was made in.

The engines share the problems of a batch as in a rollout. Seeds depend on the problem and the
sample, not on the step: two validations differ by their weights alone. No state of training is
touched, so that a run with validations trains as one without. A run that is asked to stop does not
wait for the end of a validation: it is broken off and made again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlmath.algorithms.intervals import accuracy_interval
from rlmath.algorithms.types import Score, ScoredGroup
from rlmath.answers.verifier import FAILURES
from rlmath.config.files import read_json
from rlmath.config.length_curriculum import measured_tools, validates, validation_tokens
from rlmath.config.run_files import BEST_FOLDER, VALIDATION_FILE
from rlmath.config.schema import Config
from rlmath.data.dataset import ValidationFile, measured_rows
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.rewards.several_rewards import is_verified
from rlmath.rollout.collector import CollectGroups, Rollout
from rlmath.rollout.sampling import RolloutSeed, SamplingSettings
from rlmath.telemetry.events import event
from rlmath.telemetry.metrics_writer import read_metrics
from rlmath.telemetry.reporter import ValidationResult
from rlmath.workers.hooks import hooks_fingerprint
from rlmath.workers.user_functions import environment_hook, scorer_hook

logger = logging.getLogger(__name__)

BEST_FILE = "validation.json"
"""File in the best model's folder: its step, accuracy, metrics, and how they were measured."""
NO_STEP = -1
"""Stands for the step in the seeds of validations: no step of training has it."""


class GroupCollector(Protocol):
    """Samples and scores groups.

    It is `rollout.collector.Collector`, or the connection to engines on ranks of their own."""

    def collect(self, command: CollectGroups) -> Rollout:
        """The scored groups; see `Collector.collect`."""


@dataclass(eq=False, repr=False)
class Validator:
    """Measures when it is due, and keeps the best model.

    All ranks call it alike."""

    config: Config
    mesh: Mesh
    collector: GroupCollector | None
    """Samples and scores; None where nothing is sampled."""
    timers: PhaseTimers
    files: Sequence[ValidationFile]
    steps_done: int
    """Steps done by a resumed run, whose folder has its validations and the best model."""
    total_steps: int
    export: Callable[[Path, Mapping[str, bytes]], object]
    """Writes the model as it is now into a folder, with the files of the mapping.

    A collective. OSError on rank 0."""
    asked_to_stop: Callable[[], str | None]
    """A collective, called before every batch."""
    stopped_by: str | None = field(default=None, init=False)
    """The reason for which the run was asked to stop while it validated, which broke that off."""

    figure: str = field(init=False)
    """The measured figure.

    "accuracy", or "reward_positive" where only a function of the user's says what is right."""
    measured: bool = field(init=False)
    """Whether the verifier gives the accuracy, and no part of the reward."""

    def __post_init__(self) -> None:
        self._folder = Path(self.config.run.output_dir)
        self.measured = measured_rows(self.config, (), self.files).validation
        by_rule = is_verified(self.config.reward) or self.config.validation.scorer is not None
        self.figure = "accuracy" if by_rule or self.measured else "reward_positive"
        resumes = self.steps_done and self.mesh.rank == 0
        earlier = _read_earlier(self._folder, self.config, self.measured) if resumes else None
        self._done, self._best = broadcast_from_rank_zero(earlier or (set(), None))

    def due(self, step: int) -> bool:
        """Whether the weights with `step` steps done are to be measured, and are not yet."""
        settings = self.config.validation
        if settings.every_steps is None or step in self._done:
            return False
        if step == 0:
            return settings.before_training
        return step % settings.every_steps == 0 or step == self.total_steps

    def validate(self, step: int) -> ValidationResult | None:
        """The accuracy with `step` steps done, whose weights the engines have.

        None if it is not due or was broken off."""
        if not self.due(step):
            return None
        started = time.perf_counter()
        metrics = {}
        logger.debug("The validation after step %d begins", step)
        with self.timers.phase("validation"):
            for file in self.files:
                groups = self._sample(file)
                if self.stopped_by is not None:
                    text = (
                        "The validation after step %d is broken off by %s; the same command "
                        "makes it"
                    )
                    logger.info(text, step, self.stopped_by)
                    return None
                metrics |= file_metrics(
                    file, groups, self.config.validation.samples, figure=self.figure
                )
                self._warn_of_scorer(file, groups)
        accuracies = [metrics[f"validation/{file.name}/{self.figure}"] for file in self.files]
        mean = metrics[f"validation/{self.figure}"] = sum(accuracies) / len(accuracies)
        metrics["validation/seconds"] = time.perf_counter() - started
        self._done.add(step)
        text = ", ".join(
            f"{file.name} {accuracy:.4f}"
            for file, accuracy in zip(self.files, accuracies, strict=True)
        )
        logger.info("Validation after step %d: %s %.4f (%s)", step, self.figure, mean, text)
        return ValidationResult(step, metrics)

    def _sample(self, file: ValidationFile) -> list[ScoredGroup]:
        """The scored groups of a file; incomplete if the run is asked to stop."""
        config = self.config
        groups = []
        settings = config.validation
        sampling = SamplingSettings(
            settings.samples,
            settings.temperature,
            settings.top_p,
            min_new_tokens=0,
            max_new_tokens=validation_tokens(config),
        )
        seed = RolloutSeed(config.run.seed, NO_STEP)
        title = f"validation {file.name}"
        for start in range(0, len(file.prompts), settings.batch_size):
            self.stopped_by = self.asked_to_stop()
            if self.stopped_by is not None:
                break
            batch = file.prompts[start : start + settings.batch_size]
            groups += self.collector.collect(
                CollectGroups(batch, sampling, seed, title=title, validates=True)
            ).groups
        return groups

    def keep_if_best(self, measured: ValidationResult | None) -> None:
        """Export the model where it is better than all before.

        Its weights must be those that were measured. What the disk refuses costs the model, and
        not the run."""
        if measured is None or not self.config.validation.keep_best:
            return
        accuracy = measured.metrics[f"validation/{self.figure}"]
        if self._best is not None and accuracy <= self._best:
            return
        failed = None
        account = {
            "step": measured.step,
            "accuracy": accuracy,
            "metrics": measured.metrics,
            "measured_with": _measure(self.config, self.measured),
        }
        content = (json.dumps(account, indent=1) + "\n").encode()
        folder = self._folder / BEST_FOLDER
        with self.timers.phase("keep_best"):
            try:
                self.export(folder, {BEST_FILE: content})
            except OSError as error:
                failed = str(error)
            failed = broadcast_from_rank_zero(failed)
        if failed is None:
            self._best = accuracy
            extra = event("best", measured.step)
            logger.info(
                "Best model so far: that of step %d, in %s", measured.step, folder, extra=extra
            )
        elif self.mesh.rank == 0:
            logger.warning(
                "The best model, of step %d, was not kept: %s. The run continues",
                measured.step,
                failed,
            )

    def _warn_of_scorer(self, file: ValidationFile, groups: Sequence[ScoredGroup]) -> None:
        """Warn where `validation.scorer` failed, which otherwise looks like wrong answers."""
        failed = [score for group in groups for score in group.scores if score.verdict in FAILURES]
        if self.config.validation.scorer is None or not failed or self.mesh.rank != 0:
            return
        first = failed[0].extracted.partition("\n")[0] or failed[0].verdict
        logger.warning(
            "validation.scorer failed on %d completions of %s, which count as wrong. The first: %s",
            len(failed),
            file.name,
            first,
        )


def file_metrics(
    file: ValidationFile, groups: Sequence[ScoredGroup], samples: int, figure: str = "accuracy"
) -> dict[str, float]:
    """Accuracy, or another `figure`, over all problems of the file with its 95% interval.

    Beside it stand the mean length (tokens) and the truncated share of the completions. The
    verifier says what is right, where it is asked. Lost completions count as wrong, so that they
    make no model the best one, and have no length; their number is there where there are any."""
    sampled = sum(len(group.completions) for group in groups)
    groups = [group.judged for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    right = [sum(map(is_right, group.scores)) for group in groups] + [0] * (
        file.problems - len(groups)
    )
    low, high = accuracy_interval([count / samples for count in right], samples)
    lost = sampled - len(completions)
    n = max(1, len(completions))
    return {
        f"validation/{file.name}/{figure}": sum(right) / (file.problems * samples),
        f"validation/{file.name}/{figure}_low": low,
        f"validation/{file.name}/{figure}_high": high,
        f"validation/{file.name}/mean_tokens": sum(
            completion.n_sampled for completion in completions
        )
        / n,
        f"validation/{file.name}/truncated": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / n,
        **({f"validation/{file.name}/lost": float(lost)} if lost else {}),
    }


def is_right(score: Score) -> bool:
    """Whether a completion counts as right: by the verifier, where it is asked."""
    return score.correct if score.verified_correct is None else score.verified_correct


def _measure(config: Config, measured: bool = False) -> dict[str, Any]:
    """What two accuracies must have in common to be compared.

    `measured`: the verifier alone says what is right."""
    settings = config.validation
    hook = scorer_hook(config)
    scored = (
        {}
        if hook is None
        else {"scorer": settings.scorer, "scorer_code": hooks_fingerprint([hook])}
    )
    if measured:
        scored["right"] = "by the verifier"
    if (tools := measured_tools(config.tools)) is not None:
        scored["tools"] = tools
    if (environment := environment_hook(config)) is not None:
        scored["environment"] = {
            "code": hooks_fingerprint([environment]),
            "max": config.turns.max,
            "max_feedback_tokens": config.turns.max_feedback_tokens,
        }
    return scored | {
        "paths": list(settings.paths),
        "template": settings.template or config.data.template,
        "samples": settings.samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": validation_tokens(config),
    }


def _read_earlier(folder: Path, config: Config, measured: bool) -> tuple[set[int], float | None]:
    """(steps that are validated, best accuracy that has a model) in a resumed run's folder.

    A best model that was measured otherwise, or whose account cannot be read, is not compared with.
    """
    if not validates(config):
        return set(), None
    done = set()
    if (folder / VALIDATION_FILE).is_file():
        done = {int(row["step"]) for row in read_metrics(str(folder), VALIDATION_FILE)}
    path = folder / BEST_FOLDER / BEST_FILE
    best = None
    try:
        account = read_json(path)
        if account["measured_with"] == _measure(config, measured):
            best = float(account["accuracy"])
        else:
            logger.warning(
                "%s was measured with other settings of validation and no longer counts", path
            )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(
            "%s cannot be read (%s); the next validation makes the best model", path, error
        )
    return done, best
