"""Every setting of a training run: structured config, read by OmegaConf (see `config_files`).

YAML files hold only what differs from these defaults. The docstring under a field is what `--help` prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlmath.config.gpus import GPU_GIB

MISSING = "???"
"""OmegaConf's mark for a value that the user must give."""


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    output_dir: str = MISSING
    """Folder of everything the run writes, on a disk that all nodes share; what AReaL calls experiment and trial. It
    must be new, empty, or left by this very run."""
    seed: int = 1
    """Seed of data order, sampling and initialisation (0 to 2**31 - 1)."""
    total_epochs: int = 1
    """Passes over the training prompts."""
    total_steps: int | None = None
    """Steps to train; ends the run before `total_epochs` if smaller. Null: as many as the epochs have."""
    device: str = "auto"
    """"cpu" (gloo, float32), "cuda" (nccl, bfloat16), or "auto": cuda where there is one."""
    recover_mode: str = "auto"
    """"auto": go on from the newest whole checkpoint in `output_dir`, or start where there is none; "resume": go on, or
    end with an error; "disabled": start anew, what is there is moved to `<output_dir>/earlier`."""
    distributed_timeout_seconds: float = 1800.0
    """How long a collective waits for its peers before the run ends with an error (seconds; Megatron's groups round it
    up to minutes, vLLM's have limits of their own)."""
    start_timeout_seconds: float = 600.0
    """How long the ranks wait for each other at the start before the run ends and names those that are missing
    (seconds; torchrun's own join_timeout is as long): reading data and importing libraries must be done by then."""
    stop_grace_seconds: float = 300.0
    """How long the run may take to save and stop after SIGTERM or SIGUSR1 (seconds); after that it is ended unsaved."""
    heartbeat_timeout_seconds: float = 120.0
    """A rank that gives no sign of life for so long ends the run (seconds); one whose process is gone ends it at once,
    where another rank of its node is there to see it."""
    hang_timeout_seconds: float | None = 1500.0
    """The run ends, and tells where every rank is, when no rank has entered a phase or made other progress for so long
    (seconds). Below `distributed_timeout_seconds`, or that ends it first, without telling. Null: never."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from."""

    path: str = MISSING
    """Folder of a Hugging Face model: config.json, safetensors (one file or an index), tokenizer files."""


@dataclass(frozen=True)
class DataConfig:
    """The training prompts."""

    train_path: str = MISSING
    """File or folder of prompts, in any form that docs/data.md lists: JSONL, parquet, or a folder of a Hugging Face
    data set."""
    more_train_paths: list[str] = field(default_factory=list)
    """Further files or folders of prompts, mixed with those of `train_path`."""
    train_weights: list[float] = field(default_factory=list)
    """How often each file's prompts come in one epoch, `train_path`'s first: 1 once, 0.5 half of them, 2 twice. Empty:
    all once."""
    format: str = "auto"
    """Form of the files: "auto" finds it in their first rows; "boba" (AReaL-boba, ORZ), "areal_v01" (AReaL v0.1, with
    its id2info.json beside), "simplerl" (SimpleRL-Zoo), "dapo" (DAPO-Math), "question_answer" (plain rows)."""
    template: str = "auto"
    """What is made of a problem: "auto" (as it stands where the file has whole prompts, else the tokenizer's chat
    template where there is one, else "qwen_boxed"), "r1_distill" (DeepSeek-R1-Distill), "qwen_boxed", "orz"
    (Open-Reasoner-Zero), "chat" (the tokenizer's own), "raw" (as it stands)."""
    prompts_per_step: int = 128
    """Prompts sampled in one step (AReaL: dataset.train_bs_n_seqs). For SFT: sequences of one step."""
    max_prompt_tokens: int = 1024
    """Prompts longer than this many tokens are dropped, and counted on the console."""
    max_unusable_share: float = 0.01
    """Rows without an answer, with a repeated id or that are no rows at all are left out, and listed in
    `<output_dir>/unusable_rows.jsonl`; a larger share of them ends the run (0 to 1)."""
    shuffle: bool = True
    """A new order every epoch, drawn from `run.seed`; false keeps the file's order."""


