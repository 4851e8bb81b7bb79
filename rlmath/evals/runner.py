"""An evaluation on all ranks: `evaluate` is what launch/evaluate.py runs.

    rank 0: model, problems, completions on disk -> all ranks: sample and verify the missing ones,
    append them to disk -> rank 0: read all completions from disk -> tables

The tables are computed from the files alone, so a run that was stopped and resumed writes the same
ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from rlmath.answers.string_match import Rules
from rlmath.config.help import counted
from rlmath.config.hub import is_hub_id, parse_hub_id
from rlmath.config.length_curriculum import measured_tools, tool_tokens
from rlmath.config.schema import RewardConfig, RolloutConfig, RunConfig
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer
from rlmath.data.tool_chats import OPTIONS, check_shown
from rlmath.data.tool_formats import check_format
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.fault_tolerance.exit_codes import clear_exit_status
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.distributed.rendezvous import open_rendezvous
from rlmath.evals.benchmarks import (
    Benchmark,
    LengthLimits,
    benchmark_warnings,
    check_head_dim,
    check_lengths,
    find_benchmark,
    load_benchmark,
    model_positions,
)
from rlmath.evals.completions import CompletionRecord, read_completions, remove_unfinished_lines
from rlmath.evals.model_source import EvaluatedModel, resolve_model
from rlmath.evals.plan import Plan, check_settings, read_settings
from rlmath.evals.results import BenchmarkResult, result_of
from rlmath.evals.sampling import Missing, open_engine, sample_missing
from rlmath.evals.tables import boxed_tables, first_table, second_table, write_results
from rlmath.rewards.reward_manager import try_scorer
from rlmath.rollout.called_completions import check_lost
from rlmath.run.nodes import environment_facts, meet
from rlmath.run.recovery.hub_inputs import fetch_ids
from rlmath.run.run_dir import sole_user
from rlmath.workers.hooks import hooks_fingerprint
from rlmath.workers.user_functions import word_or_function
from rlmath.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_SECONDS = 24 * 3600.0
"""Timeout of ranks that wait for engines or for the conversion of a checkpoint.

torchrun reports dead ranks."""


@dataclass(frozen=True)
class _Prepared:
    """The model, the problems and the missing completions, as rank 0 read them."""

    model: EvaluatedModel
    benchmarks: tuple[Benchmark, ...]
    lengths: LengthLimits
    missing: list[Missing]
    stop_token_ids: tuple[int, ...] | None


def evaluate(
    plan: Plan, rollout: RolloutConfig, reward_workers: int, reward_timeout: float, device_kind: str
) -> list[BenchmarkResult] | None:
    """Sample the missing completions and write the tables.

    All ranks call it; rank 0 returns the rows of the tables, the others None. `reward_workers`
    processes of each engine verify its answers, with `reward_timeout` seconds for each. ValueError,
    on all ranks, for a user's mistake."""
    world_size = environment_world_size()
    rank = environment_rank()
    if world_size % rollout.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel is {rollout.tensor_parallel}, which does not divide the "
            f"{counted(world_size, 'rank')}; change one"
        )
    mesh = Mesh(rank, world_size, 1, pipeline=1, engine_size=rollout.tensor_parallel)
    if "RANK" not in os.environ:
        # Without torchrun: what it would set for a single rank. Port 0 is any free one.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    device = open_device(device_kind)
    with ExitStack() as stack:
        pool = scorer = None
        if mesh.is_engine_leader:
            # Started before process groups and engines, so that the workers do not inherit their
            # threads.
            pool = stack.enter_context(
                WorkerPool(reward_workers, reward_timeout, rules=Rules(plan.answer_from))
            )
            if (hook := plan.scorer_hook) is not None:
                scorer = stack.enter_context(
                    WorkerPool(reward_workers, reward_timeout, function=hook)
                )
        plan, store = _plan_after_rendezvous(plan)
        init_process_group(device, COLLECTIVE_TIMEOUT_SECONDS, store)
        # The end of an engine destroys the group too.
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        prepared = _prepare_on_rank_zero(
            plan, rollout, mesh=mesh, device=device, pool=pool, stack=stack
        )
        if prepared.missing:
            model = prepared.model
            lengths = prepared.lengths
            llm = stack.enter_context(
                open_engine(
                    model.folder,
                    rollout,
                    lengths,
                    mesh=mesh,
                    device=device,
                    stop_token_ids=prepared.stop_token_ids,
                    adapter=model.adapter,
                    tool_tokens=tool_tokens(plan.tools),
                )
            )
            missing = prepared.missing
            sample_missing(
                llm,
                missing,
                plan=plan,
                rollout=rollout,
                lengths=lengths,
                mesh=mesh,
                tokenizer_folder=model.tokenizer,
                pool=pool,
                scorer=scorer,
            )
            dist.barrier()
        return _write_tables(plan, prepared) if rank == 0 else None


