"""What a validation reads and counts, and which model it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.intervals import accuracy_interval
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.data.dataset import ValidationFile, load_validation
from rlmath.data.tokenizer import load_tokenizer
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.rollout.collector import CollectGroups, Rollout
from rlmath.rollout.sampling import RolloutSeed, SamplingSettings
from rlmath.telemetry.reporter import ValidationResult
from rlmath.trainer.validation import Validator, file_metrics

pytestmark = pytest.mark.usefixtures("process_group")

ASKED = ("validation.every_steps=3", "validation.keep_best=true", "validation.paths=[a.jsonl]")


def settings(folder: Path, *overrides: str) -> Config:
    overrides_needed = [
        f"run.output_dir={folder}",
        "model.path=m",
        "data.train_path=t",
        "data.max_prompt_tokens=20",
    ]
    return load_config([], [*overrides_needed, "rollout.max_new_tokens=30", *overrides])


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number: int, prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "task": "math", "query_id": f"q-{number}", "solutions": ["1"]} | more


def test_problems_that_are_too_long_count_and_unusable_rows_are_told(
    tmp_path: Path, tied_model: Path
) -> None:
    long = row(2, "y" * 31)
    no_answer = row(3, "z", solutions=[])
    file = write_rows(tmp_path / "own.jsonl", row(1, "x" * 30), long, no_answer)
    config = settings(
        tmp_path,
        "validation.every_steps=1",
        f"validation.paths=[{file}]",
        "validation.max_new_tokens=20",
    )
    tokenizer = load_tokenizer(str(tied_model))
    (validation_file,) = load_validation(config, tokenizer, 101)
    # The context has 20 + 30 tokens, of which a completion takes 20.
    assert [prompt.prompt_id for prompt in validation_file.prompts] == ["q-1"]
    assert (
        validation_file.name,
        validation_file.too_long,
        validation_file.problems,
        len(validation_file.unusable),
    ) == ("own", 1, 2, 1)
    assert (
        "2 problems, 1 of them too long" in validation_file.lines()[0]
        and "line 3" in validation_file.lines()[1]
    )
    with pytest.raises(
        ValueError, match=r"validation.paths: .*the tokenizer gives token \d+ .*the model has 10"
    ):
        load_validation(config, tokenizer, 10)
    write_rows(file, long)
    with pytest.raises(ValueError, match="has no problem to sample"):
        load_validation(config, tokenizer, 101)
    assert load_validation(settings(tmp_path), tokenizer, 101) == ()


def group(*completions: tuple[int, bool, str]) -> ScoredGroup:
    """A group whose completions have these tokens, are right or not, and end for this reason."""
    completions_sampled = tuple(
        Completion(
            g, (5,) * tokens, (0.0,) * tokens, text="", finish_reason=reason, policy_version=0
        )  # type: ignore[arg-type]
        for g, (tokens, _, reason) in enumerate(completions)
    )
    scores = tuple(Score(1.0, right, "", "string") for _, right, _ in completions)
    return ScoredGroup(
        Prompt("q", "?", (1,), solutions=("2",), task="math"), completions_sampled, scores
    )


def test_accuracy_is_over_all_problems_and_lengths_over_what_was_sampled() -> None:
    groups = [
        group((2, True, "stop"), (4, False, "length")),
        group((6, True, "stop"), (8, True, "stop")),
    ]
    file = ValidationFile("own", [scored.prompt for scored in groups], 2, ())
    metrics = file_metrics(file, groups, samples=2)
    low, high = accuracy_interval([0.5, 1.0, 0.0, 0.0], samples=2)
    assert 0 < low < 3 / 8 < high < 1
    assert metrics == {
        "validation/own/accuracy": 3 / 8,
        "validation/own/accuracy_low": low,
        "validation/own/accuracy_high": high,
        "validation/own/mean_tokens": 5.0,
        "validation/own/truncated": 0.25,
    }


def test_right_is_what_the_verifier_says_where_a_function_pays() -> None:
    scores = [Score(0.1, True, "", "function", verified_correct=right) for right in (True, False)]
    plain = group((2, True, "stop"), (2, True, "stop"))
    file = ValidationFile("own", [plain.prompt], 0, ())
    measured_group = replace(plain, scores=tuple(scores))
    assert file_metrics(file, [measured_group], samples=2)["validation/own/accuracy"] == 0.5
    paid = file_metrics(file, [plain], samples=2, figure="reward_positive")
    assert paid["validation/own/reward_positive"] == 1.0 and "validation/own/accuracy" not in paid


@pytest.mark.parametrize(
    ("overrides", "solution", "figure"),
    [
        ((), "7", "accuracy"),
        (("reward.function=own:paid",), "7", "accuracy"),
        (("reward.function=own:paid",), "see above", "reward_positive"),
        (("reward.rewards=[format,'mine=own:paid']",), "see above", "reward_positive"),
        (("reward.rewards=[correctness,'mine=own:paid']",), "see above", "accuracy"),
        (("reward.function=own:paid", "validation.scorer=own:scorer"), "see above", "accuracy"),
    ],
)
def test_what_a_validation_measures_is_decided_once(
    tmp_path: Path, overrides: tuple[str, ...], solution: str, figure: str
) -> None:
    prompts = [
        Prompt(f"q{n}", "?", (1,), solutions=(answer,), task="math")
        for n, answer in enumerate(("7", solution))
    ]
    files = [ValidationFile("own", prompts, 0, ())]
    run_validator = validator(tmp_path, Exports(), *overrides, files=files)
    assert run_validator.figure == figure
    run_validator.keep_if_best(ValidationResult(3, {f"validation/{figure}": 0.5}))
    assert best(tmp_path) == (3, 0.5)


def test_an_accuracy_by_a_functions_rule_is_not_compared_with_one_by_the_verifier(
    tmp_path: Path,
) -> None:
    """What an earlier version kept as the best, by the function's rule."""
    function_setting = "reward.function=own:paid"
    validator(tmp_path, Exports(), function_setting).keep_if_best(
        ValidationResult(3, {"validation/reward_positive": 0.9})
    )
    files = [ValidationFile("own", [Prompt("q", "?", (1,), solutions=("7",), task="math")], 0, ())]
    validator(tmp_path, Exports(), function_setting, steps_done=3, files=files).keep_if_best(
        measured(6, 0.4)
    )
    assert best(tmp_path) == (6, 0.4)


