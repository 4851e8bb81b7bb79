"""What is wrong with a run's teacher, found before it starts: its folder, its layout, its lengths and its tokenizer.

`parallel` lays the teacher out as it does the policy, so that both must allow the layout. Tokens are compared one by
one: a teacher with another tokenizer would score other texts than the policy wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.config.schema import Config, PolicyConfig, TeacherConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.models.hf_config import inspect_model_folder, teacher_shape_of
from rlmath.planning import parallelism

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def teaches_alone(config: Config) -> bool:
    """Whether there is a teacher, and rewards are only measured."""
    return config.teacher.path is not None and not config.teacher.with_rewards


def folder_problems(config: Config) -> list[str]:
    """What is wrong with the files in `teacher.path`; none without a teacher."""
    if config.teacher.path is None:
        return []
    return inspect_model_folder(Path(config.teacher.path), "teacher.path")[1]


def layout_problems(config: Config) -> Iterator[str]:
    """Why the teacher's shape cannot be laid out as `parallel` says."""
    try:
        shape = teacher_shape_of(config)
    except ValueError as error:
        yield str(error)
        return
    if shape is None:
        return
    # No engine has the teacher, and nothing of it is recomputed.
    for problem in parallelism.layout_problems(config.parallel, 1, PolicyConfig(), shape):
        yield f"teacher.path, which has the layout of the policy: {problem}"


def length_problems(config: Config) -> Iterator[str]:
    """Sequences that are too long for the teacher."""
    try:
        shape = teacher_shape_of(config)
    except ValueError:
        return  # told by `layout_problems`
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if shape is not None and longest > shape.max_positions:
        yield (
            f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}; the model in teacher.path has "
            f"{shape.max_positions} positions (max_position_embeddings). Lower the sum, or take another teacher."
        )


def setting_problems(config: Config) -> Iterator[str]:
    """Settings that do not go with a teacher."""
    algorithm = config.algorithm
    if teaches_alone(config) and algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        yield (
            'algorithm.kl_in is "reward" and teacher.with_rewards false: no reward is learned from that the KL could '
            "be taken off. Set algorithm.kl_in=loss, or teacher.with_rewards=true."
        )

    if teaches_alone(config) and algorithm.advantage == "gae":
        yield (
            'algorithm.advantage is "gae" and teacher.with_rewards false: no reward is learned from, and the critic '
            "would be trained for nothing. Set another algorithm.advantage, or teacher.with_rewards=true."
        )


def setting_warnings(config: Config) -> Iterator[str]:
    """Settings that change nothing with this teacher, or without one."""
    teacher, selection = config.teacher, config.selection
    if teacher.path is None:
        names = [
            name for name in ("loss", "coef", "with_rewards") if getattr(teacher, name) != _default(name)
        ]
        keys = [f"teacher.{name}" for name in names]
        keys += ["memory.offload_teacher"] if config.memory.offload_teacher else []
        if keys:
            yield f"{', '.join(keys)}: no effect without teacher.path."
        return
    if teaches_alone(config) and selection.dynamic_sampling is not None:
        yield (
            f'selection.dynamic_sampling="{selection.dynamic_sampling}" drops groups by their rewards, and with '
            "teacher.with_rewards=false the teacher would teach them, too. Set selection.dynamic_sampling=null."
        )


def _default(name: str) -> object:
    return getattr(TeacherConfig(), name)


def check_teacher_tokenizer(config: Config, tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Warnings about the tokenizer in `teacher.path`, compared with the policy's; nothing where there is no teacher, or
    no such folder, as in a dry run. ValueError, which names a token, where they are not the same."""
    path = config.teacher.path
    if path is None or not os.path.isdir(path):
        return ()
    theirs = load_tokenizer(path, "teacher.path")
    difference = tokenizer_difference(tokenizer, theirs)
    if difference is not None:
        raise ValueError(
            f'teacher.path "{path}" has another tokenizer than model.path "{config.model.path}": {difference}. A '
            "teacher scores the policy's tokens by their ids. Take a teacher of the same family, whose tokenizer is "
            "the same."
        )
    if tokenizer.eos_token != theirs.eos_token:
        return (
            f"the policy ends with {tokenizer.eos_token!r} and the teacher with {theirs.eos_token!r}: the teacher "
            "gives the policy's end a low probability, and may teach it not to end.",
        )
    return ()


def tokenizer_difference(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> str | None:
    """The first token, by id, that the two do not have alike: its id, or whether it is a special one. None where they
    have the same."""
    mine, others = _tokens(ours), _tokens(theirs)
    for number in sorted({*mine, *others}):
        if mine.get(number) != others.get(number):
            return (
                f"token {number} is {_token_text(others.get(number))} in the teacher's and "
                f"{_token_text(mine.get(number))} in the policy's"
            )
    return None


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, tuple[str, bool]]:
    """(text, whether it is special) by id."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {number: (text, number in special) for text, number in tokenizer.get_vocab().items()}


def _token_text(token: tuple[str, bool] | None) -> str:
    if token is None:
        return "none"
    text, special = token
    return f"{text[:60]!r}{' (special)' if special else ''}"
