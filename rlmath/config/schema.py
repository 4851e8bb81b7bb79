"""Every setting of a training run, said once: name, type, allowed values, default, and its sentence of `--help`.

A field's type carries its range (`PositiveInt`, `Annotated[float, Range(...)]`) or its words (`Literal`); the string
under it is what `--help` prints. `help` reads all of it from here, `load` reads YAML files that hold only what differs
from the defaults. The dataclasses themselves check nothing: `help.schema_problems` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlmath.config.gpu_specs import GpuName

MISSING = "???"
"""OmegaConf's mark for a value that the user must give."""


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, without an end that is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""
    """Printed with the range when a value is outside."""

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range; NaN, infinities and what has more than 63 bits never do."""
        if isinstance(value, int) and abs(value) >= 2**63:
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """ "above 0, at most 1"."""
        if self.low == self.high:
            return f"{self.low:g}"
        low = f"{'above' if self.open_low else 'at least'} {self.low:.10g}" if self.low > -math.inf else ""
        high = f"{'below' if self.open_high else 'at most'} {self.high:.10g}" if self.high < math.inf else ""
        return ", ".join(filter(None, (low, high))) or "a finite number"


@dataclass(frozen=True)
class TakesFunction:
    """Of a text setting: it takes a function of the user's, too, by its kind in `rlmath.workers.hooks`."""

    kind: str


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
FiniteFloat = Annotated[float, Range(-math.inf)]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, open_low=True)]
FractionBelowOne = Annotated[float, Range(0, 1, open_high=True)]
Seconds = Annotated[float, Range(0, 30 * 86400, open_low=True)]
HeartbeatSeconds = Annotated[float, Range(5, 30 * 86400, why="Ranks beat once a second.")]

_FIRST_RATIO = "Before the first update the ratio is 1."
_EQUAL_RATIO = "Where engine and trainer agree the weight is 1."
_UNTRUNCATED = (
    "The trainer computes the whole distribution; "
    "with a truncated one in the engine the importance ratios would be wrong."
)
_TEMPERATURE = "At 0 a group's answers are all alike; from there to 0.01 vLLM samples at 0.01 instead."
RatioAboveOne = Annotated[float, Range(1, open_low=True, why=_FIRST_RATIO)]