@dataclass(frozen=True)
class StagesConfig:
    """Stages of one run, such as a context that grows (8k, 16k, 24k): one number of each list for a stage. Empty lists:
    one stage with the settings as they are."""

    steps: list[int] = field(default_factory=list)
    """Steps of each stage; `run.total_steps` stays null then, and epochs go on until all are done."""
    max_new_tokens: list[int] = field(default_factory=list)
    """`rollout.max_new_tokens` of each stage, which has no effect then."""
    max_tokens_per_microbatch: list[int] = field(default_factory=list)
    """`policy.max_tokens_per_microbatch` of each stage. Empty: the same in all."""


@dataclass(frozen=True)
class ValidationConfig:
    """Accuracy on files of its own while training goes on, under `validation/` in `<output_dir>/validation.jsonl` and
    TensorBoard; see docs/stages.md."""

    every_steps: int | None = None
    """After every so many steps, and after the last. Null: never."""
    paths: list[str] = field(default_factory=list)
    """Files of problems, in any form that docs/data.md lists; each is named after its file."""
    template: str | None = None
    """As `data.template`. Null: the same."""
    before_training: bool = True
    """Also before the first step."""
    batch_size: int = 128
    """Problems that are sampled at a time."""
    samples: int = 1
    """Completions of one problem."""
    temperature: float = 0.6
    """Sampling temperature; 0 is greedy."""
    top_p: float = 0.95
    """Nucleus truncation."""
    max_new_tokens: int | None = None
    """Longest completion (tokens). Null: `rollout.max_new_tokens`, or the largest of `stages.max_new_tokens`."""
    keep_best: bool = False
    """Keep the Hugging Face model with the best mean accuracy so far in `<output_dir>/best_model`."""


@dataclass(frozen=True)
class SftConfig:
    """launch/train_sft.py: cross-entropy on completions. It uses run, model, data (files of prompts with completions),
    parallel, policy, optimizer, telemetry and save, too; the other sections have no effect there."""

    max_sequence_tokens: int = 4096
    """Longer sequences (prompt and completion) are dropped, and counted on the console."""
    held_out_path: str | None = None
    """File of sequences to evaluate on. Null: `held_out_share` of the training file."""
    held_out_share: float = 0.01
    """Share of the training sequences that are only evaluated on (0: none)."""
    eval_every_steps: int | None = 100
    """Steps between evaluations of the held-out loss; there is one before the first and after the last step, too.
    Null: none."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the actor and the reference are sharded. A word such as d32t2p1 stands for the section: data 32, tensor 2,
    pipeline 1; c is context, e expert parallel, and m is another letter for t (AReaL)."""

    data: int | None = None
    """Data-parallel size: replicas of the model. Null: what remains of the ranks."""
    tensor: int = 1
    """Tensor-parallel size: ranks that share every matrix. Divides attention heads and key-value groups."""
    pipeline: int = 1
    """Pipeline-parallel size: ranks that share the stack of layers. Divides the number of layers, unless
    `first_stage_layers` or `last_stage_layers` says how they are shared."""
    virtual_pipeline: int = 1
    """Model chunks of one pipeline stage (Megatron's interleaved schedule): more of them leave the stages less idle and
    send more messages. Needs `pipeline` above 1; `pipeline` x `virtual_pipeline` divides the number of layers."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, which also holds the embedding. Null: as many as the other stages."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which also holds the output layer. Null: as many as the other stages."""
    context: int = 1
    """Context-parallel size: ranks that share the tokens of every pack, for sequences too long for one. Needs GPUs with
    Transformer Engine; written to its rules, but not run on GPUs yet."""
    expert: int = 1
    """Expert-parallel size: ranks of a pipeline stage that share the experts of every layer, for models with experts.
    Divides their number and the ranks of a stage (tensor x context x data / `expert_tensor`)."""
    expert_tensor: int = 1
    """Tensor-parallel size of every expert's matrices, independent of `tensor`. Above 1 it needs GPUs; written to
    Megatron's rules, but not run on GPUs yet."""
    sequence: bool = False
    """Megatron's sequence parallelism: norms and residuals are split over the tensor-parallel ranks."""


