"""The tools of an engine: the same on all its ranks, with sandboxes on the first."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from rlmath.config.schema import ToolsConfig
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.called_completions import CalledCompletions, open_sandboxes
from rlmath.rollout.work_queue import share_in_engine


def open_tools(
    settings: ToolsConfig,
    tokenizer: PreTrainedTokenizerFast,
    mesh: Mesh,
    continues_noise: bool,
) -> CalledCompletions | None:
    """What answers the calls of this rank's engine; None without tools.

    ValueError for a tokenizer that cannot write a call, a machine without the isolation, and an
    engine whose noise does not follow from seed and position (`continues_noise`); RuntimeError for
    sandboxes that do not work. All ranks of the engine raise it."""
    if settings.format is None:
        return None
    if not continues_noise:
        raise ValueError(
            f'tools.format is "{settings.format}", and vLLM takes its first model runner (its log '
            "says why), whose noise begins anew behind every output. Set tools.format=null"
        )
    sandboxes = None
    errors: list[ValueError | RuntimeError] = []
    if mesh.is_engine_leader:
        try:
            sandboxes = open_sandboxes(settings)
        except (ValueError, RuntimeError) as error:
            errors.append(error)
    share = share_in_engine if mesh.engine_size > 1 else None
    if share is not None:
        errors = share(errors)
    if errors:
        raise errors[0]
    return CalledCompletions(settings, tokenizer, sandboxes, share=share)
