"""Other trainers' names for settings, ours for each, and how numbers are converted.

An alias never sets anything. It answers where a user writes a name that is none of ours: in the
errors of unknown settings, and in `--help NAME`. docs/coming_from.md has the same tables (`python
-m tests.config.coming_from`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NO_KEY = "no key"
"""How an answer begins where nothing of ours corresponds to a name."""

_TOKENS = "in tokens: a micro-batch has as many sequences as fit"
_CPU_TIME = "in seconds of CPU time; by the clock it is ten times as much"
_ONE_TOOL = "the one tool is Python, in a sandbox of the engine's"

AREAL = {
    "actor.path": "`model.path`",
    "tokenizer_path": f"{NO_KEY}: the tokenizer is that of `model.path`",
    "group_size": "`rollout.group_size`",
    "gconfig.n_samples": "`rollout.group_size`",
    "gconfig.max_new_tokens": "`rollout.max_new_tokens`",
    "dataset.path": "`data.train_path`",
    "dataset.max_prompt_len": "`data.max_prompt_tokens`",
    "dataset.train_bs_n_seqs": "`data.prompts_per_step`",
    "train_dataset.path": "`data.train_path`",
    "train_dataset.batch_size": "`data.prompts_per_step`",
    "valid_dataset.path": "`validation.paths`, a list",
    "valid_dataset.batch_size": "`validation.batch_size`",
    "total_train_epochs": "`run.total_epochs`",
    "total_train_steps": "`run.total_steps`",
    "allocation_mode: sglang.d64p1m1+d32p2m1": (
        "`parallel: sglang.d64p1m1+d32p2m1`: engines on ranks of their own (`rollout.ranks`)"
    ),
    "allocation_mode: d64m1p2": "`parallel: d64m1p2`: all sample, then all train",
    "max_head_offpolicyness": "`rollout.max_staleness`",
    "max_concurrent_rollouts": "`rollout.max_concurrent_sequences`, sequences of one engine, not "
    "of all",
    "actor_train.mb_spec.max_tokens_per_mb": "`policy.max_tokens_per_microbatch`",
    "actor_inf.mb_spec.max_tokens_per_mb": "`policy.max_tokens_per_microbatch`, the same for all "
    "passes",
    "ref_inf.mb_spec.max_tokens_per_mb": "`policy.max_tokens_per_microbatch`, the same for all "
    "passes",
    "sglang.mem_fraction_static": "`rollout.memory_share`",
    "vllm.gpu_memory_utilization": "`rollout.memory_share`",
    "vllm.max_num_seqs": "`rollout.max_num_seqs`",
    "sglang.max_running_requests": "`rollout.max_num_seqs`",
    "actor.vllm.enforce_eager": "`rollout.cuda_graphs`, the opposite",
    "actor.gradient_checkpointing": "`policy.recompute_granularity: full`",
    "actor.optimizer.lr": "`optimizer.lr`",
    "actor.optimizer.type": "`optimizer.kind`",
    "actor.optimizer.lr_scheduler_type": "`optimizer.decay`",
    "actor.optimizer.gradient_clipping": "`optimizer.clip_grad`",
    "actor.optimizer.warmup_steps_proportion": "`optimizer.warmup_steps`, in updates: proportion "
    "x all updates",
    "critic.optimizer.lr": "`critic.lr`",
    "ppo.value_eps_clip": "`critic.clip`",
    "ppo.discount": "`critic.gamma`",
    "ppo.gae_lambda": "`critic.policy_lambda` and `critic.value_lambda`",
    "ppo.ppo_n_minibatches": "`algorithm.n_minibatches`",
    "ppo.actor_sample_reuse": "`algorithm.epochs`",
    "ppo.eps_clip": "`algorithm.clip_ratio`",
    "ppo.c_clip": "`algorithm.dual_clip`",
    "ppo.early_stop_imp_ratio": "`algorithm.early_stop_ratio`",
    "ppo.recompute_logprob": "`algorithm.recompute_logprobs`",
    "ppo.kl_ctl": "`algorithm.kl_coef` with `algorithm.kl_in: reward` and "
    "`algorithm.kl_estimator: k1`",
    "ppo.adv_norm: true": "`algorithm.advantage: ppo`, with `group_adv_norm: false` and "
    "`disable_value: true`",
    "ppo.group_adv_norm: true": "`algorithm.advantage: grpo`",
    "ppo.reward_output_scaling": "`reward.output_scaling`",
    "ppo.reward_output_bias": "`reward.output_bias`",
    "actor.reward_scaling": "`reward.output_scaling`",
    "actor.reward_bias": "`reward.output_bias`, with the opposite sign: it is subtracted",
    "ppo.use_decoupled_loss: true": "`algorithm.importance_correction: token`",
    "ppo.use_decoupled_loss: false": "`algorithm.recompute_logprobs: false`",
    "ppo.behav_imp_weight_cap": "`algorithm.importance_mask_high`",
    "ppo.prox_logp_method": "`algorithm.proximal_logprobs`",
    "exp_ctrl.save_freq_steps": "`save.save_freq_steps`, also `_epochs`, `_secs`; "
    "`save.export_hf` for models",
    "exp_ctrl.ckpt_freq_steps": "`save.ckpt_freq_steps`, also `_epochs`, `_secs`",
    "saver.freq_steps": "`save.save_freq_steps`",
    "evaluator.freq_steps": "`validation.every_steps`",
    "recover.mode": "`run.recover_mode`",
    "experiment_name": "`run.output_dir`, a path",
    "trial_name": "`run.output_dir`, a path",
    "cluster.fileroot": "`run.output_dir`, a path",
    "tir.max_turns": "`tools.max_calls`",
    "tir.max_length": f"{NO_KEY}: `rollout.max_new_tokens` bounds what is sampled, outputs not "
    "counted",
    "tir.tool_timeout": f"`tools.call_cpu_seconds`, {_CPU_TIME}",
    "tir.enable_tools": f"{NO_KEY}: {_ONE_TOOL}",
    "tir.is_chat_model: true": "`tools.format: chat`",
    "tir.is_chat_model: false": "`tools.format: fence`",
    "max_turns, of multi-turn workflows": "`turns.max`, with `turns.feedback`",
    "agent_run_args.max_turns": "`turns.max`, with `turns.feedback`",
    "turn_discount": "`turns.discount`",
}
"""Names of AReaL 0.1 to 0.3, and what later versions renamed."""

VERL = {
    "data.train_files": "`data.train_path`, and `data.more_train_paths` for further files",
    "data.val_files": "`validation.paths`, a list",
    "data.train_batch_size": "`data.prompts_per_step`, in prompts, as there",
    "data.val_batch_size": "`validation.batch_size`",
    "data.max_prompt_length": "`data.max_prompt_tokens`",
    "data.max_response_length": "`rollout.max_new_tokens`",
    "data.filter_overlong_prompts": f"{NO_KEY}: prompts longer than `data.max_prompt_tokens` are "
    "always dropped",
    "data.apply_chat_template_kwargs": "`data.chat_template_kwargs`",
    "actor_rollout_ref.model.path": "`model.path`",
    "actor_rollout_ref.model.custom_chat_template": "`data.chat_template`",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "`policy.recompute_granularity: full`",
    "actor_rollout_ref.model.use_remove_padding": f"{NO_KEY}: sequences are always packed",
    "actor_rollout_ref.model.lora_rank": "`lora.rank`",
    "actor_rollout_ref.model.lora_alpha": "`lora.alpha`",
    "actor_rollout_ref.model.lora_adapter_path": "`model.adapter_path`",
    "actor_rollout_ref.model.target_modules: all-linear": "`lora.target: all`",
    "actor_rollout_ref.model.lora.rank": "`lora.rank`",
    "actor_rollout_ref.model.lora.alpha": "`lora.alpha`",
    "actor_rollout_ref.model.lora.merge: true": "`lora.engine: merged`",
    "actor_rollout_ref.model.lora.merge: false": "`lora.engine: adapters`",
    "actor_rollout_ref.rollout.load_format": f"{NO_KEY}: engines get the weights of `model.path` "
    "from the trainer",
    "actor_rollout_ref.rollout.layered_summon": f"{NO_KEY}: no rank gathers the whole model",
    "actor_rollout_ref.rollout.n": "`rollout.group_size`",
    "actor_rollout_ref.rollout.response_length": "`rollout.max_new_tokens`",
    "actor_rollout_ref.rollout.dtype": "`policy.dtype`, of policy and engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "`rollout.tensor_parallel`",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "`rollout.memory_share`",
    "actor_rollout_ref.rollout.enforce_eager": "`rollout.cuda_graphs`, the opposite",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "`rollout.chunked_prefill`",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
        f"`policy.max_tokens_per_microbatch`, {_TOKENS}"
    ),
    "actor_rollout_ref.rollout.multi_turn.enable": "`tools.format: chat` or `fence`, with "
    "Python as the one tool",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "`tools.max_calls` = this - 1; "
    "without tools `turns.max`",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "`tools.max_calls`; with "
    "`environment.function` `turns.max` = this + 1",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": f"{NO_KEY}: all calls of a turn run, "
    "in order, and each counts in `tools.max_calls`",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "`tools.max_output_tokens`, in "
    "tokens, not in characters",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side: middle": f"{NO_KEY}: of a "
    "longer output beginning and end are shown, as with this value",
    "actor_rollout_ref.rollout.multi_turn.format: hermes": "`tools.format: chat`: the form is that "
    "of the model's chat template",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": f"{NO_KEY}: {_ONE_TOOL}",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "`environment.function`, a "
    "function of yours",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": f"{NO_KEY}: tokens are "
    "never encoded again, and the chat template is tried at the start",
    "actor_rollout_ref.rollout.agent.default_agent_loop: tool_agent": "`tools.format: chat`",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": f"{NO_KEY}: {_ONE_TOOL}",
    "default_timeout, of a tool's config": f"`tools.call_cpu_seconds`, {_CPU_TIME}",
    "memory_limit_mb, of a tool's config": "`tools.memory_gib`, in GiB",
    "rate_limit, of a tool's config": "`tools.cores`, for each engine",
    "sandbox_fusion_url, of a tool's config": f"{NO_KEY}: {_ONE_TOOL}",
    "actor_rollout_ref.rollout.val_kwargs.n": "`validation.samples`",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "`validation.temperature`",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "`validation.top_p`",
    "rollout.nnodes, of fully asynchronous runs": "`rollout.ranks`: these nodes x the GPUs of each",
    "async_training.partial_rollout: true": "`rollout.on_new_weights: recompute`",
    "async_training.partial_rollout: false": "`rollout.on_new_weights: finish`",
    "async_training.staleness_threshold": "`rollout.max_staleness`, in steps, not a share of "
    "samples",
    "actor.ppo_mini_batch_size": "`algorithm.n_minibatches` = `train_batch_size` / this",
    "actor.ppo_micro_batch_size_per_gpu": f"`policy.max_tokens_per_microbatch`, {_TOKENS}",
    "actor.ppo_max_token_len_per_gpu": "`policy.max_tokens_per_microbatch`",
    "actor.use_dynamic_bsz": f"{NO_KEY}: micro-batches are always cut by tokens",
    "actor.ppo_epochs": "`algorithm.epochs`",
    "actor.optim.lr": "`optimizer.lr`",
    "actor.optim.lr_warmup_steps": "`optimizer.warmup_steps`, in updates",
    "actor.optim.lr_warmup_steps_ratio": "`optimizer.warmup_steps`, in updates: ratio x all "
    "updates",
    "actor.optim.warmup_style": "`optimizer.decay`",
    "actor.optim.lr_scheduler_type": "`optimizer.decay`",
    "actor.grad_clip": "`optimizer.clip_grad`",
    "actor.clip_ratio": "`algorithm.clip_ratio`",
    "actor.clip_ratio_low": "`algorithm.clip_ratio`",
    "actor.clip_ratio_high": "`algorithm.clip_ratio_high`",
    "actor.clip_ratio_c": "`algorithm.dual_clip`",
    "actor.entropy_coeff": "`algorithm.entropy_coef`",
    "actor.use_kl_loss": "`algorithm.kl_coef` above 0 with `algorithm.kl_in: loss`",
    "actor.kl_loss_coef": "`algorithm.kl_coef` with `algorithm.kl_in: loss`",
    "actor.kl_loss_type: low_var_kl": "`algorithm.kl_estimator: k3`",
    "actor.loss_agg_mode": "`algorithm.loss_normalisation`: `token-mean` is `token`, "
    "`seq-mean-token-mean` `sequence`",
    "actor.policy_loss.loss_mode: geo_mean": "`algorithm.loss: gmpo`",
    "actor.policy_loss.loss_mode: clip_cov": "`algorithm.clip_cov_ratio`",
    "actor.policy_loss.loss_mode: kl_cov": "`algorithm.kl_cov_ratio`",
    "actor.megatron.router_replay.mode: R2": "`policy.routing_replay: old`",
    "actor.megatron.router_replay.mode: R3": "`policy.routing_replay: engine`",
    "actor.router_replay.mode: R2": "`policy.routing_replay: old`",
    "actor.router_replay.mode: R3": "`policy.routing_replay: engine`",
    "actor.fsdp_config.model_dtype": "`policy.dtype`, of policy and engine",
    "actor.fsdp_config.param_offload": "`memory.offload_parameters`",
    "actor.fsdp_config.optimizer_offload": "`memory.offload_optimizer`",
    "actor.ulysses_sequence_parallel_size": "`parallel.context`",
    "actor.megatron.tensor_model_parallel_size": "`parallel.tensor`",
    "actor.megatron.pipeline_model_parallel_size": "`parallel.pipeline`",
    "actor.megatron.virtual_pipeline_model_parallel_size": "`parallel.virtual_pipeline`",
    "actor.megatron.context_parallel_size": "`parallel.context`",
    "actor.megatron.expert_model_parallel_size": "`parallel.expert`",
    "ref.fsdp_config.param_offload": "`memory.offload_reference`",
    "critic.model.path": "`critic.path`",
    "critic.optim.lr": "`critic.lr`",
    "critic.ppo_epochs": "`critic.epochs`",
    "critic.cliprange_value": "`critic.clip`",
    "trainer.critic_warmup": "`critic.pretrain_steps`",
    "algorithm.adv_estimator: grpo": "`algorithm.advantage: grpo`",
    "algorithm.adv_estimator: gae": "`algorithm.advantage: gae`",
    "algorithm.norm_adv_by_std_in_grpo: false": "`algorithm.advantage: dr_grpo`",
    "algorithm.gamma": "`critic.gamma`",
    "algorithm.lam": "`critic.policy_lambda` and `critic.value_lambda`",
    "algorithm.use_kl_in_reward": "`algorithm.kl_in: reward`",
    "algorithm.kl_ctrl.kl_coef": "`algorithm.kl_coef` with `algorithm.kl_in: reward`",
    "algorithm.kl_penalty: kl": "`algorithm.kl_estimator: k1`",
    "algorithm.filter_groups.enable": "`selection.dynamic_sampling`",
    "algorithm.filter_groups.metric": "`selection.dynamic_sampling`: `acc` is `accuracy`",
    "algorithm.filter_groups.max_num_gen_batches": (
        "`selection.max_extra_prompts`, in prompts: (batches - 1) x the prompts of one"
    ),
    "algorithm.rollout_is": "`algorithm.importance_correction`",
    "algorithm.rollout_is_threshold": "`algorithm.importance_cap`",
    "reward_model.overlong_buffer.len": "`reward.overlong_buffer`",
    "reward_model.overlong_buffer.penalty_factor": "`reward.overlong_penalty`",
    "custom_reward_function.path": "`reward.function: path/to/file.py:name`",
    "custom_reward_function.name": "`reward.function: path/to/file.py:name`",
    "trainer.total_epochs": "`run.total_epochs`",
    "trainer.total_training_steps": "`run.total_steps`",
    "trainer.logger: wandb": "`telemetry.wandb`",
    "trainer.project_name": "`telemetry.wandb_project`",
    "trainer.experiment_name": "`telemetry.wandb_name`",
    "trainer.default_local_dir": "`run.output_dir`",
    "trainer.save_freq": "`save.save_freq_steps`",
    "trainer.test_freq": "`validation.every_steps`",
    "trainer.val_before_train": "`validation.before_training`",
    "trainer.resume_mode": "`run.recover_mode`",
    "trainer.max_actor_ckpt_to_keep": "`save.keep_models`",
    "trainer.nnodes": f"{NO_KEY}: torchrun's `--nnodes`, or `rlmath submit --nodes`",
    "trainer.n_gpus_per_node": f"{NO_KEY}: `rlmath train --ranks`, or torchrun's "
    "`--nproc-per-node`",
}

SIMPLERL = {
    "DATASET_NAME": "`data.train_path`",
    "TRAIN_BATCH_SIZE": "`data.prompts_per_step`",
    "VAL_BATCH_SIZE": "`validation.batch_size`",
    "MAX_PROMPT_LENGTH": "`data.max_prompt_tokens`, in tokens, not in characters",
    "MAX_RESPONSE_LENGTH": "`rollout.max_new_tokens`",
    "ROLLOUT_N": "`rollout.group_size`",
    "PPO_MINI_BATCH_SIZE": "`algorithm.n_minibatches` = `TRAIN_BATCH_SIZE` / this",
    "PPO_MICRO_BATCH_SIZE": f"`policy.max_tokens_per_microbatch`, {_TOKENS}",
    "LEARNING_RATE": "`optimizer.lr`",
    "CLIP_RATIO": "`algorithm.clip_ratio`",
    "KL_LOSS_COEF": "`algorithm.kl_coef` with `algorithm.kl_in: loss`",
    "KL_LOSS_TYPE: low_var_kl": "`algorithm.kl_estimator: k3`",
    "KL_COEF": "`algorithm.kl_coef` with `algorithm.kl_in: reward`",
    "REWORD_FUNCTION_TYPE": "`reward.scheme`: `mix`, `independent`",
    "FORMAT_PENALTY_VALUE": "`reward.format_penalty`",
    "TOTAL_EPOCHS": "`run.total_epochs`",
    "SAVE_FREQ": "`save.save_freq_steps`",
    "TEST_FREQ": "`validation.every_steps`",
}
"""Variables of its script."""

RLINF = {
    "runner.seq_length": "`rollout.max_new_tokens` = this - `max_prompt_length`",
    "runner.max_epochs": "`run.total_epochs`",
    "runner.max_steps": "`run.total_steps`",
    "runner.save_interval": "`save.save_freq_steps`",
    "runner.val_check_interval": "`validation.every_steps`",
    "data.train_data_paths": "`data.train_path`, and `data.more_train_paths` for further files",
    "data.val_data_paths": "`validation.paths`, a list",
    "data.rollout_batch_size": "`data.prompts_per_step`",
    "data.max_prompt_length": "`data.max_prompt_tokens`",
    "rollout.model_dir": "`model.path`",
    "rollout.gpu_memory_utilization": "`rollout.memory_share`",
    "rollout.tensor_parallel_size": "`rollout.tensor_parallel`",
    "rollout.max_running_requests": "`rollout.max_num_seqs`",
    "rollout.enforce_eager": "`rollout.cuda_graphs`, the opposite",
    "algorithm.group_size": "`rollout.group_size`",
    "algorithm.adv_type": "`algorithm.advantage`",
    "algorithm.loss_agg_func: token-mean": "`algorithm.loss_normalisation: token`",
    "algorithm.ratio_clip_eps": "`algorithm.clip_ratio`",
    "algorithm.clip_ratio_c": "`algorithm.dual_clip`",
    "algorithm.entropy_bonus": "`algorithm.entropy_coef`",
    "algorithm.kl_beta": "`algorithm.kl_coef`",
    "algorithm.kl_penalty_type: low_var_kl": "`algorithm.kl_estimator: k3`",
    "actor.optim.lr": "`optimizer.lr`",
    "actor.model.tensor_model_parallel_size": "`parallel.tensor`",
    "actor.model.pipeline_model_parallel_size": "`parallel.pipeline`",
    "actor.offload_optimizer": "`memory.offload_optimizer`",
    "actor.offload_weight": "`memory.offload_parameters`",
}

_UPDATES = "a step here has `algorithm.n_minibatches` x `algorithm.epochs` updates"
_PROMPTS_OF_TRL = (
    "`data.prompts_per_step` = this x devices x `steps_per_generation` / `num_generations`: in "
    "prompts of all ranks, "
    "not in completions of one device"
)

TRL = {
    "GRPOTrainer(model=...)": "`model.path`",
    "model_name_or_path": "`model.path`",
    "train_dataset": "`data.train_path`",
    "dataset_name": "`data.train_path`; `hf://datasets/org/name/file` for one of the hub",
    "eval_dataset": "`validation.paths`, a list",
    "reward_funcs": "`reward.function`, with `reward.function_takes: group` of all completions of "
    "a prompt; several "
    "are `reward.rewards`",
    "reward_weights": "`reward.weights`",
    "multi_objective_aggregation: normalize_then_sum": "`reward.combine: gdpo`",
    "chat_template_kwargs": "`data.chat_template_kwargs`",
    "chat_template_path": "`data.chat_template`",
    "max_prompt_length": "`data.max_prompt_tokens`: longer prompts are dropped, not cut",
    "num_generations": "`rollout.group_size`",
    "num_generations_eval": "`validation.samples`",
    "max_completion_length": "`rollout.max_new_tokens`",
    "GRPOTrainer(tools=...)": "`tools.format: chat`, with Python as the one tool, not functions of "
    "yours",
    "max_tool_calling_iterations": "`tools.max_calls`, calls, not turns; `tools.format: chat` and "
    "`fence` have Python as the one tool",
    "environment_factory": f"{NO_KEY}: {_ONE_TOOL}",
    "rollout_func": f"{NO_KEY}: sampling is always vLLM's, and {_ONE_TOOL}",
    "max_length": "`sft.max_sequence_tokens` (of SFTConfig): longer sequences are dropped, not cut",
    "max_seq_length": "`sft.max_sequence_tokens` (of SFTConfig): longer sequences are dropped, "
    "not cut",
    "packing": f"{NO_KEY}: sequences are always packed",
    "per_device_train_batch_size": _PROMPTS_OF_TRL,
    "generation_batch_size": "`data.prompts_per_step` = this / `num_generations`: in prompts, not "
    "in completions",
    "per_device_eval_batch_size": "`validation.batch_size`, in problems of all ranks",
    "steps_per_generation": "`algorithm.n_minibatches` = this / `gradient_accumulation_steps`",
    "gradient_accumulation_steps": (
        "`algorithm.n_minibatches` = `steps_per_generation` / this; memory is bounded by "
        "`policy.max_tokens_per_microbatch`, in tokens"
    ),
    "num_iterations": "`algorithm.epochs`",
    "num_train_epochs": "`run.total_epochs`",
    "max_steps": f"`run.total_steps`, in steps, not in updates: {_UPDATES}",
    "learning_rate": "`optimizer.lr`",
    "lr_scheduler_type": "`optimizer.decay`",
    "warmup_ratio": "`optimizer.warmup_steps`, in updates: ratio x all updates",
    "max_grad_norm": "`optimizer.clip_grad`",
    "optim": "`optimizer.kind`",
    "adam_epsilon": "`optimizer.adam_eps`",
    "gradient_checkpointing": "`policy.recompute_granularity: full`",
    "bf16": "`policy.dtype: bfloat16`",
    "fp16": "`policy.dtype: float16`",
    "cast_lm_head_to_fp32": "`policy.head_dtype: float32`",
    "LoraConfig.r": "`lora.rank`",
    "lora_r": "`lora.rank`",
    "lora_alpha": "`lora.alpha`",
    "target_modules: all-linear": "`lora.target: all`",
    "lora_target_modules: all-linear": "`lora.target: all`",
    "lora_dropout": f"{NO_KEY}: adapters have no dropout",
    "use_rslora": f"{NO_KEY}: adapters are scaled by `lora.alpha` / `lora.rank`",
    "modules_to_save": f"{NO_KEY}: beside its adapters nothing of a model learns",
    "beta": "`algorithm.kl_coef`, with `algorithm.kl_estimator: k3`",
    "use_bias_correction_kl": "`algorithm.kl_ratio: token`",
    "epsilon": "`algorithm.clip_ratio`",
    "epsilon_high": "`algorithm.clip_ratio_high`",
    "delta": "`algorithm.dual_clip`",
    "loss_type: dapo": "`algorithm.loss_normalisation: token`",
    "loss_type: bnpo": "`algorithm.loss_normalisation: token`",
    "loss_type: grpo": "`algorithm.loss_normalisation: sequence`",
    "loss_type: dr_grpo": "`algorithm.loss_normalisation: constant` with `algorithm.advantage: "
    "dr_grpo`",
    "loss_type: cispo": "`algorithm.loss: cispo`",
    "loss_type: sapo": "`algorithm.loss: sapo`",
    "DPPOTrainer: binary_tv": "`algorithm.loss: dppo_tv`",
    "DPPOTrainer: binary_kl": "`algorithm.loss: dppo_kl`",
    "importance_sampling_level: sequence": "`algorithm.loss: gspo`",
    "scale_rewards: group": "`algorithm.advantage: grpo`",
    "scale_rewards: none": "`algorithm.advantage: dr_grpo`",
    "scale_rewards: batch": "`algorithm.advantage: lite_ppo`",
    "mask_truncated_completions": "`selection.drop_truncated`",
    "off_policy_mask_threshold": "`algorithm.off_policy_mask`",
    "top_entropy_quantile": "`algorithm.top_entropy_share`",
    "use_adaptive_entropy": "`algorithm.entropy_target`, a number",
    "entropy_coef_delta": "`algorithm.entropy_delta`",
    "vllm_importance_sampling_mode: token_*": "`algorithm.importance_correction: token`",
    "vllm_importance_sampling_mode: sequence_*": "`algorithm.importance_correction: sequence`",
    "vllm_importance_sampling_clip_max": (
        "`algorithm.importance_cap` of the modes `*_truncate`, `algorithm.importance_mask_high` "
        "of `*_mask`"
    ),
    "sync_ref_model": "`algorithm.reference_every_steps`, a number of steps",
    "ref_model_sync_steps": "`algorithm.reference_every_steps`, with `ref_model_mixup_alpha: 1.0`",
    "use_vllm": f"{NO_KEY}: sampling is always vLLM's",
    "vllm_mode: colocate": "`rollout.ranks: 0`",
    "vllm_mode: server": "`rollout.ranks`, a number of ranks",
    "vllm_gpu_memory_utilization": "`rollout.memory_share`",
    "vllm_tensor_parallel_size": "`rollout.tensor_parallel`",
    "shuffle_dataset": "`data.shuffle`",
    "log_completions": "`telemetry.sample_groups_per_step`, a number of groups",
    "logging_steps": f"{NO_KEY}: every step is logged",
    "report_to: wandb": "`telemetry.wandb`",
    "run_name": "`telemetry.wandb_name`",
    "eval_steps": "`validation.every_steps`",
    "eval_strategy": "`validation.every_steps`, a number of steps",
    "eval_on_start": "`validation.before_training`",
    "save_steps": "`save.save_freq_steps`",
    "save_strategy": "`save.save_freq_steps` or `save.save_freq_epochs`, numbers",
    "save_total_limit": "`save.keep_models`",
    "resume_from_checkpoint": "`run.recover_mode`; the same `run.output_dir` resumes",
    "hub_model_id": "`save.push_to_hub`",
    "ddp_timeout": "`run.distributed_timeout_seconds`",
    "deepspeed": f"{NO_KEY}: the layout is `parallel.tensor`, `parallel.pipeline`, `parallel.data`",
    "fsdp": f"{NO_KEY}: the layout is `parallel.tensor`, `parallel.pipeline`, `parallel.data`",
}
"""GRPOConfig of TRL 1.10 with what it inherits, and arguments of GRPOTrainer."""

NEMO_RL = {
    "policy.model_name": "`model.path`",
    "policy.tokenizer.chat_template": "`data.chat_template`",
    "data.train.data_path": "`data.train_path`",
    "data.validation.data_path": "`validation.paths`, a list",
    "data.system_prompt_file": "`data.system_prompt`, a text, not a file",
    "data.max_input_seq_length": "`data.max_prompt_tokens`",
    "grpo.num_prompts_per_step": "`data.prompts_per_step`",
    "grpo.num_generations_per_prompt": "`rollout.group_size`",
    "grpo.max_num_steps": "`run.total_steps`",
    "grpo.max_num_epochs": "`run.total_epochs`",
    "grpo.val_period": "`validation.every_steps`",
    "grpo.val_at_start": "`validation.before_training`",
    "grpo.use_leave_one_out_baseline: true": "`algorithm.advantage: rloo`, not divided by the "
    "deviation",
    "grpo.overlong_filtering": "`selection.drop_truncated`",
    "grpo.use_dynamic_sampling": "`selection.dynamic_sampling`",
    "grpo.reward_shaping.overlong_buffer_length": "`reward.overlong_buffer`",
    "grpo.reward_shaping.overlong_buffer_penalty": "`reward.overlong_penalty`",
    "grpo.adv_estimator.name: gdpo": "`reward.combine: gdpo`",
    "grpo.async_grpo.enabled": "`rollout.ranks` above 0",
    "grpo.async_grpo.max_trajectory_age_steps": "`rollout.max_staleness`",
    "policy.train_global_batch_size": (
        "`algorithm.n_minibatches` = `grpo.num_prompts_per_step` x "
        "`grpo.num_generations_per_prompt` / this"
    ),
    "policy.train_micro_batch_size": f"`policy.max_tokens_per_microbatch`, {_TOKENS}",
    "policy.max_total_sequence_length": "the sum of `data.max_prompt_tokens` and "
    "`rollout.max_new_tokens`",
    "policy.precision": "`policy.dtype`",
    "policy.max_grad_norm": "`optimizer.clip_grad`",
    "policy.optimizer.kwargs.lr": "`optimizer.lr`",
    "policy.generation.vllm_cfg.tensor_parallel_size": "`rollout.tensor_parallel`",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "`rollout.memory_share`",
    "policy.megatron_cfg.tensor_model_parallel_size": "`parallel.tensor`",
    "policy.megatron_cfg.pipeline_model_parallel_size": "`parallel.pipeline`",
    "policy.megatron_cfg.context_parallel_size": "`parallel.context`",
    "policy.megatron_cfg.expert_model_parallel_size": "`parallel.expert`",
    "policy.megatron_cfg.activation_checkpointing": "`policy.recompute_granularity: full`",
    "policy.dtensor_cfg.lora_cfg.enabled": "`lora.rank` above 0",
    "policy.dtensor_cfg.lora_cfg.dim": "`lora.rank`",
    "policy.dtensor_cfg.lora_cfg.alpha": "`lora.alpha`",
    "policy.megatron_cfg.peft.dim": "`lora.rank`",
    "policy.megatron_cfg.peft.alpha": "`lora.alpha`",
    "loss_fn.reference_policy_kl_penalty": "`algorithm.kl_coef`",
    "loss_fn.ratio_clip_min": "`algorithm.clip_ratio`",
    "loss_fn.ratio_clip_max": "`algorithm.clip_ratio_high`",
    "loss_fn.ratio_clip_c": "`algorithm.dual_clip`",
    "loss_fn.use_importance_sampling_correction": "`algorithm.importance_correction: token`",
    "loss_fn.truncated_importance_sampling_type: tis": "`algorithm.importance_cap`",
    "loss_fn.truncated_importance_sampling_type: icepop": (
        "`algorithm.importance_mask_high` and `algorithm.importance_mask_low`"
    ),
    "loss_fn.sequence_level_importance_ratios": "`algorithm.loss: gspo`",
    "loss_fn.use_cispo": "`algorithm.loss: cispo`",
    "loss_fn.token_level_loss: false": "`algorithm.loss_normalisation: sequence`",
    "checkpointing.checkpoint_dir": "`run.output_dir`",
    "checkpointing.save_period": "`save.save_freq_steps`",
    "checkpointing.keep_top_k": "`save.keep_models`, the newest, not the best",
    "logger.wandb_enabled": "`telemetry.wandb`",
}
"""examples/configs/grpo_math_1B.yaml of August 2026."""

SLIME = {
    "custom_generate_function_path: generate_with_retool.generate": "`tools.format: chat`, with "
    "Python as the one tool",
    "custom_rm_path": "`reward.function: path/to/file.py:name`",
    "max_tool_calls": "`tools.max_calls`",
    "tool_concurrency": "`tools.cores`, for each engine",
    "python_timeout": f"`tools.call_cpu_seconds`, {_CPU_TIME}",
    "python_memory_limit": "`tools.memory_gib`, in GiB",
    "rollout_max_response_len": "`rollout.max_new_tokens`, of all turns together, not of each",
    "rollout_max_context_len": f"{NO_KEY}: `rollout.max_new_tokens` bounds what is sampled",
    "rollout_batch_size": "`data.prompts_per_step`",
    "num_rollout": "`run.total_steps`",
    "partial_rollout": "`rollout.tail: carry`, also with tools",
    "max_tokens_per_gpu": "`policy.max_tokens_per_microbatch`",
}
"""Options of slime's script retool_qwen3_4b_rl.sh, and names of its `TOOL_CONFIGS`."""

