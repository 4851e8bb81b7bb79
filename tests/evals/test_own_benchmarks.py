"""What an evaluation of small files asks of the engine for every completion.

The model guesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlmath.answers.verifier import verify
from rlmath.config.load import load_config, save_config
from rlmath.config.schema import RolloutConfig
from rlmath.data.chat import ChatSettings
from rlmath.distributed.device import Device
from rlmath.evals.benchmarks import LengthLimits, Problem
from rlmath.evals.command import input_problems, parse, plan_of, rollout_of
from rlmath.evals.model_source import resolve_model
from rlmath.evals.plan import GREEDY_INDEX, Plan, check_settings, completion_seed
from rlmath.evals.runner import _prepare
from rlmath.evals.sampling import Missing, _requests
from rlmath.workers.hooks import Hook
from rlmath.workers.worker_pool import WorkerPool
from tests.distributed.rank_pool import RankPool
from tests.evals.guessing_model import make_guessing_model
from tests.evals.test_evaluation import evaluate_in_pool
from tests.selection import matrix

SAMPLES = 5
NEW_TOKENS = 21
PROMPT_TOKENS = 40
LIMIT = 3
SEED = 9
ROWS = {"first": 4, "second": 2}
"""Problems of each file; the last one of the second is too long."""


def test_requests_have_the_seeds_the_lengths_and_the_temperatures_of_the_plan(
    tmp_path: Path,
) -> None:
    """The greedy completion has temperature 0 and the whole distribution.

    The samples have the plan's."""
    plan = Plan(
        tmp_path,
        ("quiz",),
        tmp_path,
        tmp_path / "out",
        temperature=0.7,
        top_p=0.9,
        samples=2,
        seed=SEED,
    )
    problem = Problem("q", "1+1=", (4, 5), ("2",), "math", benchmark="quiz")
    assert plan.indices == (GREEDY_INDEX, 0, 1)
    requests = _requests(6, Missing(problem, plan.indices), plan, LengthLimits(8, 30))
    assert [(request.key, request.temperature, request.top_p) for request in requests] == [
        ((6, GREEDY_INDEX), 0.0, 1.0),
        ((6, 0), 0.7, 0.9),
        ((6, 1), 0.7, 0.9),
    ]
    assert [request.seed for request in requests] == [
        completion_seed(SEED, "quiz", "q", n) for n in (GREEDY_INDEX, 0, 1)
    ]
    assert {
        (request.token_ids, request.min_new_tokens, request.max_new_tokens) for request in requests
    } == {((4, 5), 0, 30)}


