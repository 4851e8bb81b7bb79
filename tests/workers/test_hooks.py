"""Functions of the user's, of all kinds.

How they are named, loaded and checked, and what workers make of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlmath import hooks
from rlmath.algorithms.types import Prompt
from rlmath.config.load import load_config
from rlmath.config.schema import RewardConfig
from rlmath.data.formats import read_prompts
from rlmath.data.sft_sequences import load_sequences
from rlmath.data.tokenizer import PromptText, load_tokenizer, rendered
from rlmath.planning.checks import algorithm_problems
from rlmath.planning.reward_checks import hook_problems, reward_problems, try_functions
from rlmath.rewards.several_rewards import named_rewards
from rlmath.run.dry_run import plan_lines, plan_run
from rlmath.workers.function_calls import call_function, checked_value
from rlmath.workers.hooks import Hook, function_problem, plugin_problem
from rlmath.workers.user_functions import UserFunction, UserFunctionError
from tests import programs

DOCS = (programs.REPOSITORY / "docs" / "hooks.md").read_text(encoding="utf-8")
SOURCE = """
import os, subprocess, time
from rlmath import hooks

@hooks.advantage("ranked")
def ranked(rewards, tokens):
    return rewards

def form(row):
    if row["kind"] == "hangs":
        time.sleep(600)
    if row["kind"] == "ends":
        os._exit(3)
    if row["kind"] == "fills":
        bytearray(2**33)
    if row["kind"] == "starts":
        subprocess.Popen(["sleep", "600"])
    if row["kind"] == "odd":
        return {"prompt": "x", "solutions": ["1"], "answer": "1"}
    if row["kind"] == "text":
        return "1+1="
    if row["kind"] == "left out":
        return None
    return {"prompt": row["text"], "solutions": [row["result"], "2.0"], "query_id": row["number"]}

def ask(problem, row):
    if row["query_id"] == "blank":
        return " "
    if row["messages"]:
        return [{"role": "user", "content": problem + "!"}]
    return problem + " " + str(row["level"]) + "?"

def one_argument(a): return a
def two(a, b): return a
def keyword(a, *, b): return a
NUMBER = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with own.py in it."""
    (tmp_path / "own.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers here is gone after it."""
    monkeypatch.setattr(hooks, "_registered", {kind: {} for kind in hooks._registered})


# ---------------------------------------------------------------- names


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(
    ("register", "name", "told"),
    [
        (hooks.advantage, "grpo", "is a word of ours"),
        (hooks.template, "auto", "is a word of ours"),
        (hooks.metric, "Tokens", "a name is a small letter"),
        (hooks.scorer, "a:b", "a name is a small letter"),
    ],
)
def test_a_name_that_is_a_word_already_or_none_is_refused(
    register: Callable, name: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        register(name)(len)
    assert not any(hooks._registered.values())


@pytest.mark.usefixtures("registers")
def test_a_name_may_be_there_once_for_each_kind() -> None:
    hooks.advantage("mine")(len)
    hooks.metric("mine")(len)
    with pytest.raises(ValueError, match="is there twice"):
        hooks.advantage("mine")(len)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "one_argument",
            "cannot be called as it is, with rewards, tokens (too many positional arguments)",
        ),
        ("keyword", "written as (a, *, b)"),
        ("keywrd", 'Did you mean "keyword"?'),
    ],
)
def test_a_function_that_does_not_fit_its_kind_is_refused(
    folder: Path, spec: str, told: str
) -> None:
    with pytest.raises(ValueError, match=r"^algorithm.advantage: ") as error:
        hooks.load(Hook("advantage", f"own.py:{spec}", "algorithm.advantage"))
    assert told in str(error.value)


@pytest.mark.usefixtures("registers")
def test_a_registered_name_is_found_by_its_kind(folder: Path) -> None:
    assert hooks.load(Hook("advantage", "ranked", "s", ("own.py",))).__name__ == "ranked"
    (folder / "another.py").write_text("")
    message = (
        "s is 'rankd', and run.plugins registers no such hooks.advantage; there is ranked. Did "
        "you mean"
    )
    with pytest.raises(ValueError, match=message):
        hooks.load(Hook("advantage", "rankd", "s", ("another.py",)))


