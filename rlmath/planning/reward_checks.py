"""Problems of rewards and of functions of the user's (`workers.hooks`).

These are schemes, penalties and lists of rewards; whether functions can be loaded and called, and
what they return for made-up arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.help import nearest_word
from rlmath.config.length_curriculum import validates
from rlmath.config.schema import AlgorithmConfig, Config, Kind, RewardConfig, TeacherConfig
from rlmath.planning.setting_tables import learns_from_the_teacher_alone
from rlmath.rewards.reward_manager import Trial, try_reward_function, try_scorer
from rlmath.rewards.schemes import WRONG_ANSWER, raw_reward, reward_scale
from rlmath.rewards.several_rewards import (
    BUILT_IN,
    MAX_FUNCTIONS,
    TAKEN,
    NamedReward,
    functions_of,
    is_verified,
    listed_functions,
    reward_hooks,
    rewards_of,
)
from rlmath.workers.hooks import Hook, function_problem, plugin_problem
from rlmath.workers.user_functions import (
    CALL_SECONDS,
    METRIC_SECONDS,
    UserFunction,
    UserFunctionError,
    advantage_hook,
    environment_hook,
    form_hook,
    group_for_hooks,
    metric_hooks,
    scorer_hook,
    selection_hook,
    template_hook,
)

# ---------------------------------------------------------------- rewards


_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def reward_problems(reward: RewardConfig, limit: int, plugins: Collection[str]) -> Iterator[str]:
    """Problems of `reward` for completions of at most `limit` tokens."""
    if reward.overlong_buffer > limit:
        yield (
            f"reward.overlong_buffer is {reward.overlong_buffer}, above rollout.max_new_tokens "
            f"{limit}: even the "
            "shortest answer would cost. Lower it."
        )
    if reward.scheme not in WRONG_ANSWER and reward.format_penalty >= 1:
        yield (
            f"reward.format_penalty is {reward.format_penalty}; a right answer in a box gets 1 in "
            "scheme "
            f'"{reward.scheme}", and one without a box should get less. Lower it.'
        )
    yield from _list_problems(reward, plugins)


def _list_problems(reward: RewardConfig, plugins: Collection[str]) -> Iterator[str]:
    """Problems of `reward.rewards`, and of settings that go with the list."""
    if not reward.rewards:
        return
    names = [reward_text.partition("=")[0] for reward_text in reward.rewards]
    for reward_text in reward.rewards:
        yield from _entry_problems(reward_text, plugins)
    yield from _twice("reward.rewards", names)
    functions = (
        len(listed_functions(reward))
        if plugins
        else sum("=" in reward_text for reward_text in reward.rewards)
    )
    if functions > MAX_FUNCTIONS:
        yield (
            f"reward.rewards has {functions} functions; at most {MAX_FUNCTIONS}, as each has "
            "workers of its own."
        )
    if not functions and "correctness" not in names:
        yield (
            "reward.rewards has neither correctness nor a function of yours, so that no answer "
            "could be called right. "
            "Add correctness, with weight 0 if it is not to count."
        )
    if reward.weights and (len(reward.weights) != len(names) or not any(reward.weights)):
        yield (
            f"reward.weights is {reward.weights}; needed: a number for each of the {len(names)} "
            "rewards of "
            "reward.rewards, not all 0; or none: then each weighs 1."
        )
    of_sums = ("mask_no_eos_with_zero", "overlong_buffer", "length_penalty")
    if reward.combine == "gdpo" and any(getattr(reward, setting) for setting in of_sums):
        keys = ", ".join(f"reward.{setting}" for setting in of_sums if getattr(reward, setting))
        yield (
            f"{keys} changes the sum of the rewards, which reward.combine=gdpo does not learn "
            "from. List length, or a "
            "function of yours, as a reward of its own; or set reward.combine=sum."
        )


def _entry_problems(entry: str, plugins: Collection[str]) -> Iterator[str]:
    """Problems of one text of `reward.rewards`."""
    name, equals, function = entry.partition("=")
    if not equals and plugins and name not in BUILT_IN:
        equals = "="
        function = name
    if not equals and name not in BUILT_IN:
        near = nearest_word(name, BUILT_IN)
        yield (
            f"reward.rewards has {entry!r}; needed: {', '.join(BUILT_IN)}, or a function of yours "
            "as "
            f'"name=package.module:function" or "name=path/to/file.py:function".{near}'
        )
    elif equals and (not _NAME.fullmatch(name) or name in (*BUILT_IN, *TAKEN) or not function):
        yield (
            f"reward.rewards has {entry!r}; before = stands a name: a small letter, then at most "
            "39 small letters, "
            f"digits and underscores, none of {', '.join((*BUILT_IN, *TAKEN))}; after it a "
            "function."
        )


def _twice(setting: str, names: Sequence[str]) -> Iterator[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"{setting} has {', '.join(map(repr, twice))} more than once. Give each a name of "
            "its own."
        )


# ---------------------------------------------------------------- what is paid


def reward_lines(
    reward: RewardConfig, algorithm: AlgorithmConfig, teacher: TeacherConfig, longest: int
) -> Iterator[str]:
    """Lines of a plan: the range of a completion's reward, and the largest penalties beside it.

    `longest` is the most tokens of a completion."""
    if learns_from_the_teacher_alone(teacher):
        yield "Rewards: none is learned from (teacher.with_rewards=false)"
        return
    rewards = rewards_of(reward)
    verified = is_verified(reward)
    scale = reward_scale(reward, verified)
    unknown = [
        named_reward.name or "reward.function"
        for named_reward in rewards
        if named_reward.function and named_reward.weight
    ]
    if reward.combine == "gdpo":
        yield "Rewards: each of the list is normalised in its own group (reward.combine=gdpo)"
        return
    ranges = [
        sorted(named_reward.weight * extreme for extreme in _extremes(named_reward, reward))
        for named_reward in rewards
    ]
    least, largest = (
        (sum(ends) - reward.output_bias) * scale for ends in zip(*ranges, strict=True)
    )
    if not reward.rewards and reward.function is not None:
        bias = f", less reward.output_bias {reward.output_bias:g}" * bool(reward.output_bias)
        yield f"Rewards: what reward.function returns{bias}, times {scale:g}"
    elif unknown:
        yield (
            f"Rewards: {least:g} to {largest:g}, and {scale:g} times what {', '.join(unknown)} "
            "returns, weighed"
        )
    elif reward.rewards:
        yield f"Rewards: {least:g} to {largest:g} (the weighted sum of reward.rewards)"
    else:
        names = ("right", "right without a box", "wrong", "wrong without a box")
        cases = [(True, True), (True, False), (False, True), (False, False)]
        if reward.scheme in WRONG_ANSWER:
            names = ("right", "wrong")
            cases = [(True, True), (False, True)]
        paid = [
            (raw_reward(reward, correct, boxed) - reward.output_bias) * scale
            for correct, boxed in cases
        ]
        payments = ", ".join(
            f"{name} {payment:g}" for name, payment in zip(names, paid, strict=True)
        )
        yield f"Rewards: {least:g} to {largest:g} (reward.scheme={reward.scheme}: {payments})"
    yield from _penalty_lines(reward, algorithm, longest)


def _extremes(named_reward: NamedReward, reward: RewardConfig) -> tuple[float, ...]:
    """The least and greatest value of a reward of the list, before weight, bias and scaling.

    They are 0 for a function's."""
    if named_reward.function is not None:
        return 0.0, 0.0
    if named_reward.name != "correctness":
        return 0.0, 1.0
    payments = [
        raw_reward(reward, correct, boxed) for correct in (True, False) for boxed in (True, False)
    ]
    return min(payments), max(payments)


