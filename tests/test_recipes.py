"""The recipes in configs/.

Each passes a dry run, and has the numbers of the document that it is named after."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlmath.checkpoint.hf.config_json import PUBLISHED, published_names, required_shape
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.planning.parallelism import ranks_of_layout
from rlmath.run.dry_run import plan_lines, plan_run

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NOT_RECIPES = ("demo", "algorithms/")
ROWS = 2100
"""More than two steps of the largest recipe, and enough for the longest warm-up."""


@dataclass(frozen=True)
class Told:
    """What the document says of a recipe."""

    gpus: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    lr: float
    minibatches: int
    model: str
    form: str = "boba"


R1_1_5B, R1_7B, R1_32B = (f"DeepSeek-R1-Distill-Qwen-{size}" for size in ("1.5B", "7B", "32B"))
MATH = "Qwen2.5-Math-1.5B"
QWEN_32B = "Qwen2.5-32B-Instruct"
RECIPES = {
    "areal/1.5b_n1.yaml": Told(8, 512, 16, 1024, 27648, 2e-5, 4, R1_1_5B),
    "areal/1.5b_n4.yaml": Told(32, 512, 16, 1024, 27648, 2e-5, 4, R1_1_5B),
    "areal/1.5b_n16.yaml": Told(128, 512, 16, 1024, 27648, 2e-5, 4, R1_1_5B),
    "areal/7b_n4.yaml": Told(32, 512, 16, 1024, 27648, 2e-5, 4, R1_7B),
    "areal/7b_n16.yaml": Told(128, 512, 16, 1024, 27648, 2e-5, 4, R1_7B),
    "areal/32b_n16.yaml": Told(128, 512, 32, 1024, 27648, 2e-5, 4, R1_32B),
    "areal/v0.1_1.5b_stages.yaml": Told(128, 1024, 8, 2048, 24000, 1e-5, 4, R1_1_5B, "areal_v01"),
    "areal/v0.1_7b_zero.yaml": Told(128, 512, 64, 2048, 16384, 1e-6, 4, "Qwen2.5-7B", "areal_v01"),
    "rlinf/grpo-1.5b.yaml": Told(128, 512, 16, 1024, 27648, 2e-5, 4, R1_1_5B),
    "rlinf/grpo-7b.yaml": Told(128, 512, 32, 1024, 27648, 2e-5, 4, R1_7B),
    "simplerl/v1.yaml": Told(2, 128, 8, 512, 1024, 5e-7, 1, MATH, "simplerl"),
    "simplerl/v2.yaml": Told(2, 256, 8, 256, 3840, 2e-6, 2, MATH, "simplerl"),
    "tools/torl_1.5b.yaml": Told(
        8,
        128,
        16,
        prompt_tokens=512,
        new_tokens=3072,
        lr=1e-6,
        minibatches=1,
        model=MATH,
        form="simplerl",
    ),
    "tools/simpletir_7b.yaml": Told(
        8,
        512,
        16,
        prompt_tokens=4096,
        new_tokens=8000,
        lr=1e-6,
        minibatches=4,
        model="Qwen2.5-7B",
        form="simplerl",
    ),
    "tools/retool_32b.yaml": Told(
        16,
        512,
        16,
        prompt_tokens=2048,
        new_tokens=16384,
        lr=1e-6,
        minibatches=8,
        model=QWEN_32B,
        form="dapo",
    ),
}
CALLS = {
    "tools/torl_1.5b.yaml": ("fence", 1, "keep"),
    "tools/simpletir_7b.yaml": ("fence", 4, "drop"),
    "tools/retool_32b.yaml": ("chat", 7, "keep"),
}
"""Form and number of calls, one less than turns, and what becomes of a void turn."""
PARAMETERS = {
    R1_1_5B: 1_777_088_000,
    R1_7B: 7_615_616_512,
    R1_32B: 32_763_876_352,
    "Qwen2.5-7B": 7_615_616_512,
    MATH: 1_543_714_304,
    QWEN_32B: 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Worked out by hand: vocabulary x hidden for the embedding, once more for a head of its own; for a
layer the two square and two narrow matrices of attention with three biases, three of the
feed-forward network, and two norms. With experts attention has no biases and two norms of its own,
a layer a router and three matrices for each expert."""


def recipe(name: str, *overrides: str) -> Config:
    return _loaded(name, overrides)