COMMON = {
    "epochs": "`run.total_epochs`, over the prompts; `algorithm.epochs` are those over a step's "
    "samples",
    "num_epochs": "`run.total_epochs`, over the prompts; `algorithm.epochs` are those over a "
    "step's samples",
    "steps": "`run.total_steps`",
    "num_steps": "`run.total_steps`",
    "batch_size": "`data.prompts_per_step`, in prompts of all ranks, each with "
    "`rollout.group_size` completions",
    "global_batch_size": (
        "`data.prompts_per_step`, in prompts of all ranks, each with `rollout.group_size` "
        "completions"
    ),
    "micro_batch_size": f"`policy.max_tokens_per_microbatch`, {_TOKENS}",
    "data.path": "`data.train_path`",
    "model.name": "`model.path`",
    "model_path": "`model.path`",
    "max_tokens": "`rollout.max_new_tokens`",
    "n_samples_per_prompt": "`rollout.group_size`",
    "init_kl_coef": "`algorithm.kl_coef` with `algorithm.kl_in: reward`",
    "wandb_run_name": "`telemetry.wandb_name`",
}
"""Words that several trainers have, with or without a section."""

TRAINERS: Mapping[str, Mapping[str, str]] = {
    "TRL": TRL,
    "verl": VERL,
    "AReaL": AREAL,
    "NeMo-RL": NEMO_RL,
    "RLinf": RLINF,
    "SimpleRL": SIMPLERL,
    "slime": SLIME,
    "Other trainers": COMMON,
}
"""Settings that correspond to names of other trainers, by trainer.

A key is a name, or "name: value" where the answer depends on the value. The answer has our keys in
backticks and, where units differ, the conversion. Of equal answers the first is given."""


