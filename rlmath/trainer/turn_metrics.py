"""The numbers of a step's answers that went on, and of the user's environment."""

from __future__ import annotations

from collections import defaultdict

from rlmath.algorithms.dynamic_sampling import Selection
from rlmath.trainer.validation import is_right
from rlmath.workers.function_calls import MAX_METRICS


def turn_metrics(selection: Selection, is_judged: bool) -> dict[str, float]:
    """Answers and feedback over all groups that a step has; shares from 0 to 1.

    Lost completions are neither right nor wrong. Where every answer `is_judged`, as a right one
    ends its completion, first answers are known, too, by that judgement. Figures of an environment are means over all
    turns that have them; of more than MAX_METRICS names the first. Seconds are those for which
    completions waited."""
    completions = [done for group in selection.sampled for done in group.completions]
    calls = [call for done in completions for call in done.calls if call.status != "lost"]
    judged = [
        (completion, is_right(score), score.correct)
        for group in selection.sampled
        for completion, score in zip(group.judged.completions, group.judged.scores, strict=True)
    ]
    n = max(1, len(judged))
    retries = sum(completion.retries for completion, _, _ in judged)
    right_answers = sum(right for _, right, _ in judged)
    tokens = sum(len(done.token_ids) - done.n_sampled for done in completions)
    metrics = {
        "turns/answers_per_completion": 1 + retries / n,
        "turns/accuracy": right_answers / n,
        "turns/feedback_tokens": tokens / max(1, len(completions)),
        "turns/lost_completions": float(selection.filtered_completions()["lost"]),
    }
    if is_judged:
        # What ended them: where a function rewards, the verifier may measure another accuracy.
        first_right = sum(correct for done, _, correct in judged if not done.retries)
        corrected = sum(correct for done, _, correct in judged if done.retries)
        metrics |= {
            "turns/accuracy_first": first_right / n,
            "turns/corrected": corrected / n,
        }
    if calls:
        metrics |= {
            "turns/feedback_cut": sum(call.is_cut for call in calls) / len(calls),
            "turns/wait_s": sum(call.seconds for call in calls) / len(calls),
        }
    figures: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (figure for done in completions for figure in done.figures):
        figures[name].append(value)
    for name in sorted(figures)[:MAX_METRICS]:
        metrics[f"environment/{name}"] = sum(figures[name]) / len(figures[name])
    return metrics