@dataclass(frozen=True)
class PolicyConfig:
    """How the policy and the reference compute."""

    max_tokens_per_microbatch: int = 20480
    """Token budget of one packed forward/backward (AReaL: mb_spec.max_tokens_per_mb). At least the longest sequence."""
    recompute_granularity: str | None = None
    """Activation recomputation, as Megatron has it: null (none), "full" or "selective"."""
    recompute_method: str | None = None
    """With "full": "uniform" or "block"."""
    recompute_num_layers: int | None = None
    """With "full": layers that are recomputed together ("uniform"; divides those of every pipeline stage or chunk), or
    layers of each of them that are recomputed ("block")."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule. One optimizer step per minibatch that is not discarded."""

    kind: str = "adam"
    """"adam" (AdamW) or "sgd"."""
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a decay."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay: str = "constant"
    """Course after the warm-up: "constant", "linear" or "cosine" down to `min_lr`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Adam's decay of the first moment."""
    adam_beta2: float = 0.95
    """Adam's decay of the second moment."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm (L2); 0 clips nothing."""
    distributed: bool = True
    """Share the optimizer's state over the data-parallel ranks (Megatron's distributed optimizer; only for "adam")."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling by vLLM engines that live in the training ranks."""

    tensor_parallel: int = 1
    """Ranks of one engine; independent of `parallel.tensor`. Divides the world size."""
    group_size: int = 16
    """Completions of one prompt (AReaL: group_size). At least 2 where advantages come from the group."""
    max_new_tokens: int = 16384
    """Longest completion (tokens); with the prompt it must fit the model's max_position_embeddings."""
    min_new_tokens: int = 0
    """No end-of-sequence token before this many tokens."""
    temperature: float = 1.0
    """Sampling temperature, above 0; the trainer divides its logits by the same."""
    top_p: float = 1.0
    """Nucleus truncation. Only 1.0: the trainer computes the untruncated distribution."""
    top_k: int = -1
    """Top-k truncation. Only -1 (none), for the same reason."""
    memory_share: float = 0.6
    """GPU: share of the device's memory that an engine may take while it generates (0 to 1)."""
    cpu_kv_cache_gib: float = 0.5
    """CPU: size of the KV cache of one rank (GiB)."""
    max_num_seqs: int = 256
    """Most sequences that one engine decodes at a time."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one engine step; null leaves it to vLLM."""
    chunked_prefill: bool = True
    """GPU: let vLLM split long prompts over engine steps. On CPU it never does."""
    cuda_graphs: bool = True
    """GPU: capture decoding in CUDA graphs; false is vLLM's enforce_eager. Without effect on CPU."""
    progress_bar: bool = True
    """Show a progress bar of finished completions on the console."""


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the engines, and how that is checked."""

    bucket_mib: float = 64.0
    """Most weights that a rank sends, and receives, in one round (MiB). Up to twice this is held for each of the two
    while weights travel; nothing where every rank has what its engine needs. On CPU at most 16, which stay for the
    run."""
    checksum_every: int = 0
    """Every so many syncs the engines' weights are compared with the policy's, tensor by tensor, by checksums; a
    difference ends the run. 0: never."""
    probe_every: int = 0
    """Every so many syncs the engines and the policy give log-probs of the same fixed tokens, which are compared. 0:
    never."""
    probe_threshold: float = 0.2
    """A probe in which the mean difference between an engine's log-probs and the policy's exceeds this ends the run
    (nats per token). Measured with small models: 3e-7 in float32, up to 0.04 in bfloat16, 0.3 and more with one wrong
    tensor."""


@dataclass(frozen=True)
class MemoryConfig:
    """What leaves the device while the engines generate, and the watch over what stays."""

    offload_gradients: bool = True
    """Give up the gradient buffers: they hold nothing between steps."""
    offload_optimizer: bool = False
    """Move the optimizer's state and its float32 parameters to the host (pinned memory on GPU)."""
    offload_parameters: bool = False
    """Move the policy's parameters to the host once the engines have them."""
    offload_reference: bool = False
    """Move the reference model to the host whenever it is not computing, in training, too."""
    gpu: str | None = None
    """GPU whose memory the run must fit, for example "H100-80GB". Null: the one that is there; on CPU nothing is
    refused."""
    gpu_gib: float | None = None
    """Memory of the GPU (GiB), for one that `gpu` has no name for. Null: as `gpu` says."""
    leak_threshold_mib: float = 512.0
    """More memory than planned, or than the same phase of earlier steps held, is reported above this (MiB)."""
    stop_on_leak: bool = False
    """End the run where memory is reported as leaked."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards from checking the final answer."""

    scheme: str = "correctness"
    """"correctness": +1 or -1 (AReaL); "mix": 1, -0.5, and format_penalty without a box; "independent": 1 and -0.5
    with a box, 0.5 and format_penalty without one (SimpleRL). A reward is (that - output_bias) * output_scaling."""
    format_penalty: float = -1.0
    """Schemes "mix" and "independent": what an answer without a box gets (SimpleRL's FORMAT_PENALTY_VALUE)."""
    output_scaling: float | None = None
    """AReaL's reward_output_scaling. Null: 5 for "correctness", which makes +5 and -5, and 1 for the others."""
    output_bias: float = 0.0
    """AReaL's reward_output_bias, subtracted before scaling."""
    mask_no_eos_with_zero: bool = False
    """A completion cut off at rollout.max_new_tokens gets 0, right or wrong (AReaL)."""
    overlong_buffer: int = 0
    """Length costs in the last so many tokens before rollout.max_new_tokens (DAPO's soft punishment); 0: never."""
    overlong_penalty: float = 1.0
    """What the full length costs (reward); over the buffer it grows evenly from 0."""
    answer_from: str = "boxed"
    """Where the answer may stand: "boxed" (box or <answer> tag), "phrase" (else after "the answer is"), "number"
    (else the last number); the last two for base models that do not know boxes yet."""
    strict: bool = True
    """False compares numbers as loosely as the Qwen2.5-Math evaluation: within 1e-4, rounded, or a factor 100 off."""
    function: str | None = None
    """A reward function of yours, "package.module:name", instead of the judge; see docs/rewards.md."""
    function_failure: float = 0.0
    """What a completion gets when that function fails or takes too long (before scaling)."""
    timeout_seconds: float = 5.0
    """Longest check of one answer; a check that takes longer is ended and counts as wrong."""
    workers: int = 1
    """Processes per rank that check answers."""
    max_failure_share: float = 0.02
    """A step in which more than this share of checks failed (time, memory, crash) is warned of, with a sample."""


