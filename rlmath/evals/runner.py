"""An evaluation from start to end, on all ranks.

    rank 0: model, problems, what is there already -> all ranks: sample and judge what is missing, line by line to disk
    -> rank 0: read all of it from disk -> tables

The tables come from the files alone, so a run that was stopped and continued cannot tell another story.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from rlmath.config.schema import RolloutConfig, RunConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.distributed.collectives import from_rank_zero
from rlmath.distributed.device import (
    environment_rank,
    environment_world_size,
    init_process_group,
    open_device,
)
from rlmath.distributed.fault_tolerance.exit_codes import clear_exit_status
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.rendezvous import open_rendezvous
from rlmath.evals.benchmarks import (
    Benchmark,
    Lengths,
    Problem,
    check_lengths,
    find_benchmark,
    load_benchmark,
    model_positions,
)
from rlmath.evals.completions import agree_on_settings, cut_unfinished_lines, read_outcomes, read_settings
from rlmath.evals.model_source import EvaluatedModel, resolve_model
from rlmath.evals.plan import Plan
from rlmath.evals.results import BenchmarkResult, result_of
from rlmath.evals.sampling import Engines, Missing, sample_missing
from rlmath.evals.tables import boxed_table, first_table, second_table, write_results
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.trainer.run_dir import sole_user
from rlmath.trainer.startup import environment_facts, meet

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 24 * 3600.0
"""For engines that still sample, and for a checkpoint that is converted. Of ranks that die the launcher tells."""


@dataclass(frozen=True)
class Judges:
    """How the answers of an engine are judged."""

    workers: int
    timeout_seconds: float


@dataclass(frozen=True)
class _Prepared:
    """What rank 0 found out."""

    model: EvaluatedModel
    benchmarks: tuple[Benchmark, ...]
    lengths: Lengths
    missing: list[Missing]


def evaluate(
    plan: Plan, rollout: RolloutConfig, judges: Judges, device_kind: str
) -> list[BenchmarkResult] | None:
    """Sample what is missing and write the tables; what rank 0 has of them, None on others.

    All ranks call it. ValueError, on all of them, for what the user must change.
    """
    world_size, rank = environment_world_size(), environment_rank()
    if world_size % rollout.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel is {rollout.tensor_parallel}, which does not divide the {world_size} ranks; change one"
        )
    mesh = Mesh(rank, world_size, 1, 1, rollout.tensor_parallel)
    _stand_alone()
    device = open_device(device_kind)
    with ExitStack() as stack:
        pool = None
        if mesh.is_engine_leader:
            # The judges start before process groups and engines, whose threads they must not inherit.
            pool = stack.enter_context(VerifierPool(judges.workers, judges.timeout_seconds))
        init_process_group(device, LONGEST_WAIT_SECONDS, _meet())
        stack.callback(_leave)
        prepared = _prepare_on_rank_zero(plan, rollout, mesh, stack)
        if not prepared.missing:
            return _report(plan, prepared) if rank == 0 else None
        with Engines(prepared.model.folder, rollout, prepared.lengths, mesh, device) as engine:
            sample_missing(engine, prepared.missing, plan, prepared.lengths, prepared.model.folder, pool)
            dist.barrier()
            return _report(plan, prepared) if rank == 0 else None


def _meet() -> dist.Store | None:
    """The store for the process group once all ranks are here and their nodes are alike; None for one rank alone."""
    rendezvous = open_rendezvous(RunConfig.start_timeout_seconds)
    if rendezvous is None:
        return None
    meet(rendezvous, environment_facts(), RunConfig.start_timeout_seconds)
    return rendezvous.group_store(LONGEST_WAIT_SECONDS)


def _stand_alone() -> None:
    """Without torchrun, what it would say of one rank alone. Port 0 is any free one."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _leave() -> None:
    if dist.is_initialized():  # an engine that ended has done it
        dist.destroy_process_group()


def _prepare_on_rank_zero(plan: Plan, rollout: RolloutConfig, mesh: Mesh, stack: ExitStack) -> _Prepared:
    prepared, mistake = None, None
    if mesh.rank == 0:
        try:
            stack.enter_context(sole_user(plan.output, "--output"))
            clear_exit_status(plan.output)
            prepared = _prepare(plan, rollout)
        except ValueError as error:
            mistake = str(error)
    prepared, mistake = from_rank_zero((prepared, mistake))
    if prepared is None:
        raise ValueError(mistake)
    return prepared