Template = (
    Literal["auto", "r1_distill", "qwen_boxed", "orz", "chat", "raw"]
    | Annotated[str, TakesFunction("template")]
)


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    output_dir: str = MISSING
    """Folder of everything the run writes, on a disk that all nodes share; what AReaL calls experiment and trial. It
    must be new, empty, or left by this very run."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    """Seed of data order, sampling and initialisation."""
    total_epochs: PositiveInt = 1
    """Passes over the training prompts."""
    total_steps: PositiveInt | None = None
    """Steps to train; ends the run before `total_epochs` if smaller. null: as many as the epochs have."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cpu" (gloo), "cuda" (nccl), or "auto": cuda if there is one."""
    recover_mode: Literal["auto", "resume", "disabled"] = "auto"
    """"auto": resume from the newest whole checkpoint in `output_dir`, or start where there is none; "resume": resume,
    or end with an error; "disabled": start anew, what is there is moved to `<output_dir>/earlier`."""
    distributed_timeout_seconds: Seconds = 1800.0
    """How long a collective waits for its peers before the run ends with an error (seconds; Megatron's groups round it
    up to minutes, vLLM's have limits of their own)."""
    start_timeout_seconds: Seconds = 600.0
    """How long the ranks wait for each other at the start before the run ends and names those that are missing
    (seconds; torchrun's own join_timeout is as long): reading data and importing libraries must be done by then."""
    stop_grace_seconds: Seconds = 300.0
    """How long the run may take to save and stop after Ctrl-C, SIGTERM or SIGUSR1 (seconds); after that it ends
    unsaved."""
    heartbeat_timeout_seconds: HeartbeatSeconds = 120.0
    """A rank without a heartbeat for so long ends the run (seconds); one whose process is gone ends it at once, if
    another rank runs on its node."""
    hang_timeout_seconds: HeartbeatSeconds | None = 1500.0
    """The run ends, and logs where every rank is, when no rank has entered a phase or made other progress for so long
    (seconds). Below `distributed_timeout_seconds`, or that ends it first, without such a log. null: never."""
    hub_timeout_seconds: Seconds = 3600.0
    """How long downloads of what is named by ids of the Hugging Face hub may take at the start, and the upload of
    `save.push_to_hub` at the end (seconds); ranks wait for each other so much longer then."""
    max_discarded_steps: PositiveInt = 3
    """The run ends, with exit status 77, after so many steps in a row of which every minibatch was discarded: its
    policy has diverged."""
    plugins: list[str] = field(default_factory=list)
    """Modules or files of yours, package.module or path/to/file.py, that register functions by names, which are words
    of the settings that take a function then; see docs/hooks.md."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from."""

    path: str = MISSING
    """Folder of a Hugging Face model: config.json, safetensors (one file or an index), tokenizer files; or its id on
    the hub, hf://org/name or hf://org/name@revision, see docs/running.md."""


@dataclass(frozen=True)
class DataConfig:
    """The training prompts."""

    train_path: str = MISSING
    """File or folder of prompts, in any form that docs/data.md lists: JSONL, parquet, or a folder of a Hugging Face
    data set; or a file on the hub, hf://datasets/org/name/file.jsonl, with name@revision for a revision."""
    more_train_paths: list[str] = field(default_factory=list)
    """Further files, hf:// ids or folders of prompts, mixed with those of `train_path`."""
    train_weights: list[Annotated[float, Range(0, 1000, open_low=True)]] = field(default_factory=list)
    """How often each file's prompts come in one epoch, `train_path`'s first: 1 once, 0.5 half of them, 2 twice. Empty:
    all once."""
    format: (
        Literal["auto", "boba", "areal_v01", "simplerl", "dapo", "question_answer"]
        | Annotated[str, TakesFunction("data_form")]
    ) = "auto"
    """Form of the files: "auto" finds it in their first rows; "boba" (AReaL-boba, ORZ), "areal_v01" (AReaL v0.1, with
    its id2info.json beside), "simplerl" (SimpleRL-Zoo), "dapo" (DAPO-Math), "question_answer" (plain rows); or a
    function of yours that makes a problem of a row, see docs/hooks.md."""
    template: Template = "auto"
    """What is made of a problem: "auto" (as it stands where the file has whole prompts, else the tokenizer's chat
    template where there is one, else "qwen_boxed"), "r1_distill" (DeepSeek-R1-Distill), "qwen_boxed", "orz"
    (Open-Reasoner-Zero), "chat" (the tokenizer's own), "raw" (as it stands); or a function of yours, see
    docs/hooks.md."""
    chat_template: str | None = None
    """Which chat template "auto" and "chat" take: the name of one of the tokenizer's, or the path of a .jinja file; the
    exported model has it as its default. null: the tokenizer's default."""
    chat_template_kwargs: list[str] = field(default_factory=list)
    """Variables of the tokenizer's chat template, "name=value" with a JSON value or a text: enable_thinking=false for
    Qwen3 without thinking."""
    system_prompt: str | None = None
    """System turn of every conversation that does not begin with one; "" is an empty turn, where the template would
    write its own. null: as the rows and the template have it."""
    prompts_per_step: PositiveInt = 128
    """Prompts sampled in one step (AReaL: dataset.train_bs_n_seqs). For SFT: sequences of one step."""
    max_prompt_tokens: PositiveInt = 1024
    """Prompts longer than this many tokens are dropped, and counted on the console."""
    max_unusable_share: Fraction = 0.01
    """Rows without an answer, with a repeated id or that are no rows at all are left out, and listed in
    `<output_dir>/unusable_rows.jsonl`; a larger share of them ends the run."""
    shuffle: bool = True
    """A new order every epoch, drawn from `run.seed`; false keeps the file's order."""
    history_path: str | None = None
    """File of pass rates to begin with: what an earlier run left as prompt_history.jsonl, or rows {"query_id": ...,
    "correct": 3, "sampled": 8}. A run that resumes has its own. null: no pass rates."""
    history_groups: Annotated[int, Range(1, 1000)] = 4
    """Groups of a prompt that its pass rate counts, the last ones: what older weights sampled is forgotten."""
    curriculum: Literal["none", "skip_solved", "band"] = "none"
    """Which prompts are drawn, by pass rate: all ("none"), those that are not always right ("skip_solved"), or those
    from `band_low` to `band_high` ("band"). Prompts that were never sampled are drawn; the others are passed over in
    the order, and wait until `curriculum_floor` takes them. See docs/data.md."""
    solved_samples: PositiveInt = 16
    """ "skip_solved": fewest completions of a prompt that must all be right."""
    band_low: Fraction = 0.1
    """ "band": lowest pass rate that is drawn."""
    band_high: Fraction = 0.9
    """ "band": highest pass rate that is drawn."""
    curriculum_floor: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """Share of the draws that takes a prompt that was passed over, the one that has waited longest."""


@dataclass(frozen=True)
class StagesConfig:
    """Stages of one run, such as a context that grows (8k, 16k, 24k): one number of each list for a stage. Empty lists:
    one stage with the settings as they are."""

    steps: list[PositiveInt] = field(default_factory=list)
    """Steps of each stage; `run.total_steps` stays null then, and epochs repeat until all are done."""
    max_new_tokens: list[PositiveInt] = field(default_factory=list)
    """`rollout.max_new_tokens` of each stage, which has no effect then."""
    max_tokens_per_microbatch: list[PositiveInt] = field(default_factory=list)
    """`policy.max_tokens_per_microbatch` of each stage. Empty: the same in all."""


@dataclass(frozen=True)
class ValidationConfig:
    """Accuracy on files of its own during training, under `validation/` in `<output_dir>/validation.jsonl` and
    TensorBoard; see docs/training.md."""

    every_steps: PositiveInt | None = None
    """After every so many steps, and after the last. null: no validation."""
    paths: list[str] = field(default_factory=list)
    """Files, or hf:// ids, of problems, in any form that docs/data.md lists; each is named after its file."""
    template: Template | None = None
    """As `data.template`. null: the same."""
    scorer: Annotated[str, TakesFunction("scorer")] | None = None
    """A function of yours, "package.module:name" or "path/to/file.py:name", that says which completions count as right
    in validation; see docs/hooks.md. null: answers are verified as in training."""
    before_training: bool = True
    """Also before the first step."""
    batch_size: PositiveInt = 128
    """Problems that are sampled at a time."""
    samples: PositiveInt = 1
    """Completions of one problem."""
    temperature: NonNegativeFloat = 0.6
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveFraction = 0.95
    """Nucleus truncation."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion (tokens). null: `rollout.max_new_tokens`, or the largest of `stages.max_new_tokens`."""
    keep_best: bool = False
    """Keep the Hugging Face model with the best mean accuracy so far in `<output_dir>/best_model`."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised training, `rlmath sft`: cross-entropy on completions. It uses run, model, data (files of prompts with
    completions), parallel, policy, optimizer, telemetry and save, too; the other sections have no effect there."""

    max_sequence_tokens: Annotated[int, Range(2)] = 4096
    """Longer sequences (prompt and completion) are dropped, and counted on the console."""
    held_out_path: str | None = None
    """File, or its hf:// id, of sequences to evaluate on. null: `held_out_share` of the training file."""
    held_out_share: FractionBelowOne = 0.01
    """Share of the training sequences that are only evaluated on (0: none)."""
    eval_every_steps: PositiveInt | None = 100
    """Steps between evaluations of the held-out loss; there is one before the first and after the last step, too.
    null: no evaluations."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the actor and the reference are sharded. A word such as d32t2p1 stands for the section: data 32, tensor 2,
    pipeline 1; c is context, e expert parallel, and m is another letter for t (AReaL). Before a plus sign stand engines
    on ranks of their own, d12t2+d4 (AReaL: sglang.d12t2p1+d4t1p1): rollout.ranks is 24 then, of 12 engines of
    rollout.tensor_parallel 2. A word without a plus sign leaves these two as they are."""

    data: PositiveInt | None = None
    """Data-parallel size: replicas of the model. null: what remains of the ranks."""
    tensor: PositiveInt = 1
    """Tensor-parallel size: ranks that share every matrix. Divides attention heads and key-value groups."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: ranks that share the stack of layers. Divides the number of layers, unless
    `first_stage_layers` or `last_stage_layers` says how they are shared."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks of one pipeline stage (Megatron's interleaved schedule): more of them leave the stages less idle and
    send more messages. Needs `pipeline` above 1; `pipeline` x `virtual_pipeline` divides the number of layers."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage, which also holds the embedding. null: as many as the other stages."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage, which also holds the output layer. null: as many as the other stages."""
    context: PositiveInt = 1
    """Context-parallel size: ranks that share the tokens of every pack, for sequences too long for one. Needs GPUs with
    Transformer Engine; written to its rules, but not run on GPUs yet."""
    expert: PositiveInt = 1
    """Expert-parallel size: ranks of a pipeline stage that share the experts of every layer, for models with experts.
    Divides their number and the ranks of a stage (tensor x context x data / `expert_tensor`)."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of every expert's matrices, independent of `tensor`. Above 1 it needs GPUs; written to
    Megatron's rules, but not run on GPUs yet."""
    sequence: bool = False
    """Megatron's sequence parallelism: norms and residuals are split over the tensor-parallel ranks."""


@dataclass(frozen=True)
class PolicyConfig:
    """How the policy and the reference compute."""

    max_tokens_per_microbatch: PositiveInt = 20480
    """Token budget of one packed forward/backward (AReaL: mb_spec.max_tokens_per_mb). At least the longest sequence."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """GPU: Transformer Engine's layers, or Megatron's local layers with our norm and attention, which are slower and
    need no further package. On CPU the layers are local ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of all models, of the engines, too, and of what they compute; optimizers step float32 copies.
    "auto": bfloat16 on GPU, float32 on CPU. "float16" has three more bits than bfloat16, so that engine and policy
    differ least (arXiv:2510.26788), and needs a loss scale (`optimizer.initial_loss_scale`); numbers above 65,504
    overflow. "float32" needs the CPU, on which 16 bits are slow."""
    head_dtype: Literal["float32"] | None = None
    """"float32": logits are computed in it, from the output layer's weights in `dtype`, by models and engines (vLLM's
    head_dtype). They take twice the memory. The gradient of the logits is rounded to `dtype`; with teacher.loss=full
    the teacher's logits stay in it. null: as `dtype`."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation, as Megatron has it: all of a layer ("full"), or its MLP, of local layers its attention
    ("selective"). null: no recomputation."""
    recompute_method: Literal["uniform", "block"] | None = None
    """How layers are recomputed with "full"."""
    recompute_num_layers: PositiveInt | None = None
    """With "full": layers that are recomputed together ("uniform"; divides those of every pipeline stage or chunk), or
    layers of each of them that are recomputed ("block")."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule. One optimizer step per minibatch that is not discarded."""

    kind: Literal["adam", "sgd"] = "adam"
    """"adam" (AdamW) or "sgd"."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
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
    """Share the optimizer's state over the data-parallel ranks (Megatron's distributed optimizer; only for "adam")."""
    initial_loss_scale: PositiveFloat | None = None
    """In float16: what losses, which are sums over tokens, are multiplied by before the backward pass, and gradients
    divided by after it. A minibatch whose gradients overflow is skipped, and halves it, down to 1/256. null: 65,536
    over the most that the tokens of a micro-batch weigh together, as a power of two."""
    loss_scale_window: PositiveInt = 400
    """In float16: the loss scale doubles after so many updates without an overflow (Megatron: loss_scale_window,
    verl: growth_interval)."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks while the backward pass goes on. null: on GPU."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling by vLLM engines, which live in the training ranks and take turns with training there, or have ranks of
    their own (`ranks`) and sample while training goes on."""

    ranks: NonNegativeInt = 0
    """Ranks of their own that the engines have, the last ones of the run; `parallel` lays out the others. 0: engines
    live in the training ranks and take turns with training, on the same memory. Above 0 training is asynchronous; see
    docs/running.md."""
    tensor_parallel: PositiveInt = 1
    """Ranks of one engine; independent of `parallel.tensor`. Divides `ranks`, or the world size where that is 0."""
    group_size: PositiveInt = 16
    """Completions of one prompt (AReaL: group_size). At least 2 where advantages come from the group."""
    max_new_tokens: PositiveInt = 16384
    """Longest completion (tokens); with the prompt it must fit the model's max_position_embeddings."""
    min_new_tokens: NonNegativeInt = 0
    """No end-of-sequence token before this many tokens."""
    temperature: Annotated[float, Range(0.01, why=_TEMPERATURE)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: Annotated[float, Range(1, 1, why=_UNTRUNCATED)] = 1.0
    """Nucleus truncation; off, since the trainer computes the untruncated distribution."""
    top_k: Annotated[int, Range(-1, -1, why=_UNTRUNCATED)] = -1
    """Top-k truncation; off, for the same reason."""
    tail: Literal["wait", "carry", "defer"] = "wait"
    """What a step does about its longest completions: "wait" until all are finished; "carry" (partial rollouts): a step
    ends when enough groups are complete, and the others go on in the next step, with the weights of that step, which
    needs algorithm.importance_correction; "defer" (tail batching): groups with a completion of more than `slice_tokens`
    are sampled anew in steps of their own. See docs/algorithm.md."""
    max_staleness: NonNegativeInt = 1
    """"carry", or engines on `ranks` of their own: most steps between the weights that sampled a group's first token
    and the step that learns from the group (AReaL: max_head_offpolicyness). A step waits for groups that are about to
    be older, and engines of their own begin at most (`max_staleness` + version + 1) x data.prompts_per_step groups in
    all. 0: a step's own weights sample all of it."""
    on_new_weights: Literal["recompute", "keep", "finish"] = "recompute"
    """Engines on `ranks` of their own: what becomes of completions that are being sampled when new weights come:
    "recompute" continues them with the KV cache computed again (AReaL), "keep" with the old KV cache (PipelineRL),
    "finish" ends them first, under the old weights."""
    max_concurrent_sequences: PositiveInt | None = None
    """Engines on `ranks` of their own: most sequences that one engine has begun at a time, in whole groups (AReaL, of
    all engines: max_concurrent_rollouts). null: as many as fill `max_num_seqs`."""
    slice_tokens: PositiveInt | None = None
    """"carry": most new tokens of a completion in a round; a step has as many rounds as it takes. null:
    `max_new_tokens` / (`max_staleness` + 1): about one round a step. "defer": longest completion of a group that is not
    deferred. null: half of `max_new_tokens`."""
    max_groups_in_flight: PositiveInt | None = None
    """"carry": most groups in flight, begun and not learned from. null: data.prompts_per_step x (`max_staleness` + 1),
    which is the most that can be."""
    memory_share: PositiveFraction = 0.6
    """GPU: share of the device's memory that an engine may take while it generates."""
    kv_cache_gib: PositiveFloat | None = None
    """GPU: size of the KV cache of one rank (GiB), whatever else uses the device; needed where ranks share a GPU. null:
    what vLLM measures to be left of `memory_share`."""
    cpu_kv_cache_gib: PositiveFloat = 0.5
    """CPU: size of the KV cache of one rank (GiB)."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that one engine decodes at a time."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens of one engine step; null leaves it to vLLM."""
    chunked_prefill: bool = True
    """GPU: let vLLM split long prompts over engine steps. On CPU it never does."""
    cuda_graphs: bool = True
    """GPU: capture decoding in CUDA graphs; false is vLLM's enforce_eager. Without effect on CPU."""
    progress_bar: bool = True
    """Show how many completions are finished: a bar on a terminal, else a log line every 20 s."""


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the engines, and how that is checked."""

    bucket_mib: Annotated[float, Range(0.0625, 16384)] = 64.0
    """Most weights that a rank sends, and receives, in one round (MiB). Up to twice this is held for each of the two
    while weights travel; nothing where every rank has what its engine needs. On CPU at most 16, which stay for the
    run."""
    checksum_every: NonNegativeInt = 0
    """Every so many syncs the engines' weights are compared with the policy's, tensor by tensor, by checksums; a
    difference ends the run. 0: never."""
    probe_every: NonNegativeInt = 0
    """Every so many syncs the engines and the policy give log-probs of the same fixed tokens, which are compared. 0:
    never."""
    probe_threshold: PositiveFloat = 0.2
    """A probe in which the mean difference between an engine's log-probs and the policy's exceeds this ends the run
    (nats per token). Measured with small models: 3e-7 in float32, up to 0.04 in bfloat16, 0.3 and more with one wrong
    tensor."""


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
    """Move the critic and its optimizer to the host whenever it is not computing, in training, too."""
    offload_reference: bool = False
    """Move the reference model to the host whenever it is not computing, in training, too."""
    offload_teacher: bool = False
    """Move the teacher (`teacher.path`) to the host, too; with teacher.loss="full" its output layer comes back for the
    update."""
    gpu: GpuName | None = None
    """GPU whose memory the run must fit, for example "H100-80GB". null: the one that is there; on CPU nothing is
    refused."""
    gpu_gib: PositiveFloat | None = None
    """Memory of the GPU (GiB), for one that `gpu` has no name for. null: as `gpu` says."""
    leak_threshold_mib: PositiveFloat = 512.0
    """More memory than planned, or than the same phase of earlier steps held, is reported above this (MiB)."""
    stop_on_leak: bool = False
    """End the run where memory is reported as leaked."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards from checking the final answer."""

    scheme: Literal["correctness", "mix", "independent"] = "correctness"
    """"correctness": +1 or -1 (AReaL); "mix": 1, -0.5, and format_penalty without a box; "independent": 1 and -0.5
    with a box, 0.5 and format_penalty without one (SimpleRL). A reward is (that - output_bias) * output_scaling."""
    format_penalty: FiniteFloat = -1.0
    """Schemes "mix" and "independent": what an answer without a box gets (SimpleRL's FORMAT_PENALTY_VALUE)."""
    output_scaling: PositiveFloat | None = None
    """AReaL's reward_output_scaling. null: 5 for "correctness", which makes +5 and -5, and 1 for the others."""
    length_penalty: NonNegativeFloat = 0.0
    """What 1,000 tokens cost in reward, times the group's pass rate, 1 / completions at least: length is dear where a
    prompt is easy (arXiv:2506.05256)."""
    output_bias: FiniteFloat = 0.0
    """AReaL's reward_output_bias, subtracted before scaling."""
    mask_no_eos_with_zero: bool = False
    """A completion cut off at rollout.max_new_tokens gets 0, right or wrong (AReaL)."""
    overlong_buffer: NonNegativeInt = 0
    """Length costs in the last so many tokens before rollout.max_new_tokens (DAPO's soft punishment); 0: never."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What the full length costs (reward); over the buffer it grows evenly from 0."""
    answer_from: Literal["boxed", "phrase", "number"] = "boxed"
    """Where the answer may stand: "boxed" (box or <answer> tag), "phrase" (else after "the answer is"), "number"
    (else the last number); the last two for base models that do not know boxes yet."""
    strict: bool = True
    """False compares numbers as loosely as the Qwen2.5-Math evaluation: within 1e-4, rounded, or a factor 100 off."""
    function: Annotated[str, TakesFunction("reward")] | None = None
    """A reward function of yours, "package.module:name" or "path/to/file.py:name", instead of the verifier; see
    docs/rewards.md."""
    function_failure: FiniteFloat = 0.0
    """What a completion gets when that function fails or takes too long (before scaling)."""
    rewards: list[str] = field(default_factory=list)
    """Several rewards instead of one: any of "correctness", "format" (a box), "length" (1 down to 0 at
    rollout.max_new_tokens), and functions of yours, "name=package.module:function"; see docs/rewards.md. Empty: no."""
    weights: list[Annotated[float, Range(-1000, 1000)]] = field(default_factory=list)
    """What each of `rewards` weighs, in that order; 0 logs it only. Empty: 1 each."""
    combine: Literal["sum", "gdpo"] = "sum"
    """How `rewards` become one advantage: "sum" (their weighted sum is the reward) or "gdpo" (each is normalised in its
    group, then their weighted sum over the batch: GDPO, arXiv:2601.05242)."""
    timeout_seconds: Annotated[float, Range(0, 3600, open_low=True)] = 5.0
    """Longest check of one answer, from its start: seconds on a processor, or by the clock where a function of yours is
    called; a check that takes longer is ended and counts as wrong."""
    workers: Annotated[int, Range(1, 1024)] = 4
    """Most processes per engine that check answers; there are more than one where answers wait. With reward.rewards as
    many for the verifier, and for each function."""
    max_failure_share: Fraction = 0.02
    """A step in which more than this share of checks failed (time, memory, crash) is warned of, with a sample."""


@dataclass(frozen=True)
class SelectionConfig:
    """Which of the sampled groups and completions are learned from."""

    dynamic_sampling: Literal["accuracy", "reward"] | Annotated[str, TakesFunction("selection")] | None = None
    """DAPO's dynamic sampling (arXiv:2503.14476): "accuracy" drops groups that are all right or all wrong, "reward"
    those whose rewards are all the same, a function of yours those that it says (docs/hooks.md), and other prompts are
    sampled in their place. null keeps every group."""
    max_extra_prompts: NonNegativeInt = 0
    """With dynamic sampling: most prompts of a step beyond data.prompts_per_step. What is still missing then is left
    out: the step learns from fewer groups."""
    min_completion_tokens: NonNegativeInt = 0
    """Shorter completions leave their group, before advantages."""
    max_completion_tokens: PositiveInt | None = None
    """Longer completions leave their group, before advantages. null: no limit."""
    drop_truncated: bool = False
    """Completions cut off at rollout.max_new_tokens leave their group, before advantages (as DAPO's overlong
    filtering, which leaves them in the group's statistics)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, loss and early stop; the formulas are in docs/algorithm.md. The defaults are GRPO (arXiv:2402.03300)
    with a token-level loss."""

    preset: (
        Literal[
            "areal_ppo",
            "cispo",
            "clip_cov",
            "critic",
            "curriculum",
            "dapo",
            "decoupled",
            "deepseek_v32",
            "distill",
            "dppo",
            "dr_grpo",
            "gdpo",
            "gmpo",
            "grpo",
            "gspo",
            "kl_cov",
            "kpop",
            "lite_ppo",
            "maxrl",
            "opo",
            "pass_at_k",
            "reinforce_pp",
            "rloo",
            "sapo",
            "simplerl",
            "skywork_or1",
            "top_entropy",
        ]
        | None
    ) = None
    """Settings of configs/algorithms/NAME.yaml, each unless your files or the command line set it; --dry-run prints
    them. null: none."""
    advantage: (
        Literal["grpo", "dr_grpo", "rloo", "ppo", "reinforce++", "lite_ppo", "opo", "maxrl", "pass@k", "gae"]
        | Annotated[str, TakesFunction("advantage")]
    ) = "grpo"
    """"grpo": distance from the group's mean, in its deviations; "dr_grpo": distance alone; "rloo": distance from the
    mean of the others; "ppo": the reward itself, normalised over the batch's tokens (AReaL's PPO without a critic);
    "reinforce++": distance from the group's mean, normalised over the batch's tokens; "lite_ppo": the same distance in
    deviations of the batch (arXiv:2508.08221); "opo": distance from the mean weighed by tokens (arXiv:2505.23585);
    "maxrl": distance in units of the group's pass rate (arXiv:2602.02710); "pass@k": what a completion adds to the best
    of pass_k (arXiv:2505.15201); "gae": of every token, by the
    values of a critic (the section `critic`), normalised likewise: PPO; or a function of yours, see docs/hooks.md."""
    pass_k: Annotated[int, Range(2)] = 4
    """The k of advantage="pass@k", at most rollout.group_size (arXiv:2505.15201)."""
    advantage_eps: NonNegativeFloat = 1e-6
    """Added to every deviation that an advantage is divided by."""
    loss: Literal["clip", "gspo", "cispo", "gmpo", "sapo", "dppo_tv", "dppo_kl"] = "clip"
    """"clip": PPO's clipped surrogate on single tokens; "gspo": on whole completions; "cispo": clipped weights of the
    policy gradient; "gmpo": geometric mean of clipped ratios (arXiv:2507.20673); "sapo": a soft gate
    (arXiv:2511.20347); "dppo_tv", "dppo_kl": masks by total variation or KL of the token (arXiv:2602.04879)."""
    loss_normalisation: Literal["token", "sequence", "constant"] = "token"
    """"token": mean over tokens (DAPO, verl's token-mean); "sequence": mean over completions of their mean over tokens
    (GRPO, verl's seq-mean-token-mean); "constant": mean over completions of their sum / rollout.max_new_tokens
    (Dr. GRPO)."""
    n_minibatches: PositiveInt = 1
    """Parts of a step's samples; each is one optimizer step (AReaL: ppo_n_minibatches)."""
    epochs: PositiveInt = 1
    """Passes over a step's samples (verl: ppo_epochs)."""
    shuffle: bool = True
    """Samples are assigned to minibatches at random, and every epoch takes the minibatches in an order of its own, both
    drawn from run.seed and the step. False: in the order of prompts."""
    clip_ratio: PositiveFraction = 0.2
    """The importance ratio is clipped below 1 - clip_ratio, and above 1 + clip_ratio where clip_ratio_high is null. Of
    loss=gmpo the bounds are of the ratio's log, of dppo_tv and dppo_kl of the divergence."""
    clip_ratio_high: PositiveFloat | None = None
    """The importance ratio is clipped above 1 + clip_ratio_high (DAPO's clip-higher). null: clip_ratio."""
    dual_clip: RatioAboveOne | None = None
    """Largest importance ratio that counts where the advantage is negative, with loss=dppo_* whatever it is (AReaL:
    c_clip, verl: clip_ratio_c). null: no bound."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """loss=sapo: temperature of the gate where the advantage is above 0 (arXiv:2511.20347)."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """loss=sapo: temperature of the gate where it is not: a larger one shuts it sooner (arXiv:2511.20347)."""
    off_policy_mask: PositiveFloat | None = None
    """Completions with a negative advantage are left out of the surrogate where the mean of log engine - log policy is
    above this (nats a token; arXiv:2512.02556, TRL: off_policy_mask_threshold, 0.5 to begin with). null: none."""
    recompute_logprobs: bool = True
    """Ratio against log-probs recomputed by the policy before its first update, the proximal policy (AReaL:
    recompute_logprob); false: against the engine's own."""
    proximal_logprobs: Literal["recompute", "interpolate", "compare"] = "recompute"
    """Of tokens of older weights: "interpolate" takes the recomputed log-probs from those of engine and policy, by
    their versions, without a pass (AReaL: prox_logp_method=loglinear; arXiv:2512.06547); "compare" recomputes, and logs
    how far off that would be."""
    importance_correction: Literal["token", "sequence"] | None = None
    """Weight of the surrogate for the difference between engine and recomputed log-probs: "token" (AReaL:
    use_decoupled_loss) or "sequence", the product over a completion. null: no weight."""
    importance_cap: Annotated[float, Range(1, why=_EQUAL_RATIO)] | None = None
    """Truncated importance sampling: the largest such weight. null: no bound."""
    importance_mask_low: Annotated[float, Range(0, 1, open_high=True, why=_EQUAL_RATIO)] | None = None
    """Tokens, or completions, whose weight is below this are left out of the surrogate. null: no bound."""
    importance_mask_high: Annotated[float, Range(1, open_low=True, why=_EQUAL_RATIO)] | None = None
    """Tokens, or completions, whose weight is above this, before the cap, are left out (AReaL: behav_imp_weight_cap).
    null: no bound."""
    importance_mask_geometric_low: Annotated[float, Range(0, 1, open_high=True, why=_EQUAL_RATIO)] | None = (
        None
    )
    """Completions whose geometric mean of recomputed over engine probability is below this are left out of the
    surrogate (verl: rollout_rs=geometric); also without importance_correction. null: no bound."""
    importance_mask_geometric_high: Annotated[float, Range(1, open_low=True, why=_EQUAL_RATIO)] | None = None
    """Completions whose geometric mean is above this are left out, too. null: no bound."""
    importance_mask_binary_kl: PositiveFloat | None = None
    """Tokens are left out of the surrogate where the KL (nats) from the recomputed to the engine's distribution, over
    "this token" and "any other", is above this (AReaL: KPop); also without importance_correction. null: no bound."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of KL(policy || reference). 0: no reference model."""
    reference_every_steps: PositiveInt | None = None
    """After every so many steps of the run the policy becomes the reference (ProRL, arXiv:2505.24864, which also resets
    the optimizer; here it goes on). null: the reference stays the model that the run started from."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: in the "loss" of every token, or in the "reward", before advantages (AReaL: kl_ctl)."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the KL from a sampled token: "k1" (difference of log-probs), "k2" (half its square), "k3" (verl:
    low_var_kl) or "abs"."""
    kl_ratio: Literal["token", "sequence"] | None = None
    """Weigh the KL in the loss by policy / engine, of the "token" or of the whole completion ("sequence"), with
    gradient: k1 and k3 are then right off-policy (arXiv:2512.02556; TRL: use_bias_correction_kl). null: no weight."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's distribution is subtracted from the loss."""
    entropy_target: PositiveFloat | None = None
    """entropy_coef is only the first weight: after every step it rises by entropy_delta below this entropy (nats a
    token), else falls, and is off above it (Skywork-OR1, arXiv:2505.22312, has 0.2). null: it stays."""
    entropy_delta: PositiveFloat = 0.005
    """By how much entropy_target changes the weight after a step (arXiv:2505.22312)."""
    top_entropy_share: PositiveFraction = 1.0
    """Advantages count at this share of the step's tokens, those of the highest entropies (arXiv:2506.01939: 0.2; TRL:
    top_entropy_quantile). Below 1 it costs a pass where no log-probs are recomputed."""
    clip_cov_ratio: PositiveFraction | None = None
    """Clip-Cov: this share of the step's tokens, drawn from those whose covariance of log-prob and advantage lies
    within the next two, is left out (arXiv:2505.22617, as the next four: 2e-4). null: none."""
    clip_cov_low: FiniteFloat = 1.0
    """Clip-Cov: least covariance (verl: clip_cov_lb)."""
    clip_cov_high: FiniteFloat = 5.0
    """Clip-Cov: largest covariance (verl: clip_cov_ub)."""
    kl_cov_ratio: PositiveFraction | None = None
    """KL-Cov: this share of the step's tokens, of the largest covariances, has kl_cov_coef x |log policy - log
    proximal| in its loss (2e-3 to 2e-4). null: none."""
    kl_cov_coef: PositiveFloat = 1.0
    """KL-Cov: weight of that (verl: ppo_kl_coef)."""
    early_stop_ratio: RatioAboveOne | None = 5.0
    """A minibatch whose token-weighted mean importance ratio exceeds this is discarded (as RLinf). null: no bound."""
    early_stop_ratio_low: Annotated[float, Range(0, 1, open_high=True, why=_FIRST_RATIO)] | None = None
    """A minibatch whose mean ratio falls below this is discarded. null: no bound. Values that are not finite always
    discard."""
    early_stop_kl: PositiveFloat | None = None
    """A minibatch whose mean k3, KL(proximal || policy) per token (nats), exceeds this is discarded. null: no bound."""
    early_stop_action: Literal["skip", "end"] = "skip"
    """After a discarded minibatch: "skip" continues with the next, "end" ends the step's updates."""
    rollback: NonNegativeInt = 0
    """Most times that a run whose policy has diverged goes back to its last good checkpoint, with other seeds and a
    lower learning rate, instead of ending with exit status 77. 0: never. See docs/training.md."""
    rollback_lr_factor: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    """The learning rate is multiplied by this at each rollback."""
    rollback_reward_drop: PositiveFloat | None = None
    """With `rollback`: go back, too, when the mean reward of `rollback_reward_steps` steps has fallen from the best
    such mean by more than this share of its gain over the first one, and by more than three deviations of single steps.
    null: rewards are not looked at."""
    rollback_reward_steps: Annotated[int, Range(2)] = 10
    """Steps that those means are over."""

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the step's start are the policy's own, and not interpolated."""
        return self.recompute_logprobs and self.proximal_logprobs != "interpolate"

    @property
    def selects_tokens(self) -> bool:
        """Whether tokens are chosen by entropy or covariance, which takes the policy's own log-probs before a step."""
        return self.top_entropy_share < 1 or self.clip_cov_ratio is not None or self.kl_cov_ratio is not None

    @property
    def masks_alone(self) -> list[str]:
        """The masks that are set and need no `importance_correction`."""
        names = (
            "importance_mask_geometric_low",
            "importance_mask_geometric_high",
            "importance_mask_binary_kl",
        )
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True)
class CriticConfig:
    """The value model of algorithm.advantage=gae: laid out like the policy, with an optimizer of its own, which takes
    everything but the learning rate from `optimizer`. See docs/algorithm.md."""

    path: str | None = None
    """Folder, or hf:// id, of the Hugging Face model that the critic starts from, with a value head
    (...ForTokenClassification) or without. null: model.path."""
    lr: PositiveFloat | None = None
    """Peak learning rate. null: twice optimizer.lr (VAPO)."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    epochs: PositiveInt | None = None
    """Passes over a step's samples (verl: critic.ppo_epochs). null: algorithm.epochs."""
    pretrain_steps: NonNegativeInt = 0
    """First steps of the run in which the critic alone learns (VAPO's value pretraining)."""
    clip: PositiveFloat | None = None
    """Values count as no further than this from those of the step's start (in units of the reward, which is 5 or -5 by
    default; verl: cliprange_value). null: no clip."""
    gamma: PositiveFraction = 1.0
    """Discount of a token."""
    policy_lambda: Fraction = 1.0
    """Lambda of the policy's advantages: 1 takes rewards alone, 0 one token and the next value. Without effect where
    policy_length_alpha is given."""
    policy_length_alpha: PositiveFloat | None = None
    """Lambda of the policy's advantages by a completion's length: 1 - 1 / (this x its tokens); VAPO: 0.05. null:
    policy_lambda."""
    value_lambda: Fraction = 1.0
    """Lambda of the returns that the critic learns."""
    bootstrap_truncated: bool = False
    """A completion cut off at rollout.max_new_tokens goes on with the critic's value there. False: it ends with its
    reward."""


