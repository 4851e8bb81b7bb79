"""Completions from vLLM's engine core to the tables of an evaluation, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from rlmath.answers.string_match import Rules
from rlmath.distributed.mesh import Mesh
from rlmath.evals.plan import GREEDY_INDEX, Plan, completion_seed
from rlmath.evals.runner import _Prepared, _write_tables
from rlmath.evals.sampling import sample_missing
from rlmath.rollout import collector
from rlmath.rollout.engine import prepare_environment
from rlmath.workers.hooks import Hook
from rlmath.workers.worker_pool import WorkerPool
from tests.data.chat_templates import chat_tokenizer
from tests.evals.small_evaluations import ROLLOUT, make_chat_model, prepared_of, small_plan

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm import SamplingParams  # noqa: E402

Texts = Mapping[int, str]
"""Completions by the seed that their request has."""


class SpeakingCore:
    """An engine core of vLLM that runs no model: each request is answered in one step."""

    def __init__(self, texts: Texts, tokenizer: PreTrainedTokenizerFast) -> None:
        """Every completion has the text of its seed."""
        self._texts = texts
        self._tokenizer = tokenizer
        self.engine_core = SimpleNamespace(scheduler=self)
        self.requests: dict[str, Any] = {}
        self.asked: dict[int, tuple[list[int], float, float, int]] = {}
        """By seed: tokens of the prompt, temperature, top_p and most new tokens."""

    def add_request(self, core_request: Any) -> None:
        self.requests[core_request.request_id] = core_request
        parameters: SamplingParams = core_request.sampling_params
        self.asked[parameters.seed] = (
            core_request.prompt["prompt_token_ids"],
            parameters.temperature,
            parameters.top_p,
            parameters.max_tokens,
        )

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def get_output(self) -> Any:
        outputs = [self._answer(core_request) for core_request in self.requests.values()]
        self.requests.clear()
        return SimpleNamespace(outputs=outputs)

    def _answer(self, core_request: Any) -> Any:
        text = self._texts[core_request.sampling_params.seed]
        token_ids = [*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id]
        return SimpleNamespace(
            request_id=core_request.request_id,
            new_token_ids=token_ids,
            new_logprobs=[-1.0] * len(token_ids),
            finish_reason="stop",
        )


def llm_of(core: SpeakingCore) -> Any:
    """What `vllm.LLM` is around an engine core, as far as completions are sampled."""

    def process_inputs(name: str, prompt: Any, parameters: Any, **options: Any) -> Any:
        return SimpleNamespace(request_id=name, sampling_params=parameters, prompt=prompt)

    engine = SimpleNamespace(
        engine_core=core,
        input_processor=SimpleNamespace(
            process_inputs=process_inputs, generation_config_fields={"eos_token_id": ()}
        ),
        get_supported_tasks=lambda: (),
        vllm_config=SimpleNamespace(
            lora_config=None, device_config=SimpleNamespace(device_type="cpu")
        ),
    )
    return SimpleNamespace(llm_engine=engine)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """One evaluation's: what its engines have taken stays in the store."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Plan:
    return small_plan(model, tmp_path)


def text_of(index: int) -> str:
    """The greedy completion says 0, the samples 1 and 2."""
    return f"so \\boxed{{{index + 1}}}"


def core_of(plan: Plan, prepared: _Prepared) -> SpeakingCore:
    texts = {
        completion_seed(plan.seed, problem.benchmark, problem.prompt_id, index): text_of(index)
        for problem, indices in prepared.missing
        for index in indices
    }
    return SpeakingCore(texts, chat_tokenizer("qwen3"))


