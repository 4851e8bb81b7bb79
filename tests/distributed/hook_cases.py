"""What ranks do in the tests of functions of the user's that a step calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SelectionConfig,
    TelemetryConfig,
)
from rlmath.config.schema import ValidationConfig as Validation
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.trainer.step_hooks import StepHooks
from rlmath.workers.user_functions import UserFunctionError
from tests.distributed import partial_rollout_cases as partial

REWARDS = [[1.0, 0.0], [2.0]]
TOKENS = [[3, 4], [5]]


def shared(plugin: str) -> dict[str, Any]:
    """What every rank gets of functions that misbehave.

    They give something else at each call, fail, or end their worker."""
    init_process_group(open_device("cpu"), 120.0)
    rank = dist.get_rank()
    prompt = Prompt("q", "1+1=", (1,), ("2",), "math", '{"level": 3}')
    groups = [
        ScoredGroup(
            prompt,
            (Completion(0, (5,) * n, (0.0,) * n, "x" * n, "stop", 0),),
            (Score(float(n), n > 1, "", "string"),),
        )
        for n in (1, 2, 3)
    ]

    def hooks_of(
        advantage: str, selection: str | None = None, metrics: tuple[str, ...] = ()
    ) -> StepHooks:
        config = Config(
            run=RunConfig(plugins=[plugin]),
            algorithm=AlgorithmConfig(advantage=advantage),
            selection=SelectionConfig(dynamic_sampling=selection),
            telemetry=TelemetryConfig(metrics=list(metrics)),
        )
        return StepHooks(config, rank)

    def refusal(act: Any, *arguments: Any) -> str:
        try:
            return f"no error: {act(*arguments)}"
        except UserFunctionError as error:
            return str(error)

    report: dict[str, Any] = {}
    random = hooks_of("at_random", "longer", ("fails", "lengths"))
    report["random"] = [random.advantages(REWARDS, TOKENS) for _ in range(2)]
    assert random.keep is not None
    report["kept"] = random.keep(groups)
    report["metrics"] = [random.metrics(groups) for _ in range(2)]
    random.close()
    wrong = hooks_of("wrong_shape", "fails_on_three")
    assert wrong.keep is not None
    report["wrong"] = refusal(wrong.advantages, REWARDS, TOKENS)
    report["fails"] = refusal(wrong.keep, groups)
    report["after"] = wrong.keep(groups[:2])
    wrong.close()
    none = hooks_of("grpo")
    report["none"] = none.advantages(REWARDS, TOKENS), none.keep, none.metrics(groups)
    none.close()
    return report


def steps(folder: Path, place: Path, plugin: str) -> dict[str, Any]:
    """Two steps of one rank: in the second one the advantage fails."""
    from rlmath.trainer.grpo import GrpoTrainer

    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n), "id": f"q{n}"} for n in range(8)]
    for name in ("train", "held"):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "run": RunConfig(
            output_dir=str(place / "run"),
            total_steps=3,
            total_epochs=3,
            seed=7,
            device="cpu",
            plugins=[plugin],
        ),
        "data": DataConfig(
            train_path=str(place / "train.jsonl"),
            prompts_per_step=4,
            max_prompt_tokens=8,
            template="raw",
        ),
        "algorithm": AlgorithmConfig(
            advantage="per_token", n_minibatches=3, epochs=2, early_stop_ratio=None
        ),
        "reward": RewardConfig(function="tests.reward_by_hash:reward", length_penalty=250.0),
        "selection": SelectionConfig(dynamic_sampling="even", max_extra_prompts=2),
        "telemetry": TelemetryConfig(metrics=["lengths"]),
        "validation": Validation(
            every_steps=1, paths=[str(place / "held.jsonl")], max_new_tokens=4, scorer="first_three"
        ),
    }
    rollout = RolloutConfig(
        group_size=3, max_new_tokens=12, cpu_kv_cache_gib=0.1, progress_bar=False
    )
    config = partial.config_of(folder, place, 3, rollout, sections)
    prepared = partial.prepared_run(config)
    device = open_device("cpu")
    mesh = Mesh(0, 1, 1, 1, 1)
    with GrpoTrainer.open_workers(config, mesh) as workers:
        init_process_group(device, 120.0)
        trainer = GrpoTrainer(prepared.on_rank(mesh, device, workers=workers))
        partial.begin(trainer)
        first = trainer.step(0)
        state = trainer.rollouts.files(), trainer.rollouts.next_draw, trainer.actor.learner.updates
        (place / "fail").touch()
        try:
            trainer.step(1)
            failed = "no error"
        except UserFunctionError as error:
            failed = str(error)
        after = trainer.rollouts.files(), trainer.actor.learner.updates
        (place / "fail").unlink()
        repeated = trainer.step(1)
        trainer.close(0)
    functions = trainer.hooks._advantage, trainer.hooks._selection, *trainer.hooks._metrics.values()
    alive = [str(function) for function in functions if function._pool._thread.is_alive()]
    return {
        "left": alive,
        "first": first,
        "failed": failed,
        "before": (state[0], state[2]),
        "after": after,
        "again": repeated,
    }