@dataclass(frozen=True)
class Alias:
    """A name of another trainer's: ("TRL", "num_generations", "`rollout.group_size`")."""

    trainer: str
    written: str
    """The name as that trainer writes it, with its value where there is one: "loss_type: grpo"."""
    answer: str

    @property
    def name(self) -> str:
        """Without its value, in small letters: "loss_type"."""
        return plain_name(self.written.partition(":")[0].partition(",")[0])

    def __str__(self) -> str:
        """ "TRL's num_generations corresponds to rollout.group_size"."""
        owner = f"{self.trainer}'" if self.trainer.endswith("s") else f"{self.trainer}'s"
        verb = "has" if self.answer.startswith(NO_KEY) else "corresponds to"
        return f"{owner} {self.written} {verb} {self.answer}".replace("`", "")


ALIASES = tuple(
    Alias(trainer, written, key)
    for trainer, names in TRAINERS.items()
    for written, key in names.items()
)


def plain_name(name: str) -> str:
    """The form in which names are compared.

    It is in small letters, with underscores, and without the marks of command lines.

    >>> plain_name("--Learning-Rate"), plain_name("+trainer.save_freq")
    ('learning_rate', 'trainer.save_freq')
    """
    return name.strip().lstrip("+~-").lower().replace("-", "_")


