"""Settings that do not go together, as tables of text: what is refused, what changes nothing, and what is doubtful.

A row is about runs with, or without, values of settings: "rollout.tail=carry,defer" one of these, "data.band_low>0.5"
and "data.band_low>data.band_high" a larger number, "rollout.ranks" anything but 0, false, null, "" and an empty list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmath.config.help import as_yaml_word, is_among, setting_values
from rlmath.config.schema import Config

CONFLICTS = """
with optimizer.min_lr>optimizer.lr: optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}. Lower it.
with optimizer.kind=sgd and with optimizer.distributed: optimizer.distributed: Megatron shares only Adam's state. With
    kind "sgd" set it to false.
with policy.recompute_granularity=full and without policy.recompute_method: policy.recompute_method is null;
    policy.recompute_granularity="full" needs it. Set, say, policy.recompute_method=uniform.
with policy.recompute_granularity=full and without policy.recompute_num_layers: policy.recompute_num_layers is null;
    policy.recompute_granularity="full" needs it. Set, say, policy.recompute_num_layers=1.
with policy.recompute_method and without policy.recompute_granularity=full: policy.recompute_method is
    {policy.recompute_method}; only policy.recompute_granularity="full" has it. Set it to null.
with policy.recompute_num_layers and without policy.recompute_granularity=full: policy.recompute_num_layers is
    {policy.recompute_num_layers}; only policy.recompute_granularity="full" has it. Set
    policy.recompute_num_layers=null.
with parallel.pipeline=1 and with parallel.virtual_pipeline>1: parallel.virtual_pipeline is {parallel.virtual_pipeline};
    with parallel.pipeline=1 there are no stages to take turns. Set it to 1, or raise parallel.pipeline.
with parallel.pipeline=1 and with parallel.first_stage_layers: parallel.first_stage_layers is
    {parallel.first_stage_layers}; with parallel.pipeline=1 the one stage has all layers. Set it to null, or raise
    parallel.pipeline.
with parallel.pipeline=1 and with parallel.last_stage_layers: parallel.last_stage_layers is
    {parallel.last_stage_layers}; with parallel.pipeline=1 the one stage has all layers. Set it to null, or raise
    parallel.pipeline.
with stages.steps and with run.total_steps: run.total_steps is {run.total_steps} beside stages.steps, which give the
    run's length. Set it to null.
with algorithm.importance_correction and without algorithm.recompute_logprobs: algorithm.importance_correction is
    "{algorithm.importance_correction}"; it weighs recomputed log-probs against the engine's. Set
    algorithm.recompute_logprobs=true, or the former to null.
with algorithm.advantage=pass@k and with algorithm.pass_k>rollout.group_size: algorithm.pass_k is {algorithm.pass_k},
    above rollout.group_size {rollout.group_size}: a group has no so many completions. Lower the former.
with algorithm.advantage=maxrl,pass@k and with algorithm.kl_in=reward and with algorithm.kl_coef: algorithm.advantage is
    "{algorithm.advantage}", which counts successes: no KL can be taken from them. Set algorithm.kl_in=loss.
with algorithm.advantage=maxrl and with reward.length_penalty: algorithm.advantage is "maxrl", which counts rewards
    above 0: reward.length_penalty would change nothing, or make a right answer a wrong one. Set it to 0.
with algorithm.advantage=maxrl and with reward.overlong_buffer: algorithm.advantage is "maxrl", which counts rewards
    above 0: reward.overlong_buffer would change nothing, or make a right answer a wrong one. Set it to 0.
with lora.rank and with algorithm.kl_coef and with algorithm.reference_every_steps: algorithm.reference_every_steps is
    {algorithm.reference_every_steps}, and with lora.rank {lora.rank} the reference is the policy without its adapters,
    which stays what it is. Set the former to null, or lora.rank=0.
with algorithm.kl_ratio and with algorithm.kl_coef and with algorithm.kl_in=reward: algorithm.kl_ratio is
    "{algorithm.kl_ratio}", a weight of the KL in the loss, and algorithm.kl_in is "reward". Set
    algorithm.kl_ratio=null, or algorithm.kl_in=loss.
with algorithm.kl_ratio and with algorithm.kl_coef and with algorithm.kl_in=loss and without
    algorithm.kl_estimator=k1,k3: algorithm.kl_estimator is "{algorithm.kl_estimator}", whose mean is no KL to be
    weighed by algorithm.kl_ratio. Set algorithm.kl_estimator=k3, or algorithm.kl_ratio=null.