def test_every_option_reaches_the_plan_and_the_engines(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def judge(completion, solutions, row): return True\n")
    (tmp_path / "model").mkdir()
    options = {
        "model": tmp_path / "model",
        "benchmarks": "one,two",
        "data-dir": tmp_path / "data",
        "output": tmp_path / "out",
        "samples": 3,
        "temperature": 0.71,
        "top-p": 0.82,
        "max-new-tokens": 93,
        "max-prompt-tokens": 104,
        "template": "raw",
        "scorer": f"{tmp_path}/own.py:judge",
        "seed": 115,
        "limit": 126,
        "tensor-parallel": 2,
        "cpu-kv-cache-gib": 0.3,
        "memory-share": 0.45,
        "kv-cache-gib": 1.5,
        "max-num-seqs": 137,
    }
    option_words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    for switches, greedy in (([], True), (["--no-greedy"], False)):
        arguments = parse([*option_words, *switches])
        assert plan_of(arguments) == Plan(
            model=tmp_path / "model",
            benchmarks=("one", "two"),
            data_dir=tmp_path / "data",
            output=tmp_path / "out",
            greedy=greedy,
            samples=3,
            temperature=0.71,
            top_p=0.82,
            max_new_tokens=93,
            max_prompt_tokens=104,
            template="raw",
            scorer=f"{tmp_path}/own.py:judge",
            seed=115,
            limit=126,
        )
    engines = rollout_of(arguments)
    assert (engines.tensor_parallel, engines.cpu_kv_cache_gib, engines.kv_cache_gib) == (
        2,
        0.3,
        1.5,
    )
    assert (engines.memory_share, engines.max_num_seqs) == (0.45, 137)


def test_an_output_takes_no_completions_of_other_settings(tied_model: Path, tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "solutions": ["2"], "query_id": "q", "task": "math"}
    (tmp_path / "quiz.jsonl").write_text(json.dumps(row) + "\n")
    output = tmp_path / "out"
    rollout = RolloutConfig(cuda_graphs=True)
    no_pool = cast(WorkerPool, None)
    device = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
    plan = Plan(tied_model, ("quiz",), tmp_path, output, samples=2, seed=SEED, template="raw")
    plan = replace(plan, temperature=0.7, top_p=0.9, max_new_tokens=NEW_TOKENS)
    assert [missing.indices for missing in _prepare(plan, rollout, no_pool, device).missing] == [
        plan.indices
    ]
    settings = json.loads((output / "settings.json").read_text())
    assert settings["sampled"] == {"temperature": 0.7, "top_p": 0.9, "seed": SEED}
    compared = {
        name: value for name, value in settings["common"].items() if not name.startswith("about_")
    }
    model = resolve_model(tied_model, output).fingerprint
    expected = {
        "model": model,
        "template": "raw",
        "max_new_tokens": NEW_TOKENS,
        "cuda_graphs": True,
    }
    assert compared.items() >= expected.items() and compared["scorer"] is None


@pytest.fixture(scope="module")
def plan(arithmetic: Path) -> Plan:
    model = make_guessing_model(arithmetic / "base", arithmetic / "guessing")
    benchmarks_folder = arithmetic / "benchmarks"
    benchmarks_folder.mkdir()
    for name, count in ROWS.items():
        rows = [
            {
                "prompt": f"{n}+{n}=",
                "solutions": [f"\\boxed{{{n}}}"],
                "query_id": f"{name}-{n}",
                "task": "math",
            }
            for n in range(count)
        ]
        if name == "second":
            rows[-1]["prompt"] = "0+" * PROMPT_TOKENS
        (benchmarks_folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return Plan(
        model,
        tuple(ROWS),
        benchmarks_folder,
        arithmetic / "evaluated",
        samples=SAMPLES,
        temperature=1.3,
        top_p=0.98,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=PROMPT_TOKENS,
        template="raw",
        seed=SEED,
        limit=LIMIT,
    )


def greedy_tokens(model: Path, prompt: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@matrix
@pytest.mark.distributed
def test_every_problem_has_its_greedy_answer_and_its_samples(plan: Plan, ranks: RankPool) -> None:
    ranks.run(1, evaluate_in_pool, plan)
    greedy_text = greedy_tokens(Path(plan.model), "1+1=")
    tables = json.loads((plan.output / "results.json").read_text())["benchmarks"]
    texts = set()
    for name, problems in (("first", LIMIT), ("second", 1)):
        lines = [
            line
            for path in (plan.output / "generations" / name).glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        assert len(records) == problems * (1 + SAMPLES)
        for record in records:
            index = GREEDY_INDEX if record["mode"] == "greedy" else record["sample"]
            assert record["seed"] == completion_seed(SEED, name, record["problem_id"], index)
            assert record["tokens"] <= NEW_TOKENS and (record["tokens"] < NEW_TOKENS) <= (
                record["finish_reason"] == "stop"
            )
            number = record["problem_id"].rpartition("-")[2]
            assert record["correct"] == verify(record["text"], [f"\\boxed{{{number}}}"]).correct
            texts.add(record["text"])
            if index == GREEDY_INDEX:
                assert record["text"] == greedy_text
        of_modes = {record["sample"] for record in records if record["mode"] == "sample"}
        assert of_modes == set(range(SAMPLES))
        row = tables[name]["row"]
        assert (row["num_questions"], row["too_long"]) == (
            problems + (name == "second"),
            name == "second",
        )
    assert len(texts) > SAMPLES


@matrix
@pytest.mark.distributed
def test_completions_end_where_a_turn_of_the_evaluations_own_template_does(
    plan: Plan, tmp_path: Path, ranks: RankPool
) -> None:
    """The model begins with a box, with which this template ends a turn.

    The box is an added token of its tokenizer."""
    template = tmp_path / "boxed.jinja"
    template.write_text("{% for m in messages %}{{ m.content + '\\\\boxed{' }}{% endfor %}")
    chat_plan = replace(
        plan, benchmarks=("first",), output=tmp_path / "out", chat_template=str(template)
    )
    ranks.run(1, evaluate_in_pool, chat_plan)
    rows = [
        json.loads(line)
        for path in (chat_plan.output / "generations" / "first").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == LIMIT * (1 + SAMPLES)
    assert {(row["finish_reason"], row["tokens"]) for row in rows} == {("stop", 1)}


def saved_settings(run: Path, *overrides: str) -> None:
    required = [f"run.output_dir={run}", "model.path=m", "data.train_path=t.jsonl"]
    save_config(load_config([], [*required, *overrides]), run / "config.yaml")


@pytest.mark.parametrize("place", ["", "hf_model", "checkpoints/step-000010", "best_model"])
def test_a_runs_model_has_the_runs_template(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    (run / place).mkdir(parents=True)
    saved_settings(run, "data.template=raw", "validation.template=orz")
    arguments = (
        f"--model {run / place} --benchmarks a --data-dir d --output {tmp_path / 'out'}".split()
    )
    assert plan_of(parse(arguments)).template == "orz"


def test_a_runs_model_has_the_runs_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    arguments = f"--model {run} --benchmarks a --data-dir d --output {tmp_path / 'out'}".split()
    for settings, template in (([], "auto"), (["data.template=raw"], "raw")):
        saved_settings(run, *settings)
        run_plan = plan_of(parse(arguments))
        assert (run_plan.template, run_plan.answer_from) == (template, "boxed")
    assert plan_of(parse([*arguments, "--template", "orz"])).template == "orz"
    sampling_settings = [
        "reward.answer_from=phrase",
        "data.chat_template_kwargs=[a=1]",
        "data.system_prompt=Be brief.",
    ]
    lengths = ["stages.steps=[5]", "stages.max_new_tokens=[200]"]
    saved_settings(run, *sampling_settings, *lengths)
    run_plan = plan_of(parse(arguments))
    assert run_plan.chat == ChatSettings(None, ("a=1",), "Be brief.", run_plan.chat.names)
    assert (run_plan.answer_from, run_plan.max_new_tokens, run_plan.default_new_tokens) == (
        "phrase",
        None,
        200,
    )
    own_options = ["--answer-from", "number", "--system-prompt", "", "--chat-template", "think"]
    run_plan = plan_of(parse([*arguments, *own_options, "--chat-template-kwarg", "b=2"]))
    assert run_plan.answer_from == "number"
    assert run_plan.chat == ChatSettings("think", ("b=2",), "", run_plan.chat.names)
    check_settings(tmp_path / "out", {"max_new_tokens": 77}, None)
    assert plan_of(parse(arguments)).default_new_tokens == 200, "nothing was sampled there"
    (tmp_path / "out" / "generations" / "a").mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / "generations" / "a" / "0.jsonl").write_text("")
    assert plan_of(parse(arguments)).default_new_tokens == 200, "nor in a file that was opened only"
    (tmp_path / "out" / "generations" / "a" / "0.jsonl").write_text("{}\n")
    assert plan_of(parse(arguments)).default_new_tokens == 77, "as the completions that are there"
    saved_settings(run, "data.template=brief", "run.plugins=[own.py]")
    with pytest.raises(ValueError, match=r"give --template brief --plugin own\.py"):
        plan_of(parse(arguments))
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "from rlmath import hooks\n\nhooks.template('brief')(lambda problem, row: problem)\n"
        "hooks.scorer('fair')(lambda completion, solutions, row: True)\n"
    )
    functions = ["--template", "brief", "--scorer", "fair", "--plugin", str(plugin)]
    assert plan_of(parse([*arguments, *functions])).hooks == [
        Hook("template", "brief", "--template", plugins=(str(plugin),)),
        Hook("scorer", "fair", "--scorer", plugins=(str(plugin),)),
    ]
    (run / "config.yaml").write_text("trainer: {epochs: 3}\n")
    assert (
        plan_of(parse(arguments)).template == "auto" and "this release cannot read" in caplog.text
    )


def test_lengths_that_the_model_cannot_have_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    arguments = f"--benchmarks a --data-dir {tmp_path} --output {tmp_path / 'out'}".split()
    (tmp_path / "a.jsonl").write_text("")
    for place in ("model", "run/hf_model", "run/checkpoints/step-000010/hf"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text('{"max_position_embeddings": 512}')
    for model in ("model", "run", "run/hf_model", "run/checkpoints/step-000010"):
        model_words = ["--model", str(tmp_path / model), *arguments]
        for lengths, message in (
            (["--max-new-tokens", "512"], "--max-new-tokens is 512; the model has 512 positions"),
            (
                ["--max-new-tokens", "500", "--max-prompt-tokens", "13"],
                "is 500 with --max-prompt-tokens 13; the",
            ),
            (["--max-new-tokens", "511"], ""),
            ([], ""),
        ):
            problems = input_problems(plan_of(parse([*model_words, *lengths])))
            assert [message in problem for problem in problems] == [True] * bool(message)


def test_a_folder_without_its_option_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(["outputs/run", "--benchmarks", "a"])
    assert error.value.code == 2
    assert (
        '"outputs/run" belongs to no option; to evaluate that model give --model outputs/run'
        in capsys.readouterr().err
    )
