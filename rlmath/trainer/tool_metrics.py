"""The numbers of a step's calls."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.algorithms.dynamic_sampling import TOOL_REASONS, Selection
from rlmath.algorithms.resampling import has_failed
from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_formats import ends_with_call
from rlmath.rollout.work_queue import EngineUsage
from rlmath.sandbox.calls import STATUSES
from rlmath.trainer.validation import is_right
from rlmath.trainer.void_turns import VoidRule


def tool_metrics(selection: Selection, is_void: VoidRule, tools: ToolsConfig) -> dict[str, float]:
    """Calls and their outcomes over all groups that a step has; shares from 0 to 1.

    Accuracies of completions with and without calls are there where there are such; shares of calls
    where there are calls; those of failed calls, of all and of the learned completions, where
    completions were oversampled. Lost completions are neither right nor wrong nor void. Completions
    that left their groups are counted. Seconds are those for which completions waited."""
    completions = [done for group in selection.sampled for done in group.completions]
    calls = [call for completion in completions for call in completion.calls]
    output_tokens = sum(len(done.token_ids) - done.n_sampled for done in completions)
    judged = [
        (group.prompt, completion, score)
        for group in selection.sampled
        for completion, score in zip(group.completions, group.scores, strict=True)
        if not completion.is_lost
    ]
    void = sum(is_void(prompt, completion) for prompt, completion, _ in judged)
    calling = [is_right(score) for _, completion, score in judged if completion.calls]
    silent = [is_right(score) for _, completion, score in judged if not completion.calls]
    out_of_calls = sum(
        done.finish_reason == "length" and ends_with_call(group.prompt, done, tools)
        for group in selection.sampled
        for done in group.completions
    )
    filtered = selection.filtered_completions()
    n = len(completions)
    metrics = {
        "tools/calls_per_completion": len(calls) / n,
        "tools/completions_with_calls": sum(bool(done.calls) for done in completions) / n,
        "tools/given_tokens": output_tokens / n,
        "tools/out_of_calls": out_of_calls / n,
        "tools/void_turns": void / max(1, len(judged)),
        **{f"tools/{reason}_completions": float(filtered[reason]) for reason in TOOL_REASONS},
    }
    for name, right in (("with", calling), ("without", silent)):
        if right:
            metrics[f"tools/accuracy_{name}_calls"] = sum(right) / len(right)
    if calls:
        seconds = sorted(call.seconds for call in calls)
        metrics |= {
            f"tools/status/{status}": sum(call.status == status for call in calls) / len(calls)
            for status in STATUSES
        }
        metrics |= {
            "tools/outputs_cut": sum(call.is_cut for call in calls) / len(calls),
            "tools/wait_s": sum(seconds) / len(calls),
            "tools/wait_s_p99": seconds[int(0.99 * (len(seconds) - 1))],
        }
    if filtered["oversampled"]:
        learned = [done for group in selection.learned for done in group.completions]
        judged_completions = [completion for _, completion, _ in judged]
        for name, chosen in (("", judged_completions), ("_learned", learned)):
            failures = [has_failed(call) for done in chosen for call in done.calls]
            if failures:
                metrics[f"tools/failed_calls{name}"] = sum(failures) / len(failures)
    return metrics


def wait_metrics(rounds: Sequence[Sequence[EngineUsage]], prefix: str) -> dict[str, float]:
    """The share of all engines' seconds in a step's rollouts (0 to 1) in which they only waited.

    They waited for calls, with the prefix "tools", or for what follows turns, "turns". Empty where
    there was no rollout."""
    usages = [usage for usages in rounds for usage in usages]
    if not usages:
        return {}
    seconds = sum(usage.seconds for usage in usages)
    return {f"{prefix}/wait_share": sum(usage.waiting_seconds for usage in usages) / seconds}
