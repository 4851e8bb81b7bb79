"""Problems of the settings of a run's critic, teacher, adapters and experts.

`parallel` lays both out as it does the policy, so that all must allow the layout. Tokens are
compared one by one: a teacher with another tokenizer would score other texts than the policy
wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.checkpoint.hf.config_json import inspect_critic_folder, inspect_model_folder
from rlmath.checkpoint.hf.peft import adapter_problems
from rlmath.checkpoint.hf.run_shapes import InspectedShapes, RunShapes
from rlmath.checkpoint.hf.weight_map import BUFFER_RANKS
from rlmath.config.help import nearest_path
from rlmath.config.length_curriculum import sequence_length, sequence_text
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import (
    Config,
    CriticConfig,
    LoraConfig,
    ParallelConfig,
    PolicyConfig,
    TeacherConfig,
)
from rlmath.data.tokenizer import load_tokenizer
from rlmath.planning import parallelism

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# ---------------------------------------------------------------- critic


def critic_folder_problems(
    critic: CriticConfig, advantage: str, shape: ModelShape | None
) -> Iterator[str]:
    """Problems of the weights in `critic.path` for a policy of this shape.

    `advantage` is `algorithm.advantage`, without a critic in most."""
    path = critic.path
    if advantage != "gae" or path is None or shape is None:
        return
    _, problems = inspect_critic_folder(Path(path), shape)
    near = nearest_path(Path(path)) if not Path(path).exists() else ""
    yield from (problem + near for problem in problems)


def critic_layout_problems(
    inspected: InspectedShapes,
    critic: CriticConfig,
    parallel: ParallelConfig,
    policy: PolicyConfig,
) -> Iterator[str]:
    """Problems of the critic's shape, and of its layout in `parallel`."""
    if "critic" in inspected.problem_of_model:
        yield inspected.problem_of_model["critic"]
    shape = inspected.shapes.critic
    if shape is not None and critic.path is not None:
        # No engine has the critic.
        for problem in parallelism.layout_problems(parallel, 1, policy, shape):
            yield f"critic.path, which has the layout of the policy: {problem}"


def lora_problems(lora: LoraConfig, path: str | None, shape: ModelShape) -> Iterator[str]:
    """Problems of `lora` and `model.adapter_path`, the `path`, for a policy of this shape."""
    if lora.rank and shape.num_experts and lora.target != "attention":
        yield (
            f'lora.target is "{lora.target}", and a {shape.architecture} has experts, which get '
            "no adapters. Set "
            "lora.target=attention, or lora.rank=0, with which all weights learn."
        )
    if path is not None and not lora.rank:
        yield (
            f'model.adapter_path is "{path}" and lora.rank 0: all weights would learn. Set '
            "lora.rank, lora.alpha and "
            "lora.target to the adapter's, or merge it into the model (PEFT: merge_and_unload)."
        )
    elif path is not None:
        yield from adapter_problems(Path(path), lora, shape)


def engine_adapter_problems(lora: LoraConfig) -> Iterator[str]:
    """Problems of adapters that the engines sample with.

    vLLM 0.32 adapts every architecture of `weight_map.TABLES`, on GPU in the formats that
    `policy.dtype` may have there."""
    if lora.engine == "adapters" and lora.rank > BUFFER_RANKS[-1]:
        yield (
            f"lora.rank is {lora.rank}, and vLLM samples with adapters of rank "
            f"{BUFFER_RANKS[-1]} at most. Lower it, or set lora.engine=merged, which sends whole "
            "matrices in the engine's number format."
        )


def length_problems(config: Config, shapes: RunShapes) -> Iterator[str]:
    """Problems of sequences that are too long for the critic or the teacher."""
    longest = sequence_length(config)
    critic = config.critic
    teacher = config.teacher
    models = (
        ("critic", critic.path, shapes.critic),
        ("teacher", teacher.path, shapes.teacher),
    )
    for model, path, model_shape in models:
        if model_shape is not None and path is not None and longest > model_shape.max_positions:
            yield (
                f"{sequence_text(config)} is {longest}; the model in "
                f"{model}.path has "
                f"{model_shape.max_positions} positions ({model_shape.positions_key}). Lower the "
                "sum, or take "
                f"another {model}."
            )


# ---------------------------------------------------------------- experts


def routing_problems(policy: PolicyConfig, shape: ModelShape) -> Iterator[str]:
    """Problems of `policy.routing_replay` for a policy of this shape."""
    if policy.routing_replay != "none" and not shape.num_experts:
        yield (
            f'policy.routing_replay is "{policy.routing_replay}", and a {shape.architecture} has '
            "no experts to replay. Set policy.routing_replay=none."
        )


