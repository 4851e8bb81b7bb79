"""The program of a rank that has an engine of its own (`rollout.ranks`): from the process groups to the exit status.

It starts as every rank of the run does (`startup`), joins the engines' world, and samples until the trainers end the
run. It writes nothing into the run's folder.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from typing import Any

import torch.distributed as dist

from rlmath.config import length_curriculum as curriculum
from rlmath.distributed.bridge import Mailbox
from rlmath.distributed.device import environment_rank, environment_world_size, open_device
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.rewards.reward_manager import open_reward_workers
from rlmath.rollout.collector import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.generation import GenerationLoop
from rlmath.rollout.sampling import training_sampling
from rlmath.rollout.weight_sync.publish import WeightReceiver
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from rlmath.trainer.engines import engines_plan
from rlmath.trainer.loop import join_run
from rlmath.trainer.preflight.memory_estimate import engine_mesh_of, mesh_of
from rlmath.trainer.startup import PreparedRun

logger = logging.getLogger(__name__)


def run_engine_rank(prepared: PreparedRun[Any], rendezvous: Rendezvous | None) -> int:
    """Sample until the trainers end the run; the exit status, which is theirs."""
    config, inputs = prepared.config, prepared.inputs
    world_size, rank = environment_world_size(), environment_rank()
    mesh, trainers = engine_mesh_of(config, world_size, rank), mesh_of(config, world_size, 0)
    device = open_device(config.run.device, config.policy.transformer_impl == "local")
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, rank)
    stop.install()
    with ExitStack() as stack:
        leads = mesh.is_engine_leader
        workers = stack.enter_context(open_reward_workers(config.reward) if leads else nullcontext())
        bridge, heartbeat = join_run(stack, config, device, rendezvous, stop)
        assert bridge is not None
        heartbeat.enter_phase("build engine")
        mailbox = Mailbox(bridge, range(bridge.training_ranks)) if leads else None
        with bridge.as_own_world():
            engine = Engine(
                config.model.path,
                config.rollout,
                curriculum.engine_length(config),
                mesh,
                device,
                engine_shapes(prepared.shape, mesh.engine_size),
            )
        engine.on_step = heartbeat.report_progress
        if config.rollout.on_new_weights == "recompute" and not engine.continues_noise:
            raise ValueError(
                'rollout.on_new_weights is "recompute", and vLLM takes its first model runner (its log says why), '
                "whose noise begins anew where a completion is continued. Set rollout.on_new_weights=keep or finish"
            )
        plan = engines_plan(config, prepared.shape, trainers, device)
        receiver = WeightReceiver(
            engine.weights, plan, mesh, device, bridge, mailbox, heartbeat.report_progress
        )
        collector = Collector(engine, mesh, inputs.tokenizer, config.rollout, config.reward, workers)

        def on_weights(step: int) -> None:
            heartbeat.step = step + 1

        stages = curriculum.length_stages(config, inputs.total_steps)
        loop = GenerationLoop(
            engine,
            mesh,
            receiver,
            collector,
            inputs,
            config.rollout,
            config.reward,
            [training_sampling(stage.config.rollout) for stage in stages],
            config.run.seed,
            mailbox,
            workers,
            on_weights,
        )
        heartbeat.enter_phase("generate")
        stop.in_steps = True
        status = loop.run()
        stop.done()
        if mailbox is not None:
            mailbox.close()
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status
