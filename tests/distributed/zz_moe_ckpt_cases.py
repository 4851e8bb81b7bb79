import multiprocessing

multiprocessing.current_process()._config["daemon"] = False
import torch, torch.distributed as dist, json, shutil
from pathlib import Path
from dataclasses import replace
from tests.distributed.policy_cases import *
from megatron.core import dist_checkpointing, parallel_state

META = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def keys(folder, case):
    stage = build(folder, case)
    out = {}
    for chunk in stage.actor.chunks:
        for k, v in chunk.sharded_state_dict().items():
            if hasattr(v, "build"):
                built = v.build()
                built = built.values() if isinstance(built, dict) else built
                out[k] = [
                    (
                        x.key,
                        tuple(x.global_shape),
                        tuple(x.global_offset),
                        tuple(x.local_shape),
                        x.replica_id,
                        "factory",
                    )
                    for x in built
                ]
            else:
                out[k] = [
                    (
                        v.key,
                        tuple(getattr(v, "global_shape", ())),
                        tuple(getattr(v, "global_offset", ())),
                        tuple(getattr(v, "local_shape", ())),
                        v.replica_id,
                    )
                ]
    return out


def save_pieces(folder, case, samples, out):
    from rlmath.checkpoint.pieces import model_pieces, optimizer_pieces, held_by
    from rlmath.parallel.collectives import gather_objects

    stage = build(folder, case)
    stage.actor.learner.learn(microbatches(stage, samples), None, None)
    pieces, _ = model_pieces(stage.actor.chunks)
    mine = {n for h in held_by(stage.actor.learner.optimizer) for n in h.tensors()}
    names = sorted(set().union(*gather_objects(mine)))
    parts = [*(p.sharded for p in pieces), *optimizer_pieces(stage.actor.learner.optimizer, pieces, names)]
    if dist.get_rank() == 0:
        Path(out).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({str(i): p for i, p in enumerate(parts)}, str(out))
    w = whole_tensors(stage)
    second = stage.actor.learner.learn(microbatches(stage, samples), None, None)
    w2 = whole_tensors(stage)
    return (names, w, w2, second.grad_norm) if dist.get_rank() == 0 else None


def load_pieces(folder, case, samples, out, names):
    from rlmath.checkpoint.pieces import model_pieces, optimizer_pieces, held_by, make_room

    stage = build(folder, case)
    make_room(stage.actor.learner.optimizer, names, 1)
    pieces, _ = model_pieces(stage.actor.chunks)
    there = {n for h in held_by(stage.actor.learner.optimizer) for n in h.tensors()}
    parts = [
        *(p.sharded for p in pieces),
        *optimizer_pieces(stage.actor.learner.optimizer, pieces, [n for n in names if n in there]),
    ]
    dist_checkpointing.load(
        {str(i): p for i, p in enumerate(parts)}, str(out), validate_access_integrity=False
    )
    w = whole_tensors(stage)
    second = stage.actor.learner.learn(microbatches(stage, samples), None, None)
    w2 = whole_tensors(stage)
    return (w, w2, second.grad_norm) if dist.get_rank() == 0 else None


def megatron_save(folder, case, samples, out):
    stage = build(folder, case)
    stage.actor.learner.learn(microbatches(stage, samples), None, None)
    chunk = stage.actor.chunks[0]
    opt = stage.actor.learner.optimizer
    md = dict(META, dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    model = chunk.sharded_state_dict(metadata=md)
    state = {"model": model, "optimizer": opt.sharded_state_dict(model, is_loading=False, metadata=md)}
    if dist.get_rank() == 0:
        Path(out).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(out))
    return sorted(type(o).__name__ for o in opt.chained_optimizers)


def megatron_load(folder, case, out):
    stage = build(folder, case)
    chunk = stage.actor.chunks[0]
    opt = stage.actor.learner.optimizer
    md = dict(META, dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    with torch.no_grad():
        model = chunk.sharded_state_dict(metadata=md)
        state = {"model": model, "optimizer": opt.sharded_state_dict(model, is_loading=True, metadata=md)}
        state = dist_checkpointing.load(state, str(out))
        opt.load_state_dict(state["optimizer"])
    return True
