"""rlmath: reinforcement learning of mathematical reasoning, one SPMD program on Megatron-Core and vLLM."""

import os

# Read by these libraries when they are imported, so set before any of them is. Models and data are local folders.
# What an id of the Hugging Face hub names is fetched by processes of their own (config/hub), which have the user's.
if "HF_HUB_OFFLINE" not in os.environ:
    os.environ |= {"HF_HUB_OFFLINE": "1", "RLMATH_SET_OFFLINE": "1"}
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.1.0"
