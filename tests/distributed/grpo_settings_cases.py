"""What one rank does in the test of a GRPO run from its settings.

It makes the run with a real engine, and notes what each part was asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SaveConfig,
    SelectionConfig,
    StagesConfig,
    SyncConfig,
    TelemetryConfig,
    ValidationConfig,
)
from tests.distributed.optimizer_cases import run_here
from tests.distributed.partial_rollout_cases import prepared_run

SEED = 101
PROMPTS = 9
PER_STEP = 3
GROUP = 4
VALIDATED = 5
BATCH = 3
SAMPLES = 2
STAGE_TOKENS = (24, 28)
STEPS = (1, 2)
"""Steps of the two stages."""
MINIBATCHES = 3
EPOCHS = 2
RATE = 0.004
LEAST = 0.001
WARM_UP = 3


def settings(model: Path, folder: Path) -> Config:
    """No two numbers are alike where one could be taken for the other."""
    return Config(
        run=RunConfig(
            output_dir=str(folder / "run"), seed=SEED, device="cpu", max_discarded_steps=8
        ),
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            train_path=_rows(folder / "train.jsonl", "t", PROMPTS),
            prompts_per_step=PER_STEP,
            max_prompt_tokens=13,
            shuffle=False,
        ),
        stages=StagesConfig(
            steps=list(STEPS),
            max_new_tokens=list(STAGE_TOKENS),
            max_tokens_per_microbatch=[90, 130],
        ),
        policy=PolicyConfig(max_tokens_per_microbatch=77),
        optimizer=OptimizerConfig(
            kind="sgd",
            lr=RATE,
            min_lr=LEAST,
            warmup_steps=WARM_UP,
            decay="linear",
            distributed=False,
        ),
        rollout=RolloutConfig(
            group_size=GROUP,
            max_new_tokens=17,
            min_new_tokens=2,
            temperature=0.8,
            top_p=0.99,
            top_k=60,
            max_num_seqs=6,
            max_num_batched_tokens=70,
            cpu_kv_cache_gib=0.0625,
            progress_bar=False,
        ),
        sync=SyncConfig(checksum_every=2, probe_every=3, probe_threshold=0.31),
        memory=MemoryConfig(
            offload_gradients=False,
            offload_optimizer=False,
            offload_parameters=True,
            offload_reference=True,
            leak_threshold_mib=4097.0,
            stop_on_leak=True,
        ),
        reward=RewardConfig(workers=1, overlong_buffer=10, overlong_penalty=0.5),
        selection=SelectionConfig(min_completion_tokens=1),
        algorithm=AlgorithmConfig(
            advantage="rloo",
            loss_normalisation="constant",
            n_minibatches=MINIBATCHES,
            epochs=EPOCHS,
            kl_coef=0.01,
            early_stop_ratio=None,
            rollback=1,
            rollback_reward_drop=50.0,
            rollback_reward_steps=11,
        ),
        validation=ValidationConfig(
            every_steps=2,
            paths=[_rows(folder / "held.jsonl", "v", VALIDATED)],
            before_training=False,
            batch_size=BATCH,
            samples=SAMPLES,
            temperature=0.5,
            top_p=0.9,
            max_new_tokens=7,
        ),
        telemetry=TelemetryConfig(
            tensorboard=False, sample_groups_per_step=2, profile_steps=[2], capture_steps=[99]
        ),
        save=SaveConfig(
            ckpt_freq_secs=None,
            ckpt_freq_steps=53,
            save_freq_steps=54,
            keep_last=13,
            keep_models=14,
        ),
    )


def _rows(path: Path, name: str, count: int) -> str:
    rows = [
        {
            "prompt": f"{n}+1=",
            "task": "math",
            "query_id": f"{name}{n}",
            "solutions": [f"\\boxed{{{n + 1}}}"],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def whole_run(model: Path, folder: Path) -> dict[str, Any]:
    """A run of three steps; the last one begins with a validation, and one follows it."""
    from rlmath.trainer.grpo import GrpoTrainer

    report: dict[str, Any] = {"records": []}

    class Observed(GrpoTrainer):
        """Reports what it is made of and what it is asked for; it trains as ever."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            report["built"], report["asked"] = _built(self, context.on_progress), _watch(self)

        def begin(self, steps_done: int, export: Any, asked_to_stop: Any) -> None:
            super().begin(steps_done, export, asked_to_stop)
            checkpointer = export.__self__
            self.check = check = checkpointer._divergence
            report["diverges"] = check._max_discarded_steps, check.rule
            report["keeps"] = checkpointer._store._retention
            report["saves"] = checkpointer._points._frequency, checkpointer._models._frequency

        def step(self, number: int) -> Any:
            record = super().step(number)
            report["records"].append(record)
            return record

        def close(self, status: int) -> None:
            report["updates"] = self.actor.learner.updates
            report["watched"] = self.check.rewards
            super().close(status)

    report["status"] = run_here(Observed, prepared_run(settings(model, folder)))
    return report


