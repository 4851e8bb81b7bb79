"""Whether every shared object in the wheels of the GPU lock finds the symbols that it needs.

python tools/gpu_symbols.py      # the second half of `make test-gpu-lock`

Read are the tables of the ELF files, nothing is loaded: neither a GPU nor CUDA nor Python 3.12 is
needed. The wheels, 5 GB, are taken once and removed again; their tables (9 MB) stay in --folder.

A symbol is looked for where the loader would: in the libraries that the object names, and in those
that they name; in the same of an object that brings this one along; in what BEFORE says is loaded
earlier for all; in the system. transformer-engine-torch comes as source and is not looked at.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gzip
import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from packaging.utils import parse_wheel_filename

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal
from tools.gpu_lock import DIFFERS, LOCK, REPOSITORY, lock_versions, take

FROM_SOURCE = "transformer-engine-torch"
AT_ONCE = 16
"""Wheels that are on the disk at a time."""
SHARED_OBJECT = re.compile(r"\.so(\.\d+)*$")
SYSTEM = (
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
)
"""Libraries of the image. A symbol that names a version of theirs is there, as the wheel's
manylinux tag says; one without a version is there if another object names it with one, or if this
machine's have it."""
NEWER = {"_ZSt21ios_base_library_initv"}
"""Symbols of the image's libraries, Ubuntu 24.04's, that an older system on which this runs may
lack."""
DRIVER = {"libcuda.so.1": "cu[A-Z]", "libnvidia-ml.so.1": "nvml"}
"""Libraries of the GPU's driver, and how their symbols begin."""
INTERPRETER = "_?Py"
"""How the symbols of Python itself begin."""
BEFORE = {
    "transformer_engine/wheel_lib/libtransformer_engine.so": ("libnvrtc.so.13",),  # its __init__.py
    "cuda/core/cu1?/_tensor_bridge.*.so": (
        "libtorch_cpu.so",
        "libtorch_cuda.so",
    ),  # its aoti_shim.h
}
"""Libraries that an object's package has loaded for all (RTLD_GLOBAL) before it, by object."""
EXCEPTIONS = {
    "nvidia/cu13/lib/libcufile_rdma.so.1": "GPUDirect Storage over InfiniBand, which nothing of "
    "ours uses",
    "nvidia/nvshmem/lib/nvshmem_*.so.3": "NVSHMEM's launchers and networks, of which it opens "
    "what is installed",
    "numba/np/ufunc/*pool.*.so": "Numba's threads by TBB or OpenMP, of which it opens what is "
    "installed",
    "torch_c_dlpack_ext/*.so": "of torch 2.4 to 2.9; newer ones have the function themselves",
    "torchcodec/*.so": "one for each FFmpeg; for video and sound, which nothing of ours reads",
}
"""Objects that need not find all symbols, and why. One that nothing needs any more is told."""

SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
"""A row of a symbol table (System V ABI, 64-bit ELF)."""
GLOBAL = 1
WEAK = 2
UNIQUE = 10
"""Bindings of a symbol."""


@dataclass(frozen=True)
class Table:
    """What an ELF file needs and offers."""

    wheel: str
    """`name==version` of its package."""
    path: str
    """Path in the wheel."""
    soname: str
    """Name by which others need it; where it has none, the name of its file."""
    needed: Sequence[str]
    """Sonames."""
    defined: Sequence[str]
    undefined: Mapping[str, str]
    """Library whose version a symbol that must be found names, else "", by symbol."""


@dataclass(frozen=True)
class Unresolved:
    """An object that does not find all that it needs."""

    table: Table
    libraries: Sequence[str]
    """Sonames that are nowhere."""
    symbols: Sequence[str]


# ---------------------------------------------------------------- tables


def read_table(file: BinaryIO, wheel: str, path: str) -> Table | None:
    """The table of a file; None for what is no dynamic object of this kind of processor."""
    from elftools.common.exceptions import ELFError  # needed for new wheels only
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(file)
    except ELFError:  # a linker's script, or a stub
        return None
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym")
    if elf["e_machine"] != "EM_X86_64" or dynamic is None or symbols is None:
        return None
    rows = np.frombuffer(symbols.data(), SYMBOL)
    names = elf.get_section(symbols["sh_link"]).data()
    versions = elf.get_section_by_name(".gnu.version")
    libraries = {}
    for need, auxiliaries in getattr(
        elf.get_section_by_name(".gnu.version_r"), "iter_versions", tuple
    )():
        libraries |= {auxiliary["vna_other"]: need.name for auxiliary in auxiliaries}
    numbers = (
        np.zeros(len(rows), "<u2") if versions is None else np.frombuffer(versions.data(), "<u2")
    )
    defined = set()
    undefined = {}
    for row, number in zip(rows, numbers.tolist(), strict=True):
        start = int(row["name"])
        binding = row["info"] >> 4
        name = names[start : names.index(b"\0", start)].decode(errors="replace")
        if row["section"] and binding in (GLOBAL, WEAK, UNIQUE):
            defined.add(name)
        elif not row["section"] and binding == GLOBAL:
            undefined[name] = libraries.get(number & 0x7FFF, "")
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    soname = next((tag.soname for tag in dynamic.iter_tags("DT_SONAME")), Path(path).name)
    return Table(wheel, path, soname, needed=needed, defined=sorted(defined), undefined=undefined)


