"""The tools of an engine: the same on all its ranks, with sandboxes on the first."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_chats import ChatFormat
from rlmath.data.tool_formats import ToolFormat, open_format
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.called_completions import CalledCompletions, open_sandboxes
from rlmath.rollout.work_queue import share_in_engine


def open_tools(
    settings: ToolsConfig,
    tokenizer: PreTrainedTokenizerFast,
    mesh: Mesh,
    *,
    continues_noise: bool,
    stop_token_ids: Sequence[int],
) -> CalledCompletions | None:
    """What answers the calls of this rank's engine, whose completions end at `stop_token_ids`.

    None without tools. The engine's leader alone has the chat template write conversations, and
    shares what it learns: a template may take too long on one rank.

    ValueError for a tokenizer that cannot write a call, a machine without the isolation, and an
    engine whose noise does not follow from seed and position (`continues_noise`); RuntimeError for
    sandboxes that do not work, OSError where the machine has no process for them. All ranks of the
    engine raise it."""
    if settings.format is None:
        return None
    if not continues_noise:
        raise ValueError(
            f'tools.format is "{settings.format}", and vLLM takes its first model runner (its log '
            "says why), whose noise begins anew behind every output. Set tools.format=null"
        )
    tool_format: ToolFormat | None = None
    sandboxes = None
    errors: list[ValueError | RuntimeError | OSError] = []
    if mesh.is_engine_leader:
        try:
            tool_format = open_format(tokenizer, settings, stop_token_ids)
            sandboxes = open_sandboxes(settings)
        except (ValueError, RuntimeError, OSError) as error:
            errors.append(error)
    share = share_in_engine if mesh.engine_size > 1 else None
    if share is not None:
        errors = share(errors)
    if errors:
        raise errors[0]
    if share is not None:
        (frame,) = share([tool_format.frame if isinstance(tool_format, ChatFormat) else None])
        if tool_format is None:
            tool_format = open_format(tokenizer, settings, stop_token_ids, frame=frame)
    assert tool_format is not None
    return CalledCompletions(settings, tool_format, sandboxes, share=share)