class Exports:
    """A stand-in for an export: it makes the folder of a model, or finds a full disk."""

    def __init__(self) -> None:
        self.full = False

    def __call__(self, folder: Path, more: Mapping[str, bytes]) -> None:
        if self.full:
            raise OSError("No space left on device")
        folder.mkdir(exist_ok=True)
        for name, content in more.items():
            (folder / name).write_bytes(content)


def validator(
    folder: Path,
    export: Exports,
    *overrides: str,
    steps_done: int = 0,
    files: Sequence[ValidationFile] = (),
    asked_to_stop: Callable[[], str | None] = lambda: None,
    collector: Any = None,
) -> Validator:
    """A validator that needs no engine: nothing is sampled, or what `collector` has."""
    config = settings(folder, *ASKED, *overrides)
    mesh = Mesh(0, 1, 1, pipeline=1, engine_size=1)
    return Validator(
        config, mesh, collector, PhaseTimers(), files, steps_done, 10, export, asked_to_stop
    )


def best(folder: Path) -> tuple[int, float]:
    account = json.loads((folder / "best_model" / "validation.json").read_text())
    return account["step"], account["accuracy"]


def measured(step: int, accuracy: float) -> ValidationResult:
    return ValidationResult(step, {"validation/accuracy": accuracy})


def test_the_best_model_is_the_first_of_the_best(tmp_path: Path) -> None:
    run_validator = validator(tmp_path, Exports())
    bests = []
    for step, accuracy in ((0, 0.2), (3, 0.5), (6, 0.5), (9, 0.4), (10, 0.7)):
        run_validator.keep_if_best(measured(step, accuracy))
        bests.append(best(tmp_path))
    assert bests == [(0, 0.2), (3, 0.5), (3, 0.5), (3, 0.5), (10, 0.7)]
    run_validator.keep_if_best(None)
    assert best(tmp_path) == (10, 0.7)


def test_a_run_that_goes_on_remembers_the_best_and_what_it_measured(tmp_path: Path) -> None:
    validator(tmp_path, Exports()).keep_if_best(measured(3, 0.5))
    (tmp_path / "validation.jsonl").write_text('{"step": 0, "a": 0.1}\n{"step": 3, "a": 0.5}\n')
    resumed = validator(tmp_path, Exports(), steps_done=3)
    resumed.keep_if_best(measured(6, 0.4))
    assert best(tmp_path) == (3, 0.5)
    assert [step for step in range(11) if resumed.due(step)] == [6, 9, 10]
    other = validator(tmp_path, Exports(), "validation.samples=2", steps_done=3)
    other.keep_if_best(measured(6, 0.4))
    assert best(tmp_path) == (6, 0.4), "accuracies of other samples are not compared"


@pytest.mark.parametrize("account", ["", "[]", '{"accuracy": "high"}', "{" * 100_000])
def test_an_account_that_cannot_be_read_does_not_end_the_run(tmp_path: Path, account: str) -> None:
    (tmp_path / "best_model").mkdir()
    (tmp_path / "best_model" / "validation.json").write_text(account)
    validator(tmp_path, Exports(), steps_done=3).keep_if_best(measured(6, 0.1))
    assert best(tmp_path) == (6, 0.1)


def test_a_full_disk_costs_the_model_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export = Exports()
    run_validator = validator(tmp_path, export)
    run_validator.keep_if_best(measured(0, 0.2))
    export.full = True
    run_validator.keep_if_best(measured(3, 0.5))
    assert best(tmp_path) == (0, 0.2) and "No space left on device" in caplog.text
    export.full = False
    run_validator.keep_if_best(measured(6, 0.3))
    assert best(tmp_path) == (6, 0.3), "the one that was lost does not count"