@dataclass(frozen=True)
class SelectionConfig:
    """Which of the sampled groups and completions are learned from."""

    dynamic_sampling: str | None = None
    """DAPO's dynamic sampling (arXiv:2503.14476): "accuracy" drops groups that are all right or all wrong, "reward"
    those whose rewards are all the same, and samples other prompts in their place. Null keeps every group."""
    max_extra_prompts: int = 0
    """With dynamic sampling: most prompts of a step beyond data.prompts_per_step. What is still missing then is left
    out: the step learns from fewer groups."""
    min_completion_tokens: int = 0
    """Shorter completions leave their group, before advantages."""
    max_completion_tokens: int | None = None
    """Longer completions leave their group, before advantages. Null: none."""
    drop_truncated: bool = False
    """Completions cut off at rollout.max_new_tokens leave their group, before advantages (as DAPO's overlong
    filtering, which leaves them in the group's statistics)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, loss and early stop; the formulas are in docs/algorithm.md. The defaults are GRPO (arXiv:2402.03300)
    with a token-level loss."""

    advantage: str = "grpo"
    """"grpo": distance from the group's mean, in its deviations; "dr_grpo": distance alone; "rloo": distance from the
    mean of the others; "ppo": the reward itself, normalised over the batch's tokens (AReaL's PPO without a critic);
    "reinforce++": distance from the group's mean, normalised over the batch's tokens."""
    advantage_eps: float = 1e-6
    """Added to every deviation that an advantage is divided by."""
    loss: str = "clip"
    """"clip": PPO's clipped surrogate on single tokens; "gspo": on whole completions; "cispo": clipped weights of the
    policy gradient."""
    loss_normalisation: str = "token"
    """"token": mean over tokens (DAPO, verl's token-mean); "sequence": mean over completions of their mean over tokens
    (GRPO, verl's seq-mean-token-mean); "constant": mean over completions of their sum / rollout.max_new_tokens
    (Dr. GRPO)."""
    n_minibatches: int = 1
    """Parts of a step's samples; each is one optimizer step (AReaL: ppo_n_minibatches)."""
    epochs: int = 1
    """Passes over a step's samples (verl: ppo_epochs)."""
    shuffle: bool = True
    """Samples are dealt to minibatches at random, and every epoch takes the minibatches in an order of its own, both
    drawn from run.seed and the step. False: in the order of prompts."""
    clip_ratio: float = 0.2
    """The importance ratio is clipped below 1 - clip_ratio, and above 1 + clip_ratio where clip_ratio_high is null."""
    clip_ratio_high: float | None = None
    """The importance ratio is clipped above 1 + clip_ratio_high (DAPO's clip-higher). Null: clip_ratio."""
    dual_clip: float | None = None
    """Largest importance ratio that counts where the advantage is negative (AReaL: c_clip, verl: clip_ratio_c). Null:
    none."""
    recompute_logprobs: bool = True
    """Ratio against log-probs recomputed by the policy before its first update, the proximal policy (AReaL:
    recompute_logprob); false: against the engine's own."""
    importance_correction: str | None = None
    """Weight of the surrogate for the difference between engine and recomputed log-probs: "token" (AReaL:
    use_decoupled_loss) or "sequence", the product over a completion. Null: none."""
    importance_cap: float | None = None
    """Truncated importance sampling: most of that weight. Null: no bound."""
    importance_mask_low: float | None = None
    """Tokens, or completions, whose weight is below this are left out of the surrogate. Null: none."""
    importance_mask_high: float | None = None
    """Likewise above this, before the cap (AReaL: behav_imp_weight_cap). Null: none."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference). 0 leaves the reference out altogether."""
    kl_in: str = "loss"
    """Where the KL counts: in the "loss" of every token, or in the "reward", before advantages (AReaL: kl_ctl)."""
    kl_estimator: str = "k3"
    """Estimate of the KL from a sampled token: "k1" (difference of log-probs), "k2" (half its square), "k3" (verl:
    low_var_kl) or "abs"."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's distribution is subtracted from the loss."""
    early_stop_ratio: float | None = 5.0
    """A minibatch whose token-weighted mean importance ratio exceeds this is discarded (as RLinf). Null: never."""
    early_stop_ratio_low: float | None = None
    """Likewise when the mean falls below this. Null: never. Values that are not finite always discard."""
    early_stop_kl: float | None = None
    """Likewise when the mean of k3, KL(proximal || policy) per token (nats), exceeds this. Null: never."""
    early_stop_action: str = "skip"
    """After a discarded minibatch: "skip" goes on with the next, "end" ends the step's updates."""