@cache
def _loaded(name: str, overrides: tuple[str, ...]) -> Config:
    return load_config([CONFIGS / name], list(overrides))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small file of each form that recipes ask for."""
    folder = tmp_path_factory.mktemp("data")
    ids = [f"q{number}" for number in range(ROWS)]
    prompts = {name: f"<｜User｜>\nWhat is {name[1:]}+1?<｜Assistant｜><think>\n" for name in ids}
    solutions = {name: [f"\\boxed{{{int(name[1:]) + 1}}}"] for name in ids}
    boba = [
        {"prompt": prompts[name], "task": "math", "query_id": name, "solutions": solutions[name]}
        for name in ids
    ]
    v01 = [{"prompt": prompts[name], "query_id": name} for name in ids]
    chats = [
        {
            "prompt": [{"role": "user", "content": prompts[name]}],
            "reward_model": {"ground_truth": str(int(name[1:]) + 1), "style": "rule"},
            "extra_info": {"index": number, "answer": str(number + 1)},
        }
        for number, name in enumerate(ids)
    ]
    dapo = [{"data_source": "math_dapo"} | chat for chat in chats]
    paths = {
        "boba": "boba.jsonl",
        "areal_v01": "prompts.jsonl",
        "simplerl": "train.parquet",
        "dapo": "dapo.jsonl",
    }
    for form, rows in (("boba", boba), ("areal_v01", v01), ("dapo", dapo)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / paths[form]).write_text(text, encoding="utf-8")
    info = {name: {"solutions": solutions[name]} for name in ids}
    (folder / "id2info.json").write_text(json.dumps(info), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), folder / paths["simplerl"])
    return {form: folder / path for form, path in paths.items()}


def test_every_recipe_is_in_the_table():
    names = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert {name for name in names if not name.startswith(NOT_RECIPES)} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_its_dry_run(name: str, data: dict[str, Path], tmp_path: Path):
    facts = RECIPES[name]
    file = data[facts.form]
    overrides = [f"data.train_path={file}", f"run.output_dir={tmp_path / 'run'}"]
    overrides.append("data.more_train_paths=[]")
    if recipe(name).validation.paths:
        overrides.append(f"validation.paths=[{file}]")
    plan = plan_run(recipe(name, *overrides))
    assert plan.ranks == facts.gpus and plan.target.name == recipe(name).memory.gpu
    assert (
        plan.data.inputs.order.n_prompts == ROWS
        and plan.data.inputs.order.steps_per_epoch == ROWS // facts.prompts
    )
    lines = "\n".join(plan_lines(plan))
    assert (
        f"{facts.prompts} prompts x {facts.group} completions = {facts.prompts * facts.group:,} seq"
        in lines
    )
    assert (
        f"planned with the published shape of {facts.model}" in lines
        and "lengths were not checked" in lines
    )
    assert "no effect" not in lines and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_numbers_of_its_document(name: str):
    config = recipe(name)
    facts = RECIPES[name]
    assert ranks_of_layout(config.parallel) == facts.gpus
    assert (config.data.prompts_per_step, config.rollout.group_size) == (
        facts.prompts,
        facts.group,
    )
    lengths = config.data.max_prompt_tokens, with_longest_lengths(config).rollout.max_new_tokens
    assert lengths == (facts.prompt_tokens, facts.new_tokens)
    assert (config.optimizer.lr, config.algorithm.n_minibatches) == (
        facts.lr,
        facts.minibatches,
    )
    assert Path(config.model.path).name == facts.model and config.data.format == facts.form


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_calls_of_its_document(name: str):
    tools = recipe(name).tools
    form, calls, void_turns = CALLS.get(name, (None, 0, ""))
    assert tools.format == form
    if form is not None:
        assert (tools.max_calls, tools.void_turns, tools.state) == (calls, void_turns, "fresh")


@pytest.mark.parametrize("name", CALLS)
def test_the_prompt_of_a_recipe_with_a_tool_asks_for_a_box_and_shows_the_fences_that_are_read(
    name: str,
):
    config = recipe(name)
    path, _, function = config.data.template.partition(":")
    template = runpy.run_path(str(CONFIGS.parent / path))[function]
    prompt = template("What is 6 x 7?", {})
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    has_fences = "```python" in text and "```output" in text
    assert has_fences == (config.tools.format == "fence")
    assert "What is 6 x 7?" in text and "\\boxed{" in text


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_as_many_parameters_as_its_name_promises(name: str):
    shape, note = required_shape(f"/nowhere/{name}")
    assert parameter_count(shape) == PARAMETERS[name]
    assert f"configs/models/{name}.json" in note


def test_every_published_shape_is_known_by_the_name_of_its_file():
    assert (
        published_names() == sorted(PARAMETERS) == sorted(path.stem for path in PUBLISHED.iterdir())
    )
