from __future__ import annotations

import time
from pathlib import Path

from rlmath.data.tokenizer import load_tokenizer
from rlmath.evals.benchmarks import Problem
from rlmath.evals.completions import CompletionRecord
from rlmath.evals.plan import GREEDY_INDEX
from rlmath.evals.sampling import Verification
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.sampling import Request, RequestResult
from tests.rewards.attacks import HANG_SOLUTIONS, HANGS


def test_hostile_completions_cost_their_time_limit_and_nothing_else(
    untied_model: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    texts = [
        "so \\boxed{1}",  # still a thought
        f"</think> {HANGS[0]}",
        f"</think> \\boxed{{__import__('os').system('touch {marker}')}}",
        "</think>" + "\\boxed{" * 300,
        "</think> no answer",
        "</think> \\boxed{\\frac{2}{2}}",
    ]
    tokenizer = load_tokenizer(str(untied_model))
    problem = Problem("quiz", "q", "One?<think>\n", (1, 2), (*HANG_SOLUTIONS, "1"), "math")
    found: list[tuple[str, CompletionRecord]] = []
    started = time.monotonic()
    with VerifierPool(1, 1.0) as pool:
        verification = Verification(pool, tokenizer, {0: problem}, lambda *written: found.append(written))
        for index, text in zip((GREEDY_INDEX, 0, 1, 2, 3, 4), texts, strict=True):
            tokens = tuple(tokenizer(text)["input_ids"])
            request = Request((0, index), problem.token_ids, 40 + index, 0, 99)
            verification.submit(request, RequestResult((0, index), tokens, (0.0,) * len(tokens), "stop"))
        verification.finish()
    assert time.monotonic() - started < 60 and not marker.exists()
    assert {benchmark for benchmark, _ in found} == {"quiz"}
    records = [record for _, record in found]
    back = [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) for text in texts]
    assert [record.text for record in records] == back
    assert [record.correct for record in records] == [False, False, False, False, False, True]
    assert [(record.mode, record.sample) for record in records[:3]] == [
        ("greedy", 0),
        ("sample", 0),
        ("sample", 1),
    ]
    assert [record.seed for record in records] == [39, 40, 41, 42, 43, 44]
    assert [records[i].verdict for i in (0, 1, 4)] == ["no_answer", "timeout", "no_answer"]
    assert records[0].prompt_hash == problem.prompt_hash and records[0].finish_reason == "stop"


def test_the_hash_of_a_problem_is_of_all_that_its_judgement_depends_on() -> None:
    problem = Problem("quiz", "q", "?", (1, 2), ("7",), "math")
    others = [
        Problem("quiz", "q", "?", (1, 3), ("7",), "math"),
        Problem("quiz", "q", "?", (1, 2), ("8",), "math"),
        Problem("quiz", "q", "?", (1, 2), ("7",), "choice"),
    ]
    assert len({one.prompt_hash for one in (problem, *others)}) == 4
    assert Problem("other", "z", "!", (1, 2), ("7",), "math").prompt_hash == problem.prompt_hash
