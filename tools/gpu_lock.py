"""Check the GPU lock for all that we use of vLLM, Megatron-Core and Transformer Engine.

python tools/gpu_lock.py                  # compare tests/gpu/uses.txt with the packages of requirements/gpu.txt
python tools/gpu_lock.py --write          # write it anew, after the lock or our code changed; read the difference
python tools/gpu_lock.py --only-names     # whether every use in our code is listed; needs no package

The packages are read and never imported, so that neither CUDA nor Python 3.12 is needed: the lock's
wheels, without what they depend on, are taken into --folder, where they stay (330 MB). `make
test-gpu-lock` runs the first.

Found in our code: names that are imported, attributes of imported modules and classes, and
attributes of the objects in OBJECTS, which stand for what no annotation says. Listed with each: the
signature of a function or class, defaults included; of other names that they are there. A renamed
argument or another default is a difference.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "tests" / "gpu" / "uses.txt"
LOCK = REPOSITORY / "requirements" / "gpu.txt"
PACKAGES = {"vllm": "vllm", "megatron": "megatron-core", "transformer_engine": "transformer-engine"}
"""Package of the lock by the name that is imported."""
OUR_CODE = ("rlmath", "megatron_patches", "tests/gpu")
CPU_ONLY = ("rlmath/rollout/cpu_worker.py",)
"""Modules that only a CPU's engine imports."""
DIFFERS = 1
MISSING = "  IS NOT THERE"

LLM = "vllm.LLM"
ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
CLIENT = "vllm.v1.engine.core_client.InprocClient"
CORE = "vllm.v1.engine.core.EngineCore"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
OBJECTS = {
    "rlmath/rollout/engine.py": {
        "llm": LLM,
        "self._llm": LLM,
        "engine": ENGINE,
        "llm.llm_engine": ENGINE,
        "llm.llm_engine.vllm_config": "vllm.config.VllmConfig",
        "core": CLIENT,
        "worker": WORKER,
        "output": "vllm.outputs.RequestOutput",
        "row[token]": "vllm.logprobs.Logprob",
    },
    "rlmath/rollout/engine_adapters.py": {
        "llm": LLM,
        "llm.llm_engine": ENGINE,
        "llm.llm_engine.vllm_config": "vllm.config.VllmConfig",
        "manager": "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager",
        "layers": "vllm.lora.model_manager.LRUCacheLoRAModelManager",
        "manager._adapter_manager": "vllm.lora.model_manager.LRUCacheLoRAModelManager",
        "layers.get_adapter(_NUMBER)": "vllm.lora.lora_model.LoRAModel",
        "worker": WORKER,
    },
    "rlmath/rollout/engine_models.py": {
        "registry": "vllm.model_executor.models.registry._ModelRegistry",
        "plain": "vllm.model_executor.layers.attention.Attention",
        "attention": "vllm.model_executor.models.qwen2.Qwen2Attention",
    },
    "rlmath/rollout/engine_sleep.py": {
        "llm": LLM,
        "self._llm": LLM,
        "engine": ENGINE,
        "engine.output_processor": "vllm.v1.engine.output_processor.OutputProcessor",
        "core": CLIENT,
        "core.engine_core": CORE,
        "core.engine_core.scheduler": SCHEDULER,
        "executor": "vllm.v1.executor.abstract.Executor",
        "module": "vllm.device_allocator.cumem",
        "module.CuMemAllocator": "vllm.device_allocator.cumem.CuMemAllocator",
        "allocator": "vllm.device_allocator.cumem.CuMemAllocator",
        "worker": WORKER,
        "worker.model_runner": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    },
    "rlmath/rollout/scheduler_shortcuts.py": {
        "llm": LLM,
        "llm.llm_engine": ENGINE,
        "llm.llm_engine.engine_core": CLIENT,
        "llm.llm_engine.engine_core.engine_core": CORE,
        "llm.llm_engine.engine_core.engine_core.scheduler": SCHEDULER,
        "scheduler": SCHEDULER,
        "output": "vllm.v1.outputs.ModelRunnerOutput",
        "logprobs": "vllm.v1.outputs.LogprobsLists",
        "scheduler.kv_cache_manager": MANAGER,
        "manager": MANAGER,
        "manager.coordinator": "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
        "managers[0]": "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager",
        "request": "vllm.v1.request.Request",
    },
    "rlmath/rollout/shared_gpu_worker.py": {"super()": WORKER},
    "rlmath/rollout/running_completions.py": {
        "llm": LLM,
        "self._engine": ENGINE,
        "engine": ENGINE,
        "llm.llm_engine": ENGINE,
        "engine.input_processor": "vllm.v1.engine.input_processor.InputProcessor",
        "self._core": CLIENT,
        "self._core.engine_core": CORE,
        "self._core.get_output()": "vllm.v1.engine.EngineCoreOutputs",
        "self._scheduler": SCHEDULER,
        "output": "vllm.v1.engine.EngineCoreOutput",
        "core_request": "vllm.v1.engine.EngineCoreRequest",
        "checked": "vllm.v1.engine.EngineCoreRequest",
        "core_request.sampling_params": "vllm.SamplingParams",
    },
}
"""Expressions in our files, by file, and their class on a GPU."""