def test_when_a_validation_is_due(tmp_path: Path) -> None:
    def due(*overrides: str) -> list[int]:
        run_validator = validator(tmp_path, Exports(), *overrides)
        return [step for step in range(11) if run_validator.due(step)]

    assert due() == [0, 3, 6, 9, 10]
    assert due("validation.before_training=false") == [3, 6, 9, 10]
    assert due("validation.every_steps=100") == [0, 10]
    assert due("validation.every_steps=null", "validation.keep_best=false") == []


def test_a_validation_is_broken_off_when_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    file = ValidationFile("own", [Prompt("q", "?", (1,), solutions=("2",), task="math")], 0, ())
    run_validator = validator(tmp_path, Exports(), files=[file], asked_to_stop=lambda: "SIGTERM")
    assert run_validator.validate(3) is None and run_validator.stopped_by == "SIGTERM"
    assert run_validator.due(3), "the run that goes on makes it"


class Sampled:
    """A stand-in for engines: it gives the groups of the prompts that it is asked for."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self._groups = {scored.prompt.prompt_id: scored for scored in groups}
        self.batches: list[list[str]] = []

    def collect(self, command: CollectGroups) -> Rollout:
        self.batches.append([prompt.prompt_id for prompt in command.prompts])
        return Rollout([self._groups[prompt_id] for prompt_id in self.batches[-1]], [])


@pytest.mark.parametrize(
    ("overrides", "figure"),
    [((), "accuracy"), (("reward.function=own:paid",), "reward_positive")],
)
def test_a_validation_is_the_mean_of_its_files_by_the_figure_that_they_have(
    tmp_path: Path, overrides: tuple[str, ...], figure: str
) -> None:
    """The second of three problems is always right and the others half; the one of a file is wrong.

    Their solutions are texts that no verifier compares."""
    outcomes = [(True, False), (True, True), (False, True), (False, False)]
    groups = [
        replace(
            group(*((4, right, "stop") for right in row)),
            prompt=Prompt(f"q{n}", "?", (1,), solutions=("see above",), task="math"),
        )
        for n, row in enumerate(outcomes)
    ]
    files = [
        ValidationFile(name, [scored.prompt for scored in part], 0, ())
        for name, part in (("three", groups[:3]), ("one", groups[3:]))
    ]
    engines = Sampled(groups)
    run_validator = validator(
        tmp_path,
        Exports(),
        "validation.samples=2",
        "validation.batch_size=2",
        *overrides,
        files=files,
        collector=engines,
    )
    result = run_validator.validate(6)
    assert engines.batches == [["q0", "q1"], ["q2"], ["q3"]]
    assert result is not None and result.step == 6
    figures = {name: value for name, value in result.metrics.items() if name.endswith(figure)}
    assert figures == {
        f"validation/three/{figure}": pytest.approx(4 / 6),
        f"validation/one/{figure}": 0.0,
        f"validation/{figure}": pytest.approx(2 / 6),
    }
    assert run_validator.validate(6) is None, "it is done"
    run_validator.keep_if_best(result)
    assert best(tmp_path) == (6, pytest.approx(2 / 6))


def test_a_validation_samples_by_its_own_settings(tmp_path: Path) -> None:
    """Its seed is that of no training step."""
    scored = group((4, True, "stop"), (4, True, "stop"), (4, True, "stop"))
    commands: list[CollectGroups] = []

    class Engines(Sampled):
        def collect(self, command: CollectGroups) -> Rollout:
            commands.append(command)
            return super().collect(command)

    run_validator = validator(
        tmp_path,
        Exports(),
        "validation.samples=3",
        "validation.temperature=0.25",
        "validation.top_p=0.5",
        "validation.max_new_tokens=17",
        "run.seed=9",
        files=[ValidationFile("own", [scored.prompt], 0, ())],
        collector=Engines([scored]),
    )
    run_validator.validate(3)
    assert commands == [
        CollectGroups(
            [scored.prompt],
            SamplingSettings(3, 0.25, 0.5, min_new_tokens=0, max_new_tokens=17),
            RolloutSeed(9, -1),
            title="validation own",
            validates=True,
        )
    ]


def test_the_best_by_the_verifier_is_remembered_where_a_function_pays(tmp_path: Path) -> None:
    files = [ValidationFile("own", [Prompt("q", "?", (1,), solutions=("7",), task="math")], 0, ())]
    paid = "reward.function=own:paid"
    validator(tmp_path, Exports(), paid, files=files).keep_if_best(measured(3, 0.5))
    later = validator(tmp_path, Exports(), paid, steps_done=3, files=files)
    later.keep_if_best(measured(6, 0.4))
    assert best(tmp_path) == (3, 0.5)
