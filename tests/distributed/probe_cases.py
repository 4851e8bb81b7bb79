"""What the ranks do in the tests of the probe and of the checked sync.

A real policy and a real engine agree, or one of them was harmed after the sync.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlmath.config.schema import SyncConfig
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.device import init_process_group, open_device
from rlmath.rollout.engine_adapters import adapter_buffers
from tests.distributed.engine_cases import ROLLOUT, Pair, completions_of, open_engine, pair
from tests.distributed.policy_cases import Case, build, lay_out, microbatches
from tests.tiny_models import make_samples, shape_of

LONGEST = 64
"""What `open_engine` opens engines for (tokens)."""
ENGINE_NORM = "model.layers.1.input_layernorm.weight"
"""A parameter that vLLM does not pack: it can be harmed after a sync."""


@dataclass
class Checked:
    """A policy and its engine, and the probe of both."""

    both: Pair
    probe: Any

    @contextmanager
    def awake(self, step: int = 0) -> Iterator[None]:
        """The engine awake with the policy's weights, then asleep, whatever fails."""
        memory = self.both.engine.memory
        memory.wake_weights()
        try:
            self.both.sync.run(check=True)
            self.probe.score_policy(step)
            self.both.engine.set_weight_version(self.both.engine.version + 1)
            memory.wake_kv_cache()
            yield
        finally:
            memory.force_sleep()


def checked(both: Pair, settings: SyncConfig) -> Checked:
    from rlmath.rollout.weight_sync.logprob_probe import Probe

    def engine_scores(sequences: Any) -> dict[int, Any]:
        by_rank = all_gather_objects(both.engine.score(sequences))
        return dict(enumerate(by_rank[:: both.mesh.engine_size]))

    policy = both.stage.actor.forward_backward
    probe = Probe(
        policy,
        both.mesh,
        LONGEST,
        settings=settings,
        engine_scores=engine_scores,
        holds_adapters=both.stage.config.lora.rank > 0,
    )
    return Checked(both, probe)


def pairs(folder: Path, cases: list[Case], engine_size: int) -> Iterator[Pair]:
    """The policy in one layout after the other, beside one engine that starts once."""
    from rlmath.models.megatron import stop_megatron

    device = open_device("cpu")
    init_process_group(device, 120.0)
    engine = open_engine(folder, engine_size, device)
    for case in cases:
        yield pair(lay_out(folder, case, device), engine, engine_size)
        stop_megatron()
    engine.close()


def error_of(action: Callable[[], Any]) -> str:
    """The text of the RuntimeError that it ends in; empty where it does not."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def agreement(
    folder: Path, cases: list[Case], engine_size: int, threshold: float
) -> list[dict[str, Any]]:
    """What equal weights give, and what the harm of `HARMS` gives in the same layout."""
    reports = []
    for both in pairs(folder, cases, engine_size):
        strict = SyncConfig(checksum_every=1, probe_every=1, probe_threshold=threshold)
        checked_pair = checked(both, strict)
        with checked_pair.awake():
            metrics = checked_pair.probe.compare()
        reports.append(
            {
                "metrics": metrics,
                "harmed": {name: _harmed(both, harm, strict) for name, harm in HARMS.items()},
                "healed": _probed(both, strict),
            }
        )
    return reports


def _probed(both: Pair, settings: SyncConfig) -> dict[str, float]:
    checked_pair = checked(both, settings)
    with checked_pair.awake():
        return checked_pair.probe.compare()


def _harmed(
    both: Pair, harm: Callable[[Checked], Callable[[], None]], settings: SyncConfig
) -> dict[str, Any]:
    """The error under these settings, and what the probe measures.

    The probe measures where any difference is allowed."""
    report: dict[str, Any] = {}

    def probe(name: str, allowed: SyncConfig) -> None:
        checked_pair = checked(both, allowed)
        with checked_pair.awake():
            undo = harm(checked_pair)
            report[name] = error_of(lambda: report.update(checked_pair.probe.compare()))
            undo()

    probe("error", settings)
    probe("error where anything is allowed", replace(settings, probe_threshold=1e9))
    return report


def _parameter_of_the_policy(both: Pair) -> torch.Tensor | None:
    """One parameter, on the ranks that hold it."""
    from rlmath.checkpoint.hf.weight_map import placed_tensors
    from rlmath.checkpoint.hf.weights import local_parameter

    (placed,) = [
        p
        for p in placed_tensors(both.stage.shape)
        if "mlp.down_proj" in p.hf_names[0] and p.layer == 2
    ]
    parameter = local_parameter(both.stage.actor.chunks, placed)
    return None if parameter is None else parameter.data


def _change_the_policy(one: Checked, change: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Change the policy after the sync; the probe then asks the policy anew.

    The result undoes it."""
    parameter = _parameter_of_the_policy(one.both)
    original = None if parameter is None else parameter.clone()
    if parameter is not None:
        change(parameter)
    one.probe.score_policy(0)

    def undo() -> None:
        if parameter is not None and original is not None:
            parameter.copy_(original)

    return undo