with algorithm.clip_cov_ratio and with algorithm.kl_cov_ratio: algorithm.clip_cov_ratio and algorithm.kl_cov_ratio are
    two ways to hold the same tokens. Set one of them to null.
with algorithm.clip_cov_ratio and without algorithm.clip_cov_high>algorithm.clip_cov_low: algorithm.clip_cov_low is
    {algorithm.clip_cov_low:g}, not below algorithm.clip_cov_high {algorithm.clip_cov_high:g}. Lower the former.
with selection.dynamic_sampling and with rollout.group_size=1: rollout.group_size is 1; selection.dynamic_sampling drops
    groups without contrast, and a completion alone has none. Raise it, or set selection.dynamic_sampling=null.
with teacher.path and without teacher.with_rewards and with algorithm.kl_coef and with algorithm.kl_in=reward:
    algorithm.kl_in is "reward" and teacher.with_rewards false: no reward is learned from. Set algorithm.kl_in=loss, or
    teacher.with_rewards=true.
with teacher.path and without teacher.with_rewards and with algorithm.advantage=gae: algorithm.advantage is "gae" and
    teacher.with_rewards false: the critic would be trained for nothing. Set another algorithm.advantage, or
    teacher.with_rewards=true.
with algorithm.advantage=gae and with critic.bootstrap_truncated and with parallel.context>1: critic.bootstrap_truncated
    is true and parallel.context {parallel.context}: the value after a completion's last token is not gathered over
    context ranks. Set it to false, or parallel.context to 1.
with reward.weights and without reward.rewards: reward.weights is for the rewards of reward.rewards, which is empty.
    List them, or leave it out.
with reward.combine=gdpo and without reward.rewards: reward.combine is for the rewards of reward.rewards, which is
    empty. List them, or leave it out.
with reward.function and with reward.rewards: reward.function and reward.rewards are both set. Take the function into
    the list, as "mine={reward.function}", and set reward.function=null.
with reward.rewards and with reward.combine=gdpo and without algorithm.advantage=grpo: algorithm.advantage is
    "{algorithm.advantage}", and reward.combine=gdpo normalises as "grpo" does. Set algorithm.advantage="grpo", or
    reward.combine=sum.
with reward.rewards and with reward.combine=gdpo and with algorithm.kl_in=reward and with algorithm.kl_coef:
    algorithm.kl_in is "reward", and with reward.combine=gdpo there is no one reward to take it from. Set
    algorithm.kl_in="loss", or reward.combine=sum.
with rollout.ranks and without rollout.tail=wait: rollout.tail is "{rollout.tail}" and rollout.ranks {rollout.ranks}:
    engines on ranks of their own wait for no tail. Set rollout.tail=wait, or rollout.ranks=0.
with rollout.ranks and with rollout.max_concurrent_sequences and with
    rollout.group_size>rollout.max_concurrent_sequences: rollout.max_concurrent_sequences is
    {rollout.max_concurrent_sequences} and rollout.group_size {rollout.group_size}: an engine begins whole groups. Set
    it to {rollout.group_size} or more.
with rollout.ranks and with sync.checksum_every: sync.checksum_every is {sync.checksum_every} and rollout.ranks
    {rollout.ranks}: the policy may be ahead of what an engine has taken. Set sync.checksum_every=0; sync.probe_every
    compares log-probs of a version.
with rollout.ranks and with algorithm.rollback: algorithm.rollback is {algorithm.rollback} and rollout.ranks
    {rollout.ranks}: engines that are ahead of the steps cannot go back. Set algorithm.rollback=0, or rollout.ranks=0.
with rollout.ranks and without data.curriculum=none: data.curriculum is "{data.curriculum}" and rollout.ranks
    {rollout.ranks}: which pass rates a draw sees depends on the clock, and no resumed run could draw the same. Set
    data.curriculum=none, or rollout.ranks=0.
with data.curriculum=band and with data.band_low>data.band_high: data.band_low is {data.band_low:g}, above
    data.band_high {data.band_high:g}: no pass rate lies between them. Lower the former.
with validation.keep_best and without validation.every_steps: validation.keep_best needs accuracies to compare. Set
    validation.every_steps, or keep_best=false.
with validation.every_steps and without validation.paths: validation.every_steps is {validation.every_steps}, and
    validation.paths is empty. Name files of problems, or set validation.every_steps=null.