def _plan_after_rendezvous(plan: Plan) -> tuple[Plan, dist.Store | None]:
    """The plan and the store, if any, once all ranks are here and their nodes agree.

    The plan's model is on this node."""
    rendezvous = open_rendezvous(RunConfig.start_timeout_seconds)
    if rendezvous is not None:
        meet(rendezvous, environment_facts(), RunConfig.start_timeout_seconds)
    if isinstance(plan.model, str):
        hub_id = parse_hub_id(plan.model, "--model")
        earlier = str(read_settings(plan.output).get("about_model", ""))
        recorded = [parse_hub_id(earlier, "--model")] if is_hub_id(earlier) else []
        pins = fetch_ids(
            [hub_id],
            seconds=RunConfig.hub_timeout_seconds,
            start_seconds=RunConfig.start_timeout_seconds,
            rendezvous=rendezvous,
            recorded=recorded,
        )
        plan = replace(plan, model=str(pins[hub_id]))
    return plan, None if rendezvous is None else rendezvous.group_store(COLLECTIVE_TIMEOUT_SECONDS)


# ---------------------------------------------------------------- preparation, on rank 0
def _prepare_on_rank_zero(
    plan: Plan,
    rollout: RolloutConfig,
    mesh: Mesh,
    device: Device,
    pool: WorkerPool | None,
    stack: ExitStack,
) -> _Prepared:
    """`_prepare` on rank 0, sent to all; a ValueError of rank 0 is raised on all ranks."""
    prepared = None
    mistake = None
    if mesh.rank == 0:
        assert pool is not None  # rank 0 leads an engine
        try:
            stack.enter_context(sole_user(plan.output, "--output"))
            clear_exit_status(plan.output)
            prepared = _prepare(plan, rollout, pool, device)
        except ValueError as error:
            mistake = str(error)
    prepared, mistake = broadcast_from_rank_zero((prepared, mistake))
    if prepared is None:
        raise ValueError(mistake)
    return prepared


def _prepare(plan: Plan, rollout: RolloutConfig, pool: WorkerPool, device: Device) -> _Prepared:
    """Read the model and the problems, and find the completions that are missing."""
    paths = {name: find_benchmark(name, plan.data_dir) for name in plan.benchmarks}
    place = (
        plan.model if isinstance(plan.model, Path) else parse_hub_id(plan.model, "--model").place
    )
    model = resolve_model(Path(place), plan.output)
    tokenizer = load_tokenizer(str(model.tokenizer), "--model", plan.chat)
    verified = plan.scorer is None
    with word_or_function(plan.template_hook, plan.template) as template:
        benchmarks = tuple(
            load_benchmark(
                name,
                path,
                tokenizer=tokenizer,
                template=template,
                limit=plan.limit,
                verified=verified,
            )
            for name, path in paths.items()
        )
    problems = [problem for benchmark in benchmarks for problem in benchmark.problems]
    if device.kind == "cpu":
        check_head_dim(model.folder)
    positions = model_positions(model.folder)
    lengths = check_lengths(
        problems,
        positions,
        plan.max_new_tokens,
        max_prompt_tokens=plan.max_prompt_tokens,
        default_new_tokens=plan.default_new_tokens,
        tool_tokens=tool_tokens(plan.tools),
    )
    check_format(tokenizer, plan.tools, vocab_size=None, names=OPTIONS)
    for benchmark in benchmarks:
        texts = [problem.text for problem in benchmark.problems]
        check_shown(texts, plan.tools, source=benchmark.name, names=OPTIONS)
    common = {
        "about_model": str(plan.model),
        "about_model_folder": str(model.source),
        "model": model.named_as(read_settings(plan.output).get("model")),
        "template": plan.template,
        "about_chat_template": plan.chat_template,
        "chat_template_kwargs": list(plan.chat_template_kwargs),
        "system_prompt": plan.system_prompt,
        "answer_from": plan.answer_from,
        "max_new_tokens": lengths.max_new_tokens,
        "cuda_graphs": rollout.cuda_graphs,
        "scorer": None if plan.scorer_hook is None else hooks_fingerprint([plan.scorer_hook]),
        "about_scorer": plan.scorer,
        "tools": measured_tools(plan.tools),
    }
    if plan.scorer_hook is not None:
        limits = RewardConfig(timeout_seconds=pool.timeout_seconds)
        for warning in try_scorer(plan.scorer_hook, limits, [problems[0]]).warnings:
            logger.warning("%s", warning)
    sampled = {"temperature": plan.temperature, "top_p": plan.top_p, "seed": plan.seed}
    check_settings(plan.output, common, sampled if plan.samples else None)
    repaired = remove_unfinished_lines(plan.output)
    if repaired:
        logger.info(
            "Removed the unfinished last line of %d files, left by a run that was stopped", repaired
        )
    missing = [gap for benchmark in benchmarks for gap in _missing(benchmark, plan, lengths)]
    for warning in benchmark_warnings(benchmarks, tokenizer, verified):
        logger.warning("%s", warning)
    _log_work(benchmarks, lengths, plan, missing=sum(len(gap.indices) for gap in missing))
    if plan.max_new_tokens is None:
        logger.info(
            "Completions have at most %d tokens (--max-new-tokens is not given): prompts have up "
            "to %d, and the model "
            "has %s positions",
            lengths.max_new_tokens,
            lengths.max_prompt_tokens,
            "unknown" if positions is None else positions,
        )
    stops = None  # the engine's own, of the folder's template
    if plan.chat_template is not None or model.tokenizer != model.folder:
        stops = stop_token_ids(str(model.stop_tokens), tokenizer, len(tokenizer))
    return _Prepared(model, benchmarks, lengths, missing=missing, stop_token_ids=stops)


