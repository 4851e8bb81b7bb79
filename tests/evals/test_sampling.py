from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rlmath.algorithms.types import Completion
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.evals.benchmarks import Problem
from rlmath.evals.completions import CompletionRecord
from rlmath.evals.plan import GREEDY_INDEX
from rlmath.evals.sampling import Verification
from rlmath.rollout import collector
from rlmath.rollout.collector import SamplingProgress
from rlmath.rollout.sampling import Request
from rlmath.workers.hooks import Hook
from rlmath.workers.worker_pool import WorkerPool
from tests.answers.attacks import HANG_SOLUTIONS, HANGS


def completion_of(index: int, text: str) -> Completion:
    return Completion(index, (5, 6, 0), (0.0,) * 3, text, "stop", policy_version=0)


def test_hostile_completions_cost_their_time_limit_and_nothing_else(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    texts = [
        "so \\boxed{1}",  # still a thought
        f"</think> {HANGS[0]}",
        f"</think> \\boxed{{__import__('os').system('touch {marker}')}}",
        "</think>" + "\\boxed{" * 300,
        "</think> no answer",
        "</think> \\boxed{\\frac{2}{2}}",
        "</think> \\boxed{1 apple}",
        "</think> \\boxed{1 pear}",
    ]
    problem = Problem(
        "q",
        "One?<think>\n",
        (1, 2),
        (*HANG_SOLUTIONS, "1"),
        "math",
        benchmark="quiz",
        question="How many apples?",
    )
    benchmark_records: list[tuple[str, CompletionRecord]] = []
    with WorkerPool(1, 1.0) as pool:
        verification = Verification(
            pool, {0: problem}, lambda *written: benchmark_records.append(written)
        )
        for index, text in zip((GREEDY_INDEX, 0, 1, 2, 3, 4, 5, 6), texts, strict=True):
            request = Request((0, index), problem.token_ids, 40 + index, 0, 99)
            verification.submit(request, completion_of(index, text))
        verification.finish()
    assert not marker.exists()
    assert {benchmark for benchmark, _ in benchmark_records} == {"quiz"}
    records = [record for _, record in benchmark_records]
    assert [record.text for record in records] == texts
    assert {record.tokens for record in records} == {3}
    assert [record.correct for record in records] == [False] * 5 + [True, True, False]
    assert [(record.mode, record.sample) for record in records[:3]] == [
        ("greedy", 0),
        ("sample", 0),
        ("sample", 1),
    ]
    assert [record.seed for record in records] == [39, 40, 41, 42, 43, 44, 45, 46]
    assert [records[i].verdict for i in (0, 1, 4)] == ["no_answer", "timeout", "no_answer"]
    assert records[0].prompt_hash == problem.prompt_hash and records[0].finish_reason == "stop"


def test_a_scorer_of_the_users_says_what_is_right_in_a_worker_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os\n"
        "def scorer(completion, solutions, row):\n"
        "    if 'ends' in completion:\n"
        "        os._exit(3)\n"
        "    while 'hangs' in completion:\n"
        "        pass\n"
        "    return completion.endswith(solutions[0]) and row['level'] == 3\n"
    )
    texts = ["so \\boxed{9} or 1", "ends 1", "hangs 1", "so \\boxed{1}."]
    problem = Problem("q", "One?", (1, 2), ("1",), "math", '{"level": 3}', benchmark="quiz")
    records: list[CompletionRecord] = []
    hook = Hook("scorer", f"{tmp_path}/own.py:scorer", "--scorer")
    with WorkerPool(1, 1.0) as pool, WorkerPool(1, 1.0, function=hook) as scorer:
        verification = Verification(
            pool, {0: problem}, lambda _, record: records.append(record), scorer
        )
        for index, text in enumerate(texts):
            request = Request((0, index), problem.token_ids, index, 0, 99)
            verification.submit(request, completion_of(index, text))
        verification.finish()
    assert [(record.correct, record.verdict, record.extracted) for record in records] == [
        (True, "function", "9"),
        (False, "error", ""),
        (False, "timeout", ""),
        (False, "function", "1"),
    ]