"""
"""What is refused: in which runs; what was got, what is needed and what to change."""
UNUSED = """
parallel.sequence: with parallel.tensor=1
lora.alpha lora.target: with lora.rank=0; all weights learn
memory.offload_reference: with lora.rank and with algorithm.kl_coef; the reference is the policy without its adapters
optimizer.min_lr: with optimizer.decay=constant
algorithm.loss algorithm.clip_ratio algorithm.clip_ratio_high algorithm.dual_clip algorithm.early_stop_ratio_low
    algorithm.early_stop_kl algorithm.kl_cov_ratio algorithm.kl_cov_coef algorithm.sapo_temperature_pos
    algorithm.sapo_temperature_neg algorithm.proximal_logprobs: with algorithm.n_minibatches=1 and with
    algorithm.epochs=1 and with algorithm.recompute_logprobs; one minibatch a step is learned from before the policy
    changes, and every importance ratio is 1
algorithm.dual_clip: with algorithm.loss=cispo,gmpo,sapo
algorithm.clip_ratio algorithm.clip_ratio_high: with algorithm.loss=sapo; its gate has no bounds
algorithm.proximal_logprobs: with algorithm.recompute_logprobs=false
algorithm.pass_k: without algorithm.advantage=pass@k
algorithm.entropy_delta: without algorithm.entropy_target
algorithm.clip_cov_low algorithm.clip_cov_high: without algorithm.clip_cov_ratio
algorithm.kl_cov_coef: without algorithm.kl_cov_ratio
algorithm.sapo_temperature_pos algorithm.sapo_temperature_neg: without algorithm.loss=sapo
algorithm.importance_cap algorithm.importance_mask_low algorithm.importance_mask_high: without
    algorithm.importance_correction
algorithm.importance_cap: with algorithm.importance_mask_high and without
    algorithm.importance_mask_high>algorithm.importance_cap
memory.offload_reference algorithm.reference_every_steps algorithm.kl_in algorithm.kl_ratio: with algorithm.kl_coef=0;
    there is no reference
critic. memory.offload_critic: without algorithm.advantage=gae
critic.policy_lambda: with critic.policy_length_alpha
teacher.loss teacher.coef teacher.with_rewards memory.offload_teacher: without teacher.path
selection.max_extra_prompts: without selection.dynamic_sampling
reward.mask_no_eos_with_zero: with selection.drop_truncated
reward.function_failure: with reward.rewards; what fails is left out
reward.function_takes: without reward.function and without reward.rewards; no function of yours gives a reward
reward.output_scaling reward.output_bias: with reward.combine=gdpo; every reward of the list is normalised apart
rollout.max_staleness: without rollout.tail=carry and without rollout.ranks
rollout.memory_share: with rollout.kv_cache_gib
rollout.slice_tokens: with rollout.tail=wait
rollout.max_groups_in_flight: without rollout.tail=carry
rollout.on_new_weights rollout.max_concurrent_sequences: with rollout.ranks=0
rollout.on_new_weights: with rollout.ranks and with rollout.max_staleness=0; nothing is being sampled when new weights
    come
memory.offload_gradients memory.offload_optimizer memory.offload_parameters: with rollout.ranks; no engine takes turns
    with training on the same memory
algorithm.rollback_lr_factor algorithm.rollback_reward_drop algorithm.rollback_reward_steps: with algorithm.rollback=0
algorithm.rollback_reward_steps: with algorithm.rollback and without algorithm.rollback_reward_drop
data.solved_samples: without data.curriculum=skip_solved
data.band_low data.band_high: without data.curriculum=band
data.curriculum_floor: with data.curriculum=none
run.total_epochs rollout.max_new_tokens: with stages.steps
policy.max_tokens_per_microbatch: with stages.max_tokens_per_microbatch
validation.: without validation.every_steps
validation.samples validation.top_p: with validation.every_steps and with validation.temperature=0
"""
"""Settings, or whole sections, that have no effect in such runs; and why."""
DOUBTFUL = """
with rollout.tail=carry and with rollout.max_staleness=0: rollout.tail="carry" carries nothing with
    rollout.max_staleness=0: a step finishes what it begins.
with data.curriculum=band and with data.band_low=0 and with data.band_high=1: data.curriculum="band" skips nothing with
    data.band_low=0 and data.band_high=1.
