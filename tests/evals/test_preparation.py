"""What an evaluation reads before it samples, and the tables that it makes of its files."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlmath.config.length_curriculum import tool_tokens
from rlmath.config.schema import ToolsConfig
from rlmath.evals.benchmarks import LengthLimits
from rlmath.evals.plan import GREEDY_INDEX, Plan
from rlmath.evals.runner import _plan_after_rendezvous, _write_tables
from rlmath.report.results_file import read_results
from rlmath.workers.worker_pool import WorkerPool
from tests.data.chat_templates import chat_tokenizer
from tests.evals.small_evaluations import (
    LONG_PROMPT,
    POSITIONS,
    ROLLOUT,
    make_chat_model,
    prepared_of,
    small_plan,
    write_missing,
)
from tests.hub_server import hub_server

TOOLS = ToolsConfig(format="fence", max_calls=2, max_output_tokens=64)
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ style }}={% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Plan:
    return small_plan(model, tmp_path)


def test_an_evaluation_goes_on_with_the_commit_of_the_hub_that_it_began_with(
    plan: Plan, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    of_the_hub = replace(plan, model="hf://org/base")
    with hub_server() as hub:
        repository = hub.add("org/base")
        first = repository.commit(files)
        for name, value in hub.variables(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        begun, _ = _plan_after_rendezvous(of_the_hub)
        plan.output.mkdir()
        settings = {"common": {"about_model": str(begun.model)}}
        (plan.output / "settings.json").write_text(json.dumps(settings))
        repository.commit(files | {"more.json": b"{}"})
        resumed, _ = _plan_after_rendezvous(of_the_hub)
    assert first in str(begun.model) and resumed == begun


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "raw"}, "template was 'auto', now it is 'raw'"),
        ({"system_prompt": "Be brief."}, "system_prompt was None, now it is 'Be brief.'"),
        (
            {"chat_template_kwargs": ("enable_thinking=false",)},
            "chat_template_kwargs was [], now it is ['enable_thinking=false']",
        ),
        ({"answer_from": "number"}, "answer_from was 'boxed', now it is 'number'"),
        ({"max_new_tokens": 41}, "max_new_tokens was 40, now it is 41"),
        ({"temperature": 0.8}, "temperature was 0.7, now it is 0.8"),
        ({"top_p": 0.8}, "top_p was 0.9, now it is 0.8"),
        ({"seed": 3}, "seed was 9, now it is 3"),
        ({"tools": TOOLS}, "tools was None, now it is {'format': 'fence', 'max_calls': 2"),
    ],
)
def test_completions_of_other_settings_are_not_continued(
    plan: Plan, changes: dict[str, Any], message: str
) -> None:
    write_missing(prepared_of(plan), plan)
    assert not prepared_of(plan).missing
    with pytest.raises(ValueError, match="of another evaluation") as error:
        prepared_of(replace(plan, **changes))
    assert message in str(error.value)


def test_completions_of_other_engines_models_and_prompts_are_not_continued(
    plan: Plan, tmp_path: Path
) -> None:
    write_missing(prepared_of(plan), plan)
    with pytest.raises(ValueError, match="cuda_graphs was False, now it is True"):
        prepared_of(plan, replace(ROLLOUT, cuda_graphs=True))
    other = make_chat_model(tmp_path / "other", seed=6)
    with pytest.raises(ValueError, match=rf"model was '{plan.model}' \(.*, now it is '{other}' \("):
        prepared_of(replace(plan, model=other))
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    with pytest.raises(ValueError, match="of another problem 'quiz-0' of quiz: its text, template"):
        prepared_of(replace(plan, chat_template=str(file)))


def test_the_variables_and_the_system_prompt_of_a_chat_template_are_in_every_prompt(
    plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    own_plan = replace(plan, chat_template=str(file), chat_template_kwargs=("style=!",))
    texts = [gap.problem.text for gap in prepared_of(own_plan).missing]
    assert [text.partition("\n")[0] for text in texts] == ["1+1", LONG_PROMPT, "1+2", "2+2"]
    assert all(text.endswith("\\boxed{}.!=") for text in texts)
    own_plan = replace(plan, output=tmp_path / "system", system_prompt="Be brief.")
    assert all("Be brief." in gap.problem.text for gap in prepared_of(own_plan).missing)


def test_the_lengths_are_those_that_are_asked_for_and_else_what_model_tools_and_prompts_leave(
    plan: Plan, model: Path
) -> None:
    tokens = [len(gap.problem.token_ids) for gap in prepared_of(plan).missing]
    longest = max(tokens)
    assert tokens[1] == longest > tokens[0]
    free = replace(plan, max_new_tokens=None)
    room = POSITIONS - longest
    for lengths_plan, limits in (
        (plan, LengthLimits(longest, 40)),
        (free, LengthLimits(longest, room)),
        (replace(free, tools=TOOLS), LengthLimits(longest, room - tool_tokens(TOOLS))),
        (replace(free, default_new_tokens=77), LengthLimits(longest, 77)),
        (replace(free, max_prompt_tokens=90), LengthLimits(90, POSITIONS - 90)),
        (replace(free, limit=1), LengthLimits(tokens[0], POSITIONS - tokens[0])),
    ):
        assert prepared_of(lengths_plan).lengths == limits
    gaps = prepared_of(replace(plan, max_prompt_tokens=tokens[0])).missing
    assert [gap.problem.prompt_id for gap in gaps] == ["quiz-0", "quiz-2", "exam-0"]
    gaps = prepared_of(replace(plan, limit=1)).missing
    assert [gap.problem.prompt_id for gap in gaps] == ["quiz-0", "exam-0"]


def test_only_missing_completions_are_sampled_and_the_log_counts_them(
    plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with (tmp_path / "quiz.jsonl").open("a") as file:
        file.write('{"prompt": ""}\n')
    plan = replace(plan, max_prompt_tokens=100)
    fewer = replace(plan, samples=1, benchmarks=("quiz",), max_new_tokens=None)
    first = prepared_of(fewer)
    assert [gap.indices for gap in first.missing] == [(GREEDY_INDEX, 0)] * 2
    new_tokens = POSITIONS - 100
    for text in (
        "quiz: 3 problems",
        "quiz: 1 rows of its file are unusable, and are not in the table",
        "quiz: 1 of 3 prompts are longer than --max-prompt-tokens 100 and count as wrong (the "
        "longest has",
        "4 completions are requested, 0 of them are on disk already",
        f"Completions have at most {new_tokens} tokens (--max-new-tokens is not given): prompts "
        f"have up to 100, and the model has {POSITIONS} positions",
    ):
        assert text in caplog.text
    assert "unfinished" not in caplog.text
    write_missing(first, fewer)
    caplog.clear()
    (path,) = plan.output.glob("generations/quiz/*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    continued = prepared_of(replace(plan, max_new_tokens=new_tokens))
    assert [(gap.problem.prompt_id, gap.indices) for gap in continued.missing] == [
        ("quiz-0", (1,)),
        ("quiz-2", (0, 1)),
        ("exam-0", (GREEDY_INDEX, 0, 1)),
    ]
    assert "Removed the unfinished last line of 1 files" in caplog.text
    assert "9 completions are requested, 3 of them are on disk already" in caplog.text
    assert "is not given" not in caplog.text


def test_a_scorer_judges_tasks_and_references_that_the_verifier_cannot(
    plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "Why?", "solutions": ["see there"], "query_id": "q", "task": "essay"}
    (tmp_path / "essays.jsonl").write_text(json.dumps(row) + "\n")
    essays = replace(plan, benchmarks=("essays",))
    with pytest.raises(ValueError, match="essay"):
        prepared_of(essays)
    (tmp_path / "essays.jsonl").write_text(json.dumps(row | {"task": "math"}) + "\n")
    prepared_of(replace(essays, output=tmp_path / "verified"))
    assert "no usable reference" in caplog.text
    caplog.clear()
    (tmp_path / "essays.jsonl").write_text(json.dumps(row) + "\n")
    file = tmp_path / "own.py"
    file.write_text("def judge(completion, solutions, row):\n    while True: pass\n")
    judged = replace(essays, scorer=f"{file}:judge")
    with WorkerPool(1, 0.3) as pool:
        prepared = prepared_of(judged, pool=pool)
        assert len(prepared.missing) == 1
        assert any("timeout_seconds=0.3" in message for message in caplog.messages)
        assert "no usable reference" not in caplog.text
        write_missing(prepared, judged)
        file.write_text("def judge(completion, solutions, row):\n    return True\n")
        with pytest.raises(ValueError, match=rf"scorer was '{file}:judge' \(.*, now it is"):
            prepared_of(judged, pool=pool)


def test_completions_end_as_the_template_that_wrote_the_prompts_has_it(
    plan: Plan, model: Path, tmp_path: Path
) -> None:
    """None: the engine asks the model's folder."""
    tokenizer = chat_tokenizer("qwen3")
    end, end_of_turn, other_end = (
        tokenizer.convert_tokens_to_ids(mark)
        for mark in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")
    )
    assert prepared_of(plan).stop_token_ids is None
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}")
    prepared = prepared_of(replace(plan, chat_template=str(file), output=tmp_path / "own"))
    stops = set(prepared.stop_token_ids or ())
    assert {end, other_end} <= stops and end_of_turn not in stops
    adapter = make_adapter(tmp_path / "adapter", base=model)
    tokenizer.save_pretrained(adapter)
    (adapter / "generation_config.json").write_text('{"eos_token_id": 33}')
    adapted = prepared_of(replace(plan, model=adapter, output=tmp_path / "adapted"))
    assert adapted.model.folder == model and adapted.model.adapter == adapter
    assert set(adapted.stop_token_ids or ()) == {end, end_of_turn, 33}