def test_the_check_in_a_process_of_its_own(folder: Path) -> None:
    """The function is found by its name, in the same registry as the plugin's."""
    hook = Hook("advantage", "ranked", "algorithm.advantage", ("own.py",))
    assert function_problem(hook) is None
    problem = function_problem(Hook("metric", "ranked", "telemetry.metrics: a", ("own.py",))) or ""
    assert problem.startswith(
        "telemetry.metrics: a is 'ranked', and run.plugins registers no such hooks.metric"
    )
    (folder / "ends.py").write_text("import os\nos._exit(0)\n")
    assert plugin_problem("ends.py") == (
        "run.plugins: importing 'ends.py' ended the process; guard its program by __name__"
    )
    (folder / "shadows.py").write_text("from rlmath import hooks\nhooks.advantage('grpo')(len)\n")
    assert "that is a word of ours" in (plugin_problem("shadows.py") or "")
    assert 'There is "own.py"' in (plugin_problem("owm.py") or "")


def test_a_commands_plugins_are_named_by_its_option(folder: Path) -> None:
    """`rlmath eval --plugin`, which has no run.plugins."""
    assert (plugin_problem("owm.py", "--plugin") or "").startswith(
        '--plugin: there is no file "owm.py"'
    )
    hook = Hook("scorer", "fare", "--scorer", ("own.py",))
    message = "--scorer is 'fare', and --plugin registers no such hooks.scorer"
    assert (function_problem(hook) or "").startswith(message)


# ---------------------------------------------------------------- what functions return


TWO_GROUPS = [2, 1]


@pytest.mark.parametrize(
    ("kind", "returned", "value"),
    [
        ("advantage", [(1, True), (0.5,)], [[1.0, 1.0], [0.5]]),
        ("advantage", ((number for number in row) for row in ([1, 2], [3])), [[1.0, 2.0], [3.0]]),
        ("selection", True, True),
        ("selection", 0, False),
        ("metric", 3, 3.0),
        ("metric", {"a": 1, 2: 0.5}, {"a": 1.0, "2": 0.5}),
        ("template", "text", "text"),
        ("data_form", None, None),
        ("scorer", True, (1.0, [])),
        ("reward", (-1e30, {"a": 1e308}), (-1e30, [("a", 1e308)])),
    ],
)
def test_what_a_kind_may_return(kind: str, returned: object, value: object) -> None:
    assert checked_value(kind, returned, TWO_GROUPS) == value