@dataclass(frozen=True)
class TelemetryConfig:
    """What a run tells about itself."""

    tensorboard: bool = True
    """Write TensorBoard events under `<output_dir>/tensorboard`."""
    sample_groups_per_step: int = 2
    """Groups a step whose prompt, texts, rewards and advantages are kept under `<output_dir>/samples`. 0: none."""
    wandb: str = "off"
    """Weights & Biases, too: "off", "offline" (files under `<output_dir>/wandb`, without an account) or "online" (with
    an account, `wandb login`). Needs `pip install rlmath[wandb]`."""
    wandb_project: str = "rlmath"
    """Its project."""
    wandb_name: str | None = None
    """Its name of the run. Null: the name of `run.output_dir`."""
    warn_truncated: float = 0.05
    """A share of truncated completions above this is warned of, once (0 to 1; 1: never). SimpleRL's report: normal is
    less than 5%."""
    warn_dropped: float = 0.05
    """Likewise a share of prompts that the filters drop, at the start (0 to 1; 1: never)."""
    warn_importance_weight: float = 0.1
    """Likewise a mean importance weight that is further from 1 than this (a large one: never)."""
    warn_flat_steps: int = 50
    """Likewise a reward that has not risen beyond its noise over so many steps (more than the run has: never)."""
    warn_entropy_share: float = 0.2
    """Likewise an entropy below this share of the first steps', and fallen twice as far as the share of wrong answers
    (0 to 1; 0: never)."""