def _penalty_lines(reward: RewardConfig, algorithm: AlgorithmConfig, longest: int) -> Iterator[str]:
    """The most that length and a KL in the reward take from a completion of so many tokens."""
    if reward.overlong_buffer:
        yield (
            f"  less at most {reward.overlong_penalty:g} for length, in the last "
            f"{reward.overlong_buffer:,} of "
            f"{longest:,} tokens (reward.overlong_buffer)"
        )
    if reward.length_penalty:
        largest_penalty = reward.length_penalty * longest / 1000
        yield (
            f"  less at most {largest_penalty:g} for length: reward.length_penalty "
            f"{reward.length_penalty:g} x {longest:,} tokens / 1,000, where all of the group are "
            "right"
        )
    if reward.mask_no_eos_with_zero:
        yield (
            f"  0 where the completion is cut off at {longest:,} tokens "
            "(reward.mask_no_eos_with_zero)"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        largest_penalty = algorithm.kl_coef * longest / 10
        yield (
            f"  less algorithm.kl_coef {algorithm.kl_coef:g} for each nat of KL to the reference: "
            f"{largest_penalty:.3g} for "
            f"{longest:,} tokens of 0.1 nats each"
        )


# ---------------------------------------------------------------- functions of the user's


MAX_METRIC_FUNCTIONS = 8
"""Each has a worker of its own."""


def data_hooks(config: Config, kind: Kind = "grpo") -> list[Hook]:
    """Functions that make prompts of the data."""
    hooks = [template_hook(config)] if kind == "sft" else [form_hook(config), template_hook(config)]
    if kind == "grpo" and validates(config):
        hooks.append(template_hook(config, validation=True))
    return list(dict.fromkeys(hook for hook in hooks if hook is not None))


def _step_hooks(config: Config) -> list[Hook]:
    """Functions that a GRPO step or its rollout calls, and validation's scorer; not rewards."""
    hooks = [
        selection_hook(config),
        advantage_hook(config),
        scorer_hook(config),
        environment_hook(config),
        *metric_hooks(config).values(),
    ]
    return [hook for hook in hooks if hook is not None]


def hook_problems(config: Config, kind: Kind) -> Iterator[str]:
    """Problems of functions that cannot be loaded, or not be called as their kind is.

    Each is imported in a process of its own."""
    yield from _metric_problems(config.telemetry.metrics)
    problems_of_plugins = [
        problem for plugin in config.run.plugins if (problem := plugin_problem(plugin))
    ]
    yield from problems_of_plugins
    hooks = data_hooks(config, kind)
    if kind == "grpo":
        hooks += [*reward_hooks(config.reward, config.run.plugins), *_step_hooks(config)]
    for hook in hooks:
        is_word = ":" not in hook.spec and (
            problems_of_plugins or not hook.plugins
        )  # which the settings refuse already
        if not is_word and (problem := function_problem(hook)):
            yield problem


def _metric_problems(entries: Sequence[str]) -> Iterator[str]:
    """Problems of `telemetry.metrics`."""
    names = [text.partition("=")[0] for text in entries]
    for text, name in zip(entries, names, strict=True):
        if not _NAME.fullmatch(name) or text.endswith("="):
            yield (
                f'telemetry.metrics has {text!r}; needed: "name=package.module:function", or the '
                "name of one that "
                "run.plugins registers: a small letter, then at most 39 small letters, digits and "
                "underscores."
            )
    yield from _twice("telemetry.metrics", names)
    if len(names) > MAX_METRIC_FUNCTIONS:
        yield (
            f"telemetry.metrics has {len(names)} functions; at most {MAX_METRIC_FUNCTIONS}, as "
            "each has a worker of "
            "its own. Return several numbers from one."
        )


def hook_lines(config: Config, kind: Kind) -> list[str]:
    """Lines of the console that name the functions in use."""
    functions = [f"{hook.setting}={hook}" for hook in data_hooks(config, kind)]
    if kind == "grpo":
        functions += [
            f"{setting}={function}" for setting, function in functions_of(config.reward).items()
        ]
        functions += [f"{hook.setting}={hook}" for hook in _step_hooks(config)]
    return [f"Functions of yours: {'; '.join(functions)}"] if functions else []


# ---------------------------------------------------------------- trial calls


def try_functions(config: Config, prompts: Sequence[Prompt]) -> Trial:
    """Call each function of a GRPO run on made-up arguments, as the run would.

    The functions that the data were read with are left out. ValueError where one fails."""
    trial = try_reward_function(config.reward, prompts, config.run.plugins)
    if (scorer := scorer_hook(config)) is not None and validates(config):
        trial += try_scorer(scorer, config.reward, prompts)
    if not prompts:
        return trial
    groups = [_made_up_group(prompts[0], config.rollout.group_size, right) for right in (2, 3)]
    views = [group_for_hooks(group) for group in groups]
    arguments_by_kind = {
        "selection": (views[0],),
        "advantage": ([view["rewards"] for view in views], [view["tokens"] for view in views]),
        "metric": (views,),
        "environment": (["I do not know."], prompts[0].row, 1),
    }
    seconds = {"metric": METRIC_SECONDS, "environment": config.environment.timeout_seconds}
    for hook in _step_hooks(config):
        if hook.kind in arguments_by_kind:
            _try(hook, arguments_by_kind[hook.kind], seconds.get(hook.kind, CALL_SECONDS))
    return trial


def _try(hook: Hook, arguments: Sequence[object], seconds: float) -> None:
    """Call a function once, for so many seconds at most; ValueError where that fails."""
    made_up = "a turn that was" if hook.kind == "environment" else "groups that were"
    with UserFunction(hook, seconds) as function:
        try:
            function.call(*arguments)
        except UserFunctionError as error:
            raise ValueError(
                f"{error}\n  That was a call with {made_up} made up to try it. Correct the "
                "function "
                "(docs/hooks.md)."
            ) from None


def _made_up_group(prompt: Prompt, size: int, right: int) -> ScoredGroup:
    """Completions of 5, 6, ... tokens; every so many is right."""
    correct = [g % right == 0 for g in range(size)]
    answer = prompt.solutions[0] if prompt.solutions else "1"
    completions = tuple(
        Completion(
            g,
            (0,) * (5 + g),
            logprobs=(-0.5,) * (5 + g),
            text=answer if is_right else "I do not know.",
            finish_reason="stop",
            policy_version=0,
        )
        for g, is_right in enumerate(correct)
    )
    scores = tuple(
        Score(1.0 if is_right else -1.0, is_right, answer, "string") for is_right in correct
    )
    return ScoredGroup(prompt, completions, scores)
