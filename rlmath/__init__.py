"""rlmath: reinforcement learning of mathematical reasoning, one SPMD program on Megatron-Core and vLLM."""

__version__ = "0.1.0"