@dataclass(frozen=True)
class SaveConfig:
    """What a run leaves behind: checkpoints to keep, recovery points to go on from, models in Hugging Face form."""

    save_freq_epochs: int | None = None
    """Keep a checkpoint after every so many epochs (AReaL: exp_ctrl.save_freq_epochs). Null: none."""
    save_freq_steps: int | None = None
    """Likewise after every so many steps."""
    save_freq_secs: float | None = None
    """Likewise after the step in which so many seconds have passed since the last one."""
    export_hf: bool = False
    """Export the model of every kept checkpoint to `<output_dir>/models/step-NNNNNN`, too, while training waits. The
    last one is always exported, to `<output_dir>/hf_model`."""
    export_dtype: str = "auto"
    """Number format of the exported Hugging Face models: "auto" (as it was trained), "float32" or "bfloat16"."""
    ckpt_freq_epochs: int | None = None
    """Make a recovery point after every so many epochs (AReaL: exp_ctrl.ckpt_freq_epochs). Null: none."""
    ckpt_freq_steps: int | None = None
    """Likewise after every so many steps."""
    ckpt_freq_secs: float | None = 600.0
    """Likewise after the step in which so many seconds have passed since the last one. With any of these three there is
    a recovery point after the second step, too, and one after the last."""
    keep_last: int = 2
    """Recovery points that stay: the newest ones. With 2, one is left when the newest is damaged."""
    keep_models: int | None = None
    """Checkpoints of `save_freq_*` that stay: the newest ones. Null: all."""
    background: bool = True
    """Write checkpoints while training goes on; a rank's part is held a second time in the host's memory meanwhile."""


