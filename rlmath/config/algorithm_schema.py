"""The settings of what is learned, and how: rewards, selection, algorithm, critic and teacher.

See `schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlmath.config.objectives import FIRST_RATIO, LossKind, ObjectiveSettings, RatioAboveOne
from rlmath.config.setting_types import (
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Range,
    TakesFunction,
    Words,
)
from rlmath.config.shipped_files import shipped

PRESETS = tuple(sorted(file.stem for file in shipped("configs/algorithms").glob("*.yaml")))
_EQUAL_RATIO = "Where engine and trainer agree the weight is 1."


@dataclass(frozen=True)
class RewardConfig:
    """Rewards from checking the final answer."""

    scheme: Literal["correctness", "plus_minus_one", "zero_one", "mix", "independent"] = (
        "correctness"
    )
    """What a right and a wrong answer get. "correctness": 1 and -1, scaled to 5 and -5 (AReaL);
    "plus_minus_one": 1 and -1 (DAPO); "zero_one": 1 and 0 (TRL, verl, most papers); "mix": 1, -0.5,
    and format_penalty without a box; "independent": 1 and -0.5 with a box, 0.5 and format_penalty
    without one (SimpleRL). A reward is (that - output_bias) * output_scaling."""
    format_penalty: FiniteFloat = -1.0
    """Schemes "mix" and "independent": what an answer without a box gets (SimpleRL's
    FORMAT_PENALTY_VALUE)."""
    output_scaling: PositiveFloat | None = None
    """AReaL's reward_output_scaling. null: 5 for "correctness", which makes +5 and -5, and 1 for
    the others."""
    length_penalty: NonNegativeFloat = 0.0
    """What 1,000 tokens cost in reward, times the group's pass rate, 1 / completions at least:
    length is dear where a prompt is easy (arXiv:2506.05256)."""
    output_bias: FiniteFloat = 0.0
    """AReaL's reward_output_bias, subtracted before scaling."""
    mask_no_eos_with_zero: bool = False
    """A completion cut off at rollout.max_new_tokens gets 0, right or wrong (AReaL)."""
    overlong_buffer: NonNegativeInt = 0
    """Length costs in the last so many tokens before rollout.max_new_tokens (DAPO's soft
    punishment); 0: never."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What the full length costs (reward); over the buffer it grows evenly from 0."""
    answer_from: Literal["boxed", "phrase", "number"] = "boxed"
    """Places where an answer may stand: "boxed" (box or <answer> tag), "phrase" (else after "the
    answer is"), "number" (else the last number); the last two are for base models that do not know
    boxes yet."""
    strict: bool = True
    """False compares numbers as loosely as the Qwen2.5-Math evaluation: within 1e-4, rounded, or a
    factor 100 off."""
    function: Annotated[str, TakesFunction("reward")] | None = None
    """A reward function of yours, "package.module:name" or "path/to/file.py:name", instead of the
    verifier; see docs/rewards.md."""
    function_takes: Literal["completion", "group"] = "completion"
    """What a reward function of yours is called with: "completion" (one), or "group": the list of
    all completions of a prompt, of which it returns a list of numbers, as batch rewards of TRL and
    verl do; see docs/rewards.md."""
    function_failure: FiniteFloat = 0.0
    """What a completion gets when that function fails or takes too long (before scaling)."""
    rewards: list[str] = field(default_factory=list)
    """Several rewards instead of one: any of "correctness", "format" (a box), "length" (1 down to 0
    at rollout.max_new_tokens), and functions of yours, "name=package.module:function"; see
    docs/rewards.md. Empty: no."""
    weights: list[Annotated[float, Range(-1000, 1000)]] = field(default_factory=list)
    """What each of `rewards` weighs, in that order; 0 logs it only. Empty: 1 each."""
    combine: Literal["sum", "gdpo"] = "sum"
    """How `rewards` become one advantage: "sum" (their weighted sum is the reward) or "gdpo" (each
    is normalised in its group, then their weighted sum over the batch: GDPO, arXiv:2601.05242)."""
    timeout_seconds: Annotated[float, Range(0, 3600, open_low=True)] = 5.0
    """Longest check of one answer, from its start: seconds on a processor, or by the clock where a
    function of yours is called; a check that takes longer is ended and counts as wrong."""
    workers: Annotated[int, Range(1, 1024)] = 4
    """Most processes per engine that check answers; there are more than one where answers wait.
    With reward.rewards as many for the verifier, and for each function."""
    max_failure_share: Fraction = 0.02
    """A step in which more than this share of checks failed (time, memory, crash) is warned of,
    with a sample."""


