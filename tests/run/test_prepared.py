"""What a rank gets of a prepared run."""

from __future__ import annotations

from typing import Any

from rlmath.config.schema import Config, RunConfig
from rlmath.data.dataset import ValidationFile
from rlmath.distributed.mesh import Mesh
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.resume import Origin

SHAPES: Any = object()
INPUTS: Any = object()
DEVICE: Any = object()
WORKERS: Any = object()


def test_a_rank_gets_the_run_its_place_and_the_fingerprint_of_its_reward_functions() -> None:
    config = Config(run=RunConfig(seed=3))
    origin = Origin(model="a model", data="rows", reward="a reward", hooks="hooks", adapter="")
    validation = (ValidationFile("held", [], too_long=0, unusable=()),)
    mesh = Mesh(1, 2, 2, pipeline=1, engine_size=1)
    prepared = PreparedRun(
        config, SHAPES, INPUTS, origin=origin, recovery=None, validation=validation
    )
    context = prepared.on_rank(mesh, DEVICE, workers=WORKERS)
    assert context.config is config and context.shapes is SHAPES and context.inputs is INPUTS
    assert context.mesh is mesh and context.device is DEVICE and context.workers is WORKERS
    assert context.validation is validation
    assert context.reward_fingerprint == "a reward"