def route_problems_of_gpus(policy: PolicyConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Problems of routes that engines are to record, or layers to replay, on GPUs."""
    if policy.routing_replay == "engine":
        yield (
            'policy.routing_replay is "engine", and engines on GPU record no routes yet. Set '
            "policy.routing_replay=none, or with several updates a step old, which replays the "
            "policy's own of the step's start."
        )
    # Local layers recompute their attention alone.
    recomputes_experts = (
        policy.recompute_granularity == "selective"
        and policy.transformer_impl == "transformer_engine"
    )
    if policy.routing_replay != "none" and parallel.pipeline > 1 and recomputes_experts:
        yield (
            'policy.recompute_granularity is "selective" and policy.routing_replay '
            f'"{policy.routing_replay}": experts that are computed again alone, between other '
            "micro-batches of a pipeline, do not know theirs. Set "
            "policy.recompute_granularity=full, policy.transformer_impl=local, "
            "parallel.pipeline=1, or policy.routing_replay=none."
        )


def uncaptured_route_problems(policy: PolicyConfig) -> Iterator[str]:
    """Problems of the replay of an update that was captured without routes of engines."""
    if policy.routing_replay == "engine":
        yield (
            'policy.routing_replay is "engine", and the capture has no routes: only steps of '
            "telemetry.capture_steps of a run with that setting have them, and one that failed may "
            "have none. Set policy.routing_replay=none, with which tokens may take other experts than in the run."
        )


def routing_warnings(policy: PolicyConfig, shape: ModelShape) -> list[str]:
    """What a run of a mixture of experts risks without replay."""
    if policy.routing_replay != "none" or not shape.num_experts:
        return []
    return [
        'policy.routing_replay="none" with a mixture of experts: engine and training round '
        "differently and may send a token to other experts, and training runs of large mixtures "
        "have collapsed so. policy.routing_replay=engine (on CPU) trains the experts that sampled, "
        "policy.routing_replay=old (with several updates a step) those of a step's start "
        "(docs/algorithm.md)."
    ]


# ---------------------------------------------------------------- teacher


def teacher_folder_problems(teacher: TeacherConfig) -> list[str]:
    """Problems of the files in `teacher.path`; none without a teacher."""
    if teacher.path is None:
        return []
    return inspect_model_folder(Path(teacher.path), "teacher.path")[1]


def teacher_layout_problems(inspected: InspectedShapes, parallel: ParallelConfig) -> Iterator[str]:
    """Problems of the teacher's shape, and of its layout in `parallel`."""
    if "teacher" in inspected.problem_of_model:
        yield inspected.problem_of_model["teacher"]
    shape = inspected.shapes.teacher
    if shape is not None:
        # No engine has the teacher, and nothing of it is recomputed.
        for problem in parallelism.layout_problems(parallel, 1, PolicyConfig(), shape):
            yield f"teacher.path, which has the layout of the policy: {problem}"


def check_teacher_tokenizer(
    path: str | None, tokenizer: PreTrainedTokenizerFast, policy_path: str
) -> tuple[str, ...]:
    """Warnings about the tokenizer in `teacher.path`, compared with the policy's in `model.path`.

    There are none without a teacher, or without its folder, as in a dry run. ValueError, which
    names a token, where the two are not the same."""
    if path is None or not os.path.isdir(path):
        return ()
    teacher = load_tokenizer(path, "teacher.path")
    difference = tokenizer_difference(tokenizer, teacher)
    if difference is not None:
        raise ValueError(
            f'teacher.path "{path}" has another tokenizer than model.path "{policy_path}": '
            f"{difference}. A "
            "teacher scores the policy's tokens by their ids. Take a teacher of the same family, "
            "whose tokenizer is "
            "the same."
        )
    if tokenizer.eos_token != teacher.eos_token:
        return (
            f"the policy ends with {tokenizer.eos_token!r} and the teacher with "
            f"{teacher.eos_token!r}: the teacher "
            "gives the policy's end a low probability, and may teach it not to end.",
        )
    return ()


def tokenizer_difference(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast
) -> str | None:
    """The first token, by id, that the two do not have alike.

    None where they have the same."""
    policy_tokens = _tokens(ours)
    teacher_tokens = _tokens(theirs)
    for number in sorted({*policy_tokens, *teacher_tokens}):
        if policy_tokens.get(number) != teacher_tokens.get(number):
            return (
                f"token {number} is {teacher_tokens.get(number, 'none')} in the teacher's and "
                f"{policy_tokens.get(number, 'none')} in "
                "the policy's"
            )
    return None


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    """Tokens by id."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        number: f"{text[:60]!r}{' (special)' * (number in special)}"
        for text, number in tokenizer.get_vocab().items()
    }


def folder_problems(
    teacher: TeacherConfig, critic: CriticConfig, advantage: str, shape: ModelShape | None
) -> list[str]:
    """Problems of the files of both, for a policy of this shape."""
    return [
        *teacher_folder_problems(teacher),
        *critic_folder_problems(critic, advantage, shape),
    ]