def _policy_moves_on(one: Checked) -> Callable[[], None]:
    return _change_the_policy(one, lambda parameter: parameter.mul_(-1.0))


def _policy_is_not_finite(one: Checked) -> Callable[[], None]:
    return _change_the_policy(one, lambda parameter: parameter.view(-1)[:1].fill_(torch.nan))


def _change_the_last_engine(
    one: Checked, change: Callable[[torch.Tensor], Any]
) -> Callable[[], None]:
    """Its weights leave with its sleep: nothing to undo."""
    if one.both.mesh.engine_index == one.both.mesh.num_engines - 1:
        change(one.both.engine.weights.matrix(ENGINE_NORM))
    return lambda: None


def _last_engine_goes_astray(one: Checked) -> Callable[[], None]:
    return _change_the_last_engine(one, lambda matrix: matrix.mul_(-1.0))


def _last_engine_is_not_finite(one: Checked) -> Callable[[], None]:
    return _change_the_last_engine(one, lambda matrix: matrix.fill_(torch.nan))


HARMS = {
    "policy moves on": _policy_moves_on,
    "policy not finite": _policy_is_not_finite,
    "engine astray": _last_engine_goes_astray,
    "engine not finite": _last_engine_is_not_finite,
}


def adapters_lost(folder: Path) -> dict[str, Any]:
    """What the probe says of an engine with the policy's adapters, and then of one without."""
    stage = build(folder, Case(lora="all", lr=1.0))
    engine = open_engine(folder, 1, stage.device, lora=stage.config.lora)
    both = pair(stage, engine, 1)
    learned = stage.actor.learner.learn(microbatches(stage, make_samples(8, seed=0)), None, None)
    assert learned.discarded is None
    strict = SyncConfig(probe_every=1, probe_threshold=1e-5)
    whole = _probed(both, strict)
    checked_pair = checked(both, strict)
    with checked_pair.awake():
        (model,) = engine._llm.collective_rpc(lambda worker: worker.get_model())
        for buffer in adapter_buffers(model).values():
            buffer.zero_()
        error = error_of(checked_pair.probe.compare)
    engine.close()
    return {"whole": whole, "error": error}


def texts_after_scores(folder: Path) -> dict[str, Any]:
    """Texts after prompts that fill blocks of vLLM's cache.

    They are sampled without and with the same tokens scored before."""
    from rlmath.distributed.mesh import Mesh
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

    device = open_device("cpu")
    init_process_group(device, 120.0)
    shape = shape_of(folder)
    engine = Engine(str(folder), ROLLOUT, 256, Mesh(0, 1, 1, 1, 1), device, engine_shapes(shape, 1))
    engine.memory.sleep()
    both = pair(lay_out(folder, Case(), device), engine, 1)
    draw = random.Random(7)
    prompts = [tuple(draw.randrange(3, shape.vocab_size) for _ in range(200)) for _ in range(3)]
    report: dict[str, Any] = {}
    for scored in (False, True):
        engine.memory.wake_weights()
        both.sync.run()
        engine.set_weight_version(1)
        engine.memory.wake_kv_cache()
        if scored:
            report["scores"] = [engine.score(prompts) for _ in range(2)]
            report["left"] = left_behind(engine)
        report["after scores" if scored else "alone"] = completions_of(
            engine, _requests_of(prompts)
        )
        engine.memory.sleep()
    engine.close()
    return report


def _requests_of(prompts: list[tuple[int, ...]]) -> list[Any]:
    from rlmath.rollout.sampling import Request

    return [
        Request((100 + number, 0), prompt, number, 0, ROLLOUT.max_new_tokens)
        for number, prompt in enumerate(prompts)
    ]


def left_behind(engine: Any) -> int:
    """Requests that vLLM still has."""
    llm_engine = engine._llm.llm_engine
    scheduler = llm_engine.engine_core.engine_core.scheduler
    return len(llm_engine.output_processor.request_states) + sum(scheduler.get_request_counts())
