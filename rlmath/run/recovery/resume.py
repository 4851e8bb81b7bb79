"""Whether a run resumes from a checkpoint, and from which.

`find_recovery` runs on every rank before anything is started: it reads manifests and small files,
and refuses a checkpoint of another run. With the process group there, `checkpoint_choice` reads the
candidates' files, each rank a share of them. What a run is made of (model, data) is compared by
fingerprint, not by path.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.algorithms.types import Prompt
from rlmath.checkpoint import directory
from rlmath.checkpoint.directory import Checkpoint, Progress
from rlmath.checkpoint.hf.headers import fingerprint_to_compare, model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.config.help import as_yaml_word, counted, is_among, setting_values
from rlmath.config.hub import is_same
from rlmath.config.length_curriculum import (
    has_length_stages,
    length_stage_at,
    length_stages,
    stage_list_problems,
)
from rlmath.config.load import load_config, shown_values
from rlmath.config.run_files import ADAPTER_CONFIG, CHECKPOINTS_FOLDER
from rlmath.config.schema import Config, RewardConfig
from rlmath.data.dataset import Inputs, PromptFiles, SftInputs
from rlmath.data.sft_sequences import sequences_fingerprint
from rlmath.distributed.device_kind import resolve_kind
from rlmath.rewards.several_rewards import functions_of
from rlmath.rollout.sampling import CPU_SAMPLER_VERSION
from rlmath.run.recovery.rollbacks_file import read_rollbacks, rollbacks_of, superseded_by
from rlmath.run.recovery.tokenizer_changes import tokenizer_changes
from rlmath.workers.hooks import Hook, code_fingerprint, hooks_fingerprint, is_same_function
from rlmath.workers.user_functions import advantage_hook, environment_hook, selection_hook

logger = logging.getLogger(__name__)


def data_fingerprint(prompts: Sequence[Prompt], sizes: Sequence[int] = ()) -> str:
    """Fingerprint of the prompts in use, in order, and of the number of prompts of each file.

    A prompt's tokens, solutions and names count."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = (prompt.prompt_id, prompt.token_ids, prompt.solutions, prompt.task, prompt.more_json)
        digest.update(json.dumps(row).encode())
    if sizes:
        digest.update(json.dumps(list(sizes)).encode())
    return digest.hexdigest()[:16]


MAY_CHANGE = """
run.output_dir run.total_epochs run.total_steps run.device run.recover_mode run.distributed_timeout_seconds
run.start_timeout_seconds run.stop_grace_seconds run.heartbeat_timeout_seconds run.hang_timeout_seconds
run.hub_timeout_seconds run.max_discarded_steps run.plugins algorithm.rollback data.history_path parallel. policy.
lora.engine optimizer.distributed optimizer.overlap_grad_reduce algorithm.reference_every_steps critic.path
rollout.tensor_parallel rollout.memory_share rollout.kv_cache_gib rollout.cpu_kv_cache_gib rollout.max_num_seqs
rollout.max_num_batched_tokens rollout.chunked_prefill rollout.cuda_graphs rollout.progress_bar rollout.slice_tokens
rollout.max_groups_in_flight rollout.max_concurrent_sequences stages.max_tokens_per_microbatch sync. memory. validation.
tools.cores tools.sessions tools.isolation environment.workers environment.timeout_seconds
reward.timeout_seconds reward.workers reward.max_failure_share sft.eval_every_steps telemetry. save.
""".split()
"""Settings, or whole sections, that may differ in a resumed run.

They say where and how it computes, what it keeps and measures, and how long it is. Length stages
may change as far as they are not done yet (`refused_changes`)."""


BY_CONTENT = tuple(
    """
    model.path model.adapter_path data.train_path data.more_train_paths data.format data.template data.chat_template
    data.chat_template_kwargs data.system_prompt data.max_unusable_share sft.held_out_path
    """.split()
)
"""Settings that a checkpoint compares by what they hold: they may have moved."""


CheckpointToResume = tuple[Checkpoint, Progress]


@dataclass(frozen=True)
class Recovery:
    """Checkpoints that a run can resume from, newest first."""

    candidates: list[CheckpointToResume]
    notes: list[str]
    """Lines for the console about checkpoints that are skipped."""
    warnings: tuple[str, ...] = ()
    """Changes since the checkpoint that a resumed run may have."""


