"""The recipes in configs/: each passes a dry run, and has the numbers of the document that it is named after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.models.hf_config import PUBLISHED, published_names, required_shape
from rlmath.planning.dry_run import plan_lines, plan_run
from rlmath.planning.parallelism import ranks_of_layout

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
}
PARAMETERS = {
    R1_1_5B: 1_777_088_000,
    R1_7B: 7_615_616_512,
    R1_32B: 32_763_876_352,
    "Qwen2.5-7B": 7_615_616_512,
    MATH: 1_543_714_304,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Worked out by hand: vocabulary x hidden for the embedding, once more for a head of its own; for a layer the two
square and two narrow matrices of attention with three biases, three of the feed-forward network, and two norms. With
experts attention has no biases and two norms of its own, a layer a router and three matrices for each expert."""


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
    paths = {"boba": "boba.jsonl", "areal_v01": "prompts.jsonl", "simplerl": "train.parquet"}
    for form, rows in (("boba", boba), ("areal_v01", v01)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / paths[form]).write_text(text, encoding="utf-8")
    info = {name: {"solutions": solutions[name]} for name in ids}
    (folder / "id2info.json").write_text(json.dumps(info), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), folder / paths["simplerl"])
    return {form: folder / path for form, path in paths.items()}


def test_every_recipe_is_in_the_table():
    found = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert {name for name in found if not name.startswith(NOT_RECIPES)} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_its_dry_run(name: str, data: dict[str, Path], tmp_path: Path):
    told = RECIPES[name]
    file = data[told.form]
    overrides = [f"data.train_path={file}", f"run.output_dir={tmp_path / 'run'}"]
    if recipe(name).validation.paths:
        overrides.append(f"validation.paths=[{file}]")
    plan = plan_run(recipe(name, *overrides))
    assert plan.ranks == told.gpus and plan.target.name == recipe(name).memory.gpu
    assert (
        plan.data.inputs.order.n_prompts == ROWS
        and plan.data.inputs.order.steps_per_epoch == ROWS // told.prompts
    )
    lines = "\n".join(plan_lines(plan))
    assert f"{told.prompts} prompts x {told.group} completions = {told.prompts * told.group:,} seq" in lines
    assert (
        f"planned with the published shape of {told.model}" in lines and "lengths were not checked" in lines
    )
    assert "no effect" not in lines and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_numbers_of_its_document(name: str):
    config, told = recipe(name), RECIPES[name]
    assert ranks_of_layout(config.parallel) == told.gpus
    assert (config.data.prompts_per_step, config.rollout.group_size) == (told.prompts, told.group)
    lengths = config.data.max_prompt_tokens, with_longest_lengths(config).rollout.max_new_tokens
    assert lengths == (told.prompt_tokens, told.new_tokens)
    assert (config.optimizer.lr, config.algorithm.n_minibatches) == (told.lr, told.minibatches)
    assert Path(config.model.path).name == told.model and config.data.format == told.form


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_tells_its_source_and_its_differences(name: str):
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    comment = " ".join(
        line.lstrip("# ") for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")]
    )
    assert "Not run on GPUs here." in comment and "Differences from the original" in comment
    assert "Source: " in comment or "experiment log" in comment


def test_the_stages_of_areal_v01():
    """Lengths are the README's; the script has max_tokens_per_mb = 2048 + new + 1024, KL 0.001, temperature 0.6."""
    config = recipe("areal/v0.1_1.5b_stages.yaml")
    stages = config.stages
    assert stages.max_new_tokens == [8192, 16384, 24000] and stages.steps == [10 * (40315 // 1024)] * 3
    assert stages.max_tokens_per_microbatch == [2048 + new + 1024 for new in stages.max_new_tokens]
    assert (config.algorithm.kl_coef, config.algorithm.kl_in, config.rollout.temperature) == (
        0.001,
        "reward",
        0.6,
    )


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("areal/")])
def test_areal_learns_by_ppo_without_a_critic(name: str):
    config = recipe(name)
    algorithm, optimizer = config.algorithm, config.optimizer
    assert (algorithm.advantage, algorithm.clip_ratio, algorithm.early_stop_ratio) == ("ppo", 0.2, 5.0)
    assert not algorithm.recompute_logprobs and optimizer.decay == "constant"
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-5)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.05, 1.0)
    zero = name.endswith("zero.yaml")
    assert (config.reward.output_scaling, config.reward.output_bias) == ((0.5, -1.0) if zero else (5.0, 0.0))
    assert (config.save.save_freq_epochs, config.save.ckpt_freq_secs) == (1, 600)


@pytest.mark.parametrize(
    ("name", "clip_grad", "recompute", "shuffle", "tensor", "engine", "share"),
    [("grpo-1.5b", 0.8, True, False, 2, 1, 0.55), ("grpo-7b", 1.0, False, True, 4, 2, 0.65)],
)
def test_rlinf_has_the_keys_of_its_files(
    name: str, clip_grad: float, recompute: bool, shuffle: bool, tensor: int, engine: int, share: float
):
    config = recipe(f"rlinf/{name}.yaml")
    assert (config.algorithm.advantage, config.algorithm.loss_normalisation) == ("grpo", "token")
    assert (config.algorithm.recompute_logprobs, config.algorithm.shuffle) == (recompute, shuffle)
    assert (config.algorithm.early_stop_ratio, config.algorithm.kl_coef) == (5.0, 0.0)
    assert (config.parallel.tensor, config.parallel.sequence) == (tensor, True)
    assert (config.rollout.tensor_parallel, config.rollout.memory_share) == (engine, share)
    assert (config.rollout.max_num_seqs, config.rollout.min_new_tokens) == (64, 1)
    assert (config.policy.recompute_method, config.policy.recompute_num_layers) == ("block", 20)
    optimizer = config.optimizer
    assert (optimizer.clip_grad, optimizer.weight_decay, optimizer.adam_eps) == (clip_grad, 0.05, 1e-5)
    assert (config.run.total_epochs, config.save.save_freq_steps) == (5, 50)


@pytest.mark.parametrize(
    ("name", "scheme", "penalty", "epochs", "save", "validation"),
    [("v1", "mix", -1.0, 2, 25, 55), ("v2", "independent", -0.3, 9, 20, None)],
)
def test_simplerl_has_the_parameters_of_the_log(
    name: str, scheme: str, penalty: float, epochs: int, save: int, validation: int | None
):
    config = recipe(f"simplerl/{name}.yaml")
    algorithm = config.algorithm
    assert (config.reward.scheme, config.reward.format_penalty) == (scheme, penalty)
    assert (algorithm.kl_coef, algorithm.kl_estimator, algorithm.entropy_coef) == (0.001, "k3", 0.001)
    assert (algorithm.clip_ratio, config.rollout.tensor_parallel, config.rollout.memory_share) == (
        0.2,
        2,
        0.6,
    )
    assert (config.run.total_epochs, config.save.save_freq_steps) == (epochs, save)
    assert config.validation.every_steps == validation and config.rollout.temperature == 1.0


def test_simplerl_v2_fits_the_model_as_it_is_published():
    shape, _ = required_shape(f"/nowhere/{MATH}")
    config = recipe("simplerl/v2.yaml")
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens == shape.max_positions == 4096


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_as_many_parameters_as_its_name_promises(name: str):
    shape, note = required_shape(f"/nowhere/{name}")
    assert parameter_count(shape) == PARAMETERS[name]
    assert f"configs/models/{name}.json" in note


def test_every_published_shape_is_known_by_the_name_of_its_file():
    assert published_names() == sorted(PARAMETERS) == sorted(path.stem for path in PUBLISHED.iterdir())
