"""What answers the finished turns of an engine: the same on all its ranks, by the first's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Prompt
from rlmath.config.schema import Config
from rlmath.data.dataset import ValidationFile
from rlmath.data.feedback import FeedbackTokens
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import RewardManager
from rlmath.rollout.finished_turns import Environment, Feedback, FinishedTurns, TurnAnswers
from rlmath.rollout.sampling import Key
from rlmath.rollout.work_queue import share_in_engine
from rlmath.workers.user_functions import environment_hook
from rlmath.workers.worker_pool import WorkerPool


class EngineTurns:
    """Gives every rollout of an engine what answers its finished turns."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        stop_token_ids: Sequence[int],
        *,
        tokens: FeedbackTokens | None,
    ) -> None:
        """The engine's leader has `tokens`; it starts the workers of the user's function."""
        self.discount = config.turns.discount
        self._settings = config.turns
        self._mesh = mesh
        self._stop_token_ids = stop_token_ids
        self._tokens = tokens
        hook = environment_hook(config)
        self._has_environment = hook is not None
        self._pool: WorkerPool | None = None
        if hook is not None and mesh.is_engine_leader:
            environment = config.environment
            self._pool = WorkerPool(environment.workers, environment.timeout_seconds, function=hook)

    def of_rollout(
        self,
        prompt_of: Callable[[Key], Prompt],
        rewards: RewardManager | None,
        validates: bool,
    ) -> FinishedTurns | None:
        """What answers the turns of a rollout; the leader's `rewards` judge nothing else.

        None in a validation with `turns.feedback`, which would tell what is right."""
        if validates and not self._has_environment:
            return None
        answers: TurnAnswers | None = None
        if self._pool is not None:
            answers = Environment(self._pool)
        elif rewards is not None and self._settings.feedback is not None:
            answers = Feedback(rewards, self._settings.feedback)
        return FinishedTurns(
            self._settings,
            self._stop_token_ids,
            answers=answers,
            tokens=self._tokens,
            prompt_of=prompt_of,
            share=share_in_engine if self._mesh.engine_size > 1 else None,
            asks_always=self._has_environment,
        )

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def open_turns(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    mesh: Mesh,
    prompts: Iterable[str],
    *,
    continues_noise: bool,
    stop_token_ids: Sequence[int],
) -> EngineTurns | None:
    """What answers the finished turns of this rank's engine; None where the first answer ends.

    `prompts` are the texts of all prompts. The engine's leader alone has the chat template write
    conversations, which the start has tried; it may take too long there all the same.

    ValueError for that, and for an engine whose noise does not follow from seed and position
    (`continues_noise`), OSError where the machine has no process for the user's function. All ranks
    of the engine raise it."""
    if not config.answers_turns:
        return None
    if not continues_noise:
        raise ValueError(
            "finished answers go on (turns.feedback, environment.function), and vLLM takes its "
            "first model runner (its log says why), whose noise begins anew in every turn. Set "
            "turns.feedback=null and environment.function=null"
        )
    turns: EngineTurns | None = None
    errors: list[ValueError | RuntimeError | OSError] = []
    if mesh.is_engine_leader:
        try:
            tokens = FeedbackTokens(tokenizer, config.turns.max_feedback_tokens, prompts)
            turns = EngineTurns(config, mesh, stop_token_ids, tokens=tokens)
        except (ValueError, RuntimeError, OSError) as error:
            errors.append(error)
    if mesh.engine_size > 1:
        errors = share_in_engine(errors)
    if errors:
        raise errors[0]
    return turns or EngineTurns(config, mesh, stop_token_ids, tokens=None)


def turn_prompts(
    config: Config, prompts: Iterable[Prompt], validation: Iterable[ValidationFile]
) -> list[str]:
    """The texts of all prompts whose completions may have several turns."""
    texts = [prompt.text for prompt in prompts]
    if config.environment.function is not None:
        texts += [prompt.text for file in validation for prompt in file.prompts]
    return texts