def is_alias(key: str) -> bool:
    """Whether `key` as a whole is a name of another trainer's."""
    name = plain_name(key)
    return any(alias.name == name for alias in ALIASES)


def exact_aliases(key: str) -> list[Alias]:
    """Aliases whose whole name is `key`, or the end of it from a dot on.

    The end counts where the name has a dot itself, or is a word of several trainers.

    >>> [str(alias) for alias in exact_aliases("num_generations")]
    ["TRL's num_generations corresponds to rollout.group_size"]
    """
    name = plain_name(key)
    return _distinct(
        alias
        for alias in ALIASES
        if alias.name == name
        or (
            name.endswith(f".{alias.name}")
            and ("." in alias.name or alias.trainer == "Other trainers")
        )
    )


def similar_aliases(key: str) -> list[Alias]:
    """Aliases that end as `key` does, in as many of their dotted parts as any does.

    At least the last part is the same.

    >>> [alias.written for alias in similar_aliases("rollout.n")]
    ['actor_rollout_ref.rollout.n']
    """
    parts = plain_name(key).split(".")

    def common(alias: Alias) -> int:
        pairs = zip(reversed(parts), reversed(alias.name.split(".")), strict=False)
        count = 0
        for part, alias_part in pairs:
            if part != alias_part:
                break
            count += 1
        return count

    most_words_in_common = max(map(common, ALIASES))
    return _distinct(
        alias for alias in ALIASES if most_words_in_common and common(alias) == most_words_in_common
    )


def _distinct(aliases: Iterable[Alias]) -> list[Alias]:
    """The first alias of each answer."""
    first: dict[str, Alias] = {}
    for alias in aliases:
        first.setdefault(alias.answer, alias)
    return list(first.values())
