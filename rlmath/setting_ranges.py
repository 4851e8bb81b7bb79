"""What single settings may be: the range of every number and the words of every choice in the config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.gpus import GPU_GIB


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, without an end that is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""
    """Said with the range when it is violated."""

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """ "above 0, at most 1"."""
        if self.low == self.high:
            return f"{self.low:g}"
        low = [] if self.low == -math.inf else [f"{'above' if self.open_low else 'at least'} {self.low:.10g}"]
        high = (
            [] if self.high == math.inf else [f"{'below' if self.open_high else 'at most'} {self.high:.10g}"]
        )
        return ", ".join(low + high) or "a finite number"


_COUNT = Range(1)
_NOT_NEGATIVE = Range(0)
_POSITIVE = Range(0, open_low=True)
_FINITE = Range(-math.inf)
_SHARE = Range(0, 1, open_low=True)
_DECAY = Range(0, 1, open_high=True)
_FIRST_RATIO = "Before the first update the ratio is 1."
_EQUAL_RATIO = "Where engine and trainer agree the weight is 1."
_ABOVE_ONE = Range(1, open_low=True, why=_FIRST_RATIO)
_UNTRUNCATED = (
    "The trainer computes the whole distribution; "
    "with a truncated one in the engine the importance ratios would be wrong."
)

RANGES: dict[str, Range] = {
    "run.seed": Range(0, 2**31 - 1),
    "run.total_epochs": _COUNT,
    "run.total_steps": _COUNT,
    "run.distributed_timeout_seconds": Range(0, 30 * 86400, open_low=True),
    "run.start_timeout_seconds": Range(0, 30 * 86400, open_low=True),
    "run.stop_grace_seconds": Range(0, 30 * 86400, open_low=True),
    "run.heartbeat_timeout_seconds": Range(5, 30 * 86400, why="Ranks beat once a second."),
    "run.hang_timeout_seconds": Range(5, 30 * 86400, why="Ranks beat once a second."),
    "data.prompts_per_step": _COUNT,
    "data.max_prompt_tokens": _COUNT,
    "data.train_weights": Range(0, 1000, open_low=True),
    "data.max_unusable_share": Range(0, 1),
    "stages.steps": _COUNT,
    "stages.max_new_tokens": _COUNT,
    "stages.max_tokens_per_microbatch": _COUNT,
    "parallel.data": _COUNT,
    "parallel.tensor": _COUNT,
    "parallel.pipeline": _COUNT,
    "parallel.virtual_pipeline": _COUNT,
    "parallel.context": _COUNT,
    "parallel.expert": _COUNT,
    "parallel.expert_tensor": _COUNT,
    "parallel.first_stage_layers": _COUNT,
    "parallel.last_stage_layers": _COUNT,
    "policy.max_tokens_per_microbatch": _COUNT,
    "policy.recompute_num_layers": _COUNT,
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr": _NOT_NEGATIVE,
    "optimizer.warmup_steps": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.adam_beta1": _DECAY,
    "optimizer.adam_beta2": _DECAY,
    "optimizer.adam_eps": _POSITIVE,
    "optimizer.clip_grad": _NOT_NEGATIVE,
    "rollout.tensor_parallel": _COUNT,
    "rollout.group_size": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.min_new_tokens": _NOT_NEGATIVE,
    "rollout.temperature": Range(
        0.01,
        why="At 0 a group's answers are all alike; from there to 0.01 vLLM samples at 0.01 instead.",
    ),
    "rollout.top_p": Range(1, 1, why=_UNTRUNCATED),
    "rollout.top_k": Range(-1, -1, why=_UNTRUNCATED),
    "rollout.memory_share": _SHARE,
    "rollout.cpu_kv_cache_gib": _POSITIVE,
    "rollout.max_num_seqs": _COUNT,
    "rollout.max_num_batched_tokens": _COUNT,
    "sync.bucket_mib": Range(0.0625, 16384),
    "sync.checksum_every": _NOT_NEGATIVE,
    "sync.probe_every": _NOT_NEGATIVE,
    "sync.probe_threshold": _POSITIVE,
    "memory.gpu_gib": _POSITIVE,
    "memory.leak_threshold_mib": _POSITIVE,
    "reward.format_penalty": _FINITE,
    "reward.output_scaling": _POSITIVE,
    "reward.output_bias": _FINITE,
    "reward.overlong_buffer": _NOT_NEGATIVE,
    "reward.overlong_penalty": _NOT_NEGATIVE,
    "reward.function_failure": _FINITE,
    "reward.timeout_seconds": Range(0, 3600, open_low=True),
    "reward.workers": Range(1, 1024),
    "reward.max_failure_share": Range(0, 1),
    "selection.max_extra_prompts": _NOT_NEGATIVE,
    "selection.min_completion_tokens": _NOT_NEGATIVE,
    "selection.max_completion_tokens": _COUNT,
    "algorithm.advantage_eps": _NOT_NEGATIVE,
    "algorithm.n_minibatches": _COUNT,
    "algorithm.epochs": _COUNT,
    "algorithm.clip_ratio": _SHARE,
    "algorithm.clip_ratio_high": _POSITIVE,
    "algorithm.dual_clip": _ABOVE_ONE,
    "algorithm.importance_cap": Range(1, why=_EQUAL_RATIO),
    "algorithm.importance_mask_low": Range(0, 1, open_high=True, why=_EQUAL_RATIO),
    "algorithm.importance_mask_high": Range(1, open_low=True, why=_EQUAL_RATIO),
    "algorithm.kl_coef": _NOT_NEGATIVE,
    "algorithm.entropy_coef": _NOT_NEGATIVE,
    "algorithm.early_stop_ratio": _ABOVE_ONE,
    "algorithm.early_stop_ratio_low": Range(0, 1, open_high=True, why=_FIRST_RATIO),
    "algorithm.early_stop_kl": _POSITIVE,
    "validation.every_steps": _COUNT,
    "validation.batch_size": _COUNT,
    "validation.samples": _COUNT,
    "validation.temperature": _NOT_NEGATIVE,
    "validation.top_p": _SHARE,
    "validation.max_new_tokens": _COUNT,
    "sft.max_sequence_tokens": Range(2),
    "sft.held_out_share": Range(0, 1, open_high=True),
    "sft.eval_every_steps": _COUNT,
    "telemetry.sample_groups_per_step": _NOT_NEGATIVE,
    "telemetry.warn_truncated": Range(0, 1),
    "telemetry.warn_dropped": Range(0, 1),
    "telemetry.warn_importance_weight": _POSITIVE,
    "telemetry.warn_flat_steps": Range(2),
    "telemetry.warn_entropy_share": Range(0, 1),
    "save.save_freq_epochs": _COUNT,
    "save.save_freq_steps": _COUNT,
    "save.save_freq_secs": _POSITIVE,
    "save.ckpt_freq_epochs": _COUNT,
    "save.ckpt_freq_steps": _COUNT,
    "save.ckpt_freq_secs": _POSITIVE,
    "save.keep_last": _COUNT,
    "save.keep_models": _COUNT,
}
"""Range of every number in the config, and of every number of a list."""

TEMPLATES = ("auto", "r1_distill", "qwen_boxed", "orz", "chat", "raw")

WORDS: dict[str, tuple[str, ...]] = {
    "run.device": ("auto", "cpu", "cuda"),
    "run.recover_mode": ("auto", "resume", "disabled"),
    "data.format": ("auto", "boba", "areal_v01", "simplerl", "dapo", "question_answer"),
    "data.template": TEMPLATES,
    "policy.recompute_granularity": ("full", "selective"),
    "policy.recompute_method": ("uniform", "block"),
    "optimizer.kind": ("adam", "sgd"),
    "optimizer.decay": ("constant", "linear", "cosine"),
    "memory.gpu": tuple(GPU_GIB),
    "reward.scheme": ("correctness", "mix", "independent"),
    "reward.answer_from": ("boxed", "phrase", "number"),
    "selection.dynamic_sampling": ("accuracy", "reward"),
    "algorithm.advantage": ("grpo", "dr_grpo", "rloo", "ppo", "reinforce++"),
    "algorithm.loss": ("clip", "gspo", "cispo"),
    "algorithm.loss_normalisation": ("token", "sequence", "constant"),
    "algorithm.importance_correction": ("token", "sequence"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "abs"),
    "algorithm.early_stop_action": ("skip", "end"),
    "validation.template": TEMPLATES,
    "telemetry.wandb": ("off", "offline", "online"),
    "save.export_dtype": ("auto", "float32", "bfloat16"),
}
"""Words that a text setting may have; paths have none."""