def _prepare(plan: Plan, rollout: RolloutConfig) -> _Prepared:
    paths = {name: find_benchmark(name, plan.data_dir) for name in plan.benchmarks}
    model = resolve_model(plan.model, plan.output)
    tokenizer = load_tokenizer(str(model.folder))
    benchmarks = tuple(
        load_benchmark(name, path, tokenizer, plan.template, plan.limit) for name, path in paths.items()
    )
    problems = [problem for benchmark in benchmarks for problem in benchmark.problems]
    lengths = check_lengths(
        problems, model_positions(model.folder), plan.max_new_tokens, plan.max_prompt_tokens
    )
    agree_on_settings(plan.output, _common_settings(plan, rollout, model), _sampled_settings(plan))
    cut = cut_unfinished_lines(plan.output)
    if cut:
        logger.info("Unfinished lines of a run that was stopped are removed from %d files", cut)
    missing = [one for benchmark in benchmarks for one in _missing(benchmark, plan, lengths)]
    _tell(benchmarks, lengths, plan, sum(len(one.indices) for one in missing))
    return _Prepared(model, benchmarks, lengths, missing)


def _common_settings(plan: Plan, rollout: RolloutConfig, model: EvaluatedModel) -> dict[str, object]:
    """What every completion depends on, but for its problem."""
    return {
        "about_model": str(plan.model),
        "model": model.fingerprint,
        "template": plan.template,
        "max_new_tokens": plan.max_new_tokens,
        "cuda_graphs": rollout.cuda_graphs,
    }


def _sampled_settings(plan: Plan) -> dict[str, object] | None:
    if not plan.samples:
        return None
    return {"temperature": plan.temperature, "top_p": plan.top_p, "seed": plan.seed}


def _missing(benchmark: Benchmark, plan: Plan, lengths: Lengths) -> list[Missing]:
    """The completions that are not on disk. ValueError where those that are there are of other problems."""
    there = read_outcomes(plan.output, benchmark.name)
    missing = []
    for problem in benchmark.problems:
        _check_same(problem, {there[key].prompt_hash for key in _keys(problem, plan) if key in there}, plan)
        indices = tuple(key[1] for key in _keys(problem, plan) if key not in there)
        if indices and len(problem.token_ids) <= lengths.max_prompt_tokens:
            missing.append(Missing(problem, indices))
    return missing


def _keys(problem: Problem, plan: Plan) -> Sequence[tuple[str, int]]:
    return [(problem.problem_id, index) for index in plan.indices]


def _check_same(problem: Problem, hashes: set[str], plan: Plan) -> None:
    if hashes - {problem.prompt_hash}:
        raise ValueError(
            f'--output "{plan.output}" holds completions of another problem {problem.problem_id!r} of '
            f"{problem.benchmark}: its text, template or solutions have changed. Give another --output."
        )


def _tell(benchmarks: Sequence[Benchmark], lengths: Lengths, plan: Plan, missing: int) -> None:
    """What is about to happen, and what will not."""
    for benchmark in benchmarks:
        logger.info("%s: %d problems", benchmark.name, len(benchmark.problems))
        if benchmark.unusable:
            logger.warning(
                "%s: %d rows of its file are no problem that can be used, and are not in the table",
                benchmark.name,
                benchmark.unusable,
            )
        long = [p for p in benchmark.problems if len(p.token_ids) > lengths.max_prompt_tokens]
        if long:
            logger.warning(
                "%s: %d of %d prompts are longer than --max-prompt-tokens %d and count as wrong (the longest has %d)",
                benchmark.name,
                len(long),
                len(benchmark.problems),
                lengths.max_prompt_tokens,
                max(len(p.token_ids) for p in long),
            )
    wanted = len(plan.indices) * sum(
        len(p.token_ids) <= lengths.max_prompt_tokens for benchmark in benchmarks for p in benchmark.problems
    )
    logger.info("%d completions are asked for, %d of them are there already", wanted, wanted - missing)


def _report(plan: Plan, prepared: _Prepared) -> list[BenchmarkResult]:
    results = [
        result_of(
            benchmark, read_outcomes(plan.output, benchmark.name), plan, prepared.lengths.max_prompt_tokens
        )
        for benchmark in prepared.benchmarks
    ]
    settings = read_settings(plan.output) | {"limit": plan.limit, "max_prompt_tokens": plan.max_prompt_tokens}
    write_results(plan.output, settings, results)
    print(boxed_table(first_table(results)))
    print(boxed_table(second_table(results)), flush=True)
    logger.info("results.json, results.csv and results.md are in %s", plan.output)
    return results