@dataclass(frozen=True)
class TeacherConfig:
    """On-policy distillation: a larger model scores what the policy samples (GKD, arXiv:2306.13649; MiniLLM,
    arXiv:2306.08543); see docs/algorithm.md."""

    path: str | None = None
    """Folder, or hf:// id, of the teacher, a Hugging Face model with the same tokenizer; its shape may differ from the
    policy's, as far as `parallel` can lay it out. null: no teacher."""
    loss: Literal["advantage", "full"] = "advantage"
    """"advantage": `coef` x (teacher's log-prob - policy's) is added to every sampled token's advantage; "full": `coef`
    x KL(policy || teacher) over the whole vocabulary, at every token, is part of the loss, with gradient."""
    coef: PositiveFloat = 1.0
    """Weight of the teacher's part."""
    with_rewards: bool = False
    """Learn from rewards, too. False: rewards are only measured, and the teacher's part alone is learned from."""


@dataclass(frozen=True)
class TelemetryConfig:
    """Where metrics and samples are written, and when the run warns."""

    tensorboard: bool = True
    """Write TensorBoard events under `<output_dir>/tensorboard`."""
    sample_groups_per_step: NonNegativeInt = 2
    """Groups a step whose prompt, texts, rewards and advantages are kept under `<output_dir>/samples`. 0: none."""
    metrics: list[str] = field(default_factory=list)
    """Functions of yours that make numbers of a step's groups, "name=package.module:function" or the name of one that
    is registered; logged as own/<name>. See docs/hooks.md."""
    profile_steps: list[PositiveInt] = field(default_factory=list)
    """Steps whose torch profile every training rank writes to `<output_dir>/profile`: a trace and a table of what took
    longest. They take longer than others."""
    capture_steps: list[PositiveInt] = field(default_factory=list)
    """Steps of which everything that their update was made of is written to `<output_dir>/captures`, for `rlmath
    replay`, and the checkpoint before them stays. Of the last step before a failure it is written in any case."""
    report: bool = True
    """Write `<output_dir>/report.html` at the run's end: curves, warnings, settings and samples on one page. Needs
    plotly."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases, too: "off", "offline" (files under `<output_dir>/wandb`, without an account) or "online" (with
    an account, `wandb login`). Needs `pip install rlmath[wandb]`."""
    wandb_project: str = "rlmath"
    """Project of Weights & Biases."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases. null: the name of `run.output_dir`."""
    warn_truncated: Fraction = 0.05
    """A share of truncated completions above this is warned of, once (1: never). SimpleRL's report: normal is less than
    5%."""
    warn_dropped: Fraction = 0.05
    """Alert: a larger share of prompts that the filters drop, at the start (1: never)."""
    warn_importance_weight: PositiveFloat = 0.1
    """Alert: a mean importance weight that is further from 1 than this (a large one: never)."""
    warn_flat_steps: Annotated[int, Range(2)] = 50
    """Alert: a reward that has not risen beyond its noise over so many steps (more than the run has: never)."""
    warn_entropy_share: Fraction = 0.2
    """Alert: an entropy below this share of the first steps', and fallen twice as far as the share of wrong answers
    (0: never)."""


