"""rlmath: reinforcement learning of mathematical reasoning, one SPMD program on Megatron-Core and vLLM."""

import os

# Read by these libraries when they are imported, so set before any of them is. Models and data are local folders.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.1.0"
