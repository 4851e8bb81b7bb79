"""Every setting of a training run, stated once.

A setting has a name, a type, allowed values, a default, and its sentence of `--help`.

A field's type carries its range (`PositiveInt`, `Annotated[float, Range(...)]`) or its words
(`Literal`); the string under it is what `--help` prints. `help` reads all of it from here, `load`
reads YAML files that hold only what differs from the defaults. The dataclasses themselves check
nothing: `help.schema_problems` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlmath.config.algorithm_schema import (
    AlgorithmConfig,
    CriticConfig,
    RewardConfig,
    SelectionConfig,
    TeacherConfig,
)
from rlmath.config.gpu_specs import GpuName
from rlmath.config.setting_types import (
    Fraction,
    FractionBelowOne,
    HeartbeatSeconds,
    NamedValues,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Range,
    Seconds,
    TakesFunction,
)

Kind = Literal["grpo", "sft"]
"""Kinds of training: GRPO, and supervised on written solutions."""
MISSING = "???"
"""OmegaConf's mark for a value that the user must give."""

_UNTRUNCATED = (
    "The trainer computes the whole distribution; "
    "with a truncated one in the engine the importance ratios would be wrong."
)
_TEMPERATURE = (
    "At 0 a group's answers are all alike; from there to 0.01 vLLM samples at 0.01 instead."
)