@dataclass(frozen=True)
class Config:
    """All settings of launch/train_grpo.py and launch/train_sft.py."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    save: SaveConfig = field(default_factory=SaveConfig)


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, without an end that is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""
    """Said with the range when it is violated."""

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """ "above 0, at most 1"."""
        if self.low == self.high:
            return f"{self.low:g}"
        low = [] if self.low == -math.inf else [f"{'above' if self.open_low else 'at least'} {self.low:.10g}"]
        high = (
            [] if self.high == math.inf else [f"{'below' if self.open_high else 'at most'} {self.high:.10g}"]
        )
        return ", ".join(low + high) or "a finite number"


_COUNT = Range(1)

_NOT_NEGATIVE = Range(0)

_POSITIVE = Range(0, open_low=True)

_FINITE = Range(-math.inf)

_SHARE = Range(0, 1, open_low=True)

_DECAY = Range(0, 1, open_high=True)

_FIRST_RATIO = "Before the first update the ratio is 1."

_EQUAL_RATIO = "Where engine and trainer agree the weight is 1."

_ABOVE_ONE = Range(1, open_low=True, why=_FIRST_RATIO)

_UNTRUNCATED = (
    "The trainer computes the whole distribution; "
    "with a truncated one in the engine the importance ratios would be wrong."
)

RANGES: dict[str, Range] = {
    "run.seed": Range(0, 2**31 - 1),
    "run.total_epochs": _COUNT,
    "run.total_steps": _COUNT,
    "run.distributed_timeout_seconds": Range(0, 30 * 86400, open_low=True),
    "run.start_timeout_seconds": Range(0, 30 * 86400, open_low=True),
    "run.stop_grace_seconds": Range(0, 30 * 86400, open_low=True),
    "run.heartbeat_timeout_seconds": Range(5, 30 * 86400, why="Ranks beat once a second."),
    "run.hang_timeout_seconds": Range(5, 30 * 86400, why="Ranks beat once a second."),
    "data.prompts_per_step": _COUNT,
    "data.max_prompt_tokens": _COUNT,
    "data.train_weights": Range(0, 1000, open_low=True),
    "data.max_unusable_share": Range(0, 1),
    "stages.steps": _COUNT,
    "stages.max_new_tokens": _COUNT,
    "stages.max_tokens_per_microbatch": _COUNT,
    "parallel.data": _COUNT,
    "parallel.tensor": _COUNT,
    "parallel.pipeline": _COUNT,
    "parallel.virtual_pipeline": _COUNT,
    "parallel.context": _COUNT,
    "parallel.expert": _COUNT,
    "parallel.expert_tensor": _COUNT,
    "parallel.first_stage_layers": _COUNT,
    "parallel.last_stage_layers": _COUNT,
    "policy.max_tokens_per_microbatch": _COUNT,
    "policy.recompute_num_layers": _COUNT,
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr": _NOT_NEGATIVE,
    "optimizer.warmup_steps": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.adam_beta1": _DECAY,
    "optimizer.adam_beta2": _DECAY,
    "optimizer.adam_eps": _POSITIVE,
    "optimizer.clip_grad": _NOT_NEGATIVE,
    "rollout.tensor_parallel": _COUNT,
    "rollout.group_size": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.min_new_tokens": _NOT_NEGATIVE,
    "rollout.temperature": Range(
        0.01,
        why="At 0 a group's answers are all alike; from there to 0.01 vLLM samples at 0.01 instead.",
    ),
    "rollout.top_p": Range(1, 1, why=_UNTRUNCATED),
    "rollout.top_k": Range(-1, -1, why=_UNTRUNCATED),
    "rollout.memory_share": _SHARE,
    "rollout.cpu_kv_cache_gib": _POSITIVE,
    "rollout.max_num_seqs": _COUNT,
    "rollout.max_num_batched_tokens": _COUNT,
    "sync.bucket_mib": Range(0.0625, 16384),
    "sync.checksum_every": _NOT_NEGATIVE,
    "sync.probe_every": _NOT_NEGATIVE,
    "sync.probe_threshold": _POSITIVE,
    "memory.gpu_gib": _POSITIVE,
    "memory.leak_threshold_mib": _POSITIVE,
    "reward.format_penalty": _FINITE,
    "reward.output_scaling": _POSITIVE,
    "reward.output_bias": _FINITE,
    "reward.overlong_buffer": _NOT_NEGATIVE,
    "reward.overlong_penalty": _NOT_NEGATIVE,
    "reward.function_failure": _FINITE,
    "reward.timeout_seconds": Range(0, 3600, open_low=True),
    "reward.workers": Range(1, 1024),
    "reward.max_failure_share": Range(0, 1),
    "selection.max_extra_prompts": _NOT_NEGATIVE,
    "selection.min_completion_tokens": _NOT_NEGATIVE,
    "selection.max_completion_tokens": _COUNT,
    "algorithm.advantage_eps": _NOT_NEGATIVE,
    "algorithm.n_minibatches": _COUNT,
    "algorithm.epochs": _COUNT,
    "algorithm.clip_ratio": _SHARE,
    "algorithm.clip_ratio_high": _POSITIVE,
    "algorithm.dual_clip": _ABOVE_ONE,
    "algorithm.importance_cap": Range(1, why=_EQUAL_RATIO),
    "algorithm.importance_mask_low": Range(0, 1, open_high=True, why=_EQUAL_RATIO),
    "algorithm.importance_mask_high": Range(1, open_low=True, why=_EQUAL_RATIO),
    "algorithm.kl_coef": _NOT_NEGATIVE,
    "algorithm.entropy_coef": _NOT_NEGATIVE,
    "algorithm.early_stop_ratio": _ABOVE_ONE,
    "algorithm.early_stop_ratio_low": Range(0, 1, open_high=True, why=_FIRST_RATIO),
    "algorithm.early_stop_kl": _POSITIVE,
    "validation.every_steps": _COUNT,
    "validation.batch_size": _COUNT,
    "validation.samples": _COUNT,
    "validation.temperature": _NOT_NEGATIVE,
    "validation.top_p": _SHARE,
    "validation.max_new_tokens": _COUNT,
    "sft.max_sequence_tokens": Range(2),
    "sft.held_out_share": Range(0, 1, open_high=True),
    "sft.eval_every_steps": _COUNT,
    "telemetry.sample_groups_per_step": _NOT_NEGATIVE,
    "telemetry.warn_truncated": Range(0, 1),
    "telemetry.warn_dropped": Range(0, 1),
    "telemetry.warn_importance_weight": _POSITIVE,
    "telemetry.warn_flat_steps": Range(2),
    "telemetry.warn_entropy_share": Range(0, 1),
    "save.save_freq_epochs": _COUNT,
    "save.save_freq_steps": _COUNT,
    "save.save_freq_secs": _POSITIVE,
    "save.ckpt_freq_epochs": _COUNT,
    "save.ckpt_freq_steps": _COUNT,
    "save.ckpt_freq_secs": _POSITIVE,
    "save.keep_last": _COUNT,
    "save.keep_models": _COUNT,
}
"""Range of every number in the config, and of every number of a list."""


TEMPLATES = ("auto", "r1_distill", "qwen_boxed", "orz", "chat", "raw")

WORDS: dict[str, tuple[str, ...]] = {
    "run.device": ("auto", "cpu", "cuda"),
    "run.recover_mode": ("auto", "resume", "disabled"),
    "data.format": ("auto", "boba", "areal_v01", "simplerl", "dapo", "question_answer"),
    "data.template": TEMPLATES,
    "policy.recompute_granularity": ("full", "selective"),
    "policy.recompute_method": ("uniform", "block"),
    "optimizer.kind": ("adam", "sgd"),
    "optimizer.decay": ("constant", "linear", "cosine"),
    "memory.gpu": tuple(GPU_GIB),
    "reward.scheme": ("correctness", "mix", "independent"),
    "reward.answer_from": ("boxed", "phrase", "number"),
    "selection.dynamic_sampling": ("accuracy", "reward"),
    "algorithm.advantage": ("grpo", "dr_grpo", "rloo", "ppo", "reinforce++"),
    "algorithm.loss": ("clip", "gspo", "cispo"),
    "algorithm.loss_normalisation": ("token", "sequence", "constant"),
    "algorithm.importance_correction": ("token", "sequence"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "abs"),
    "algorithm.early_stop_action": ("skip", "end"),
    "validation.template": TEMPLATES,
    "telemetry.wandb": ("off", "offline", "online"),
    "save.export_dtype": ("auto", "float32", "bfloat16"),
}
"""Words that a text setting may have; paths have none."""
