"""What is wrong with the settings of a critic, and which of them change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.config.help import nearest_path
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, CriticConfig
from rlmath.models.hf_config import critic_shape_of, inspect_critic_folder
from rlmath.planning import parallelism


def folder_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """Why the weights in `critic.path` cannot be loaded for a policy of this shape."""
    path = config.critic.path
    if config.algorithm.advantage != "gae" or path is None or shape is None:
        return
    _, problems = inspect_critic_folder(Path(path), shape)
    near = nearest_path(Path(path)) if not Path(path).exists() else ""
    yield from (problem + near for problem in problems)


def layout_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Why the critic of a policy of this shape cannot be laid out as `parallel` says."""
    try:
        critic = critic_shape_of(config, shape)
    except ValueError as error:
        yield str(error)
        return
    if critic is None:
        return
    if config.critic.path is not None:
        # No engine has the critic.
        for problem in parallelism.layout_problems(config.parallel, 1, config.policy, critic):
            yield f"critic.path, which has the layout of the policy: {problem}"
    if config.critic.bootstrap_truncated and config.parallel.context > 1:
        yield (
            f"critic.bootstrap_truncated is true and parallel.context {config.parallel.context}: the value after a "
            "completion's last token is not gathered over context ranks. Set it to false, or parallel.context to 1."
        )


def length_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Sequences that are too long for the critic."""
    try:
        critic = critic_shape_of(config, shape)
    except ValueError:
        return  # told by `layout_problems`
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if critic is not None and config.critic.path is not None and longest > critic.max_positions:
        yield (
            f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}; the model in critic.path has "
            f"{critic.max_positions} positions (max_position_embeddings). Lower the sum, or take another critic."
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