def _built(trainer: Any, on_progress: Any) -> dict[str, Any]:
    vllm = trainer.engines.engine._llm.llm_engine.vllm_config
    scheduler = trainer.actor.learner.scheduler
    policy = trainer.actor.forward_backward
    monitor = trainer.engines.switch._monitor
    return {
        "steps": [(stage.first_step, stage.steps) for stage in trainer.shapes.length_stages],
        "order": {
            name: getattr(trainer.order, name)
            for name in ("n_prompts", "prompts_per_step", "seed", "shuffle")
        },
        "updates": (scheduler.lr_warmup_steps, scheduler.lr_decay_steps),
        "engine": {
            "max_model_len": vllm.model_config.max_model_len,
            "seed": vllm.model_config.seed,
            "logprobs_mode": vllm.model_config.logprobs_mode,
            "enforce_eager": vllm.model_config.enforce_eager,
            "dtype": str(vllm.model_config.dtype),
            "max_num_seqs": vllm.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": vllm.scheduler_config.max_num_batched_tokens,
            "kv_cache_memory_bytes": vllm.cache_config.kv_cache_memory_bytes,
            "tensor_parallel_size": vllm.parallel_config.tensor_parallel_size,
        },
        "temperatures": (policy.temperature, trainer.reference.temperature),
        "min_tokens_mask": (policy.min_tokens_mask, trainer.reference.min_tokens_mask),
        "offloaded": trainer.offload.names,
        "monitor": (monitor._threshold, monitor._stop),
        "reward": trainer.engines.collector._reward,
        "progress": (
            trainer.engines.engine.on_step == on_progress,
            policy.on_microbatch == on_progress,
        ),
        "probe": [len(sequence) for sequence in trainer.engines._probe.sequences],
        "probe_temperature": trainer.engines._probe._policy.temperature,
        "updaters": [
            (updater.normalisation, updater.config.policy.max_tokens_per_microbatch)
            for updater in trainer.updaters
        ],
    }


def _watch(trainer: Any) -> dict[str, list[Any]]:
    """Notes what engine, vLLM, sync and learner are asked for, which they do as ever."""
    asked: dict[str, list[Any]] = {
        "collected": [],
        "vllm": [],
        "checks": [],
        "probes": [],
        "learned": [],
    }
    asked |= {"samples": [], "versions": [], "waiting": []}
    engine = trainer.engines.engine
    collector = trainer.engines.collector
    take = engine.set_weight_version
    manage = collector._reward_manager
    transfer = trainer.engines._transfer
    probe = trainer.engines._probe
    learner = trainer.actor.learner
    core = trainer.engines.engine._llm.llm_engine.engine_core
    collect = trainer.engines.collector.collect
    add = core.add_request
    run = transfer.run
    ask = probe._policy.logprobs
    learn = learner.learn

    def collecting(what: Any) -> Any:
        assert what.validates == what.title.startswith("validation")
        ids = [prompt.prompt_id for prompt in what.prompts]
        asked["collected"].append((ids, asdict(what.sampling), asdict(what.seed), what.title))
        return collect(what)

    def adding(request: Any) -> Any:
        params = request.sampling_params
        if params.prompt_logprobs is None:
            names = (
                "temperature",
                "top_p",
                "top_k",
                "max_tokens",
                "min_tokens",
                "seed",
                "logprobs",
            )
            asked["vllm"].append(
                (tuple(request.prompt_token_ids), {key: getattr(params, key) for key in names})
            )
        return add(request)

    def running(check: bool = False) -> Any:
        asked["checks"].append(check)
        return run(check=check)

    def asking(batches: Any) -> Any:
        asked["probes"].append(probe._step)
        return ask(batches)

    def learning(
        batches: Any, old: Any, reference: Any, on_policy: bool = False, **options: Any
    ) -> Any:
        indices = sorted(index for batch in batches for index in batch.sample_indices)
        weights = sorted({float(w) for batch in batches for w in batch.loss_weights_T if w > 0})
        asked["learned"].append((indices, weights, old is None, reference is None, on_policy))
        for batch in batches:
            asked["samples"] += [(probe._step, *row) for row in _rows_of(batch)]
        return learn(batches, old, reference, on_policy, **options)

    def taking(version: int, **more: Any) -> None:
        asked["versions"].append(version)
        take(version, **more)

    def managing(*arguments: Any, **options: Any) -> Any:
        manager = manage(*arguments, **options)
        wait = manager.wait

        def waiting(*on_progress: Any) -> None:
            asked["waiting"].append(on_progress == (engine.on_step,))
            wait(*on_progress)

        manager.wait = waiting
        return manager

    engine.set_weight_version = taking
    collector._reward_manager = managing
    trainer.engines.collector.collect, core.add_request = collecting, adding
    transfer.run, probe._policy.logprobs, learner.learn = running, asking, learning
    return asked


def _rows_of(batch: Any) -> list[tuple[Any, ...]]:
    """Rows of every sample of a micro-batch: index, tokens, advantages, log-probs of the engine.

    The last two are of its completion only."""
    rows = []
    bounds = batch.cu_seqlens_S1.tolist()
    for index, start, end in zip(batch.sample_indices, bounds, bounds[1:], strict=False):
        learned = batch.completion_index_T[start:end] >= 0
        columns = (
            batch.advantages_T[start:end][learned],
            batch.behaviour_logprobs_T[start:end][learned],
        )
        tokens = batch.token_ids_T[start:end].tolist()
        rows.append((index, tokens, *(column.tolist() for column in columns)))
    return rows