@dataclass(frozen=True)
class SaveConfig:
    """What a run leaves behind: checkpoints to keep, recovery points to resume from, models in Hugging Face form."""

    save_freq_epochs: PositiveInt | None = None
    """Keep a checkpoint after every so many epochs (AReaL: exp_ctrl.save_freq_epochs). null: no such checkpoints."""
    save_freq_steps: PositiveInt | None = None
    """Keep a checkpoint after every so many steps."""
    save_freq_secs: PositiveFloat | None = None
    """Keep a checkpoint after the step in which so many seconds have passed since the last one."""
    export_hf: bool = False
    """Export the model of every kept checkpoint to `<output_dir>/models/step-NNNNNN`, too, while training waits. The
    last one is always exported, to `<output_dir>/hf_model`."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the exported Hugging Face models; "auto": as it was trained."""
    ckpt_freq_epochs: PositiveInt | None = None
    """Make a recovery point after every so many epochs (AReaL: exp_ctrl.ckpt_freq_epochs). null: no such points."""
    ckpt_freq_steps: PositiveInt | None = None
    """Make a recovery point after every so many steps."""
    ckpt_freq_secs: PositiveFloat | None = 600.0
    """Make a recovery point after the step in which so many seconds have passed since the last one. With any of these
    three there is a recovery point after the second step, too, and one after the last."""
    keep_last: PositiveInt = 2
    """Recovery points that stay: the newest ones. With 2, one is left when the newest is damaged."""
    keep_models: PositiveInt | None = None
    """Checkpoints of `save_freq_*` that stay: the newest ones. null: all stay."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub, org/name, to which the model of a finished run (`<output_dir>/hf_model`) is
    uploaded; made, private, where there is none. Needs a token (HF_TOKEN or `hf auth login`) and `export_hf`. null:
    nothing is uploaded."""
    background: bool = True
    """Write checkpoints during training; a rank's part is held a second time in the host's memory meanwhile."""


@dataclass(frozen=True)
class Config:
    """All settings of `rlmath train` and `rlmath sft`."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    stages: StagesConfig = StagesConfig()
    parallel: ParallelConfig = ParallelConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
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
