"""The numbers of a step's calls."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.algorithms.dynamic_sampling import TOOL_REASONS, Selection
from rlmath.algorithms.types import Completion, Score
from rlmath.sandbox.calls import STATUSES
from rlmath.trainer.validation import is_right
from rlmath.trainer.void_turns import VoidRule


def tool_metrics(selection: Selection, is_void: VoidRule) -> dict[str, float]:
    """Calls and their outcomes over all that was sampled; shares from 0 to 1.

    Lost completions are neither right nor wrong nor void. Accuracies of completions with and without calls are there where there are such; shares of calls
    where there are calls. Completions that left their groups are counted. Seconds are those for
    which completions waited."""
    pairs = [
        pair
        for group in selection.sampled
        for pair in zip(group.completions, group.scores, strict=True)
    ]
    judged_groups = [group.judged for group in selection.sampled]
    judged = [
        pair
        for group in judged_groups
        for pair in zip(group.completions, group.scores, strict=True)
    ]
    void = sum(
        is_void(group.prompt, completion)
        for group in judged_groups
        for completion in group.completions
    )
    calling = [pair for pair in judged if pair[0].calls]
    silent = [pair for pair in judged if not pair[0].calls]
    calls = [call for completion, _ in pairs for call in completion.calls]
    output_tokens = sum(len(completion.token_ids) - completion.n_sampled for completion, _ in pairs)
    filtered = selection.filtered_completions()
    metrics = {
        "tools/calls_per_completion": len(calls) / len(pairs),
        "tools/completions_with_calls": len(calling) / len(pairs),
        "tools/given_tokens": output_tokens / len(pairs),
        "tools/void_turns": void / max(1, len(judged)),
        **{f"tools/{reason}_completions": float(filtered[reason]) for reason in TOOL_REASONS},
    }
    for name, part in (("with", calling), ("without", silent)):
        if part:
            metrics[f"tools/accuracy_{name}_calls"] = _accuracy(part)
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
    return metrics


def _accuracy(pairs: Sequence[tuple[Completion, Score]]) -> float:
    return sum(is_right(score) for _, score in pairs) / len(pairs)