@dataclass(frozen=True)
class Origin:
    """Fingerprints of a run's inputs; "" if not known, as in a dry run without weights."""

    model: str
    data: str
    reward: str = ""
    """The files of the user's reward functions; they may change, with a warning."""
    hooks: str = ""
    """The files of functions that select groups, give advantages or answer turns.

    They may change, with a warning."""
    older_data: str = ""
    """The fingerprint without the places where files end.

    Checkpoints before November 27, 2026 have it."""
    adapter: str = ""
    """Fingerprint of the contents of `model.adapter_path`; "" without it."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; None where the tokenizer is not read."""


def origin_of(config: Config, inputs: PromptFiles, has_weights: bool = True) -> Origin:
    sizes = [share.n_prompts for share in inputs.order.shares]
    reward = reward_fingerprint(config.reward, config.run.plugins)
    model = model_fingerprint(config.model.path) if has_weights else ""
    data = data_fingerprint(inputs.prompts, sizes)
    hooks = hooks_fingerprint(learning_hooks(config))
    adapter = adapter_fingerprint(config) if has_weights else ""
    stops = inputs.stop_token_ids if isinstance(inputs, Inputs) else None
    return Origin(model, data, reward, hooks=hooks, adapter=adapter, stop_token_ids=stops)


def adapter_fingerprint(config: Config) -> str:
    """Fingerprint of the contents of `model.adapter_path`; "" without it."""
    path = config.model.adapter_path
    return "" if path is None else model_fingerprint(path, ADAPTER_CONFIG)


def learning_hooks(config: Config) -> list[Hook]:
    """The user's functions that decide what is learned.

    They select groups, give advantages, or answer turns."""
    hooks = (selection_hook(config), advantage_hook(config), environment_hook(config))
    return [hook for hook in hooks if hook is not None]


def reward_fingerprint(reward: RewardConfig, plugins: Sequence[str] = ()) -> str:
    """Fingerprint of the files of the user's reward functions; "" without any."""
    if not reward.rewards:
        return code_fingerprint(reward.function, plugins)
    codes = {
        setting: code_fingerprint(function, plugins)
        for setting, function in functions_of(reward).items()
    }
    return hashlib.sha256(json.dumps(codes).encode()).hexdigest()[:16] if codes else ""


def sft_origin_of(config: Config, inputs: SftInputs, has_weights: bool = True) -> Origin:
    """The origin of a supervised run.

    Held-out sequences are no part of it, but decide which sequences are left for training. It
    matters where files end."""
    sequences = iter(inputs.sequences)
    files = [list(itertools.islice(sequences, share.n_prompts)) for share in inputs.order.shares]
    return Origin(
        model_fingerprint(config.model.path) if has_weights else "",
        sequences_fingerprint(*(files or [inputs.sequences])),
        older_data=sequences_fingerprint(inputs.sequences),
        adapter=adapter_fingerprint(config) if has_weights else "",
        stop_token_ids=inputs.stop_token_ids,
    )


