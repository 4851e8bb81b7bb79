"""One step's rollout: every engine samples its share of the prompts and judges while it samples."""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.config import RewardConfig, RolloutConfig
from rlmath.parallel.collectives import gather_objects
from rlmath.parallel.mesh import Mesh
from rlmath.rewards.judge import Judge
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import Generated, Request, request_seed
from rlmath.types import Completion, FinishReason, Prompt, Score, ScoredGroup

Key = tuple[int, int]
"""(position of the prompt in the step's batch, sample index)."""


@dataclass(frozen=True)
class RolloutSeed:
    """What the seed of every request is made of, beside the prompt and the sample index."""

    run_seed: int
    step: int


def engine_requests(
    prompts: Sequence[Prompt], group_size: int, engines: int, engine_index: int, seed: RolloutSeed
) -> list[Request]:
    """The requests of one engine: all G samples of every `engines`-th prompt."""
    return [
        Request((p, g), prompts[p].token_ids, request_seed(seed.run_seed, seed.step, prompts[p].prompt_id, g))
        for p in range(engine_index, len(prompts), engines)
        for g in range(group_size)
    ]


class Collector:
    """Samples and judges; the ranks of one engine generate alike, and the first of them judges."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerFast,
        rollout: RolloutConfig,
        reward: RewardConfig,
        pool: VerifierPool | None,
    ) -> None:
        assert (pool is not None) == mesh.speaks_for_engine, (
            "the rank that speaks for an engine has the judges"
        )
        self._engine = engine
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._judge = None if pool is None else Judge(pool, reward, rollout.max_new_tokens)

    def collect(self, prompts: Sequence[Prompt], seed: RolloutSeed) -> list[ScoredGroup]:
        """G scored completions of each of the P prompts, the same list on every rank."""
        requests = engine_requests(
            prompts, self._rollout.group_size, self._mesh.engines, self._mesh.engine_index, seed
        )
        mine = self._sample(prompts, requests, seed.step)
        judged: dict[Key, tuple[Completion, Score]] = {}
        for part in gather_objects(mine):
            judged.update(part)
        return [
            ScoredGroup(
                prompt,
                tuple(judged[p, g][0] for g in range(self._rollout.group_size)),
                tuple(judged[p, g][1] for g in range(self._rollout.group_size)),
            )
            for p, prompt in enumerate(prompts)
        ]

    def _sample(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], step: int
    ) -> dict[Key, tuple[Completion, Score]]:
        """What this rank reports: all its engine's completions, or nothing where another rank speaks for it."""
        completions: dict[Key, Completion] = {}
        # None: shown on a terminal, not in a log file.
        hide_bar = None if self._mesh.rank == 0 and self._rollout.progress_bar else True
        with tqdm(total=len(requests), desc=f"rollout {step + 1}", disable=hide_bar, leave=False) as bar:
            for generated in self._engine.generate(requests):
                bar.update()
                if self._judge is None:
                    continue
                completion = self._completion(generated)
                completions[generated.key] = completion
                self._judge.ask(prompts[generated.key[0]], completion)
        if self._judge is None:
            return {}
        pairs = zip(completions.items(), self._judge.scores(), strict=True)
        return {key: (completion, score) for (key, completion), score in pairs}

    def _completion(self, generated: Generated) -> Completion:
        reason: FinishReason = "stop" if generated.finish_reason == "stop" else "length"
        text = self._tokenizer.decode(generated.token_ids, skip_special_tokens=True)
        return Completion(generated.key[1], generated.token_ids, generated.logprobs, str(text), reason)