def _missing(benchmark: Benchmark, plan: Plan, lengths: LengthLimits) -> list[Missing]:
    """The completions that are not on disk, or lost there.

    ValueError if those on disk were sampled for other problems."""
    on_disk = read_completions(plan.output, benchmark.name)
    missing = []
    for problem in benchmark.problems:
        keys = [(problem.prompt_id, index) for index in plan.indices]
        if {on_disk[key].prompt_hash for key in keys if key in on_disk} - {problem.prompt_hash}:
            raise ValueError(
                f'--output "{plan.output}" holds completions of another problem '
                f"{problem.prompt_id!r} of "
                f"{problem.benchmark}: its text, template or solutions have changed. Give another "
                "--output."
            )
        indices = tuple(key[1] for key in keys if key not in on_disk or on_disk[key].is_lost)
        if indices and len(problem.token_ids) <= lengths.max_prompt_tokens:
            missing.append(Missing(problem, indices))
    return missing


def _log_work(
    benchmarks: Sequence[Benchmark], lengths: LengthLimits, plan: Plan, missing: int
) -> None:
    """Log the problems, and how many completions are requested and on disk."""
    requested = 0
    for benchmark in benchmarks:
        name = benchmark.name
        problems = benchmark.problems
        logger.info("%s: %d problems", name, len(problems))
        if benchmark.unusable:
            rows = benchmark.unusable
            logger.warning(
                "%s: %d rows of its file are unusable, and are not in the table", name, rows
            )
        tokens = (len(problem.token_ids) for problem in problems)
        too_long = [length for length in tokens if length > lengths.max_prompt_tokens]
        if too_long:
            logger.warning(
                f"{name}: {len(too_long)} of {len(problems)} prompts are longer than "
                "--max-prompt-tokens "
                f"{lengths.max_prompt_tokens} and count as wrong (the longest has {max(too_long)})"
            )
        requested += len(plan.indices) * (len(problems) - len(too_long))
    logger.info(
        "%d completions are requested, %d of them are on disk already",
        requested,
        requested - missing,
    )


# ---------------------------------------------------------------- tables
def check_records(records: Sequence[CompletionRecord]) -> None:
    """Warn of completions that were lost; RuntimeError where they are many."""
    check_lost(
        [record.calls[-1]["output"] for record in records if record.is_lost],
        calling=sum(bool(record.calls) for record in records),
        outcome="They are not judged; the same command samples them again",
    )


def _write_tables(plan: Plan, prepared: _Prepared) -> list[BenchmarkResult]:
    """Write and print the tables of the completions on disk, and return their rows.

    RuntimeError where many are lost."""
    longest = prepared.lengths.max_prompt_tokens
    records = {
        benchmark.name: read_completions(plan.output, benchmark.name)
        for benchmark in prepared.benchmarks
    }
    check_records([record for of_name in records.values() for record in of_name.values()])
    results = [
        result_of(benchmark, records[benchmark.name], plan, max_prompt_tokens=longest)
        for benchmark in prepared.benchmarks
    ]
    settings = read_settings(plan.output) | {
        "limit": plan.limit,
        "max_prompt_tokens": plan.max_prompt_tokens,
    }
    write_results(plan.output, settings, results)
    print(boxed_tables(first_table(results)))
    print(boxed_tables(second_table(results)), flush=True)
    logger.info("results.json, results.csv and results.md are in %s", plan.output)
    return results