@pytest.mark.parametrize(
    ("kind", "returned"),
    [
        ("advantage", [[1.0, 1.0]]),
        ("advantage", [[1.0, float("nan")], [1.0]]),
        ("advantage", [[1.0, float("inf")], [1.0]]),
        ("advantage", [[1.0, None], [1.0]]),
        ("advantage", [{1.0, 2.0}, [1.0]]),
        ("advantage", [{1.0: "a", 2.0: "b"}, [1.0]]),
        ("advantage", [{"a": 1.0, "b": 2.0}.values(), [1.0]]),
        ("advantage", {(1.0, 2.0), (1.0,)}),
        ("advantage", ["12", "3"]),
        ("selection", None),
        ("metric", {"a": float("inf")}),
        ("metric", {"\x1b": 1.0}),
        ("metric", {str(n): 1.0 for n in range(51)}),
        ("template", 5),
        ("template", [{"role": "user"}]),
        ("data_form", "text"),
        ("scorer", (1.0, {"a": 1.0})),
        ("reward", {0.5}),
    ],
)
def test_what_a_kind_may_not_return(kind: str, returned: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        checked_value(kind, returned, TWO_GROUPS)


def test_an_advantage_that_changes_its_lists_is_held_to_what_it_was_given() -> None:
    def shortens(rewards: list[list[float]], tokens: list[list[int]]) -> list[list[float]]:
        for row in rewards:
            row.pop()
        return rewards

    reply = call_function("advantage", shortens, [[[5.0, 1.0], [2.0]], [[1, 1], [1]]])
    assert "needed: lists of 2, 1 numbers, got 1, 0" in reply["message"]


# ---------------------------------------------------------------- data forms and templates


def test_rows_of_a_data_form_and_what_each_failure_costs(folder: Path) -> None:
    """A row that ends, fills or hangs its worker costs that row alone.

    Rows that the function leaves out are unusable, as others."""
    kinds = ["", "ends", "odd", "fills", "starts", "text", "left out", "hangs", ""]
    rows = [
        {"kind": kind, "text": f"{n}+1=", "result": n + 1, "number": n}
        for n, kind in enumerate(kinds)
    ]
    lines = [json.dumps(row) for row in rows]
    lines.insert(1, "no JSON")
    lines.insert(2, json.dumps({"kind": ""}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with UserFunction(Hook("data_form", "own.py:form", "data.format"), seconds=2.0) as form:
        file = read_prompts("rows.jsonl", form)
    assert [(row.query_id, row.prompt, row.solutions, row.whole) for row in file.rows] == [
        ("0", "0+1=", ("1", "2.0"), False),
        ("4", "4+1=", ("5", "2.0"), False),
        ("8", "8+1=", ("9", "2.0"), False),
    ]
    assert json.loads(file.rows[0].more_json) == rows[0] and file.form == "own.py:form"
    reasons = {row.where.rpartition("line ")[2]: row.reason for row in file.unusable}
    assert sorted(reasons, key=int) == ["2", "3", "4", "5", "6", "8", "9", "10"]
    for line, reason in {
        "3": "data.format own.py:form failed: KeyError: 'text'",
        "4": "its worker ended (exit code 3)",
        "5": "own.py:form returned 'answer'; known: prompt, solutions, query_id, task",
        "6": "MemoryError",
        "8": 'needed: None, or a dict with "prompt" and "solutions"; it returned \'1+1=\'',
        "9": "own.py:form leaves it out",
        "10": "it took more than 2 s",
    }.items():
        assert reason in reasons[line]


def test_a_template_makes_texts_and_messages(folder: Path, tied_model: Path) -> None:
    rows = [
        {"question": "1+1", "answer": "2", "level": 3, "id": "a"},
        {"question": "2+2", "answer": "4", "level": 4, "id": "b"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(str(tied_model))
    turns = [{"role": "user", "content": "3+3="}, {"role": "assistant", "content": "6"}]
    sft = [{"prompt": "1+1=", "completion": "2"}, {"messages": turns}]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sft))
    (folder / "say.py").write_text(
        "def say(problem, row):\n    return problem * (1 + len(row['messages']))\n"
    )
    with UserFunction(Hook("template", "own.py:ask", "data.template")) as ask:
        file = read_prompts("rows.jsonl")
        assert list(rendered(file.rows, ask, tokenizer)) == [
            PromptText("1+1 3?"),
            PromptText("2+2 4?"),
        ]
        blank = [file.rows[0], replace(file.rows[1], query_id="blank")]
        with pytest.raises(
            ValueError, match=r"data.template own.py:ask of the prompt 'blank' is blank"
        ):
            list(rendered(blank, ask, tokenizer))
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        chat = replace(file.rows[0], messages=({"role": "user", "content": "1+1"},))
        assert list(rendered([chat], ask, tokenizer)) == [PromptText("[user]1+1!", is_chat=True)]
    with UserFunction(Hook("template", "say.py:say", "data.template")) as say:
        sequences, _ = load_sequences("sft.jsonl", tokenizer, say, 64, 0.0)
    texts = [
        tokenizer.decode(list(sequence.prompt_ids), skip_special_tokens=True)
        for sequence in sequences
    ]
    assert texts == ["1+1=", "3+3=3+3="]


def test_a_function_that_cannot_be_loaded_or_fails_says_so(folder: Path) -> None:
    with UserFunction(
        Hook("selection", "own.py:nothing", "selection.dynamic_sampling")
    ) as missing_function:
        with pytest.raises(ValueError, match="has no function 'nothing'"):
            missing_function.call({})
    with UserFunction(Hook("advantage", "own.py:two", "algorithm.advantage")) as two:
        assert two.call([[1.0]], [[3]]) == [[1.0]]
        with pytest.raises(
            UserFunctionError, match=r"algorithm.advantage own.py:two failed: needed: numbers from"
        ):
            two.call([[1e31]], [[3]])


# -------------------------------------------------------------- the page of the docs, and a dry run


def test_the_functions_of_the_docs_are_what_a_dry_run_takes(
    made_arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, from the blocks of docs/hooks.md; the data form leaves out one row in five."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "own.py").write_text("from rlmath import hooks\n\n" + "\n\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    rows = [
        {"kind": "arithmetic" if n % 5 else "prose", "text": f"{n}+1", "result": n + 1, "number": n}
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    settings = yaml.safe_load(example)
    settings["run"] |= {"output_dir": "run", "device": "cpu"}
    settings["model"] = {"path": str(made_arithmetic / "base")}
    settings["data"] |= {
        "train_path": "rows.jsonl",
        "max_unusable_share": 0.3,
        "prompts_per_step": 4,
        "max_prompt_tokens": 32,
    }
    settings["validation"] |= {"every_steps": 1, "paths": [str(_held(tmp_path))]}
    settings["rollout"] = {"group_size": 4, "max_new_tokens": 16, "cpu_kv_cache_gib": 0.1}
    settings["policy"] = {"max_tokens_per_microbatch": 512}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    lines = "\n".join(plan_lines(plan_run(load_config([Path("run.yaml")], []), 1)))
    assert (
        "Functions of yours: data.format=homework; data.template=brief; reward.function=digits; "
        "selection.dynamic_sampling=not_all_right; algorithm.advantage=best_only; "
        "validation.scorer=exact; environment.function=hints; "
        "telemetry.metrics: spread=spread; telemetry.metrics: long=own.py:share_of_long"
    ) in lines
    assert (
        "Turns: 2 answers of a completion at most; between two up to 256 tokens of hints" in lines
    )
    assert "4 rows cannot be used" in lines and "4: homework leaves it out" in lines
    assert "'1'" in lines and "Q: 1+1\\nA:" in lines


def _held(folder: Path) -> Path:
    file = folder / "held.jsonl"
    file.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    return file


def test_what_is_wrong_is_told_by_its_setting(folder: Path) -> None:
    wrong_settings = (
        "run.plugins=[own.py]",
        "algorithm.advantage=own.py:one_argument",
        "selection.dynamic_sampling=own.py:keywrd",
        "telemetry.metrics=[rankd]",
    )
    paths = ("run.output_dir=o", "model.path=m", "data.train_path=t")
    problems = list(hook_problems(load_config([], [*paths, *wrong_settings]), "grpo"))
    assert [problem[:60] for problem in problems] == [
        "selection.dynamic_sampling: 'own.py' has no function 'keywrd"[:60],
        "algorithm.advantage: own.py:one_argument cannot be called as it is"[:60],
        "telemetry.metrics: rankd is 'rankd', and run.plugins registers no"[:60],
    ]
    broken = load_config([], [*paths, "run.plugins=[no.py]", "algorithm.advantage=ranked"])
    (told_once,) = hook_problems(broken, "grpo")
    assert told_once.startswith('run.plugins: there is no file "no.py".')
    names = load_config([], [*paths, "telemetry.metrics=[a=own.py:two,a=own.py:two,A=own.py:two]"])
    assert [problem[:30] for problem in hook_problems(names, "grpo")][:2] == [
        "telemetry.metrics has 'A=own.p",
        "telemetry.metrics has 'a' more",
    ]


@pytest.mark.parametrize(
    ("setting", "source", "told"),
    [
        (
            "algorithm.advantage",
            "def f(rewards, tokens):\n    return [[1.0]]\n",
            "needed: lists of 4, 4 numbers, got 1",
        ),
        (
            "telemetry.metrics",
            "def f(groups):\n    return groups[0].length\n",
            "has no attribute 'length'",
        ),
    ],
)
def test_a_wrong_result_of_a_trial_call_ends_the_start(
    folder: Path, setting: str, source: str, told: str
) -> None:
    (folder / "wrong.py").write_text(source)
    value = "[a=wrong.py:f]" if setting == "telemetry.metrics" else "wrong.py:f"
    paths = ("run.output_dir=o", "model.path=m", "data.train_path=t", "rollout.group_size=4")
    config = load_config([], [*paths, f"{setting}={value}"])
    with pytest.raises(ValueError, match="groups that were made up to try it") as error:
        try_functions(config, [Prompt("q", "1+1=", (1,), ("2",), "math")])
    assert told in str(error.value)


def test_a_reward_that_a_plugin_registers_stands_in_the_list_by_its_name() -> None:
    reward = RewardConfig(rewards=["correctness", "digits", "long=own.py:steps"])
    assert [
        (named_reward.name, named_reward.function) for named_reward in named_rewards(reward)
    ] == [
        ("correctness", None),
        ("digits", "digits"),
        ("long", "own.py:steps"),
    ]
    paths = (
        "run.output_dir=o",
        "model.path=m",
        "data.train_path=t",
        "reward.rewards=[correctness,digits]",
    )
    config = load_config([], [*paths])
    (problem,) = reward_problems(config.reward, config.rollout.max_new_tokens, plugins=[])
    assert (
        "reward.rewards has 'digits'; needed: correctness, format, length, or a function of yours"
        in problem
    )
    assert (
        list(reward_problems(config.reward, config.rollout.max_new_tokens, plugins=["own.py"]))
        == []
    )


def test_settings_that_do_not_go_with_an_advantage_of_the_users(folder: Path) -> None:
    paths = (
        "run.output_dir=o",
        "model.path=m",
        "data.train_path=t",
        "algorithm.advantage=own.py:two",
    )
    single = load_config([], [*paths, "rollout.group_size=1"])
    assert list(algorithm_problems(single)) == []
    (problem,) = algorithm_problems(
        load_config([], [*paths, "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"])
    )
    assert "these are of own.py:two" in problem
