"""Libraries in wheels that lack a symbol or another library are found by their ELF tables."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.gpu_symbols import SYSTEM, Table, problems, system_exports, tables_of_wheel

BASE = "int base(void) { return 1; }"
USER = """
#include <math.h>
#include <stdio.h>
int base(void);
__attribute__((weak)) int perhaps(void);
double user(double x) { puts(""); return perhaps ? base() : sin(x); }
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with two libraries, libbase.so.1 and libuser.so, which names the first as needed.

    It has a file, too, that only looks like a library."""
    folder = tmp_path_factory.mktemp("wheel")
    for name, source in (("base", BASE), ("user", USER)):
        (folder / f"{name}.c").write_text(source)
    shared = ["gcc", "-shared", "-fPIC", "-o"]
    subprocess.run(
        [*shared, "libbase.so.1", "base.c", "-Wl,-soname,libbase.so.1"], cwd=folder, check=True
    )
    subprocess.run([*shared, "libuser.so", "user.c", "libbase.so.1", "-lm"], cwd=folder, check=True)
    (folder / "script.so").write_text("INPUT(libuser.so)")
    with zipfile.ZipFile(folder / "pack-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("libbase.so.1", "libuser.so", "script.so", "user.c"):
            archive.write(folder / name, f"pack/{name}")
    return folder / "pack-1-py3-none-any.whl"


def test_tables_of_real_libraries(wheel: Path) -> None:
    base, user = tables_of_wheel(wheel, "pack==1")
    assert (base.path, base.soname) == (
        "pack/libbase.so.1",
        "libbase.so.1",
    ) and "base" in base.defined
    assert set(user.needed) <= {"libbase.so.1", *SYSTEM} and "libbase.so.1" in user.needed
    assert "perhaps" not in user.undefined and user.undefined["base"] == ""
    assert user.undefined["sin"] == "libm.so.6" and user.undefined["puts"] == "libc.so.6"
    assert {"sin", "puts", "_Znwm"} <= system_exports()
    assert problems([base, user], set(), ()) == []
    assert problems([user], set(), ()) == [
        "pack==1: pack/libuser.so",
        "    libbase.so.1 is in no wheel",
        "    base: nothing exports it",
    ]


def table(path: str, needed: str = "", defined: str = "", undefined: str = "") -> Table:
    return Table(
        "pack==1",
        path,
        Path(path).name,
        needed.split(),
        defined.split(),
        dict.fromkeys(undefined.split(), ""),
    )


def lacking(*tables: Table) -> list[str]:
    return problems(tables, {"malloc"}, ())


def test_a_symbol_is_looked_for_where_the_loader_would() -> None:
    deep = table("c.so", defined="f")
    loaded = table("b.so", "c.so", undefined="malloc PyList_New")
    assert lacking(deep, loaded, table("a.so", "b.so", undefined="f")) == []
    assert lacking(deep, table("a.so", undefined="f")) == ["pack==1: a.so", "    f: only in c.so"]
    assert lacking(table("a.so", "gone.so libc.so.6")) == [
        "pack==1: a.so",
        "    gone.so is in no wheel",
    ]
    # what brings b.so along has brought c.so, too
    assert lacking(deep, table("b.so", undefined="f"), table("a.so", "b.so c.so")) == []


def test_symbols_of_the_driver_are_for_those_that_name_it() -> None:
    assert lacking(table("a.so", "libcuda.so.1", undefined="cuInit")) == []
    assert lacking(table("a.so", undefined="cuInit")) == [
        "pack==1: a.so",
        "    cuInit: nothing exports it",
    ]
    other = lacking(table("a.so", "libcuda.so.1", undefined="custom"))
    assert other == ["pack==1: a.so", "    custom: nothing exports it"]


def test_transformer_engine_finds_what_it_loads_before_and_an_exception_is_told_when_it_is_needless() -> (
    None
):
    engine = table(
        "transformer_engine/wheel_lib/libtransformer_engine.so", undefined="nvrtcVersion"
    )
    compiler = table("libnvrtc.so.13", defined="nvrtcVersion")
    assert lacking(engine, compiler) == []
    assert problems([engine], set(), ("transformer_engine/*",)) == []
    messages = problems([engine, compiler], set(), ("transformer_engine/*",))
    assert messages == ["transformer_engine/* needs no exception any more"]
