"""Functions of the user's (`rlmath.workers.hooks`), checked before a run starts: whether they can be loaded and
called, and what they return for what is made up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.length_curriculum import validates
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Kind
from rlmath.rewards.reward_manager import try_reward_function, try_scorer
from rlmath.rewards.several_rewards import functions_of, reward_hooks
from rlmath.workers.hooks import Hook, function_problem, plugin_problem
from rlmath.workers.user_functions import (
    CALL_SECONDS,
    METRIC_SECONDS,
    UserFunction,
    UserFunctionError,
    advantage_hook,
    form_hook,
    group_for_hooks,
    metric_hooks,
    scorer_hook,
    selection_hook,
    template_hook,
)

MAX_METRIC_FUNCTIONS = 8
"""Each has a worker of its own."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def data_hooks(config: Config, kind: Kind = "grpo") -> list[Hook]:
    """Those that make prompts of the data."""
    found = [template_hook(config)] if kind == "sft" else [form_hook(config), template_hook(config)]
    if kind == "grpo" and validates(config):
        found.append(template_hook(config, validation=True))
    return list(dict.fromkeys(hook for hook in found if hook is not None))


def _step_hooks(config: Config) -> list[Hook]:
    """Those that a GRPO step calls, and the scorer of validation; not rewards."""
    found = [
        selection_hook(config),
        advantage_hook(config),
        scorer_hook(config),
        *metric_hooks(config).values(),
    ]
    return [hook for hook in found if hook is not None]


def hook_problems(config: Config, kind: Kind) -> Iterator[str]:
    """Functions that cannot be loaded, or not be called as their kind is; each is imported in a process of its own."""
    yield from _metric_problems(config.telemetry.metrics)
    found = [problem for plugin in config.run.plugins if (problem := plugin_problem(plugin))]
    yield from found
    hooks = data_hooks(config, kind)
    if kind == "grpo":
        hooks += [*reward_hooks(config.reward, config.run.plugins), *_step_hooks(config)]
    for hook in hooks:
        if not (found and ":" not in hook.spec) and (problem := function_problem(hook)):
            yield problem


def hook_warnings(config: Config) -> Iterator[str]:
    """Functions that this run never calls."""
    if config.validation.scorer is not None and not validates(config):
        yield "validation.scorer has no effect without validation.every_steps: nothing is validated."


def _metric_problems(entries: Sequence[str]) -> Iterator[str]:
    names = [entry.partition("=")[0] for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if not _NAME.fullmatch(name) or entry.endswith("="):
            yield (
                f'telemetry.metrics has {entry!r}; needed: "name=package.module:function", or the name of one that '
                "run.plugins registers: a small letter, then at most 39 small letters, digits and underscores."
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"telemetry.metrics has {', '.join(map(repr, twice))} more than once. Give every metric its own name."
    if len(names) > MAX_METRIC_FUNCTIONS:
        yield (
            f"telemetry.metrics has {len(names)} functions; at most {MAX_METRIC_FUNCTIONS}, as each has a worker of "
            "its own. Return several numbers from one."
        )


def hook_lines(config: Config, kind: Kind) -> list[str]:
    """For the console: which are in use."""
    functions = [f"{hook.setting}={hook}" for hook in data_hooks(config, kind)]
    if kind == "grpo":
        functions += [f"{setting}={one}" for setting, one in functions_of(config.reward).items()]
        functions += [f"{hook.setting}={hook}" for hook in _step_hooks(config)]
    return [f"Functions of yours: {'; '.join(functions)}"] if functions else []


# ---------------------------------------------------------------- trial calls


def try_functions(config: Config, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Call each function of a GRPO run on what is made up, as the run would, but for those that the data were read
    with. Warnings; ValueError where one fails."""
    warnings = try_reward_function(config.reward, prompts, config.run.plugins)
    if (scorer := scorer_hook(config)) is not None and validates(config):
        warnings += try_scorer(scorer, config.reward, prompts)
    if not prompts:
        return warnings
    groups = [_made_up_group(prompts[0], config.rollout.group_size, right) for right in (2, 3)]
    given = [group_for_hooks(group) for group in groups]
    rewards, tokens = [one["rewards"] for one in given], [one["tokens"] for one in given]
    for hook in _step_hooks(config):
        if hook.kind == "selection":
            _try(hook, given[0])
        elif hook.kind == "advantage":
            _try(hook, rewards, tokens)
        elif hook.kind == "metric":
            _try(hook, given)
    return warnings


def _try(hook: Hook, *arguments: object) -> None:
    seconds = METRIC_SECONDS if hook.kind == "metric" else CALL_SECONDS
    with UserFunction(hook, seconds) as function:
        try:
            function.call(*arguments)
        except UserFunctionError as error:
            raise ValueError(
                f"{error}\n  That was a call with groups that were made up to try it. Correct the function "
                "(docs/hooks.md)."
            ) from None


def _made_up_group(prompt: Prompt, size: int, right: int) -> ScoredGroup:
    """Completions of 5, 6, ... tokens; every so many is right."""
    correct = [g % right == 0 for g in range(size)]
    answer = prompt.solutions[0] if prompt.solutions else "1"
    completions = tuple(
        Completion(g, (0,) * (5 + g), (-0.5,) * (5 + g), answer if one else "I do not know.", "stop", 0)
        for g, one in enumerate(correct)
    )
    scores = tuple(Score(1.0 if one else -1.0, one, answer, "string") for one in correct)
    return ScoredGroup(prompt, completions, scores)
