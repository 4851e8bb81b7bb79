"""rlmath: reinforcement learning of mathematical reasoning.

It is one SPMD program on Megatron-Core and vLLM.

`verify`, `load_config`, `Config`, `train` and `Run` are its public names (`rlmath.cli.api`), and
`hooks` the module (`rlmath.workers.hooks`) that files of the user's functions import; they are
stable.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Read by these libraries when they are imported, so set before any of them is. Models and data are
# local folders. What an id of the Hugging Face hub names is fetched by processes of their own
# (config/hub), which have the user's.
if "HF_HUB_OFFLINE" not in os.environ:
    os.environ |= {"HF_HUB_OFFLINE": "1", "RLMATH_SET_OFFLINE": "1"}
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from rlmath.cli.api import Config, Run, load_config, train, verify

__version__ = "0.1.0"
__all__ = ["Config", "Run", "__version__", "load_config", "train", "verify"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: a rank has no use for them.

    Who asks for another than `hooks` has a program of his own, whose libraries may use the network.
    """
    if name == "hooks":
        return importlib.import_module("rlmath.workers.hooks")
    if name in __all__:
        if os.environ.pop("RLMATH_SET_OFFLINE", None):
            del os.environ["HF_HUB_OFFLINE"]
        return getattr(importlib.import_module("rlmath.cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the public names, which are imported when they are first asked for."""
    return sorted({*globals(), *__all__, "hooks"})