def find_recovery(config: Config, origin: Origin, total_steps: int) -> Recovery | None:
    """The checkpoints that the run can resume from; None for a start from the beginning.

    Reads manifests, sizes and small files only. ValueError if the newest checkpoint belongs to
    another run (batch size, group size, data, model, ...) or is beyond its `total_steps`, if the
    folder's rollbacks are those of another run, if all checkpoints are damaged, if the folder
    cannot be read (a link to a disk that is not mounted, no permission), and, with
    run.recover_mode "resume", if there is no checkpoint."""
    if config.run.recover_mode == "disabled":
        return None
    root = Path(config.run.output_dir) / CHECKPOINTS_FOLDER
    notes: list[str] = []
    readable_checkpoints = list(_readable_checkpoints(config, notes))
    rollbacks = read_rollbacks(config.run.output_dir)
    candidates = []
    compares_tokenizers = bool(readable_checkpoints) and origin.stop_token_ids is not None
    model_files = read_metadata_files(config.model.path) if compares_tokenizers else {}
    for checkpoint, progress, saved_config in readable_checkpoints:
        if (later := superseded_by(rollbacks, progress)) is not None:
            text = f"rollback {later.number} of the run went back to step {later.step}"
            notes.append(f"the checkpoint {checkpoint.folder} is skipped: {text}")
            continue
        problems = list(
            _other_run(saved_config, config, progress, origin=origin, total_steps=total_steps)
        )
        if origin.stop_token_ids is not None:
            model = Path(config.model.path)
            problems += tokenizer_changes(
                model, model_files, checkpoint.folder, stops=origin.stop_token_ids
            )
        if problems:
            lines = [*(f"  - {problem}" for problem in problems), f"{START_OVER.capitalize()}."]
            raise ValueError(
                "\n".join([f"The run cannot resume from {checkpoint.folder}:", *lines])
            )
        rollbacks_of(
            config.run.output_dir, progress, rollbacks
        )  # raises where the file is another run's
        candidates.append((checkpoint, progress))
    if candidates:
        return Recovery(candidates, notes, tuple(_changed_code(config, candidates[0], origin)))
    if notes:
        raise ValueError(
            f"no checkpoint in {root} is whole: {'. '.join(notes)}. {START_OVER.capitalize()}."
        )
    if config.run.recover_mode == "resume":
        raise ValueError(
            f'run.recover_mode is "resume", and {root} has no checkpoint to resume from. '
            'Give the run.output_dir of a run that has one, or run.recover_mode "auto".'
        )
    return None


def changes_since_newest(config: Config) -> list[str] | None:
    """The settings that the newest whole checkpoint in the run's folder refuses, as changes.

    None if the run would start from the beginning. This reads manifests and small files only. A
    change of an input is listed only beside a refused setting: whether its contents differ is found
    out at the start. ValueError if the folder cannot be read."""
    if config.run.recover_mode == "disabled":
        return None
    for _, progress, saved_config in _readable_checkpoints(config, []):
        if not (refused := _changed_settings(saved_config, config, progress)):
            return []
        input_changes = [
            f"{change} (refused, too, if the model or the rows become others by it)"
            for change in refused_changes(saved_config, config, progress.step)
            if change.startswith(BY_CONTENT)
        ]
        return [*refused, *input_changes]
    return None


START_OVER = "to start from the beginning, give another run.output_dir or run.recover_mode=disabled"


def _readable_checkpoints(
    config: Config, notes: list[str]
) -> Iterator[tuple[Checkpoint, Progress, Config]]:
    """The readable checkpoints in the run's folder with their small files, newest first.

    Problems of the others are added to `notes`. ValueError if the folder cannot be read."""
    try:
        checkpoints, damaged = directory.complete_checkpoints(
            Path(config.run.output_dir) / CHECKPOINTS_FOLDER
        )
        notes += damaged
        for checkpoint in checkpoints:
            try:
                progress, saved_config = _read_small_files(checkpoint)
            except directory.OutOfReachError:
                raise
            except (OSError, ValueError) as error:
                notes.append(
                    f"the checkpoint {checkpoint.folder} is damaged and is skipped: {error}"
                )
            else:
                yield checkpoint, progress, saved_config
    except ValueError as error:
        raise ValueError(out_of_reach_text(error)) from error


def out_of_reach_text(error: ValueError) -> str:
    return (
        f"what the run can resume from cannot be known: {error}. Mount the disk, correct the link "
        "or the permissions, "
        f"or move it away; {START_OVER}."
    )


def _read_small_files(checkpoint: Checkpoint) -> tuple[Progress, Config]:
    """A checkpoint's progress and settings; ValueError or OSError if they are damaged."""
    try:
        damage = directory.wrong_contents(checkpoint, (directory.PROGRESS, directory.SETTINGS))
    except OSError as error:
        directory.raise_if_out_of_reach(Path(error.filename or checkpoint.folder), error)
        raise
    if damage:
        raise ValueError(damage[0])
    progress = directory.read_progress(checkpoint.folder)
    if progress.step != checkpoint.step:
        raise ValueError(f"{directory.PROGRESS} is that of step {progress.step}")
    return progress, load_config([checkpoint.folder / directory.SETTINGS], [], saved=True)


