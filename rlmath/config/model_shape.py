"""The shape of a model, from its config.json.

`checkpoint.hf.config_json` reads and checks it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretching of rotary embeddings ("rope_type" "llama3" in config.json).

    Frequencies whose wavelength is longer than original_max_positions / low_freq_factor are divided
    by `factor`, those with one shorter than original_max_positions / high_freq_factor stay, and
    those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    """Longest sequence before the model was stretched (tokens)."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation ("linear"; arXiv:2306.15595).

    Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN ("yarn"; arXiv:2309.00071).

    Frequencies that turn `beta_slow` times or less within the original length are divided by
    `factor`, those that turn `beta_fast` times or more stay, and those between are blended.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    """Factor of rotated queries and keys."""
    truncate: bool
    """Whether the bounds of the blend are whole numbers of dimensions."""


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE ("longrope"; arXiv:2402.13753) within the original length.

    Every frequency is divided by a factor of its own. Beyond that length the factors are others, by
    the length of a text (transformers) or of an engine (vLLM)."""

    short_factors: tuple[float, ...]
    attention_factor: float
    longest: int
    """Positions with the other factors (tokens)."""


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dims of vLLM 0.32's attention on CPU."""


def cpu_head_dim_problem(head_dim: int) -> str | None:
    """The problem of the model for an engine on CPU; None where there is none."""
    if head_dim in CPU_HEAD_DIMS:
        return None
    return (
        f"the model's head dim is {head_dim}; vLLM's attention on CPU has only "
        f"{', '.join(map(str, CPU_HEAD_DIMS))}. "
        "Take another model, or a GPU."
    )


def expert_number_bytes(num_experts: int) -> int:
    """Bytes of the number of one of so many experts, where the choice of a router is kept.

    >>> expert_number_bytes(256), expert_number_bytes(512)
    (1, 2)
    """
    return 1 if num_experts <= 256 else 2


VALUE_HEAD = "ForTokenClassification"
"""How the name of an architecture ends that gives one number for each token."""


@dataclass(frozen=True)
class ModelShape:
    """Facts that the program needs of a Hugging Face config.json."""

    architecture: str
    """The first of `architectures`, for example "Qwen2ForCausalLM"."""
    num_layers: int
    hidden_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int
    ffn_size: int
    """Feed-forward units; of one expert, where layers have experts."""
    vocab_size: int
    """Rows of the embedding in the Hugging Face files, before padding for tensor parallelism."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    max_positions: int
    """Longest sequence (tokens)."""
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    """Query, key and value projections have a bias."""
    torch_dtype: str
    """Number format of the files, such as "bfloat16"; "float32" where config.json names none."""
    qk_norm: bool = False
    """Every head's query and key are normalised, with a weight per head dimension."""
    rope_scaling: RopeScaling | None = None
    """How rotary embeddings are stretched; None: they are plain."""
    rotary_dim: int | None = None
    """Dimensions of a head that are rotated, the first ones; None: all."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers (from 0) that do not rotate."""
    sliding_window: int | None = None
    """Tokens that a query attends to, itself and the last ones before it; None: all."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers (from 0) without the window that the others have.

    The others would have it if it were shorter than `max_positions`: vLLM is told of both kinds."""
    num_experts: int = 0
    """Experts of every layer; 0: a layer has one feed-forward network for all tokens."""
    experts_per_token: int = 0
    """Experts that the router of a layer picks for each token."""
    norm_topk_prob: bool = False
    """The weights of a token's experts are scaled so that their sum is 1."""

    @property
    def rotary_magnitude(self) -> float:
        """Factor of rotated queries and keys, beside the rotation."""
        return getattr(self.rope_scaling, "attention_factor", 1.0)

    @property
    def rotary_table_positions(self) -> int:
        """Positions of vLLM's table of angles, which may be more than the model has."""
        match self.rope_scaling:
            case LinearScaling(factor):
                return int(factor * self.max_positions)
            case YarnScaling(factor, original_max_positions=original):
                return int(factor * original)
            case LongRopeScaling(longest=longest):
                return self.max_positions + longest
        return self.max_positions

    @property
    def positions_key(self) -> str:
        """The key of config.json that gives `max_positions`."""
        is_long = isinstance(self.rope_scaling, LongRopeScaling)
        return "original_max_position_embeddings" if is_long else "max_position_embeddings"

    @property
    def outputs(self) -> int:
        """Numbers that the last layer gives for each token.

        There is one for every token of the vocabulary, or one alone."""
        return 1 if self.architecture.endswith(VALUE_HEAD) else self.vocab_size
