"""Experts that an engine records and the policy replays, against a dense formula in float64."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.config.schema import AlgorithmConfig, Config, DataConfig, RolloutConfig
from rlmath.planning.memory_estimate import step_sequences
from rlmath.planning.memory_formulas import sampled_route_bytes
from tests.distributed import oracle, routing_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.routed_model import Ids, RoutedModel, ids_of
from tests.distributed.routing_cases import SAMPLES, Policy, Sampling, Step
from tests.distributed.test_moe import in_files
from tests.distributed.test_parity import assert_close
from tests.selection import matrix
from tests.tiny_models import make_model_folder, shape_of

pytestmark = pytest.mark.distributed

ALONE = Case(max_tokens=64)
FILLED = Case(data=2, expert=2, max_tokens=64)
"""Two ranks, of which one has an empty micro-batch where a minibatch has one sample."""
RECOMPUTED = Case(recompute=True, max_tokens=64)
LAYOUTS = [
    ALONE,
    RECOMPUTED,
    FILLED,
    pytest.param(Case(tensor=2, sequence=True, expert=2, max_tokens=64), marks=matrix),
    pytest.param(Case(pipeline=2, virtual_pipeline=2, recompute=True, max_tokens=64), marks=matrix),
]


@dataclass(frozen=True)
class Pair:
    """A model that has sampled, and one with other routers, which is trained."""

    sampler: Path
    policy: Path
    routes: dict[Ids, Tensor]
    """The sampler's, [tokens - 1, layers, experts of a token]."""

    def routes_of_samples(self) -> list[Tensor]:
        return [self.routes[ids_of(sample)] for sample in SAMPLES]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("routed")
    sampler = make_model_folder(
        root / "sampler", architecture="Qwen3MoeForCausalLM", num_experts_per_tok=3
    )
    policy = root / "policy"
    shutil.copytree(sampler, policy)
    weights = load_file(policy / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = weight + 0.03 * torch.randn(weight.shape, generator=draw)
    save_file(weights, policy / "model.safetensors", {"format": "pt"})
    model = RoutedModel(sampler)
    return Pair(
        sampler, policy, {ids_of(sample): model.routes_of(ids_of(sample)) for sample in SAMPLES}
    )


def distance(logprobs: dict[int, list[float]], model: RoutedModel) -> float:
    """The largest difference to the model's log-probs (nats)."""
    assert sorted(logprobs) == list(range(len(SAMPLES)))
    distances = []
    with torch.no_grad():
        for index, sample in enumerate(SAMPLES):
            expected = oracle.completion_logprobs(model, sample)
            distances.append((torch.tensor(logprobs[index]) - expected).abs().max())
    return float(torch.stack(distances).max())


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_policy_with_other_routers_computes_and_learns_with_the_replayed_experts(
    ranks: RankPool, pair: Pair, case: Case
) -> None:
    results = ranks.run(
        case.ranks, routing_cases.passes, Policy(pair.policy, case, pair.routes_of_samples())
    )
    logprobs = {index: row for result in results for index, row in result.logprobs.items()}
    routed = RoutedModel(pair.policy, pair.routes)
    assert distance(logprobs, routed) < 1e-5
    assert distance(logprobs, RoutedModel(pair.policy)) > 0.1, "its own experts are others"
    oracle.loss(routed, SAMPLES).backward()
    expected = {
        name: gradient.float()
        for name, gradient in in_files(oracle.gradients(routed.model)).items()
    }
    assert sum(name.endswith("gate.weight") for name in expected) == 4
    assert_close(results[0].gradients, expected, 1e-4)
    check_counts(results[0].counts, pair, routed)


def check_counts(counts: dict[str, float], pair: Pair, routed: RoutedModel) -> None:
    """The shares are those of the experts that the routed model would have chosen."""
    differs = []
    for ids, routes in pair.routes.items():
        chosen = routed.routes_of(ids)
        differs.append((chosen != routes).any(-1))
    differs_TL = torch.cat(differs)
    shares = (differs_TL.double().mean(), differs_TL.any(1).double().mean())
    assert 0.1 < shares[0] < shares[1] < 1
    assert counts["differing_pairs"] / counts["pairs"] == pytest.approx(float(shares[0]))
    assert counts["differing_tokens"] / counts["tokens"] == pytest.approx(float(shares[1]))


@pytest.mark.parametrize(
    ("step", "counted"),
    [(Step(3, "engine"), 3), (Step(3, "engine", recomputes=False), 2)],
    ids=["recomputing", "not"],
)
def test_a_step_counts_what_differs_in_its_first_pass_and_keeps_no_routes(
    ranks: RankPool, pair: Pair, step: Step, counted: int
) -> None:
    """Counts are those of its first weights; its first minibatch has two of three samples."""
    policy = Policy(pair.policy, FILLED, pair.routes_of_samples())
    results = ranks.run(2, routing_cases.step, policy, step)
    assert [kept_bytes for _, kept_bytes in results] == [0, 0]
    counts = results[0][0]
    routed = RoutedModel(pair.policy, pair.routes)
    differs_TL = torch.cat(
        [
            (routed.routes_of(ids) != pair.routes[ids]).any(-1)
            for ids in (ids_of(sample) for sample in SAMPLES[:counted])
        ]
    )
    assert counts["pairs"] == differs_TL.numel()
    assert counts["differing_pairs"] == differs_TL.sum()
    assert counts["tokens"] == len(differs_TL)
    assert counts["differing_tokens"] == differs_TL.any(1).sum()


@pytest.mark.parametrize("recomputes", [True, False], ids=["all minibatches", "the first alone"])
def test_the_first_step_measures_the_mismatch_with_the_engines_experts_and_with_its_own(
    ranks: RankPool, pair: Pair, recomputes: bool
) -> None:
    """Sampling by the policy's weights with the sampler's experts is what an engine has done here."""
    samples = SAMPLES[:3]
    engine, own = RoutedModel(pair.policy, pair.routes), RoutedModel(pair.policy)
    sampled = []
    differences = []
    with torch.no_grad():
        for sample in samples:
            logprobs = oracle.completion_logprobs(engine, sample)
            differences.append((oracle.completion_logprobs(own, sample) - logprobs).abs())
            sampled.append(replace(sample, behaviour_logprobs=tuple(logprobs.tolist())))
    expected = torch.cat(differences if recomputes else differences[:2])
    algorithm = AlgorithmConfig(n_minibatches=2, shuffle=False, recompute_logprobs=recomputes)
    policy = Policy(pair.policy, ALONE, pair.routes_of_samples())
    ((first, second),) = ranks.run(1, routing_cases.first_steps, policy, sampled, algorithm)
    assert first["train/behaviour_logprob_diff_max"] < 1e-5 < 0.03 < float(expected.mean())
    assert first["routing/mismatch_without_replay"] == pytest.approx(float(expected.mean()), 1e-4)
    assert first["routing/mismatch_without_replay_max"] == pytest.approx(
        float(expected.max()), 1e-4
    )
    assert not any(name.startswith("routing/") for name in second)


def test_the_updates_that_replay_their_own_pass_count_all_tokens_of_samples(
    ranks: RankPool, pair: Pair
) -> None:
    """An empty micro-batch has none."""
    policy = Policy(pair.policy, FILLED, pair.routes_of_samples())
    (counts, _), _ = ranks.run(2, routing_cases.step, policy, Step(3, "old"))
    assert counts["tokens"] == sum(sample.length for sample in SAMPLES[:3])
    assert 0 < counts["differing_tokens"] < counts["tokens"]


def test_a_reference_of_the_same_weights_routes_by_itself(ranks: RankPool, pair: Pair) -> None:
    case = replace(ALONE, lora="attention", optimizer="adam", distributed=False)
    policy = Policy(pair.policy, case, pair.routes_of_samples())
    ((plain, routed),) = ranks.run(1, routing_cases.reference_logprobs, policy)
    assert routed == plain
    assert distance(plain, RoutedModel(pair.policy)) < 1e-5


def test_nothing_changes_to_the_bit_where_both_sides_choose_alike(
    ranks: RankPool, pair: Pair
) -> None:
    replayed, own = (
        ranks.run(1, routing_cases.passes, Policy(pair.sampler, RECOMPUTED, routes))[0]
        for routes in (pair.routes_of_samples(), None)
    )
    assert replayed.logprobs == own.logprobs
    assert replayed.counts["differing_tokens"] == 0 < replayed.counts["tokens"]
    assert own.counts["tokens"] == 0
    assert all(
        torch.equal(replayed.gradients[name], gradient) for name, gradient in own.gradients.items()
    )


@pytest.mark.parametrize(
    "case",
    [ALONE, pytest.param(Case(tensor=2, sequence=True, expert=2, max_tokens=64), marks=matrix)],
    ids=str,
)
def test_an_update_replays_the_experts_of_the_pass_before_it(
    ranks: RankPool, pair: Pair, case: Case
) -> None:
    results = ranks.run(case.ranks, routing_cases.old_routes, (pair.sampler, pair.policy), case)
    first, again, later = results[0]
    assert first == again
    assert distance(first, RoutedModel(pair.sampler)) < 1e-5
    assert distance(later, RoutedModel(pair.policy, pair.routes)) < 1e-5


BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU; one takes half a MiB here."""
PLAIN = RolloutConfig(max_new_tokens=24, max_num_seqs=8, cpu_kv_cache_gib=0.1, progress_bar=False)
ENGINES = {
    "a prefix": PLAIN,
    "prompts in pieces": replace(PLAIN, max_num_batched_tokens=48),
    "a full cache": replace(PLAIN, cpu_kv_cache_gib=0.006),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_records_the_experts_of_every_token_that_it_reads(
    ranks: RankPool, pair: Pair, name: str
) -> None:
    """Whether it computes a prompt, finds it, splits it, or computes a completion again.

    Prompts have a block in common, or need a second one each while they are continued."""
    splits_prompts = name == "prompts in pieces"
    first_block = tuple(3 + token % 90 for token in range(BLOCK))
    prompts = [(*first_block, 9, 9, 9, 20 + p) for p in range(4)]
    if name == "a full cache":
        prompts = [(20 + p, *first_block[:-9]) for p in range(4)]
    (recording,) = ranks.run(
        1, routing_cases.recorded, pair.sampler, Sampling(ENGINES[name], prompts, splits_prompts)
    )
    alike = 8 - len(set(map(tuple, recording.token_ids)))
    assert alike == (4 if splits_prompts else 0), "completions are alike where they are greedy"
    model = RoutedModel(pair.sampler)
    for ids, routes in zip(recording.token_ids, recording.routes, strict=True):
        assert torch.equal(routes.sort(-1)[0], model.routes_of(ids))
    read = sum(len(ids) - 1 for ids in recording.token_ids)
    computed = sum(recording.scheduled)
    if name == "a full cache":
        assert computed >= read + BLOCK, "none was computed again"
    else:
        assert computed < read - 6 * BLOCK, "no prefix was found"
    assert not splits_prompts or max(recording.scheduled) <= 48


@pytest.mark.parametrize("engine_size", [1, pytest.param(2, marks=matrix)])
def test_routes_stay_where_they_were_sampled_until_a_rank_fetches_them(
    ranks: RankPool, pair: Pair, engine_size: int
) -> None:
    (lengths, rows), (_, other_rows) = ranks.run(
        2, routing_cases.collected_and_fetched, pair.sampler, engine_size
    )
    model = RoutedModel(pair.sampler)
    numbers: dict[int, list[int]] = {}
    for number, (ids, place, held, fetched) in enumerate(rows):
        _, other_place, other_held, other_fetched = other_rows[number]
        assert place == other_place and place.tokens == lengths[number] - 1
        numbers.setdefault(place.rank, []).append(place.number)
        routes = model.routes_of(ids)
        assert (held is None) != (other_held is None), "one rank holds them"
        whole = other_held if held is None else held
        assert torch.equal(whole.sort(-1)[0], routes)
        part = other_fetched if fetched is None else fetched
        assert (fetched is None) == bool(number % 2) != (other_fetched is None)
        assert torch.equal(part.sort(-1)[0], routes[:, [3, 1]])
    assert sorted(numbers) == ([0] if engine_size == 2 else [0, 1])
    # The validation before it has kept none.
    assert all(sorted(kept) == list(range(len(kept))) for kept in numbers.values())


def test_an_engine_s_first_rank_holds_no_more_routes_than_planned(
    ranks: RankPool, pair: Pair
) -> None:
    """They are as many as planned where every completion is as long as it may be."""
    ((lengths, rows),) = ranks.run(1, routing_cases.collected_and_fetched, pair.sampler, 1)
    shape = shape_of(pair.sampler)
    settings = routing_cases.ROLLOUT
    run = Config(
        data=DataConfig(prompts_per_step=len(lengths) // settings.group_size, max_prompt_tokens=3),
        rollout=settings,
    )
    planned = sampled_route_bytes(
        shape, step_sequences(run).tokens, step_sequences(run).sampled, engines=1
    )
    held = sum(held.nbytes for _, _, held, _ in rows)
    longest = 3 + settings.max_new_tokens
    missing = sum(longest - length for length in lengths)
    assert planned == held + missing * shape.num_layers * shape.experts_per_token
    assert held > planned / 4
