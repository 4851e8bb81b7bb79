"""Settings that do not go together, a rule a row.

Rules say what is refused (CONFLICTS), what changes nothing (UNUSED), and what is doubtful
(DOUBTFUL); `setting_rules` has the forms of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from rlmath.config.help import is_among
from rlmath.config.objectives import OBJECTIVES, ObjectiveSettings
from rlmath.config.schema import AlgorithmConfig, Config, TeacherConfig
from rlmath.planning.setting_rules import Conflict, Doubt, Rule, Unused
from rlmath.rewards.several_rewards import takes_groups

# pyright: reportUnnecessaryComparison=true, reportUnnecessaryContains=true


# ---------------------------------------------------------------- conditions of several rows


def exceeds(value: float | None, limit: float | None) -> bool:
    """Whether both are set, and the value is above the limit."""
    return value is not None and limit is not None and value > limit


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    return all([algorithm.kl_coef, algorithm.kl_in == "reward"])


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    return all([algorithm.kl_coef, algorithm.kl_in == "loss"])


def learns_from_the_teacher_alone(teacher: TeacherConfig) -> bool:
    """Whether there is a teacher, and rewards are measured but not learned from."""
    return all([teacher.path, not teacher.with_rewards])


def goes_back_when_rewards_fall(algorithm: AlgorithmConfig) -> bool:
    return all([algorithm.rollback, algorithm.rollback_reward_drop])


# ---------------------------------------------------------------- rows of `config.objectives`


def unread_by_objectives() -> Iterator[Unused]:
    """A row for every setting that only some objectives read."""
    names = dict.fromkeys(name for objective in OBJECTIVES.values() for name in objective.settings)
    for name in names:
        losses = [loss for loss, objective in OBJECTIVES.items() if name in objective.settings]
        yield Unused(
            [f"algorithm.{name}"],
            when=lambda config, losses=losses: [config.algorithm.loss not in losses],
            text=f"without algorithm.loss={','.join(losses)}",
        )


def doubts_of_objectives() -> Iterator[Doubt]:
    """A row for every combination that is doubtful with one objective."""
    for loss, objective in OBJECTIVES.items():
        for text, when in objective.doubts.items():
            yield Doubt(
                when=lambda config, loss=loss, when=when: [
                    config.algorithm.loss == loss,
                    *when(config.algorithm),
                ],
                text=text,
            )


# ---------------------------------------------------------------- the rules

CONFLICTS = (
    Conflict(
        when=lambda config: [config.optimizer.min_lr > config.optimizer.lr],
        text="optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}. Lower it.",
    ),
    Conflict(
        when=lambda config: [config.optimizer.kind == "sgd", config.optimizer.distributed],
        text='optimizer.distributed: Megatron shares only Adam\'s state. With kind "sgd" set it '
        "to false.",
    ),
    Conflict(
        when=lambda config: [
            config.policy.recompute_granularity == "full",
            not config.policy.recompute_method,
        ],
        text='policy.recompute_method is null; policy.recompute_granularity="full" needs it. Set, '
        "say, "
        "policy.recompute_method=uniform.",
    ),
    Conflict(
        when=lambda config: [
            config.policy.recompute_granularity == "full",
            not config.policy.recompute_num_layers,
        ],
        text='policy.recompute_num_layers is null; policy.recompute_granularity="full" needs it. '
        "Set, say, "
        "policy.recompute_num_layers=1.",
    ),
    Conflict(
        when=lambda config: [
            config.policy.recompute_method,
            config.policy.recompute_granularity != "full",
        ],
        text="policy.recompute_method is {policy.recompute_method}; only "
        'policy.recompute_granularity="full" has '
        "it. Set it to null.",
    ),
    Conflict(
        when=lambda config: [
            config.policy.recompute_num_layers,
            config.policy.recompute_granularity != "full",
        ],
        text="policy.recompute_num_layers is {policy.recompute_num_layers}; only "
        'policy.recompute_granularity="full" has it. Set policy.recompute_num_layers=null.',
    ),
    Conflict(
        when=lambda config: [config.parallel.pipeline == 1, config.parallel.virtual_pipeline > 1],
        text="parallel.virtual_pipeline is {parallel.virtual_pipeline}; with parallel.pipeline=1 "
        "there are no "
        "stages to take turns. Set it to 1, or raise parallel.pipeline.",
    ),
    Conflict(
        when=lambda config: [config.parallel.pipeline == 1, config.parallel.first_stage_layers],
        text="parallel.first_stage_layers is {parallel.first_stage_layers}; with "
        "parallel.pipeline=1 the one "
        "stage has all layers. Set it to null, or raise parallel.pipeline.",
    ),
    Conflict(
        when=lambda config: [config.parallel.pipeline == 1, config.parallel.last_stage_layers],
        text="parallel.last_stage_layers is {parallel.last_stage_layers}; with "
        "parallel.pipeline=1 the one stage "
        "has all layers. Set it to null, or raise parallel.pipeline.",
    ),
    Conflict(
        when=lambda config: [config.stages.steps, config.run.total_steps],
        text="run.total_steps is {run.total_steps} beside stages.steps, which give the run's "
        "length. Set it to "
        "null.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.importance_correction,
            not config.algorithm.recompute_logprobs,
        ],
        text='algorithm.importance_correction is "{algorithm.importance_correction}"; it weighs '
        "recomputed "
        "log-probs against the engine's. Set algorithm.recompute_logprobs=true, or the former to "
        "null.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.advantage == "pass@k",
            config.algorithm.pass_k > config.rollout.group_size,
        ],
        text="algorithm.pass_k is {algorithm.pass_k}, above rollout.group_size "
        "{rollout.group_size}: a group has "
        "no so many completions. Lower the former.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.advantage == "pass@k",
            exceeds(config.algorithm.pass_k, config.selection.resample_to),
        ],
        text="algorithm.pass_k is {algorithm.pass_k}, above selection.resample_to "
        "{selection.resample_to}, the most of a group that are learned from. Lower the former.",
    ),
    Conflict(
        when=lambda config: [config.selection.resample_to, not config.tools.format],
        text="selection.resample_to is {selection.resample_to}, and tools.format is null: "
        "completions are chosen by their failed calls, and none calls. Set "
        "selection.resample_to=null, or tools.format.",
    ),
    Conflict(
        when=lambda config: [
            config.selection.resample_to,
            not exceeds(config.rollout.group_size, config.selection.resample_to),
        ],
        text="selection.resample_to is {selection.resample_to}, not below rollout.group_size "
        "{rollout.group_size}: nothing is left to choose. Raise rollout.group_size, which says how "
        "many are sampled (GRPO-RoC: twice as many), or set selection.resample_to=null.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.advantage in ("maxrl", "pass@k"),
            kl_in_reward(config.algorithm),
        ],
        text='algorithm.advantage is "{algorithm.advantage}", which counts successes: no KL can '
        "be taken from "
        "them. Set algorithm.kl_in=loss.",
    ),
    Conflict(
        when=lambda config: [config.algorithm.advantage == "maxrl", config.reward.length_penalty],
        text='algorithm.advantage is "maxrl", which counts rewards above 0: reward.length_penalty '
        "would change "
        "nothing, or make a right answer a wrong one. Set it to 0.",
    ),
    Conflict(
        when=lambda config: [config.algorithm.advantage == "maxrl", config.reward.overlong_buffer],
        text='algorithm.advantage is "maxrl", which counts rewards above 0: '
        "reward.overlong_buffer would change "
        "nothing, or make a right answer a wrong one. Set it to 0.",
    ),
    Conflict(
        when=lambda config: [
            config.lora.rank,
            config.algorithm.kl_coef,
            config.algorithm.reference_every_steps,
        ],
        text="algorithm.reference_every_steps is {algorithm.reference_every_steps}, and with "
        "lora.rank "
        "{lora.rank} the reference is the policy without its adapters, which stays what it is. "
        "Set the "
        "former to null, or lora.rank=0.",
    ),
    Conflict(
        when=lambda config: [config.algorithm.kl_ratio, kl_in_reward(config.algorithm)],
        text='algorithm.kl_ratio is "{algorithm.kl_ratio}", a weight of the KL in the loss, and '
        "algorithm.kl_in "
        'is "reward". Set algorithm.kl_ratio=null, or algorithm.kl_in=loss.',
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.kl_ratio,
            kl_in_loss(config.algorithm),
            config.algorithm.kl_estimator not in ("k1", "k3"),
        ],
        text='algorithm.kl_estimator is "{algorithm.kl_estimator}", whose mean is no KL to be '
        "weighed by "
        "algorithm.kl_ratio. Set algorithm.kl_estimator=k3, or algorithm.kl_ratio=null.",
    ),
    Conflict(
        when=lambda config: [config.algorithm.clip_cov_ratio, config.algorithm.kl_cov_ratio],
        text="algorithm.clip_cov_ratio and algorithm.kl_cov_ratio are two ways to hold the same "
        "tokens. Set one "
        "of them to null.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.clip_cov_ratio,
            config.algorithm.clip_cov_high <= config.algorithm.clip_cov_low,
        ],
        text="algorithm.clip_cov_low is {algorithm.clip_cov_low:g}, not below "
        "algorithm.clip_cov_high "
        "{algorithm.clip_cov_high:g}. Lower the former.",
    ),
    Conflict(
        when=lambda config: [config.selection.dynamic_sampling, config.rollout.group_size == 1],
        text="rollout.group_size is 1; selection.dynamic_sampling drops groups without contrast, "
        "and a "
        "completion alone has none. Raise it, or set selection.dynamic_sampling=null.",
    ),
    Conflict(
        when=lambda config: [
            learns_from_the_teacher_alone(config.teacher),
            kl_in_reward(config.algorithm),
        ],
        text='algorithm.kl_in is "reward" and teacher.with_rewards false: no reward is learned '
        "from. Set "
        "algorithm.kl_in=loss, or teacher.with_rewards=true.",
    ),
    Conflict(
        when=lambda config: [
            learns_from_the_teacher_alone(config.teacher),
            config.algorithm.advantage == "gae",
        ],
        text='algorithm.advantage is "gae" and teacher.with_rewards false: the critic would be '
        "trained for "
        "nothing. Set another algorithm.advantage, or teacher.with_rewards=true.",
    ),
    Conflict(
        when=lambda config: [
            config.algorithm.advantage == "gae",
            config.critic.bootstrap_truncated,
            config.parallel.context > 1,
        ],
        text="critic.bootstrap_truncated is true and parallel.context {parallel.context}: the "
        "value after a "
        "completion's last token is not gathered over context ranks. Set it to false, or "
        "parallel.context "
        "to 1.",
    ),
    Conflict(
        when=lambda config: [config.reward.weights, not config.reward.rewards],
        text="reward.weights is for the rewards of reward.rewards, which is empty. List them, or "
        "leave it out.",
    ),
    Conflict(
        when=lambda config: [config.reward.combine == "gdpo", not config.reward.rewards],
        text="reward.combine is for the rewards of reward.rewards, which is empty. List them, or "
        "leave it out.",
    ),
    Conflict(
        when=lambda config: [config.reward.function, config.reward.rewards],
        text="reward.function and reward.rewards are both set. Take the function into the list, as "
        '"mine={reward.function}", and set reward.function=null.',
    ),
    Conflict(
        when=lambda config: [
            config.reward.rewards,
            config.reward.combine == "gdpo",
            config.algorithm.advantage != "grpo",
        ],
        text='algorithm.advantage is "{algorithm.advantage}", and reward.combine=gdpo normalises '
        'as "grpo" does. '
        'Set algorithm.advantage="grpo", or reward.combine=sum.',
    ),
    Conflict(
        when=lambda config: [
            config.reward.rewards,
            config.reward.combine == "gdpo",
            kl_in_reward(config.algorithm),
        ],
        text='algorithm.kl_in is "reward", and with reward.combine=gdpo there is no one reward to '
        "take it from. "
        'Set algorithm.kl_in="loss", or reward.combine=sum.',
    ),
    Conflict(
        when=lambda config: [config.rollout.ranks, config.rollout.tail != "wait"],
        text='rollout.tail is "{rollout.tail}" and rollout.ranks {rollout.ranks}: engines on '
        "ranks of their own "
        "wait for no tail. Set rollout.tail=wait, or rollout.ranks=0.",
    ),
    Conflict(
        when=lambda config: [
            config.rollout.ranks,
            config.rollout.max_concurrent_sequences,
            exceeds(config.rollout.group_size, config.rollout.max_concurrent_sequences),
        ],
        text="rollout.max_concurrent_sequences is {rollout.max_concurrent_sequences} and "
        "rollout.group_size "
        "{rollout.group_size}: an engine begins whole groups. Set it to {rollout.group_size} or "
        "more.",
    ),
    Conflict(
        when=lambda config: [config.rollout.ranks, config.sync.checksum_every],
        text="sync.checksum_every is {sync.checksum_every} and rollout.ranks {rollout.ranks}: the "
        "policy may be "
        "ahead of what an engine has taken. Set sync.checksum_every=0; sync.probe_every compares "
        "log-probs "
        "of a version.",
    ),
    Conflict(
        when=lambda config: [config.rollout.ranks, config.algorithm.rollback],
        text="algorithm.rollback is {algorithm.rollback} and rollout.ranks {rollout.ranks}: "
        "engines that are "
        "ahead of the steps cannot go back. Set algorithm.rollback=0, or rollout.ranks=0.",
    ),
    Conflict(
        when=lambda config: [config.rollout.ranks, config.data.curriculum != "none"],
        text='data.curriculum is "{data.curriculum}" and rollout.ranks {rollout.ranks}: which '
        "pass rates a draw "
        "sees depends on the clock, and no resumed run could draw the same. Set "
        "data.curriculum=none, or "
        "rollout.ranks=0.",
    ),
    Conflict(
        when=lambda config: [
            config.data.curriculum == "band",
            config.data.band_low > config.data.band_high,
        ],
        text="data.band_low is {data.band_low:g}, above data.band_high {data.band_high:g}: no "
        "pass rate lies "
        "between them. Lower the former.",
    ),
    Conflict(
        when=lambda config: [
            config.tools.format,
            config.tools.call_cpu_seconds > config.tools.completion_cpu_seconds,
        ],
        text="tools.call_cpu_seconds is {tools.call_cpu_seconds:g}, above "
        "tools.completion_cpu_seconds {tools.completion_cpu_seconds:g}, which ends a call. Lower "
        "the former.",
    ),
    Conflict(
        when=lambda config: [config.turns.feedback, config.environment.function],
        text='turns.feedback and environment.function "{environment.function}" are both set: one '
        "of them says what follows an answer. Set the other to null.",
    ),
    Conflict(
        when=lambda config: [
            config.turns.feedback is not None,
            not (config.turns.feedback or "").strip(),
        ],
        text="turns.feedback is empty: nothing would be said of a wrong answer. Give it a text, "
        "verdict, or null.",
    ),
    Conflict(
        when=lambda config: [config.answers_turns, config.tools.format],
        text='tools.format is "{tools.format}", and turns.feedback or environment.function is set: '
        "completions that call tools get no further turns yet. Set tools.format=null, or the other "
        "two.",
    ),
    Conflict(
        when=lambda config: [config.answers_turns, config.policy.routing_replay == "engine"],
        text='policy.routing_replay is "engine", and turns.feedback or environment.function is '
        "set: routes of completions with several turns are not kept yet. Set "
        "policy.routing_replay=none (or old, with several updates a step), or the other two to "
        "null.",
    ),
    Conflict(
        when=lambda config: [config.turns.feedback, takes_groups(config.reward)],
        text="turns.feedback is set and reward.function_takes group: each answer is judged as soon "
        "as it is there, before the others of its group. Set reward.function_takes=completion, or "
        "turns.feedback=null.",
    ),
    Conflict(
        when=lambda config: [
            config.answers_turns,
            config.turns.discount < 1,
            config.reward.combine == "gdpo",
        ],
        text="turns.discount is {turns.discount:g}, and with reward.combine=gdpo every reward is "
        "normalised apart, without it. Set turns.discount=1, or reward.combine=sum.",
    ),
    Conflict(
        when=lambda config: [config.policy.routing_replay == "engine", config.rollout.ranks],
        text='policy.routing_replay is "engine" and rollout.ranks {rollout.ranks}: engines on ranks '
        "of their own send no routes yet. Set rollout.ranks=0, or policy.routing_replay=none (or "
        "old, with several updates a step).",
    ),
    Conflict(
        when=lambda config: [config.policy.routing_replay != "none", config.parallel.context > 1],
        text='policy.routing_replay is "{policy.routing_replay}" and parallel.context '
        "{parallel.context}: routes are not split over context ranks yet. Set parallel.context=1, "
        "or policy.routing_replay=none.",
    ),
    Conflict(
        when=lambda config: [
            config.policy.routing_replay == "old",
            any([not config.algorithm.recomputes, config.on_policy]),
        ],
        text='policy.routing_replay is "old", and no pass before the update recomputes log-probs, '
        "whose experts it could take. Set algorithm.recompute_logprobs=true without "
        "algorithm.proximal_logprobs=interpolate, and algorithm.n_minibatches or algorithm.epochs "
        "above 1, or policy.routing_replay=none.",
    ),
    Conflict(
        when=lambda config: [config.validation.keep_best, not config.validation.every_steps],
        text="validation.keep_best needs accuracies to compare. Set validation.every_steps, or "
        "keep_best=false.",
    ),
    Conflict(
        when=lambda config: [config.validation.every_steps, not config.validation.paths],
        text="validation.every_steps is {validation.every_steps}, and validation.paths is empty. "
        "Name files of "
        "problems, or set validation.every_steps=null.",
    ),
)
UNUSED = (
    Unused(
        ["parallel.sequence"],
        when=lambda config: [config.parallel.tensor == 1],
        text="with parallel.tensor=1",
    ),
    Unused(
        ["lora.alpha", "lora.target", "lora.engine", "save.merged_dtype"],
        when=lambda config: [config.lora.rank == 0],
        text="with lora.rank=0: all weights learn",
    ),
    Unused(
        ["save.merged_dtype"],
        when=lambda config: [config.lora.rank, not config.save.merged],
        text="with lora.rank and with save.merged=false: adapters alone are exported",
    ),
    Unused(
        ["memory.offload_reference"],
        when=lambda config: [config.lora.rank, config.algorithm.kl_coef],
        text="with lora.rank and with algorithm.kl_coef: the reference is the policy without its "
        "adapters",
    ),
    Unused(
        ["optimizer.min_lr"],
        when=lambda config: [config.optimizer.decay == "constant"],
        text="with optimizer.decay=constant",
    ),
    Unused(
        [
            *(f"algorithm.{setting.name}" for setting in fields(ObjectiveSettings)),
            "algorithm.early_stop_ratio_low",
            "algorithm.early_stop_kl",
            "algorithm.kl_cov_ratio",
            "algorithm.kl_cov_coef",
            "algorithm.proximal_logprobs",
        ],
        when=lambda config: [
            config.algorithm.n_minibatches == 1,
            config.algorithm.epochs == 1,
            config.algorithm.recompute_logprobs,
        ],
        text="with algorithm.n_minibatches=1 and with algorithm.epochs=1 and with "
        "algorithm.recompute_logprobs: "
        "one minibatch a step is learned from before the policy changes, and every importance "
        "ratio is 1",
    ),
    *unread_by_objectives(),
    Unused(
        ["algorithm.proximal_logprobs"],
        when=lambda config: [not config.algorithm.recompute_logprobs],
        text="with algorithm.recompute_logprobs=false",
    ),
    Unused(
        ["algorithm.pass_k"],
        when=lambda config: [config.algorithm.advantage != "pass@k"],
        text="without algorithm.advantage=pass@k",
    ),
    Unused(
        ["algorithm.entropy_delta"],
        when=lambda config: [not config.algorithm.entropy_target],
        text="without algorithm.entropy_target",
    ),
    Unused(
        ["algorithm.clip_cov_low", "algorithm.clip_cov_high"],
        when=lambda config: [not config.algorithm.clip_cov_ratio],
        text="without algorithm.clip_cov_ratio",
    ),
    Unused(
        ["algorithm.kl_cov_coef"],
        when=lambda config: [not config.algorithm.kl_cov_ratio],
        text="without algorithm.kl_cov_ratio",
    ),
    Unused(
        [
            "algorithm.importance_cap",
            "algorithm.importance_mask_low",
            "algorithm.importance_mask_high",
        ],
        when=lambda config: [not config.algorithm.importance_correction],
        text="without algorithm.importance_correction",
    ),
    Unused(
        ["algorithm.importance_cap"],
        when=lambda config: [
            config.algorithm.importance_mask_high,
            not exceeds(config.algorithm.importance_mask_high, config.algorithm.importance_cap),
        ],
        text="with algorithm.importance_mask_high and without "
        "algorithm.importance_mask_high>algorithm.importance_cap",
    ),
    Unused(
        [
            "memory.offload_reference",
            "algorithm.reference_every_steps",
            "algorithm.kl_in",
            "algorithm.kl_ratio",
        ],
        when=lambda config: [config.algorithm.kl_coef == 0],
        text="with algorithm.kl_coef=0: there is no reference",
    ),
    Unused(
        ["critic.", "memory.offload_critic"],
        when=lambda config: [config.algorithm.advantage != "gae"],
        text="without algorithm.advantage=gae",
    ),
    Unused(
        ["critic.policy_lambda"],
        when=lambda config: [config.critic.policy_length_alpha],
        text="with critic.policy_length_alpha",
    ),
    Unused(
        ["teacher.loss", "teacher.coef", "teacher.with_rewards", "memory.offload_teacher"],
        when=lambda config: [not config.teacher.path],
        text="without teacher.path",
    ),
    Unused(
        ["selection.max_extra_prompts"],
        when=lambda config: [not config.selection.dynamic_sampling],
        text="without selection.dynamic_sampling",
    ),
    Unused(
        ["reward.mask_no_eos_with_zero"],
        when=lambda config: [config.selection.drop_truncated],
        text="with selection.drop_truncated",
    ),
    Unused(
        ["reward.function_failure"],
        when=lambda config: [config.reward.rewards],
        text="with reward.rewards: what fails is left out",
    ),
    Unused(
        ["reward.function_takes"],
        when=lambda config: [not config.reward.function, not config.reward.rewards],
        text="without reward.function and without reward.rewards: no function of yours gives a "
        "reward",
    ),
    Unused(
        ["reward.output_scaling", "reward.output_bias"],
        when=lambda config: [config.reward.combine == "gdpo"],
        text="with reward.combine=gdpo: every reward of the list is normalised apart",
    ),
    Unused(
        ["tools."],
        when=lambda config: [not config.tools.format],
        text="without tools.format",
    ),
    Unused(
        ["turns."],
        when=lambda config: [not config.answers_turns],
        text="without turns.feedback and without environment.function",
    ),
    Unused(
        ["environment."],
        when=lambda config: [not config.environment.function],
        text="without environment.function",
    ),
    Unused(
        ["tools.sessions"],
        when=lambda config: [config.tools.format, config.tools.state == "fresh"],
        text="with tools.format and with tools.state=fresh",
    ),
    Unused(
        ["rollout.max_staleness"],
        when=lambda config: [config.rollout.tail != "carry", not config.rollout.ranks],
        text="without rollout.tail=carry and without rollout.ranks",
    ),
    Unused(
        ["rollout.memory_share"],
        when=lambda config: [config.rollout.kv_cache_gib],
        text="with rollout.kv_cache_gib",
    ),
    Unused(
        ["rollout.slice_tokens"],
        when=lambda config: [config.rollout.tail == "wait"],
        text="with rollout.tail=wait",
    ),
    Unused(
        ["rollout.max_groups_in_flight"],
        when=lambda config: [config.rollout.tail != "carry"],
        text="without rollout.tail=carry",
    ),
    Unused(
        ["rollout.on_new_weights", "rollout.max_concurrent_sequences"],
        when=lambda config: [config.rollout.ranks == 0],
        text="with rollout.ranks=0",
    ),
    Unused(
        ["rollout.on_new_weights"],
        when=lambda config: [config.rollout.ranks, config.rollout.max_staleness == 0],
        text="with rollout.ranks and with rollout.max_staleness=0: nothing is being sampled when "
        "new weights "
        "come",
    ),
    Unused(
        ["memory.offload_gradients", "memory.offload_optimizer", "memory.offload_parameters"],
        when=lambda config: [config.rollout.ranks],
        text="with rollout.ranks: no engine takes turns with training on the same memory",
    ),
    Unused(
        [
            "algorithm.rollback_lr_factor",
            "algorithm.rollback_reward_drop",
            "algorithm.rollback_reward_steps",
        ],
        when=lambda config: [config.algorithm.rollback == 0],
        text="with algorithm.rollback=0",
    ),
    Unused(
        ["algorithm.rollback_reward_steps"],
        when=lambda config: [config.algorithm.rollback, not config.algorithm.rollback_reward_drop],
        text="with algorithm.rollback and without algorithm.rollback_reward_drop",
    ),
    Unused(
        ["data.solved_samples"],
        when=lambda config: [config.data.curriculum != "skip_solved"],
        text="without data.curriculum=skip_solved",
    ),
    Unused(
        ["data.band_low", "data.band_high"],
        when=lambda config: [config.data.curriculum != "band"],
        text="without data.curriculum=band",
    ),
    Unused(
        ["data.curriculum_floor"],
        when=lambda config: [config.data.curriculum == "none"],
        text="with data.curriculum=none",
    ),
    Unused(
        ["run.total_epochs", "rollout.max_new_tokens"],
        when=lambda config: [config.stages.steps],
        text="with stages.steps",
    ),
    Unused(
        ["policy.max_tokens_per_microbatch"],
        when=lambda config: [config.stages.max_tokens_per_microbatch],
        text="with stages.max_tokens_per_microbatch",
    ),
    Unused(
        ["validation."],
        when=lambda config: [not config.validation.every_steps],
        text="without validation.every_steps",
    ),
    Unused(
        ["validation.samples", "validation.top_p"],
        when=lambda config: [config.validation.every_steps, config.validation.temperature == 0],
        text="with validation.every_steps and with validation.temperature=0",
    ),
)
DOUBTFUL = (
    Doubt(
        when=lambda config: [config.rollout.tail == "carry", config.rollout.max_staleness == 0],
        text='rollout.tail="carry" carries nothing with rollout.max_staleness=0: a step finishes '
        "what it begins.",
    ),
    Doubt(
        when=lambda config: [
            config.data.curriculum == "band",
            config.data.band_low == 0,
            config.data.band_high == 1,
        ],
        text='data.curriculum="band" skips nothing with data.band_low=0 and data.band_high=1.',
    ),
    Doubt(
        when=lambda config: [
            goes_back_when_rewards_fall(config.algorithm),
            config.data.curriculum != "none",
        ],
        text="algorithm.rollback_reward_drop: data.curriculum skips prompts that the policy "
        "solves, and rewards "
        "may fall without a worse policy.",
    ),
    Doubt(
        when=lambda config: [goes_back_when_rewards_fall(config.algorithm), config.stages.steps],
        text="algorithm.rollback_reward_drop: stages change the length of completions, and "
        "rewards may fall "
        "without a worse policy.",
    ),
    Doubt(
        when=lambda config: [config.tools.format, config.tools.isolation == "none"],
        text='tools.isolation="none": what the model writes runs with your rights, files and '
        "network.",
    ),
    *doubts_of_objectives(),
    Doubt(
        when=lambda config: [
            kl_in_loss(config.algorithm),
            config.algorithm.kl_estimator == "k1",
            not config.algorithm.kl_ratio,
        ],
        text='algorithm.kl_estimator="k1" in the loss has an expected gradient of 0 and holds '
        'nothing back; "k2" '
        "has that of the KL.",
    ),
    Doubt(
        when=lambda config: [kl_in_reward(config.algorithm), config.algorithm.kl_estimator != "k1"],
        text='algorithm.kl_estimator="{algorithm.kl_estimator}" in the reward has no gradient of '
        "first order "
        'near the reference; "k1" has that of the KL.',
    ),
    Doubt(
        when=lambda config: [kl_in_reward(config.algorithm), config.algorithm.advantage == "grpo"],
        text='algorithm.advantage="grpo" divides by the group\'s deviation: where all rewards of '
        "a group are "
        'equal, the KL alone makes it. "rloo", "dr_grpo", "ppo" and kl_in="loss" do not.',
    ),
    Doubt(
        when=lambda config: [
            config.selection.dynamic_sampling,
            not config.selection.max_extra_prompts,
        ],
        text="selection.dynamic_sampling drops groups and, with selection.max_extra_prompts=0, "
        "samples none in "
        "their place.",
    ),
    Doubt(
        when=lambda config: [
            config.selection.dynamic_sampling,
            config.algorithm.advantage == "gae",
            config.rollout.group_size > 1,
        ],
        text='selection.dynamic_sampling drops groups without contrast; algorithm.advantage="gae" '
        "compares with "
        "a critic's values, and could learn from them.",
    ),
    Doubt(
        when=lambda config: [
            config.selection.dynamic_sampling,
            learns_from_the_teacher_alone(config.teacher),
        ],
        text="selection.dynamic_sampling drops groups by their rewards, and with "
        "teacher.with_rewards=false the "
        "teacher would teach them, too. Set selection.dynamic_sampling=null.",
    ),
)


# ---------------------------------------------------------------- what holds of a run


def conflicts(config: Config) -> Iterator[str]:
    """The texts of CONFLICTS that hold."""
    return _texts(CONFLICTS, config)


def doubts(config: Config) -> Iterator[str]:
    """The texts of DOUBTFUL that hold."""
    return _texts(DOUBTFUL, config)


def without_effect(config: Config, changed: Sequence[str]) -> Iterator[str]:
    """The texts of UNUSED about the settings that are `changed`."""
    for rule in UNUSED:
        keys = [key for key in changed if is_among(key, rule.keys)]
        if keys and rule.holds(config):
            yield f"{', '.join(keys)}: no effect {rule.text}."


def _texts(rules: Iterable[Rule], config: Config) -> Iterator[str]:
    for rule in rules:
        if rule.holds(config):
            yield rule.text.format_map(vars(config))