@dataclass(frozen=True)
class SelectionConfig:
    """Which of the sampled groups and completions are learned from."""

    dynamic_sampling: (
        Literal["accuracy", "reward"] | Annotated[str, TakesFunction("selection")] | None
    ) = None
    """DAPO's dynamic sampling (arXiv:2503.14476): "accuracy" drops groups that are all right or all
    wrong, "reward" those whose rewards are all the same, a function of yours those that it says
    (docs/hooks.md), and other prompts are sampled in their place. null keeps every group."""
    max_extra_prompts: NonNegativeInt = 0
    """With dynamic sampling: most prompts of a step beyond data.prompts_per_step. What is still
    missing then is left out: the step learns from fewer groups."""
    min_completion_tokens: NonNegativeInt = 0
    """Shorter completions leave their group, before advantages."""
    max_completion_tokens: PositiveInt | None = None
    """Longer completions leave their group, before advantages. null: no limit."""
    drop_truncated: bool = False
    """Completions cut off at rollout.max_new_tokens leave their group, before advantages (as DAPO's
    overlong filtering, which leaves them in the group's statistics)."""
    resample_to: Annotated[int, Range(2)] | None = None
    """With tools: most completions of a prompt that are learned from, of the rollout.group_size
    that are sampled (GRPO-RoC, arXiv:2508.20722, takes half). Right and wrong answers keep their
    shares; of the right ones those with the fewest failed calls stay, of the wrong ones any. null:
    all."""


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of advantages and of a step's updates, which come first in `AlgorithmConfig`."""

    preset: Annotated[str, Words(PRESETS)] | None = None
    """Settings of configs/algorithms/NAME.yaml, each unless your files or the command line set it;
    --dry-run prints them. null: none."""
    advantage: (
        Literal[
            "grpo",
            "dr_grpo",
            "rloo",
            "ppo",
            "reinforce++",
            "lite_ppo",
            "opo",
            "maxrl",
            "pass@k",
            "gae",
        ]
        | Annotated[str, TakesFunction("advantage")]
    ) = "grpo"
    """"grpo": distance from the group's mean, in its deviations; "dr_grpo": distance alone; "rloo":
    distance from the mean of the others; "ppo": the reward itself, normalised over the batch's
    tokens (AReaL's PPO without a critic); "reinforce++": distance from the group's mean, normalised
    over the batch's tokens; "lite_ppo": the same distance in deviations of the batch
    (arXiv:2508.08221); "opo": distance from the mean weighed by tokens (arXiv:2505.23585); "maxrl":
    distance in units of the group's pass rate (arXiv:2602.02710); "pass@k": what a completion adds
    to the best of pass_k (arXiv:2505.15201); "gae": of every token, by the values of a critic (the
    section `critic`), normalised likewise: PPO; or a function of yours, see docs/hooks.md."""
    pass_k: Annotated[int, Range(2)] = 4
    """The k of advantage="pass@k", at most rollout.group_size (arXiv:2505.15201)."""
    advantage_eps: NonNegativeFloat = 1e-6
    """Added to every deviation that an advantage is divided by."""
    loss: LossKind = "clip"  # here for its place in help; `ObjectiveSettings` describes it
    loss_normalisation: Literal["token", "sequence", "constant"] = "token"
    """"token": mean over tokens (DAPO, verl's token-mean); "sequence": mean over completions of
    their mean over tokens (GRPO, verl's seq-mean-token-mean); "constant": mean over completions of
    their sum / rollout.max_new_tokens (Dr. GRPO)."""
    n_minibatches: PositiveInt = 1
    """Parts of a step's samples; each is one optimizer step (AReaL: ppo_n_minibatches)."""
    epochs: PositiveInt = 1
    """Passes over a step's samples (verl: ppo_epochs)."""
    shuffle: bool = True
    """Samples are assigned to minibatches at random, and every epoch takes the minibatches in an
    order of its own, both drawn from run.seed and the step. False: in the order of prompts."""


