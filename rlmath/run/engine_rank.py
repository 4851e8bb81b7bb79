"""The program of a rank of an engine (`rollout.ranks`), from process groups to exit status.

It starts as every rank of the run does (`startup`), joins the engines' world, and samples until the
trainers end the run. It writes nothing into the run's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from rlmath.config import length_curriculum
from rlmath.data.dataset import Inputs, measured_rows
from rlmath.distributed.bridge import Mailbox
from rlmath.distributed.device import run_device
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.planning.memory_estimate import engine_mesh_of, mesh_of
from rlmath.rollout.collector import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.engine_loop import EngineLoop, Leader, SamplingPlan
from rlmath.rollout.engine_tools import open_tools
from rlmath.rollout.engine_turns import open_turns, turn_prompts
from rlmath.rollout.sampling import training_sampling
from rlmath.rollout.weight_sync.offer import WeightReceiver
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters, engine_shapes
from rlmath.run.join import join_run
from rlmath.run.prepared import PreparedRun
from rlmath.trainer.context import RankContext
from rlmath.trainer.rollouts.engines import offer_plans, open_engine_workers, validation_scorer
from rlmath.workers.user_functions import scorer_hook

logger = logging.getLogger(__name__)


def run_engine_rank(prepared: PreparedRun[Any], rendezvous: Rendezvous | None) -> int:
    """Sample until the trainers end the run; the exit status, which is theirs."""
    config = prepared.config
    rank = environment_rank()
    mesh = engine_mesh_of(config.rollout, environment_world_size(), rank)
    device = run_device(config)
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, rank)
    stop.install()
    with ExitStack() as stack:
        measured = measured_rows(config, prepared.inputs.prompts, prepared.validation)
        workers = stack.enter_context(open_engine_workers(config, mesh, measured))
        bridge, heartbeat = join_run(stack, config, device, rendezvous=rendezvous, stop=stop)
        heartbeat.enter_phase("build engine")
        progress = heartbeat.report_progress
        rank_of_engine = EngineRank(
            prepared.on_rank(mesh, device, workers=workers, bridge=bridge, on_progress=progress)
        )
        heartbeat.enter_phase("generate")
        stop.in_steps = True

        def on_weights(step: int) -> None:
            heartbeat.step = step + 1

        status = rank_of_engine.run(on_weights)
        stop.done()
        rank_of_engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


class EngineRank:
    """One rank of an engine, and what connects it to the trainers."""

    def __init__(self, context: RankContext[Inputs]) -> None:
        """The context's mesh is the engines' world.

        Its `on_progress` is called after every vLLM step, and while weights are received."""
        config = context.config
        inputs = context.inputs
        shape = context.shapes.policy
        mesh = context.mesh
        device = context.device
        bridge = context.bridge
        assert bridge is not None
        self._mailbox = (
            Mailbox(bridge, range(bridge.training_ranks)) if mesh.is_engine_leader else None
        )
        self._scorer = validation_scorer(config, mesh)
        with bridge.as_own_world():
            self._engine = engine = Engine(
                config.model.path,
                config.rollout,
                length_curriculum.engine_length(config),
                mesh=mesh,
                device=device,
                weight_shapes=engine_shapes(
                    shape, mesh.engine_size, adapters=engine_adapters(shape, config.lora)
                ),
                stop_token_ids=inputs.stop_token_ids,
            )
        engine.on_step = context.on_progress
        if config.rollout.on_new_weights == "recompute" and not engine.continues_noise:
            raise ValueError(
                'rollout.on_new_weights is "recompute", and vLLM takes its first model runner '
                "(its log says why), "
                "whose noise begins anew where a completion is continued. Set "
                "rollout.on_new_weights=keep or finish"
            )
        engine.tools = open_tools(
            config.tools,
            inputs.tokenizer,
            mesh,
            continues_noise=engine.continues_noise,
            stop_token_ids=inputs.stop_token_ids,
        )
        self._turns = open_turns(
            config,
            inputs.tokenizer,
            mesh,
            turn_prompts(config, inputs.prompts, context.validation),
            continues_noise=engine.continues_noise,
            stop_token_ids=inputs.stop_token_ids,
        )
        trainer_mesh = mesh_of(config.parallel, config.rollout, bridge.world_size, rank=0)
        plans = offer_plans(config, shape, trainer_mesh, device=device)
        stages = context.shapes.length_stages
        leader = None
        if self._mailbox is not None and context.workers is not None:
            leader = Leader(self._mailbox, context.workers)
        self._loop = EngineLoop(
            engine,
            mesh,
            receiver=WeightReceiver(
                engine.weights,
                plans,
                mesh,
                device=device,
                bridge=bridge,
                mailbox=self._mailbox,
                on_progress=context.on_progress,
            ),
            collector=Collector(
                engine,
                mesh,
                inputs.tokenizer,
                rollout=config.rollout,
                reward=config.reward,
                pool=context.workers,
                scorer=self._scorer,
                has_scorer=scorer_hook(config) is not None,
                turns=self._turns,
            ),
            plan=SamplingPlan(
                inputs,
                config.rollout,
                config.reward,
                sampling_of_stage=[training_sampling(stage.config.rollout) for stage in stages],
                run_seed=config.run.seed,
            ),
            leader=leader,
            turns=self._turns,
        )

    def run(self, on_weights: Callable[[int], None]) -> int:
        """Sample until the trainers end the run; its exit status.

        `on_weights` gets the step, from 0, of every new version."""
        return self._loop.run(on_weights)

    def close(self) -> None:
        if self._engine.tools is not None:
            self._engine.tools.close()
        if self._turns is not None:
            self._turns.close()
        if self._mailbox is not None:
            self._mailbox.close()  # the trainers end with it
        self._engine.close()
        if self._scorer is not None:
            self._scorer.close()