@pytest.mark.parametrize(
    ("answer_from", "extracted"), [("boxed", ["9", ""]), ("number", ["9", "4"])]
)
def test_the_vote_of_what_a_scorer_judges_stands_where_answers_may_stand(
    tmp_path: Path, answer_from: str, extracted: list[str]
) -> None:
    """The scorer alone says what is right; the answer is compared with those of other samples."""
    (tmp_path / "own.py").write_text("def scorer(completion, solutions, row):\n    return 1.0\n")
    problem = Problem(
        prompt_id="q",
        text="One?",
        token_ids=(1, 2),
        solutions=("1",),
        task="math",
        benchmark="quiz",
    )
    records: list[CompletionRecord] = []
    hook = Hook("scorer", f"{tmp_path}/own.py:scorer", "--scorer")
    with WorkerPool(1, 60.0, function=hook) as scorer:
        verification = Verification(
            scorer,
            {0: problem},
            lambda _, record: records.append(record),
            scorer=scorer,
            answer_from=answer_from,
        )
        for index, text in enumerate(["so \\boxed{9}", "so it is 4"]):
            request = Request(
                (0, index), problem.token_ids, seed=index, min_new_tokens=0, max_new_tokens=99
            )
            verification.submit(request, completion_of(index, text))
        verification.finish()
    assert [record.extracted for record in records] == extracted
    assert all(record.correct for record in records)


def test_the_log_has_how_much_all_engines_have_sampled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(collector, "COUNT_SECONDS", 0.0)
    store = RunStore(dist.HashStore(), "evaluation")
    first, second = (
        SamplingProgress(10, Mesh(rank, 2, 1, 1, 1), store, "step 7/20") for rank in (0, 1)
    )
    caplog.set_level(logging.INFO)
    first.tick()
    (line,) = caplog.messages
    assert (
        line.startswith("step 7/20: sampled 0 of 10 completions (0%) in 00:0")
        and "left" not in line
    )
    for _ in range(3):
        first.add_one()
    for _ in range(2):
        second.add_one()
    second.tick()
    first.tick()
    second.close()
    first.tick()
    for line in caplog.messages[1:]:  # also when the other engine's count is deleted
        assert re.fullmatch(
            r"step 7/20: sampled 5 of 10 completions \(50%\) in \d\d:\d\d, about \d\d:\d\d left",
            line,
        )
    assert len(caplog.messages) == 3


def test_counts_and_lines_come_as_seldom_as_they_should(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine ticks at every step of its own: not every one is a message to the store."""
    clock = [100.0]
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(collector, "COUNT_SECONDS", 2.0)
    monkeypatch.setattr(collector, "PROGRESS_SECONDS", 6.0)
    store = RunStore(dist.HashStore(), "evaluation")
    engines = [SamplingProgress(40, Mesh(rank, 2, 1, 1, 1), store, "s") for rank in (0, 1)]
    caplog.set_level(logging.INFO)
    counted = []
    for _ in range(13):
        for engine in reversed(engines):
            engine.tick()
            engine.add_one()
        counted.append(store.get_all(["sampled/1"]).get("sampled/1"))
        clock[0] += 1.0
    numbers = [0 if count is None else count[0] for count in counted]
    assert numbers == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12]
    told = [re.findall(r"sampled (\d+) of 40 .* in 00:(\d\d)", line) for line in caplog.messages]
    assert told == [[("12", "06")], [("24", "12")]]


def test_the_time_left_is_told_by_tokens_before_a_completion_is_finished(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines, 10 completions of at most 100 tokens: 250 and 150 tokens are 40% of the work."""
    monkeypatch.setattr(collector, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(collector, "COUNT_SECONDS", 0.0)
    store = RunStore(dist.HashStore(), "evaluation")
    first, second = (
        SamplingProgress(10, Mesh(rank, 2, 1, 1, 1), store, title="evaluation", longest=100)
        for rank in (0, 1)
    )
    caplog.set_level(logging.INFO)
    first.tokens, second.tokens = 250, 150
    second.tick()
    first.tick()
    (line,) = caplog.messages
    assert re.fullmatch(
        r"evaluation: sampled 0 of 10 completions \(0%\) in \d\d:\d\d, about \d\d:\d\d left", line
    )
    assert collector.left_text(0, 10, 60.0, tokens=400, longest=100) == ", about 01:30 left"
    assert collector.left_text(0, 10, 60.0) == ""


def test_the_hash_of_a_problem_is_of_all_that_its_judgement_depends_on() -> None:
    problem = Problem("q", "?", (1, 2), ("7",), "math", benchmark="quiz")
    variants = [
        Problem("q", "?", (1, 3), ("7",), "math", benchmark="quiz"),
        Problem("q", "?", (1, 2), ("8",), "math", benchmark="quiz"),
        Problem("q", "?", (1, 2), ("7",), "choice", benchmark="quiz"),
    ]
    assert len({variant.prompt_hash for variant in (problem, *variants)}) == 4
    assert (
        Problem("z", "!", (1, 2), ("7",), "math", benchmark="other").prompt_hash
        == problem.prompt_hash
    )