def make_adapter(folder: Path, base: Path) -> Path:
    """A PEFT folder with adapters of one matrix."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {"lora_A": torch.ones(2, 128), "lora_B": torch.ones(128, 2)}
    tensors = {f"{name}.{matrix}.weight": values for matrix, values in matrices.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_heads_that_attention_on_cpu_does_not_have_are_refused_there_alone(
    plan: Plan, tmp_path: Path
) -> None:
    narrow = replace(plan, model=make_chat_model(tmp_path / "narrow", hidden_size=64))
    with pytest.raises(ValueError, match="--model: the model's head dim is 16"):
        prepared_of(narrow)
    assert prepared_of(narrow, kind="cuda").missing


def test_the_tables_are_of_the_completions_on_disk(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem whose prompt is too long counts as wrong; each benchmark has its own numbers."""
    plan = replace(plan, max_prompt_tokens=100, limit=3)
    prepared = prepared_of(plan)
    right = {("quiz-0", GREEDY_INDEX), ("quiz-0", 1), ("exam-0", 0), ("exam-0", 1)}
    write_missing(prepared, plan, lambda *completion: completion in right)
    quiz, exam = _write_tables(plan, prepared)
    assert (quiz.row["num_questions"], quiz.row["too_long"]) == (3, 1)
    assert quiz.row["greedy_acc"] == pytest.approx(1 / 3)
    assert quiz.row["sample_pass@1"] == pytest.approx(1 / 6)
    assert (quiz.row["greedy_length"], quiz.row["sample_length"]) == (9, 10.5)
    assert (exam.row["greedy_acc"], exam.row["sample_pass@1"]) == (0, 1)
    printed = capsys.readouterr().out
    for text in ("num_questions", "|   exam  |", "greedy_acc 95%", "maj@2", "too_long"):
        assert text in printed
    results = read_results(plan.output)
    assert list(results.accuracies) == ["quiz", "exam"]
    assert results.accuracies["exam"]["sample_pass@1"].shares == {"exam-0": 1.0}
    settings = results.settings
    assert (settings["limit"], settings["max_prompt_tokens"], settings["seed"]) == (3, 100, 9)
    assert settings["about_model_folder"] == settings["about_model"] == str(plan.model)


def test_no_table_is_made_of_many_lost_completions(plan: Plan) -> None:
    prepared = prepared_of(plan)
    call = {"code": "1", "output": "killed", "status": "lost"}
    write_missing(prepared, plan, finish_reason="lost", calls=[call])
    with pytest.raises(RuntimeError, match=r"12 of 12 completions .*killed"):
        _write_tables(plan, prepared)
    assert not (plan.output / "results.json").exists()