def _other_run(
    saved_config: Config, new_config: Config, progress: Progress, origin: Origin, total_steps: int
) -> Iterator[str]:
    """Why a checkpoint with the settings `saved_config` is not of the run of `new_config`."""
    if progress.step > total_steps:
        keys = (
            "stages.steps" if has_length_stages(new_config) else "run.total_steps, run.total_epochs"
        )
        yield (
            f"{keys}: {counted(progress.step, 'step', 'are')} done there, the run has "
            f"{total_steps} now"
        )
    yield from _changed_settings(saved_config, new_config, progress, total_steps=total_steps)
    as_many_files = len(saved_config.data.more_train_paths) == len(new_config.data.more_train_paths)
    recorded_data = progress.data_fingerprint
    if as_many_files and recorded_data == origin.older_data:
        recorded_data = origin.data
    model = origin.model
    adapter = origin.adapter
    recorded_model = progress.model_fingerprint
    recorded_adapter = progress.adapter_fingerprint
    if model:
        model = fingerprint_to_compare(recorded_model, model, new_config.model.path)
    if adapter and new_config.model.adapter_path is not None:
        place = new_config.model.adapter_path
        adapter = fingerprint_to_compare(recorded_adapter, adapter, place, config=ADAPTER_CONFIG)
    for key, path, was, is_now in (
        ("model.path", new_config.model.path, recorded_model, model),
        ("model.adapter_path", new_config.model.adapter_path, recorded_adapter, adapter),
        ("data.train_path", new_config.data.train_path, recorded_data, origin.data),
    ):
        is_known = is_now or (key == "model.adapter_path" and origin.model)
        if is_known and was != is_now:
            yield (
                f"{key}: what the run started from has changed (fingerprint {was or 'none'} "
                f"of {shown_values(saved_config)[key]} there, {is_now or 'none'} of {path} now)"
            )


def _changed_code(config: Config, newest: CheckpointToResume, origin: Origin) -> Iterator[str]:
    """Warnings about code that has changed since the checkpoint."""
    checkpoint, progress = newest
    changed = []
    if progress.reward_fingerprint not in ("", origin.reward):
        changed += [
            f"{setting}={function}" for setting, function in functions_of(config.reward).items()
        ]
        changed = changed or ["reward.function"]
    if progress.hooks_fingerprint not in ("", origin.hooks):
        changed += [f"{hook.setting}={hook}" for hook in learning_hooks(config)]
    if changed:
        yield (
            f"{', '.join(changed)}: the code has changed since the checkpoint of step "
            f"{checkpoint.step}. The run "
            "continues with it as it is now: what was measured before and after may not be "
            "comparable; groups in "
            "flight that a reward function has scored a part of are sampled anew"
        )
    if (
        progress.syncs
        and progress.cpu_sampler != CPU_SAMPLER_VERSION
        and resolve_kind(config.run.device) == "cpu"
    ):
        yield (
            f"The checkpoint of step {checkpoint.step} is from a version whose engines drew other "
            "tokens from the same "
            "seeds on CPU: the completions from here on are others than they would have been, as "
            "good as those"
        )


def _changed_settings(
    saved_config: Config, new_config: Config, progress: Progress, total_steps: int | None = None
) -> list[str]:
    changes = refused_changes(
        saved_config,
        new_config,
        progress.step,
        reward_code=progress.reward_fingerprint,
        total_steps=total_steps,
    )
    return [change for change in changes if not change.startswith(BY_CONTENT)]