ENGINE_ARGUMENTS = "vllm.engine.arg_utils.EngineArgs"
GIVES_ENGINE_ARGUMENTS = (
    "_device_arguments",
    "_gpu_arguments",
    "_shared_gpu_arguments",
    "_mesh_arguments",
    "_open_llm",
    "__init__",
    "open_standalone",
)
"""Functions of rlmath/rollout/engine.py whose dictionaries and keywords are arguments of vLLM's
engine."""
ENVIRONMENT = "vllm.envs"
"""Has the variables that vLLM reads."""


@dataclass(frozen=True, order=True)
class Use:
    """A name of a package, and our file that uses it."""

    name: str
    """`package.module.name`, or `package.module.Class.attribute`."""
    file: str


# ---------------------------------------------------------------- our code


def uses_of_repository(root: Path = REPOSITORY) -> list[Use]:
    """All uses, in order."""
    uses: set[Use] = set()
    for folder in OUR_CODE:
        for path in sorted((root / folder).rglob("*.py")):
            our_file = str(path.relative_to(root))
            if our_file not in CPU_ONLY:
                uses |= {
                    Use(name, our_file) for name in names_used(path.read_text("utf-8"), our_file)
                }
    return sorted(uses)


def names_used(source: str, path: str) -> set[str]:
    """Names of the packages that a module of ours uses."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imported = _imported(nodes)
    objects = OBJECTS.get(path, {})
    names = set(imported.values())
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        owner = _source_of(node.value)
        if owner in imported:
            names.add(f"{imported[owner]}.{node.attr}")
        elif owner in objects:
            names.add(f"{objects[owner]}.{node.attr}")
    words = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names |= {f"{ENVIRONMENT}.{word}" for word in words if re.fullmatch("VLLM_[A-Z0-9_]+", word)}
    if path == "rlmath/rollout/engine.py":
        names |= {f"{ENGINE_ARGUMENTS}.{name}" for name in _engine_arguments(tree)}
    return names


def _source_of(expression: ast.expr) -> str:
    """The text of an expression; names and their attributes do without `ast.unparse`."""
    if isinstance(expression, ast.Attribute):
        return f"{_source_of(expression.value)}.{expression.attr}"
    return expression.id if isinstance(expression, ast.Name) else ast.unparse(expression)


def _engine_arguments(tree: ast.Module) -> set[str]:
    """Keys of dictionaries, but for those inside of others, and keywords of `LLM`."""
    names = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name not in GIVES_ENGINE_ARGUMENTS:
            continue
        nodes = list(ast.walk(function))
        inner = {id(value) for node in nodes if isinstance(node, ast.Dict) for value in node.values}
        for node in nodes:
            if isinstance(node, ast.Dict) and id(node) not in inner:
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "arguments":
                names.add(ast.literal_eval(node.slice))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "LLM":
                names |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    return names


def _imported(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Full name in the package by the name in a module of ours."""
    names = {}
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in PACKAGES
        ):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name: alias.name
                for alias in node.names
                if alias.name.split(".")[0] in PACKAGES
            }
    return names