def tables_of_wheel(wheel: Path, pin: str) -> Iterator[Table]:
    """Tables of all shared objects in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if SHARED_OBJECT.search(name):
                with (
                    tempfile.TemporaryFile() as copy
                ):  # an archive's member cannot be read from its end
                    shutil.copyfileobj(archive.open(name), copy)
                    if (table := read_table(copy, pin, name)) is not None:
                        yield table


def tables_of_lock(lock: Path, folder: Path) -> list[Table]:
    """Tables of all wheels of the lock.

    Those that were read once are in the folder."""
    pins = [
        f"{name}=={version}"
        for name, version in lock_versions(lock.read_text("utf-8")).items()
        if name != FROM_SOURCE
    ]
    files = {pin: folder / f"{pin}.json.gz" for pin in pins}
    new_pins = [pin for pin in pins if not files[pin].exists()]
    for start in range(0, len(new_pins), AT_ONCE):
        print(f"{start} of {len(new_pins)} wheels are read", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            take(new_pins[start : start + AT_ONCE], Path(place))
            for wheel in sorted(Path(place).iterdir()):
                name, version, *_ = parse_wheel_filename(wheel.name)
                rows = [asdict(table) for table in tables_of_wheel(wheel, f"{name}=={version}")]
                with gzip.open(files[f"{name}=={version}"], "wt", 6) as file:
                    json.dump(rows, file)
    return [
        Table(**row) for pin in pins for row in json.loads(gzip.decompress(files[pin].read_bytes()))
    ]


def system_exports() -> set[str]:
    """Symbols of this machine's SYSTEM libraries."""
    for name in SYSTEM:
        ctypes.CDLL(name)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    symbols: set[str] = set()
    for path in (Path(word) for word in mapped if Path(word).name.startswith(SYSTEM)):
        with path.open("rb") as file:
            table = read_table(file, "", path.name)
        assert table is not None
        symbols |= set(table.defined)
    return symbols


# ---------------------------------------------------------------- who finds what


def unresolved(tables: Sequence[Table], system: set[str]) -> list[Unresolved]:
    """Objects that lack a library or a symbol, EXCEPTIONS among them."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for index, table in enumerate(tables):
        for name in {table.soname, Path(table.path).name}:
            by_name[name].append(index)
    brought = [_brought(index, tables, by_name) for index in range(len(tables))]
    scopes = [set(indices) for indices in brought]
    for indices in brought:
        for index in indices:
            scopes[index] |= indices
    defined = [set(table.defined) for table in tables]
    system = system.union(
        NEWER,
        *(
            {name for name, library in table.undefined.items() if library in SYSTEM}
            for table in tables
        ),
    )
    lacking = []
    for index, table in enumerate(tables):
        loaded_before = set(
            BEFORE.get(
                next((pattern for pattern in BEFORE if fnmatch.fnmatch(table.path, pattern)), ""),
                (),
            )
        )
        for name in loaded_before:
            for provider in by_name[name]:
                scopes[index] |= brought[provider]
        begins = [
            INTERPRETER,
            *(
                DRIVER[name]
                for provider in scopes[index]
                for name in tables[provider].needed
                if name in DRIVER
            ),
        ]
        missing = set(table.undefined) - system
        for provider in scopes[index]:
            missing -= defined[provider]
        symbols = sorted(name for name in missing if not re.match("|".join(begins), name))
        libraries = [name for name in table.needed if name not in {*SYSTEM, *DRIVER, *by_name}]
        if symbols or libraries:
            lacking.append(Unresolved(table, libraries, symbols))
    return lacking


def _brought(start: int, tables: Sequence[Table], by_name: Mapping[str, Sequence[int]]) -> set[int]:
    """The object itself, the objects that it names as needed, and so on."""
    brought = {start}
    pending = [start]
    while pending:
        index = pending.pop()
        needed = {
            provider for name in tables[index].needed for provider in by_name.get(name, ())
        } - brought
        brought |= needed
        pending += needed
    return brought


def problems(
    tables: Sequence[Table], system: set[str], exceptions: Iterable[str] = EXCEPTIONS
) -> list[str]:
    """Lines on objects that lack something and are no exceptions, and on needless exceptions."""
    lines = []
    used = set()
    exporters: dict[str, list[str]] = defaultdict(list)
    for table in tables:
        for name in table.defined:
            exporters[name].append(Path(table.path).name)
    for lack in unresolved(tables, system):
        excepted = {pattern for pattern in exceptions if fnmatch.fnmatch(lack.table.path, pattern)}
        used |= excepted
        if not excepted:
            lines.append(f"{lack.table.wheel}: {lack.table.path}")
            lines += [f"    {name} is in no wheel" for name in lack.libraries]
            lines += [
                f"    {name}: "
                + (
                    f"only in {', '.join(exporters[name][:3])}"
                    if exporters[name]
                    else "nothing exports it"
                )
                for name in lack.symbols
            ]
    return lines + [
        f"{pattern} needs no exception any more" for pattern in exceptions if pattern not in used
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 where every object finds what it needs."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", type=Path, default=LOCK, help="requirements/gpu.txt")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / ".gpu-lock", help="of the tables (.gpu-lock)"
    )
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tables = tables_of_lock(arguments.lock, arguments.folder)
    lines = problems(tables, system_exports())
    if lines:
        print("\n".join(lines), file=sys.stderr)
        return DIFFERS
    print(
        f"All {sum(len(table.undefined) for table in tables)} symbols of {len(tables)} shared "
        "objects "
        "are found, but for:"
    )
    print("\n".join(f"    {pattern}: {reason}" for pattern, reason in EXCEPTIONS.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