def sample(
    core: SpeakingCore,
    plan: Plan,
    prepared: _Prepared,
    pool: WorkerPool | None,
    scorer: WorkerPool | None = None,
    rank: int = 0,
    engines: int = 1,
) -> None:
    """What one rank of an evaluation does, whose engine has no other."""
    sample_missing(
        llm_of(core),
        prepared.missing,
        plan=plan,
        rollout=ROLLOUT,
        lengths=prepared.lengths,
        mesh=Mesh(rank, engines, 1, pipeline=1, engine_size=1),
        tokenizer_folder=prepared.model.tokenizer,
        pool=pool,
        scorer=scorer,
    )


def lines_of(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """The completions on disk, by the name of their file."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(plan.output.glob("generations/*/*.jsonl")):
        lines.setdefault(path.name, []).extend(map(json.loads, path.read_text().splitlines()))
    return lines


def test_two_engines_share_the_work_and_the_tables_are_of_both(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is late: it finds the greedy completions that nobody else begins."""
    monkeypatch.setattr(collector, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(collector, "COUNT_SECONDS", 0.0)
    caplog.set_level("INFO")
    prepared = prepared_of(plan)
    core = core_of(plan, prepared)
    with WorkerPool(1, 60.0) as pool:
        for rank in (1, 0):
            sample(core, plan, prepared, pool, rank=rank, engines=2)
    assert "evaluation: sampled 0 of 12 completions (0%)" in caplog.text
    for problem, indices in prepared.missing:
        for index in indices:
            seed = completion_seed(9, problem.benchmark, problem.prompt_id, index)
            sampling = (0.0, 1.0) if index == GREEDY_INDEX else (0.7, 0.9)
            assert core.asked[seed] == (list(problem.token_ids), *sampling, 40)
    lines = lines_of(plan)
    of_first_engine = {(row["problem_id"], row["mode"]) for row in lines["rank-0000.jsonl"]}
    assert of_first_engine == {("quiz-0", "greedy"), ("quiz-2", "greedy")}
    rows = [*lines.pop("rank-0000.jsonl"), *lines.pop("rank-0001.jsonl")]
    assert not lines and len(rows) == 12
    assert all(row["text"] == text_of(row["sample"] - (row["mode"] == "greedy")) for row in rows)
    quiz, exam = _write_tables(plan, prepared)
    assert (quiz.row["greedy_acc"], quiz.row["sample_pass@1"]) == pytest.approx((1 / 3, 1 / 3))
    assert (exam.row["greedy_acc"], exam.row["sample_pass@1"]) == (1, 0)


def test_a_scorer_and_the_place_of_answers_are_those_of_the_plan(
    plan: Plan, tmp_path: Path
) -> None:
    """The scorer says what is right. The answers that vote are found as the plan says."""
    (tmp_path / "own.py").write_text(
        "def judge(completion, solutions, row):\n    return completion == 'it is 8'\n"
    )
    plan = replace(plan, benchmarks=("exam",), answer_from="number")
    prepared = prepared_of(plan)
    (problem,) = [gap.problem for gap in prepared.missing]
    texts = {
        completion_seed(plan.seed, "exam", problem.prompt_id, index): f"it is {9 + index}"
        for index in plan.indices
    }
    core = SpeakingCore(texts, chat_tokenizer("qwen3"))
    hook = Hook("scorer", f"{tmp_path}/own.py:judge", "--scorer")
    with (
        WorkerPool(1, 60.0, rules=Rules("number")) as pool,
        WorkerPool(1, 60.0, function=hook) as scorer,
    ):
        sample(core, plan, prepared, pool, scorer=scorer)
    rows = lines_of(plan)["rank-0000.jsonl"]
    assert {(row["extracted"], row["correct"], row["verdict"]) for row in rows} == {
        ("8", True, "function"),
        ("9", False, "function"),
        ("10", False, "function"),
    }


def test_only_ranks_with_workers_write(plan: Plan) -> None:
    """The others make the same steps of their engine."""
    prepared = prepared_of(plan)
    core = core_of(plan, prepared)
    sample(core, plan, prepared, pool=None)
    assert len(core.asked) == 12 and lines_of(plan) == {}
