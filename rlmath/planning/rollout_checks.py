"""What is wrong with partial rollouts, tail batching and engines on ranks of their own, and what of them changes
nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.schema import AlgorithmConfig, Config, MemoryConfig, RolloutConfig


def partial_rollout_problems(config: Config) -> Iterator[str]:
    """What does not go with completions that several versions of the policy sample."""
    rollout, algorithm, per_step = config.rollout, config.algorithm, config.data.prompts_per_step
    if rollout.tail != "carry":
        return
    in_flight, oldest = rollout.max_groups_in_flight, rollout.max_staleness
    if in_flight is not None and not per_step <= in_flight <= per_step * (oldest + 1):
        yield (
            f"rollout.max_groups_in_flight is {in_flight}; needed: from data.prompts_per_step, {per_step}, as a step "
            f"learns from so many groups, to data.prompts_per_step x (rollout.max_staleness + 1) = "
            f"{per_step} x {oldest + 1} = {per_step * (oldest + 1)}, since more could not all be learned in time. "
            "Change it, or rollout.max_staleness."
        )
    if oldest > 0:
        yield from _old_token_problems(algorithm, 'rollout.tail is "carry"')


def _old_token_problems(algorithm: AlgorithmConfig, got: str) -> Iterator[str]:
    """What a loss needs to learn from tokens of older versions of the policy, where its ratio is not to these."""
    corrected = algorithm.importance_correction is not None
    bounded = algorithm.importance_cap is not None or algorithm.importance_mask_high is not None
    if algorithm.recompute_logprobs and not (corrected and bounded):
        yield (
            f"{got}: older versions of the policy sample a part of the tokens, and the ratio to recomputed log-probs "
            "leaves that uncorrected. Needed is a bounded weight per token: algorithm.importance_correction=token and "
            "algorithm.importance_mask_high=5 (or algorithm.importance_cap), as in configs/algorithms/decoupled.yaml; "
            "or rollout.max_staleness=0; or algorithm.recompute_logprobs=false, where the clip bounds the ratio to the "
            "older versions (AReaL without use_decoupled_loss)."
        )


def old_token_warnings(config: Config) -> Iterator[str]:
    """The loss of a run that learns from tokens of older versions."""
    rollout, algorithm = config.rollout, config.algorithm
    old = rollout.max_staleness > 0 and (rollout.tail == "carry" or rollout.ranks > 0)
    if old and not algorithm.recompute_logprobs:
        yield (
            f"algorithm.recompute_logprobs=false with rollout.max_staleness={rollout.max_staleness}: the loss clips "
            "the ratio to the versions that sampled the tokens, and tokens that the policy has moved away from since "
            "give no gradient. configs/algorithms/decoupled.yaml has the loss that is made for old tokens."
        )


def asynchronous_problems(config: Config) -> Iterator[str]:
    """What does not go with engines on ranks of their own."""
    rollout = config.rollout
    if rollout.ranks < 1:
        return
    if rollout.tail != "wait":
        yield (
            f'rollout.tail is "{rollout.tail}" and rollout.ranks {rollout.ranks}: engines on ranks of their own sample '
            "on while the others train, so that no step waits for its longest completions. Set rollout.tail=wait, "
            "or rollout.ranks=0."
        )
    elif rollout.max_staleness > 0:
        got = f"rollout.ranks is {rollout.ranks} and rollout.max_staleness {rollout.max_staleness}"
        yield from _old_token_problems(config.algorithm, got)
    if rollout.max_concurrent_sequences is not None and rollout.max_concurrent_sequences < rollout.group_size:
        yield (
            f"rollout.max_concurrent_sequences is {rollout.max_concurrent_sequences} and rollout.group_size "
            f"{rollout.group_size}: an engine begins whole groups. Set it to {rollout.group_size} or more."
        )
    if config.sync.checksum_every > 0:
        yield (
            f"sync.checksum_every is {config.sync.checksum_every} and rollout.ranks {rollout.ranks}: when an engine on "
            "ranks of its own has taken a version, the policy may be ahead of it already, and there is nothing to "
            "compare with. Set sync.checksum_every=0; sync.probe_every compares log-probs of a version."
        )


def asynchronous_warnings(config: Config) -> Iterator[str]:
    """Settings that change nothing with engines on ranks of their own, or without."""
    rollout, memory = config.rollout, config.memory
    if rollout.ranks == 0:
        names, default, without = (
            ("on_new_weights", "max_concurrent_sequences"),
            RolloutConfig(),
            "rollout.ranks=0",
        )
        changed = [f"rollout.{name}" for name in names if getattr(rollout, name) != getattr(default, name)]
        if changed:
            yield f"{', '.join(changed)}: no effect with {without}."
        return
    names = ("offload_gradients", "offload_optimizer", "offload_parameters")
    changed = [f"memory.{name}" for name in names if getattr(memory, name) != getattr(MemoryConfig(), name)]
    if changed:
        yield (
            f"{', '.join(changed)}: no effect with rollout.ranks={rollout.ranks}, since no engine takes turns with "
            "training on the same memory."
        )
    if rollout.max_staleness == 0 and rollout.on_new_weights != RolloutConfig().on_new_weights:
        yield (
            f'rollout.on_new_weights="{rollout.on_new_weights}" has no effect with rollout.max_staleness=0: nothing is '
            "being sampled when new weights come."
        )


def partial_rollout_warnings(config: Config) -> Iterator[str]:
    """Settings of partial rollouts that change nothing in this run, or that fit the rest badly."""
    rollout, default = config.rollout, RolloutConfig()
    used = {
        "wait": (),
        "carry": ("max_staleness", "slice_tokens", "max_groups_in_flight"),
        "defer": ("slice_tokens",),
    }
    names = [name for name in used["carry"] if getattr(rollout, name) != getattr(default, name)]
    used_here = (*used[rollout.tail], *(("max_staleness",) if rollout.ranks else ()))
    unused = [f"rollout.{name}" for name in names if name not in used_here]
    if unused:
        yield f'{", ".join(unused)}: no effect with rollout.tail="{rollout.tail}".'
    if rollout.tail == "carry" and rollout.max_staleness == 0:
        yield 'rollout.tail="carry" carries nothing with rollout.max_staleness=0: a step finishes what it begins.'
    if config.algorithm.advantage in ("ppo", "reinforce++", "gae"):
        compares = (
            f'algorithm.advantage="{config.algorithm.advantage}" compares a completion with all of its step'
        )
        if rollout.tail == "defer":
            yield (
                f'{compares}, and with rollout.tail="defer" a step has short groups only, or long ones: take '
                'rollout.tail="carry" with rollout.max_staleness=1, or advantages of a group ("grpo", "dr_grpo", '
                '"rloo").'
            )
        if rollout.tail == "carry" and rollout.max_staleness > 1:
            yield (
                f"{compares}, and with rollout.max_staleness={rollout.max_staleness} some steps have more of the short "
                "groups and others more of the long ones: take rollout.max_staleness=1, or advantages of a group "
                '("grpo", "dr_grpo", "rloo").'
            )
    longest = max(config.stages.max_new_tokens or [rollout.max_new_tokens])
    if rollout.tail == "defer" and (rollout.slice_tokens or 0) >= longest:
        yield (
            f"rollout.slice_tokens={rollout.slice_tokens} is no less than the longest completion ({longest} tokens): "
            "nothing is deferred."
        )
