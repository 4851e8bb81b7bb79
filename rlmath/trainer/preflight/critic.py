"""What is wrong with the settings of a critic, and which of them change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.config.help import nearest_path
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, CriticConfig
from rlmath.models.hf_config import inspect_critic_folder
from rlmath.trainer.preflight import parallelism


def critic_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Of a policy of this shape: the critic's folder, its layout, and settings that do not go together."""
    critic = config.critic
    if config.algorithm.advantage != "gae":
        return
    if critic.path is not None:
        found, problems = inspect_critic_folder(Path(critic.path), shape)
        near = nearest_path(Path(critic.path)) if not Path(critic.path).exists() else ""
        yield from (problem + near for problem in problems)
        if found is not None and not problems:
            one_engine = 1
            for problem in parallelism.layout_problems(config.parallel, one_engine, config.policy, found):
                yield f"of the model in critic.path, which is laid out like the policy: {problem}"
            if found.max_positions < config.data.max_prompt_tokens + config.rollout.max_new_tokens:
                yield (
                    f"the model in critic.path has {found.max_positions} positions (max_position_embeddings); "
                    f"data.max_prompt_tokens + rollout.max_new_tokens is {config.data.max_prompt_tokens} + "
                    f"{config.rollout.max_new_tokens}. Lower the sum, or take another model."
                )
    if config.teacher.path is not None and not config.teacher.with_rewards:
        yield (
            'algorithm.advantage is "gae" and teacher.with_rewards false: a critic values rewards, and nothing is to '
            "be learned from these. Set teacher.with_rewards=true, or another algorithm.advantage."
        )
    if critic.bootstrap_truncated and config.parallel.context > 1:
        yield (
            f"critic.bootstrap_truncated is true and parallel.context {config.parallel.context}: the value after a "
            "completion's last token is not gathered over context ranks. Set it to false, or parallel.context to 1."
        )


def critic_warnings(config: Config) -> Iterator[str]:
    """Settings of a critic that change nothing in this run, or less than one may think."""
    critic, default = config.critic, CriticConfig()
    changed = [f"critic.{name}" for name in vars(default) if getattr(critic, name) != getattr(default, name)]
    if config.algorithm.advantage != "gae":
        changed += ["memory.offload_critic"] * config.memory.offload_critic
        if changed:
            yield f'{", ".join(changed)}: no effect with algorithm.advantage="{config.algorithm.advantage}".'
        return
    if critic.policy_length_alpha is not None and critic.policy_lambda != default.policy_lambda:
        yield "critic.policy_lambda has no effect with critic.policy_length_alpha."
    if config.rollout.group_size > 1 and config.selection.dynamic_sampling is not None:
        yield (
            'selection.dynamic_sampling drops groups without contrast; algorithm.advantage="gae" compares with a '
            "critic's values, and could learn from them."
        )