def refused_changes(
    saved_config: Config,
    new_config: Config,
    steps_done: int | None = None,
    reward_code: str = "",
    total_steps: int | None = None,
) -> list[str]:
    """["rollout.group_size: 8 there, 16 now", ...] of the settings that a run must keep.

    `reward_code` is the fingerprint of its reward function: another spelling of the same function
    is no change. Length stages must keep the lengths of the `steps_done` (None: all stages).
    `total_steps` is the number of steps now planned; None: not known."""
    saved_values = setting_values(saved_config)
    new_values = setting_values(new_config)
    saved_texts = shown_values(saved_config)
    new_texts = shown_values(new_config)
    staged = has_length_stages(saved_config) or has_length_stages(new_config)
    # Where there are stages, it is their max_new_tokens that count.
    may_change = (*MAY_CHANGE, "rollout.max_new_tokens") if staged else tuple(MAY_CHANGE)
    if steps_done is not None:
        may_change = (*may_change, "stages.")
    own_ranks = saved_config.rollout.ranks > 0, new_config.rollout.ranks > 0
    if all(own_ranks):
        may_change = (
            *may_change,
            "rollout.ranks",
        )  # but not to or from 0: what is in flight is another
    elif not any(own_ranks):
        may_change = (*may_change, "rollout.on_new_weights")
        if saved_config.rollout.tail == new_config.rollout.tail != "carry":
            may_change = (*may_change, "rollout.max_staleness")
    if is_same_function(saved_config.reward.function, new_config.reward.function, reward_code):
        may_change = (*may_change, "reward.function")
    for key in ("algorithm.advantage", "selection.dynamic_sampling", "environment.function"):
        if is_same_function(saved_values[key], new_values[key]):
            may_change = (*may_change, key)
    changes = [
        f"{key}: {as_yaml_word(saved_texts[key])} there, {as_yaml_word(new_texts[key])} now"
        for key in new_values
        if not is_same(saved_texts[key], new_texts[key]) and not is_among(key, may_change)
    ]
    if steps_done is None or (
        not staged and saved_config.rollout.max_new_tokens == new_config.rollout.max_new_tokens
    ):
        return changes
    lengths = _stage_changes(saved_config, new_config, steps_done) if staged else ()
    way = _stages_that_resume(saved_config, new_config, steps_done, total_steps=total_steps)
    return [
        f"{change}{way}" if change.startswith(_LENGTH) else change
        for change in (*changes, *lengths)
    ]


_LENGTH = ("rollout.max_new_tokens: ", "stages: ")
"""Beginnings of a refused change of the completions' length."""


def _stages_that_resume(
    saved_config: Config, new_config: Config, steps_done: int, total_steps: int | None
) -> str:
    """The advice with which length stages the run resumes.

    The steps that are done keep their lengths, the others have those of `new_config`."""
    if list(stage_list_problems(new_config)):
        return ""
    staged = has_length_stages(new_config)
    total = sum(new_config.stages.steps) if staged else total_steps or new_config.run.total_steps
    last = steps_done + 1 if total is None else total
    if last <= steps_done:
        return ""
    old_stages = length_stages(saved_config, steps_done)
    new_stages = length_stages(new_config, last)
    rows = []
    for step in range(last):
        length = length_stage_at(
            old_stages if step < steps_done else new_stages, step
        ).config.rollout.max_new_tokens
        rows.append(
            (length, length_stage_at(new_stages, step).config.policy.max_tokens_per_microbatch)
        )
    runs = [(row, sum(1 for _ in steps)) for row, steps in itertools.groupby(rows)]
    counts = [str(count) for _, count in runs]
    if total is None:
        counts[-1] = "N"
    lists = {"steps": counts, "max_new_tokens": [str(length) for (length, _), _ in runs]}
    if new_config.stages.max_tokens_per_microbatch:
        lists["max_tokens_per_microbatch"] = [str(budget) for (_, budget), _ in runs]
    words = [f"stages.{name}=[{','.join(numbers)}]" for name, numbers in lists.items()]
    if new_config.run.total_steps is not None:
        words = ["run.total_steps=null", *words]
    note = "" if total is not None else " (N: the steps that are left)"
    return f". For other lengths from step {steps_done + 1} on, resume with {' '.join(words)}{note}"


def _stage_changes(saved_config: Config, new_config: Config, steps_done: int) -> Iterator[str]:
    """The first step that is done and had completions of another length than it would have now."""
    if problems := list(stage_list_problems(new_config)):
        yield problems[0]
        return
    saved_stages, new_stages = (
        length_stages(config, steps_done) for config in (saved_config, new_config)
    )
    for step in range(steps_done):
        stages = length_stage_at(saved_stages, step), length_stage_at(new_stages, step)
        old, new = (stage.config.rollout.max_new_tokens for stage in stages)
        if old != new:
            yield (
                f"stages: step {step + 1}, which is done, had at most {old} new tokens there, "
                f"{new} now"
            )
            return