@dataclass(frozen=True)
class AlgorithmConfig(ObjectiveSettings, UpdateSettings):
    """Advantages, loss and early stop; the formulas are in docs/algorithm.md.

    The defaults are GRPO (arXiv:2402.03300) with a token-level loss."""

    off_policy_mask: PositiveFloat | None = None
    """Completions with a negative advantage are left out of the surrogate where the mean of log
    engine - log policy is above this (nats a token; arXiv:2512.02556, TRL:
    off_policy_mask_threshold, 0.5 to begin with). null: none."""
    recompute_logprobs: bool = True
    """Ratio against log-probs recomputed by the policy before its first update, the proximal policy
    (AReaL: recompute_logprob); false: against the engine's own."""
    proximal_logprobs: Literal["recompute", "interpolate", "compare"] = "recompute"
    """Recomputed log-probs of tokens of older weights: "interpolate" takes them from those of
    engine and policy, by their versions, without a pass (AReaL: prox_logp_method=loglinear;
    arXiv:2512.06547); "compare" recomputes, and logs how far off that would be."""
    importance_correction: Literal["token", "sequence"] | None = None
    """Weight of the surrogate for the difference between engine and recomputed log-probs: "token"
    (AReaL: use_decoupled_loss) or "sequence", the product over a completion. null: no weight."""
    importance_cap: Annotated[float, Range(1, why=_EQUAL_RATIO)] | None = None
    """Truncated importance sampling: the largest such weight. null: no bound."""
    importance_mask_low: Annotated[float, Range(0, 1, open_high=True, why=_EQUAL_RATIO)] | None = (
        None
    )
    """Tokens, or completions, whose weight is below this are left out of the surrogate. null: no
    bound."""
    importance_mask_high: Annotated[float, Range(1, open_low=True, why=_EQUAL_RATIO)] | None = None
    """Tokens, or completions, whose weight is above this, before the cap, are left out (AReaL:
    behav_imp_weight_cap). null: no bound."""
    importance_mask_geometric_low: (
        Annotated[float, Range(0, 1, open_high=True, why=_EQUAL_RATIO)] | None
    ) = None
    """Completions whose geometric mean of recomputed over engine probability is below this are left
    out of the surrogate (verl: rollout_rs=geometric); also without importance_correction. null: no
    bound."""
    importance_mask_geometric_high: (
        Annotated[float, Range(1, open_low=True, why=_EQUAL_RATIO)] | None
    ) = None
    """Completions whose geometric mean is above this are left out, too. null: no bound."""
    importance_mask_binary_kl: PositiveFloat | None = None
    """Tokens are left out of the surrogate where the KL (nats) from the recomputed to the engine's
    distribution, over "this token" and "any other", is above this (AReaL: KPop); also without
    importance_correction. null: no bound."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of KL(policy || reference). 0: no reference model."""
    reference_every_steps: PositiveInt | None = None
    """After every so many steps of the run the policy becomes the reference (ProRL,
    arXiv:2505.24864, which also resets the optimizer; here it goes on). null: the reference stays
    the model that the run started from."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place where the KL counts: in the "loss" of every token, or in the "reward", before
    advantages (AReaL: kl_ctl)."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the KL from a sampled token: "k1" (difference of log-probs), "k2" (half its
    square), "k3" (verl: low_var_kl) or "abs"."""
    kl_ratio: Literal["token", "sequence"] | None = None
    """Weigh the KL in the loss by policy / engine, of the "token" or of the whole completion
    ("sequence"), with gradient: k1 and k3 are then right off-policy (arXiv:2512.02556; TRL:
    use_bias_correction_kl). null: no weight."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's distribution is subtracted from
    the loss."""
    entropy_target: PositiveFloat | None = None
    """entropy_coef is only the first weight: after every step it rises by entropy_delta below this
    entropy (nats a token), else falls, and is off above it (Skywork-OR1, arXiv:2505.22312, has
    0.2). null: it stays."""
    entropy_delta: PositiveFloat = 0.005
    """Change of the entropy bonus's weight after a step with entropy_target (arXiv:2505.22312)."""
    top_entropy_share: PositiveFraction = 1.0
    """Advantages count at this share of the step's tokens, those of the highest entropies
    (arXiv:2506.01939: 0.2; TRL: top_entropy_quantile). Below 1 it costs a pass where no log-probs
    are recomputed."""
    clip_cov_ratio: PositiveFraction | None = None
    """Clip-Cov: this share of the step's tokens, drawn from those whose covariance of log-prob and
    advantage lies within the next two, is left out (arXiv:2505.22617, as the next four: 2e-4).
    null: none."""
    clip_cov_low: FiniteFloat = 1.0
    """Clip-Cov: least covariance (verl: clip_cov_lb)."""
    clip_cov_high: FiniteFloat = 5.0
    """Clip-Cov: largest covariance (verl: clip_cov_ub)."""
    kl_cov_ratio: PositiveFraction | None = None
    """KL-Cov: this share of the step's tokens, of the largest covariances, has kl_cov_coef x |log
    policy - log proximal| in its loss (2e-3 to 2e-4). null: none."""
    kl_cov_coef: PositiveFloat = 1.0
    """KL-Cov: weight of that (verl: ppo_kl_coef)."""
    early_stop_ratio: RatioAboveOne | None = 5.0
    """A minibatch whose token-weighted mean importance ratio exceeds this is discarded (as RLinf).
    null: no bound."""
    early_stop_ratio_low: Annotated[float, Range(0, 1, open_high=True, why=FIRST_RATIO)] | None = (
        None
    )
    """A minibatch whose mean ratio falls below this is discarded. null: no bound. Values that are
    not finite always discard."""
    early_stop_kl: PositiveFloat | None = None
    """A minibatch whose mean k3, KL(proximal || policy) per token (nats), exceeds this is
    discarded. null: no bound."""
    early_stop_action: Literal["skip", "end"] = "skip"
    """After a discarded minibatch: "skip" continues with the next, "end" ends the step's
    updates."""
    rollback: NonNegativeInt = 0
    """Most times that a run whose policy has diverged goes back to its last good checkpoint, with
    other seeds and a lower learning rate, instead of ending with exit status 77. 0: never. See
    docs/training.md."""
    rollback_lr_factor: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    """The learning rate is multiplied by this at each rollback."""
    rollback_reward_drop: PositiveFloat | None = None
    """With `rollback`: go back, too, when the mean reward of `rollback_reward_steps` steps has
    fallen from the best such mean by more than this share of its gain over the first one, and by
    more than three deviations of single steps. null: rewards are not looked at."""
    rollback_reward_steps: Annotated[int, Range(2)] = 10
    """Steps that those means are over."""

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the step's start are the policy's own, and not interpolated."""
        return self.recompute_logprobs and self.proximal_logprobs != "interpolate"

    @property
    def selects_tokens(self) -> bool:
        """Whether tokens are chosen by entropy or covariance.

        That takes the policy's own log-probs before a step."""
        return (
            self.top_entropy_share < 1
            or self.clip_cov_ratio is not None
            or self.kl_cov_ratio is not None
        )

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
    """The value model of algorithm.advantage=gae: laid out like the policy, with an optimizer of
    its own, which takes everything but the learning rate from `optimizer`. See docs/algorithm.md.
    """

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
    """Values count as no further than this from those of the step's start (in units of the reward,
    which is 5 or -5 by default; verl: cliprange_value). null: no clip."""
    gamma: PositiveFraction = 1.0
    """Discount of a token."""
    policy_lambda: Fraction = 1.0
    """Lambda of the policy's advantages: 1 takes rewards alone, 0 one token and the next value.
    Without effect where policy_length_alpha is given."""
    policy_length_alpha: PositiveFloat | None = None
    """Lambda of the policy's advantages by a completion's length: 1 - 1 / (this x its tokens);
    VAPO: 0.05. null: policy_lambda."""
    value_lambda: Fraction = 1.0
    """Lambda of the returns that the critic learns."""
    bootstrap_truncated: bool = False
    """A completion cut off at rollout.max_new_tokens goes on with the critic's value there. False:
    it ends with its reward."""


@dataclass(frozen=True)
class TeacherConfig:
    """On-policy distillation: a larger model scores what the policy samples (GKD, arXiv:2306.13649;
    MiniLLM, arXiv:2306.08543); see docs/algorithm.md."""

    path: str | None = None
    """Folder, or hf:// id, of the teacher, a Hugging Face model with the same tokenizer; its shape
    may differ from the policy's, as far as `parallel` can lay it out. null: no teacher."""
    loss: Literal["advantage", "full"] = "advantage"
    """"advantage": `coef` x (teacher's log-prob - policy's) is added to every sampled token's
    advantage; "full": `coef` x KL(policy || teacher) over the whole vocabulary, at every token, is
    part of the loss, with gradient."""
    coef: PositiveFloat = 1.0
    """Weight of the teacher's part."""
    with_rewards: bool = False
    """Learn from rewards, too. False: rewards are only measured, and the teacher's part alone is
    learned from."""