# ---------------------------------------------------------------- the packages


class Sources:
    """The Python files of some packages, by path from the folder that is imported from."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self.tree = cache(self._parse)

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        content = self._files.get(f"{path}.py", self._files.get(f"{path}/__init__.py"))
        return None if content is None else ast.parse(content)

    def find(self, name: str) -> ast.AST | None:
        """The node of `package.module.name` or `package.module.Class.attribute`.

        It is a module, function, class or assignment; None where the name is not there."""
        if (module := self.tree(name)) is not None:
            return module
        place, _, attribute = name.rpartition(".")
        if not place:
            return None
        owner = self.find(place)
        if isinstance(owner, ast.Module):
            return self._in_module(place, attribute)
        if isinstance(owner, ast.ClassDef):
            return self._in_class(place, owner, attribute)
        return None

    def home(self, name: str) -> str:
        """The module that defines what a module's name stands for, behind imports."""
        place, _, attribute = name.rpartition(".")
        tree = self.tree(place) if place else None
        if tree is None:
            return place
        node = _bound(tree, attribute)
        if isinstance(node, ast.ImportFrom):
            return self.home(_target(node, attribute, place, sources=self))
        return place

    def _in_module(self, module: str, name: str) -> ast.AST | None:
        tree = self.tree(module)
        assert tree is not None
        node = _bound(tree, name)
        if isinstance(node, ast.ImportFrom):
            return self.find(_target(node, name, module, sources=self))
        return node

    def _in_class(self, place: str, owner: ast.ClassDef, name: str) -> ast.AST | None:
        """The method or assignment of a class or its bases that has a name."""
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and {name, f"self.{name}"} & set(
                _targets(node)
            ):
                return node
        return next(
            (
                node
                for base in self.bases(place, owner)
                if (node := self.find(f"{base}.{name}")) is not None
            ),
            None,
        )

    def bases(self, place: str, owner: ast.ClassDef) -> Iterator[str]:
        """Names of the base classes that are in the packages."""
        module = self.home(place)
        for base in owner.bases:
            name = f"{module}.{ast.unparse(base).partition('[')[0]}"
            if isinstance(self.find(name), ast.ClassDef):
                yield name

    def signature(self, name: str) -> list[str] | None:
        """A line for each argument of a function or of a class's constructor.

        Another name has the line that binds it; None where the name is not there."""
        node = self.find(name)
        if node is None:
            return None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _arguments(node.args)
        if isinstance(node, ast.ClassDef):
            return self._fields(name, node)
        return [] if isinstance(node, ast.Module) else [ast.unparse(node).partition("\n")[0][:100]]

    def _fields(self, name: str, node: ast.ClassDef) -> list[str]:
        """The arguments of `__init__`, or the fields of a data class, those of its bases first."""
        constructor = next(
            (
                statement
                for statement in node.body
                if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
            ),
            None,
        )
        if constructor is not None:
            return _arguments(constructor.args)
        lines = [
            line for base in self.bases(name, node) for line in self._fields(base, self.find(base))
        ]
        is_data = node.decorator_list or node.keywords  # a data class, or one of msgspec's
        own_fields = (
            [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            if is_data
            else []
        )
        return lines + [ast.unparse(field) for field in own_fields]


def _bound(tree: ast.Module, name: str) -> ast.AST | None:
    """The node that binds a name in a module, also under a condition.

    A function or class goes before an import, an import before an assignment."""
    binding = None
    for node in _statements(tree.body):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ):
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            binding = binding or node
        elif isinstance(node, ast.ImportFrom) and any(
            name == (alias.asname or alias.name) for alias in node.names
        ):
            binding = node
    return binding


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Targets of an assignment as they are written."""
    return [
        ast.unparse(target)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _target(node: ast.ImportFrom, name: str, module: str, sources: Sources) -> str:
    """The full name behind an import in `module`."""
    (real,) = (alias.name for alias in node.names if name == (alias.asname or alias.name))
    if node.level == 0:
        return f"{node.module}.{real}"
    parts = module.split(".")
    is_package = f"{module.replace('.', '/')}/__init__.py" in sources._files
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *filter(None, [node.module]), real])


def _arguments(arguments: ast.arguments) -> list[str]:
    """The arguments of a function as they are written, without self and cls."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    lines = [
        _argument(argument, default) for argument, default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg or arguments.kwonlyargs:
        lines.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    lines += [
        _argument(argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        lines.append(f"**{arguments.kwarg.arg}")
    return [line for line in lines if line not in ("self", "cls")]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg} = {ast.unparse(default)}"


# ---------------------------------------------------------------- the list


def listed(uses: Sequence[Use], sources: Sources) -> str:
    """The text of the list: a name and who uses it, then a line for each of its arguments."""
    lines = []
    for name in names_of(uses):
        signature = sources.signature(name)
        lines.append(line_of(name, uses) + (MISSING if signature is None else ""))
        lines += [f"    {line}" for line in signature or []]
    return "\n".join(lines) + "\n"


def names_of(uses: Sequence[Use]) -> list[str]:
    """The names that are used, each once, in order."""
    return sorted({use.name for use in uses})


def line_of(name: str, uses: Sequence[Use]) -> str:
    """The name, and our files that use it."""
    return f"{name}  ({', '.join(use.file for use in uses if use.name == name)})"


def names_listed(text: str) -> list[str]:
    """The lines of the list without what the packages say: names and who uses them."""
    return [line for line in text.splitlines() if not line.startswith("    ")]


def lock_versions(text: str) -> dict[str, str]:
    """Versions by package."""
    pins = [
        line.split("#")[0].strip().split("==")
        for line in text.splitlines()
        if "==" in line.split("#")[0]
    ]
    return {name: version for name, version in pins}


def fetch(folder: Path) -> dict[str, bytes]:
    """The Python files of the locked packages, whose wheels are taken into the folder once."""
    versions = lock_versions(LOCK.read_text("utf-8"))
    files = {}
    for package in PACKAGES.values():
        pattern = f"{package.replace('-', '_')}-{versions[package]}-*.whl"
        if not list(folder.glob(pattern)):
            take([f"{package}=={versions[package]}"], folder)
        files |= python_files(next(folder.glob(pattern)))
    return files


def take(pins: Sequence[str], folder: Path) -> None:
    """Download wheels for the lock's Python and system, without their dependencies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--python-version", "3.12", "--dest", str(folder)]
    for kind in ("2014", *(f"_2_{minor}" for minor in range(5, 40))):
        command += ["--platform", f"manylinux{kind}_x86_64"]
    subprocess.run([*command, *pins], check=True)


def python_files(wheel: Path) -> dict[str, bytes]:
    """Python files of a wheel by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 where nothing differs."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / ".gpu-lock", help="of the archives (.gpu-lock)"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--write", action="store_true", help="write the list anew")
    modes.add_argument("--only-names", action="store_true", help="only whether all uses are listed")
    arguments = parser.parse_args(argv)
    uses = uses_of_repository()
    old_text = LIST.read_text("utf-8") if LIST.exists() else ""
    if arguments.only_names:
        return report(
            names_listed(old_text),
            [line_of(name, uses) for name in names_of(uses)],
            "what our code uses",
        )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = listed(uses, Sources(fetch(arguments.folder)))
    if arguments.write:
        LIST.write_text(text, "utf-8")
    missing = [line for line in text.splitlines() if line.endswith(MISSING)]
    print("\n".join(missing), file=sys.stderr, end="\n" if missing else "")
    return report(
        old_text.splitlines(), text.splitlines(), "the packages of the lock"
    ) or DIFFERS * bool(missing)


def report(old: Sequence[str], new: Sequence[str], whose: str) -> int:
    """Print how the list differs."""
    lines = list(
        difflib.unified_diff(old, new, str(LIST.relative_to(REPOSITORY)), whose, lineterm="", n=2)
    )
    print("\n".join(lines[:200]), end="\n" if lines else "")
    if not lines:
        print(f"Nothing differs between {LIST.relative_to(REPOSITORY)} and {whose}")
    return DIFFERS if lines else 0


if __name__ == "__main__":
    sys.exit(main())