Template = (
    Literal["auto", "r1_distill", "qwen_boxed", "orz", "chat", "raw"]
    | Annotated[str, TakesFunction("template")]
)


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    output_dir: str = MISSING
    """Folder of everything the run writes, on a disk that all nodes share; what AReaL calls
    experiment and trial. It must be new, empty, or left by this very run."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    """Seed of data order, sampling and initialisation."""
    total_epochs: PositiveInt = 1
    """Passes over the training prompts."""
    total_steps: PositiveInt | None = None
    """Steps to train; ends the run before `total_epochs` if smaller. null: as many as the epochs
    have."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cpu" (gloo), "cuda" (nccl), or "auto": cuda if there is one."""
    recover_mode: Literal["auto", "resume", "disabled"] = "auto"
    """"auto": resume from the newest whole checkpoint in `output_dir`, or start where there is
    none; "resume": resume, or end with an error; "disabled": start anew, what is there is moved to
    `<output_dir>/earlier`."""
    distributed_timeout_seconds: Seconds = 1800.0
    """How long a collective waits for its peers before the run ends with an error (seconds;
    Megatron's groups round it up to minutes, vLLM's have limits of their own)."""
    start_timeout_seconds: Seconds = 600.0
    """How long the ranks wait for each other at the start before the run ends and names those that
    are missing (seconds; torchrun's own join_timeout is as long): reading data and importing
    libraries must be done by then."""
    stop_grace_seconds: Seconds = 300.0
    """How long the run may take to save and stop after Ctrl-C, SIGTERM or SIGUSR1 (seconds); after
    that it ends unsaved."""
    heartbeat_timeout_seconds: HeartbeatSeconds = 120.0
    """A rank without a heartbeat for so long ends the run (seconds); one whose process is gone ends
    it at once, if another rank runs on its node."""
    hang_timeout_seconds: HeartbeatSeconds | None = 1500.0
    """The run ends, and logs where every rank is, when no rank has entered a phase or made other
    progress for so long (seconds). Below `distributed_timeout_seconds`, or that ends it first,
    without such a log. null: never."""
    hub_timeout_seconds: Seconds = 3600.0
    """How long downloads of what is named by ids of the Hugging Face hub may take at the start, on
    rank 0 and then on the other nodes, and the upload of `save.push_to_hub` at the end (seconds);
    ranks wait for each other so much longer then."""
    max_discarded_steps: PositiveInt = 3
    """The run ends, with exit status 77, after so many steps in a row of which every minibatch was
    discarded: its policy has diverged."""
    plugins: list[str] = field(default_factory=list)
    """Modules or files of yours, package.module or path/to/file.py, that register functions by
    names, which are words of the settings that take a function then; see docs/hooks.md."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from."""

    path: str = MISSING
    """Folder of a Hugging Face model: config.json, safetensors (one file or an index), tokenizer
    files; or its id on the hub, hf://org/name or hf://org/name@revision, see docs/running.md."""
    adapter_path: str | None = None
    """Folder of LoRA adapters to begin with, as PEFT writes it (adapter_config.json,
    adapter_model.safetensors), for the model of `path`; `lora` has its rank, alpha and target; no
    id on the hub. null: new adapters, which change nothing at first."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the policy (LoRA, arXiv:2106.09685), which are trained instead of its
    weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters: 8 to 32 learns from rewards what full training does. 0: no adapters,
    all weights learn. Adapters want some ten times the learning rate of full training
    (`optimizer.lr`)."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by `alpha` / `rank` (PEFT: lora_alpha)."""
    target: Literal["all", "attention", "mlp"] = "all"
    """Linear layers with adapters: those of attention, of the feed-forward network, or all of
    these. The embedding and the output layer have none. Models with experts: "attention" only."""
    engine: Literal["adapters", "merged"] = "adapters"
    """How the rollout engines hold what learns: as adapters beside the model's weights, as training
    does, or merged into these. Rounded to bfloat16 or float16, merged weights lose most of the
    first steps' small updates, and a sync sends the whole matrices."""


NO_LORA = LoraConfig()


@dataclass(frozen=True)
class DataConfig:
    """The training prompts."""

    train_path: str = MISSING
    """File or folder of prompts, in any form that docs/data.md lists: JSONL, parquet, or a folder
    of a Hugging Face data set; or a file on the hub, hf://datasets/org/name/file.jsonl, with
    name@revision for a revision."""
    more_train_paths: list[str] = field(default_factory=list)
    """Further files, hf:// ids or folders of prompts, mixed with those of `train_path`."""
    train_weights: list[Annotated[float, Range(0, 1000, open_low=True)]] = field(
        default_factory=list
    )
    """How often each file's prompts come in one epoch, `train_path`'s first: 1 once, 0.5 half of
    them, 2 twice. Empty: all once."""
    format: (
        Literal["auto", "boba", "areal_v01", "simplerl", "dapo", "question_answer"]
        | Annotated[str, TakesFunction("data_form")]
    ) = "auto"
    """Form of the files: "auto" finds it in their first rows; "boba" (AReaL-boba, ORZ), "areal_v01"
    (AReaL v0.1, with its id2info.json beside), "simplerl" (SimpleRL-Zoo), "dapo" (DAPO-Math),
    "question_answer" (plain rows); or a function of yours that makes a problem of a row, see
    docs/hooks.md."""
    template: Template = "auto"
    """What is made of a problem: "auto" (as it stands where the file has whole prompts, else the
    tokenizer's chat template where there is one, else "qwen_boxed"), "r1_distill"
    (DeepSeek-R1-Distill), "qwen_boxed", "orz" (Open-Reasoner-Zero), "chat" (the tokenizer's own),
    "raw" (as it stands); or a function of yours, see docs/hooks.md."""
    chat_template: str | None = None
    """Which chat template "auto" and "chat" take: the name of one of the tokenizer's, or the path
    of a .jinja file; the exported model has it as its default. null: the tokenizer's default."""
    chat_template_kwargs: Annotated[list[str], NamedValues()] = field(default_factory=list)
    """Variables of the tokenizer's chat template, as a mapping, {enable_thinking: false} for Qwen3
    without thinking, or as a list, [enable_thinking=false], of names with a JSON value or a text.
    The template must read them."""
    system_prompt: str | None = None
    """System turn of every conversation that does not begin with one; "" is an empty turn, where
    the template would write its own. null: as the rows and the template have it."""
    prompts_per_step: PositiveInt = 128
    """Prompts sampled in one step (AReaL: dataset.train_bs_n_seqs). For SFT: sequences of one
    step."""
    max_prompt_tokens: PositiveInt = 1024
    """Prompts longer than this many tokens are dropped, and counted on the console."""
    max_unusable_share: Fraction = 0.01
    """Rows without an answer, with a repeated id or that are no rows at all are left out, and
    listed in `<output_dir>/unusable_rows.jsonl`; a larger share of them ends the run."""
    shuffle: bool = True
    """A new order every epoch, drawn from `run.seed`; false keeps the file's order."""
    history_path: str | None = None
    """File of pass rates to begin with: what an earlier run left as prompt_history.jsonl, or rows
    {"query_id": ..., "correct": 3, "sampled": 8}. A run that resumes has its own. null: no pass
    rates."""
    history_groups: Annotated[int, Range(1, 1000)] = 4
    """Groups of a prompt that its pass rate counts, the last ones: what older weights sampled is
    forgotten."""
    curriculum: Literal["none", "skip_solved", "band"] = "none"
    """Which prompts are drawn, by pass rate: all ("none"), those that are not always right
    ("skip_solved"), or those from `band_low` to `band_high` ("band"). Prompts that were never
    sampled are drawn; the others are passed over in the order, and wait until `curriculum_floor`
    takes them. See docs/data.md."""
    solved_samples: PositiveInt = 16
    """ "skip_solved": fewest completions of a prompt that must all be right."""
    band_low: Fraction = 0.1
    """ "band": lowest pass rate that is drawn."""
    band_high: Fraction = 0.9
    """ "band": highest pass rate that is drawn."""
    curriculum_floor: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """Share of the draws that takes a prompt that was passed over, the one that has waited
    longest."""


@dataclass(frozen=True)
class StagesConfig:
    """Stages of one run, such as a context that grows (8k, 16k, 24k): one number of each list for a
    stage. Empty lists: one stage with the settings as they are."""

    steps: list[PositiveInt] = field(default_factory=list)
    """Steps of each stage; `run.total_steps` stays null then, and epochs repeat until all are
    done."""
    max_new_tokens: list[PositiveInt] = field(default_factory=list)
    """`rollout.max_new_tokens` of each stage, which has no effect then."""
    max_tokens_per_microbatch: list[PositiveInt] = field(default_factory=list)
    """`policy.max_tokens_per_microbatch` of each stage. Empty: the same in all."""


@dataclass(frozen=True)
class ValidationConfig:
    """Accuracy on files of its own during training, under `validation/` in
    `<output_dir>/validation.jsonl` and TensorBoard; see docs/training.md."""

    every_steps: PositiveInt | None = None
    """Validate after every so many steps, and after the last. null: no validation."""
    paths: list[str] = field(default_factory=list)
    """Files, or hf:// ids, of problems, in any form that docs/data.md lists; each is named after
    its file."""
    template: Template | None = None
    """The form of its prompts, one of those of `data.template`. null: `data.template` itself."""
    scorer: Annotated[str, TakesFunction("scorer")] | None = None
    """A function of yours, "package.module:name" or "path/to/file.py:name", that says which
    completions count as right in validation; see docs/hooks.md. null: answers are verified as in
    training."""
    before_training: bool = True
    """Validate before the first step, too."""
    batch_size: PositiveInt = 128
    """Problems that are sampled at a time."""
    samples: PositiveInt = 1
    """Completions of one problem."""
    temperature: NonNegativeFloat = 0.6
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveFraction = 0.95
    """Nucleus truncation."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion (tokens). null: `rollout.max_new_tokens`, or the largest of
    `stages.max_new_tokens`."""
    keep_best: bool = False
    """Keep the Hugging Face model with the best mean accuracy so far in
    `<output_dir>/best_model`."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised training, `rlmath sft`: cross-entropy on completions.

    It uses run, model, data (files of prompts with completions), parallel, policy, optimizer,
    telemetry and save, too, and of tools the format "fence" and max_output_tokens; the other
    sections have no effect there."""

    max_sequence_tokens: Annotated[int, Range(2)] = 4096
    """Longer sequences (prompt and completion) are dropped, and counted on the console."""
    held_out_path: str | None = None
    """File, or its hf:// id, of sequences to evaluate on. null: `held_out_share` of the training
    file."""
    held_out_share: FractionBelowOne = 0.01
    """Share of the training sequences that are only evaluated on (0: none)."""
    eval_every_steps: PositiveInt | None = 100
    """Steps between evaluations of the held-out loss; there is one before the first and after the
    last step, too. null: no evaluations."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the actor and the reference are sharded.

    A word such as d32t2p1 stands for the section: data 32, tensor 2, pipeline 1; c is context, e
    expert parallel, and m is another letter for t (AReaL). Before a plus sign stand engines on
    ranks of their own, d12t2+d4 (AReaL: sglang.d12t2p1+d4t1p1): rollout.ranks is 24 then, of 12
    engines of rollout.tensor_parallel 2. A word without a plus sign leaves these two as they are.
    """

    data: PositiveInt | None = None
    """Data-parallel size: replicas of the model. null: what remains of the ranks."""
    tensor: PositiveInt = 1
    """Tensor-parallel size: ranks that share every matrix. Divides attention heads and key-value
    groups."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: ranks that share the stack of layers. Divides the number of layers,
    unless `first_stage_layers` or `last_stage_layers` says how they are shared."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks of one pipeline stage (Megatron's interleaved schedule): more of them leave the
    stages less idle and send more messages. Needs `pipeline` above 1; `pipeline` x
    `virtual_pipeline` divides the number of layers."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage, which also holds the embedding. null: as many as the
    other stages."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage, which also holds the output layer. null: as many as the
    other stages."""
    context: PositiveInt = 1
    """Context-parallel size: ranks that share the tokens of every pack, for sequences too long for
    one. Needs GPUs with Transformer Engine; written to its rules, but not run on GPUs yet."""
    expert: PositiveInt = 1
    """Expert-parallel size: ranks of a pipeline stage that share the experts of every layer, for
    models with experts. Divides their number and the ranks of a stage (tensor x context x data /
    `expert_tensor`)."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of every expert's matrices, independent of `tensor`. Above 1 it needs
    GPUs; written to Megatron's rules, but not run on GPUs yet."""
    sequence: bool = False
    """Megatron's sequence parallelism: norms and residuals are split over the tensor-parallel
    ranks."""


@dataclass(frozen=True)
class PolicyConfig:
    """How the policy and the reference compute."""

    max_tokens_per_microbatch: PositiveInt = 20480
    """Token budget of one packed forward/backward (AReaL: mb_spec.max_tokens_per_mb). At least the
    longest sequence."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """GPU: Transformer Engine's layers, or Megatron's local layers with our norm and attention,
    which are slower and need no further package. On CPU the layers are local ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of all models, of the engines, too, and of what they compute; optimizers step
    float32 copies. "auto": bfloat16 on GPU, float32 on CPU. "float16" has three more bits than
    bfloat16, so that engine and policy differ least (arXiv:2510.26788), and needs a loss scale
    (`optimizer.initial_loss_scale`); numbers above 65,504 overflow. "float32" needs the CPU, on
    which 16 bits are slow."""
    head_dtype: Literal["float32"] | None = None
    """"float32": logits are computed in it, from the output layer's weights in `dtype`, by models
    and engines (vLLM's head_dtype). They take twice the memory. The gradient of the logits is
    rounded to `dtype`; with teacher.loss=full the teacher's logits stay in it. null: as `dtype`."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation, as Megatron has it: all of a layer ("full"), or its MLP, of local
    layers its attention ("selective"). null: no recomputation."""
    recompute_method: Literal["uniform", "block"] | None = None
    """How layers are recomputed with "full"."""
    recompute_num_layers: PositiveInt | None = None
    """Layers that are recomputed together with "full" ("uniform"; divides those of every pipeline
    stage or chunk), or layers of each of them that are recomputed ("block")."""
    routing_replay: Literal["none", "engine", "old"] = "none"
    """Models with experts: which experts the policy sends its tokens to in training: those that it
    chooses itself ("none"); those that the engine chose when it sampled, for the log-probs of a
    step's start and for the update ("engine", R3 of arXiv:2510.11370; on CPU so far); or those of
    the pass that recomputes log-probs, for the update ("old", R2). See docs/algorithm.md."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    One optimizer step per minibatch that is not discarded."""

    kind: Literal["adam", "sgd"] = "adam"
    """"adam" (AdamW) or "sgd"."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate; with `lora.rank` ten times that of full training."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: "constant", or "linear" or "cosine" down to `min_lr`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    adam_beta1: FractionBelowOne = 0.9
    """Adam's decay of the first moment."""
    adam_beta2: FractionBelowOne = 0.95
    """Adam's decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm (L2); 0 clips nothing."""
    distributed: bool = True
    """Share the optimizer's state over the data-parallel ranks (Megatron's distributed optimizer;
    only for "adam")."""
    initial_loss_scale: PositiveFloat | None = None
    """The loss scale at the start, in float16: losses, which are sums over tokens, are multiplied
    by it before the backward pass, and gradients divided by it after that. A minibatch whose
    gradients overflow is skipped, and halves it, down to 1/256. null: 65,536 over the most that the
    tokens of a micro-batch weigh together, as a power of two."""
    loss_scale_window: PositiveInt = 400
    """Updates without an overflow after which the loss scale doubles, in float16 (Megatron:
    loss_scale_window, verl: growth_interval)."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks while the backward pass goes on. null: on
    GPU."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling by vLLM engines, which live in the training ranks and take turns with training
    there, or have ranks of their own (`ranks`) and sample while training goes on."""

    ranks: NonNegativeInt = 0
    """Ranks of their own that the engines have, the last ones of the run; `parallel` lays out the
    others. 0: engines live in the training ranks and take turns with training, on the same memory.
    Above 0 training is asynchronous; see docs/running.md."""
    tensor_parallel: PositiveInt = 1
    """Ranks of one engine; independent of `parallel.tensor`. Divides `ranks`, or the world size
    where that is 0."""
    group_size: PositiveInt = 16
    """Completions of one prompt (AReaL: group_size). At least 2 where advantages come from the
    group."""
    max_new_tokens: PositiveInt = 16384
    """Longest completion (tokens); with the prompt it must fit the model's
    max_position_embeddings."""
    min_new_tokens: NonNegativeInt = 0
    """No end-of-sequence token before this many tokens."""
    temperature: Annotated[float, Range(0.01, why=_TEMPERATURE)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: Annotated[float, Range(1, 1, why=_UNTRUNCATED)] = 1.0
    """Nucleus truncation; off, since the trainer computes the untruncated distribution."""
    top_k: Annotated[int, Range(-1, -1, why=_UNTRUNCATED)] = -1
    """Top-k truncation; off, for the same reason."""
    tail: Literal["wait", "carry", "defer"] = "wait"
    """What a step does about its longest completions: "wait" until all are finished; "carry"
    (partial rollouts): a step ends when enough groups are complete, and the others go on in the
    next step, with the weights of that step, which needs algorithm.importance_correction; "defer"
    (tail batching): groups with a completion of more than `slice_tokens` are sampled anew in steps
    of their own. See docs/algorithm.md."""
    max_staleness: NonNegativeInt = 1
    """"carry", or engines on `ranks` of their own: most steps between the weights that sampled a
    group's first token and the step that learns from the group (AReaL: max_head_offpolicyness). A
    step waits for groups that are about to be older, and engines of their own begin at most
    (`max_staleness` + version + 1) x data.prompts_per_step groups in all. 0: a step's own weights
    sample all of it."""
    on_new_weights: Literal["recompute", "keep", "finish"] = "recompute"
    """Engines on `ranks` of their own: what becomes of completions that are being sampled when new
    weights come: "recompute" continues them with the KV cache computed again (AReaL), "keep" with
    the old KV cache (PipelineRL), "finish" ends them first, under the old weights."""
    max_concurrent_sequences: PositiveInt | None = None
    """Engines on `ranks` of their own: most sequences that one engine has begun at a time, in whole
    groups (AReaL, of all engines: max_concurrent_rollouts). null: as many as fill `max_num_seqs`.
    """
    slice_tokens: PositiveInt | None = None
    """"carry": most new tokens of a completion in a round; a step has as many rounds as it takes.
    null: `max_new_tokens` / (`max_staleness` + 1): about one round a step. "defer": longest
    completion of a group that is not deferred. null: half of `max_new_tokens`."""
    max_groups_in_flight: PositiveInt | None = None
    """"carry": most groups in flight, begun and not learned from. null: data.prompts_per_step x
    (`max_staleness` + 1), which is the most that can be."""
    memory_share: PositiveFraction = 0.6
    """GPU: share of the device's memory that an engine may take while it generates."""
    kv_cache_gib: PositiveFloat | None = None
    """GPU: size of the KV cache of one rank (GiB), whatever else uses the device; needed where
    ranks share a GPU. null: what vLLM measures to be left of `memory_share`."""
    cpu_kv_cache_gib: PositiveFloat = 0.5
    """CPU: size of the KV cache of one rank (GiB)."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that one engine decodes at a time."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens of one engine step; null leaves it to vLLM."""
    chunked_prefill: bool = True
    """GPU: let vLLM split long prompts over engine steps. On CPU it never does."""
    cuda_graphs: bool = True
    """GPU: capture decoding in CUDA graphs; false is vLLM's enforce_eager. Without effect on
    CPU."""
    progress_bar: bool = True
    """Show how many completions are finished: a bar on a terminal, else a log line every 20 s."""


@dataclass(frozen=True)
class ToolsConfig:
    """A Python tool that completions call while they are sampled; see docs/tool_use.md."""

    format: Literal["fence", "chat"] | None = None
    """Form of a call: "fence", a block of kind python in the text, behind which a block of kind
    output is put, for models that have no form of their own; "chat", that of the model's chat
    template (Qwen2.5, Qwen3, Llama 3, Mistral, SmolLM3), whose prompts then show the tool. null: no
    tool."""
    max_calls: Annotated[int, Range(1, 1000)] = 8
    """Most calls of a completion; one that makes another is cut off, as at
    rollout.max_new_tokens."""
    max_output_tokens: Annotated[int, Range(64, 65536)] = 256
    """Most tokens of an output that the model is shown; of a longer one the beginning and the
    end."""
    state: Literal["session", "fresh"] = "session"
    """"session": names live on between the calls of a completion; "fresh": every call is alone."""
    isolation: Literal["landlock", "preloaded", "none"] = "landlock"
    """How the kernel confines the code: "landlock", "preloaded" for kernels without Landlock, where
    code opens no file, "none" only for code that you trust; see docs/tools.md."""
    call_cpu_seconds: Seconds = 5.0
    """Most CPU time of a call (seconds); by the clock ten times as much."""
    completion_cpu_seconds: Seconds = 30.0
    """Most CPU time of all calls of a completion (seconds)."""
    memory_gib: Annotated[float, Range(0.0625, 1024)] = 1.0
    """Most memory of a completion's code beyond the interpreter's (GiB)."""
    cores: Annotated[int, Range(1, 1024)] = 2
    """Calls that are executed at a time, for each engine."""
    sessions: Annotated[int, Range(1, 65536)] = 64
    """Sessions that are kept alive between calls, for each engine; others are made again when they
    are needed, by executing their earlier calls."""
    void_turns: Literal["mask", "drop", "keep"] = "mask"
    """What becomes of a last turn without an answer, cut off or not: "mask": it has no weight in
    the gradient, but counts otherwise; "drop": its completion leaves the group; "keep": it is
    learned from as others are (SimpleTIR, arXiv:2509.02479, drops)."""


@dataclass(frozen=True)
class TurnsConfig:
    """Further turns behind finished answers; see docs/turns.md."""

    feedback: str | None = None
    """What a wrong answer is told, so that the model may give another: "verdict", how it was
    judged, or any other text. A right answer ends the completion. null: the first answer does."""
    max: Annotated[int, Range(2, 1000)] = 2
    """Most answers of a completion, with `feedback` or environment.function."""
    discount: PositiveFraction = 1.0
    """Factor of a reward above 0 for each answer before the last one (AReaL: turn_discount)."""
    max_feedback_tokens: Annotated[int, Range(64, 65536)] = 256
    """Most tokens of what an answer is told; of a longer text the beginning and the end."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """A function of yours that answers turns; see docs/turns.md."""

    function: Annotated[str, TakesFunction("environment")] | None = None
    """Function of yours, "package.module:function", or the name of one that is registered, that
    gets the texts of a completion (sampled and shown), the prompt's row and the number of the turn, after every
    finished turn, and returns the next text, or None where it is over. null: none."""
    workers: PositiveInt = 4
    """Calls at a time, for each engine."""
    timeout_seconds: Annotated[float, Range(0, 3600, open_low=True)] = 60.0
    """Most seconds of a call, by the clock. One that takes longer, fails or ends its process is
    tried again twice; then the completion leaves its group."""


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the engines, and how that is checked."""

    bucket_mib: Annotated[float, Range(0.0625, 16384)] = 64.0
    """Most weights that a rank sends, and receives, in one round (MiB). Up to twice this is held
    for each of the two while weights travel; nothing where every rank has what its engine needs. On
    CPU at most 16, which stay for the run."""
    checksum_every: NonNegativeInt = 0
    """Every so many syncs the engines' weights are compared with the policy's, tensor by tensor, by
    checksums; a difference ends the run. 0: never."""
    probe_every: NonNegativeInt = 0
    """Every so many syncs the engines and the policy give log-probs of the same fixed tokens, which
    are compared. 0: never."""
    probe_threshold: PositiveFloat = 0.2
    """A probe in which the mean difference between an engine's log-probs and the policy's exceeds
    this ends the run (nats per token). Measured with small models: 3e-7 in float32, up to 0.04 in
    bfloat16, 0.3 and more with one wrong tensor."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is offloaded while the engines generate, and the checks of what stays."""

    offload_gradients: bool = True
    """Free the gradient buffers: they hold nothing between steps."""
    offload_optimizer: bool = False
    """Move the optimizer's state and its float32 parameters to the host (pinned memory on GPU)."""
    offload_parameters: bool = False
    """Move the policy's parameters to the host once the engines have them."""
    offload_critic: bool = False
    """Move the critic and its optimizer to the host whenever it is not computing, in training,
    too."""
    offload_reference: bool = False
    """Move the reference model to the host whenever it is not computing, in training, too."""
    offload_teacher: bool = False
    """Move the teacher (`teacher.path`) to the host, too; with teacher.loss="full" its output layer
    comes back for the update."""
    gpu: GpuName | None = None
    """GPU whose memory the run must fit, for example "H100-80GB". null: the one that is there; on
    CPU nothing is refused."""
    gpu_gib: PositiveFloat | None = None
    """Memory of the GPU (GiB), for one that `gpu` has no name for. null: as `gpu` says."""
    leak_threshold_mib: PositiveFloat = 512.0
    """More memory than planned, or than the same phase of earlier steps held, is reported above
    this (MiB)."""
    stop_on_leak: bool = False
    """End the run where memory is reported as leaked."""


@dataclass(frozen=True)
class TelemetryConfig:
    """Metrics and samples that are written, and limits at which the run warns."""

    tensorboard: bool = True
    """Write TensorBoard events under `<output_dir>/tensorboard`."""
    sample_groups_per_step: NonNegativeInt = 2
    """Groups a step whose prompt, texts, rewards and advantages are kept under
    `<output_dir>/samples`. 0: none."""
    metrics: list[str] = field(default_factory=list)
    """Functions of yours that make numbers of a step's groups, "name=package.module:function" or
    the name of one that is registered; logged as own/<name>. See docs/hooks.md."""
    profile_steps: list[PositiveInt] = field(default_factory=list)
    """Steps whose torch profile every training rank writes to `<output_dir>/profile`: a trace and a
    table of what took longest. They take longer than others."""
    capture_steps: list[PositiveInt] = field(default_factory=list)
    """Steps of which everything that their update was made of is written to
    `<output_dir>/captures`, for `rlmath replay`, and the checkpoint before them stays. Of the last
    step before a failure it is written in any case."""
    report: bool = True
    """Write `<output_dir>/report.html` at the run's end: curves, accuracies, warnings, settings and
    samples on one page."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases, too: "off", "offline" (files under `<output_dir>/wandb`, without an
    account) or "online" (with an account, `wandb login`). Needs `pip install rlmath[wandb]`."""
    wandb_project: str = "rlmath"
    """Project of Weights & Biases."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases. null: the name of `run.output_dir`."""
    warn_truncated: Fraction = 0.05
    """A share of truncated completions above this is warned of, once (1: never). SimpleRL's report:
    normal is less than 5%."""
    warn_dropped: Fraction = 0.05
    """Alert: a larger share of prompts that the filters drop, at the start (1: never)."""
    warn_importance_weight: PositiveFloat = 0.1
    """Alert: a mean importance weight that is further from 1 than this (a large one: never)."""
    warn_flat_steps: Annotated[int, Range(2)] = 50
    """Alert: a reward that has not risen beyond its noise over so many steps (more than the run
    has: never)."""
    warn_entropy_share: Fraction = 0.2
    """Alert: an entropy below this share of the first steps', and fallen twice as far as the share
    of wrong answers (0: never)."""


@dataclass(frozen=True)
class SaveConfig:
    """What a run leaves behind: checkpoints to keep, recovery points to resume from, models in
    Hugging Face form."""

    save_freq_epochs: PositiveInt | None = None
    """Keep a checkpoint after every so many epochs (AReaL: exp_ctrl.save_freq_epochs). null: no
    such checkpoints."""
    save_freq_steps: PositiveInt | None = None
    """Keep a checkpoint after every so many steps."""
    save_freq_secs: PositiveFloat | None = None
    """Keep a checkpoint after the step in which so many seconds have passed since the last one."""
    export_hf: bool = False
    """Export the model of every kept checkpoint to `<output_dir>/models/step-NNNNNN`, too, while
    training waits. The last one is always exported, to `<output_dir>/hf_model`. With LoRA each has
    the adapters in `adapter/`, as PEFT reads them (`PeftModel.from_pretrained(model,
    "<output_dir>/hf_model/adapter")`)."""
    merged: bool = True
    """With LoRA, export the whole model with its adapters merged, too. false: only the folders
    `adapter/`, which need the model of `model.path`."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the exported Hugging Face models; "auto": that of `model.path`, tensor by
    tensor, and of adapters that of training."""
    merged_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """With LoRA, number format of the model with its adapters merged: float32 keeps all of a small
    update, which rounding to bfloat16 loses. null: that of `export_dtype`."""
    ckpt_freq_epochs: PositiveInt | None = None
    """Make a recovery point after every so many epochs (AReaL: exp_ctrl.ckpt_freq_epochs). null: no
    such points."""
    ckpt_freq_steps: PositiveInt | None = None
    """Make a recovery point after every so many steps."""
    ckpt_freq_secs: PositiveFloat | None = 600.0
    """Make a recovery point after the step in which so many seconds have passed since the last one.
    With any of these three there is a recovery point after the second step, too, and one after the
    last."""
    keep_last: PositiveInt = 2
    """Recovery points that stay: the newest ones. With 2, one is left when the newest is
    damaged."""
    keep_models: PositiveInt | None = None
    """Checkpoints of `save_freq_*` that stay: the newest ones. null: all stay."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub, org/name, to which the model of a finished run
    (`<output_dir>/hf_model`) is uploaded; made, private, where there is none. Needs a token
    (HF_TOKEN or `hf auth login`) and `export_hf`. null: nothing is uploaded."""
    background: bool = True
    """Write checkpoints during training; a rank's part is held a second time in the host's memory
    meanwhile."""


@dataclass(frozen=True)
class Config:
    """All settings of `rlmath train` and `rlmath sft`."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    stages: StagesConfig = StagesConfig()
    parallel: ParallelConfig = ParallelConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: ToolsConfig = ToolsConfig()
    turns: TurnsConfig = TurnsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sync: SyncConfig = SyncConfig()
    memory: MemoryConfig = MemoryConfig()
    reward: RewardConfig = RewardConfig()
    selection: SelectionConfig = SelectionConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    validation: ValidationConfig = ValidationConfig()
    sft: SftConfig = SftConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    save: SaveConfig = SaveConfig()

    @property
    def answers_turns(self) -> bool:
        """Whether finished answers are told something, and further ones follow."""
        return self.turns.feedback is not None or self.environment.function is not None

    @property
    def learned_group_size(self) -> int:
        """Most completions of a prompt that a step learns from."""
        group_size = self.rollout.group_size
        return min(group_size, self.selection.resample_to or group_size)

    @property
    def on_policy(self) -> bool:
        """Whether a step's old log-probs are those of the update's own forward pass.

        No extra pass is then needed. That takes one minibatch, one epoch, and neither KL in the
        reward nor a teacher in the advantages nor a choice of tokens."""
        algorithm = self.algorithm
        teacher = self.teacher
        only_one = algorithm.n_minibatches == algorithm.epochs == 1
        kl_in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        in_advantages = kl_in_reward or (teacher.path is not None and teacher.loss == "advantage")
        return (
            algorithm.recompute_logprobs
            and only_one
            and not in_advantages
            and not algorithm.selects_tokens
        )