with algorithm.rollback and with algorithm.rollback_reward_drop and without data.curriculum=none:
    algorithm.rollback_reward_drop: data.curriculum skips prompts that the policy solves, and rewards may fall without a
    worse policy.
with algorithm.rollback and with algorithm.rollback_reward_drop and with stages.steps: algorithm.rollback_reward_drop:
    stages change the length of completions, and rewards may fall without a worse policy.
with algorithm.loss=gspo and with algorithm.clip_ratio>0.01: algorithm.clip_ratio={algorithm.clip_ratio:g} hardly ever
    clips the mean ratio of a completion; GSPO's paper has 3e-4, and 4e-4 for algorithm.clip_ratio_high.
with algorithm.loss=gmpo and with algorithm.clip_ratio=0.2 and without algorithm.clip_ratio_high:
    algorithm.clip_ratio=0.2 bounds the log of a token's ratio with algorithm.loss=gmpo; its paper has 0.4.
with algorithm.kl_coef and with algorithm.kl_in=loss and with algorithm.kl_estimator=k1 and without algorithm.kl_ratio:
    algorithm.kl_estimator="k1" in the loss has an expected gradient of 0 and holds nothing back; "k2" has that of the
    KL.
with algorithm.kl_coef and with algorithm.kl_in=reward and without algorithm.kl_estimator=k1:
    algorithm.kl_estimator="{algorithm.kl_estimator}" in the reward has no gradient of first order near the reference;
    "k1" has that of the KL.
with algorithm.kl_coef and with algorithm.kl_in=reward and with algorithm.advantage=grpo: algorithm.advantage="grpo"
    divides by the group's deviation: where all rewards of a group are equal, the KL alone makes it. "rloo", "dr_grpo",
    "ppo" and kl_in="loss" do not.
with selection.dynamic_sampling and without selection.max_extra_prompts: selection.dynamic_sampling drops groups and,
    with selection.max_extra_prompts=0, samples none in their place.
with selection.dynamic_sampling and with algorithm.advantage=gae and with rollout.group_size>1:
    selection.dynamic_sampling drops groups without contrast; algorithm.advantage="gae" compares with a critic's values,
    and could learn from them.
with selection.dynamic_sampling and with teacher.path and without teacher.with_rewards: selection.dynamic_sampling drops
    groups by their rewards, and with teacher.with_rewards=false the teacher would teach them, too. Set
    selection.dynamic_sampling=null.
"""
"""What is told at the start, and is no error."""


def conflicts(config: Config) -> Iterator[str]:
    """The texts of CONFLICTS that hold."""
    return _texts(CONFLICTS, config)


def doubts(config: Config) -> Iterator[str]:
    """The texts of DOUBTFUL that hold."""
    return _texts(DOUBTFUL, config)


def without_effect(config: Config, changed: Sequence[str]) -> Iterator[str]:
    """What UNUSED has of the settings that are `changed`."""
    values = setting_values(config)
    for keys, rest in _rows(UNUSED):
        when, _, why = rest.partition("; ")
        if holds(when, values) and (given := [key for key in changed if is_among(key, keys.split())]):
            yield f"{', '.join(given)}: no effect {when}{why and ': '}{why}."


def _texts(table: str, config: Config) -> Iterator[str]:
    values = setting_values(config)
    for when, text in _rows(table):
        if holds(when, values):
            yield text.format_map(vars(config))


def _rows(table: str) -> Iterator[tuple[str, str]]:
    """What stands before the colon of every row, and behind it."""
    for line in table.replace("\n    ", " ").strip().split("\n"):
        head, _, rest = line.partition(": ")
        yield head, rest


def holds(when: str, values: Mapping[str, Any]) -> bool:
    """Whether clauses such as "with lora.rank and without optimizer.kind=sgd" are so of settings by their keys."""
    return all([_is_so(*clause.split(" "), values) for clause in when.split(" and ")])


def _is_so(word: str, said: str, values: Mapping[str, Any]) -> bool:
    """Whether what is said of a value is so, or with the word "without" is not."""
    key, sign, other = re.fullmatch(r"([\w.]+)([=>]?)(.*)", said).groups()
    value = values[key]
    if sign == ">":
        limit = values[other] if other in values else float(other)
        is_so = value is not None and limit is not None and value > limit
    elif sign:
        is_so = (f"{value:g}" if isinstance(value, float) else as_yaml_word(value)) in other.split(",")
    else:
        is_so = bool(value)
    return is_so == (word == "with")
