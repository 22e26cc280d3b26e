"""The C library is built where there is a compiler, and nothing is left where there is none."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook, that builds in a folder of its own, where an older library is."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "infra/native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = tmp_path / "pump.c"
    shutil.copy(module.SOURCE, source)
    monkeypatch.setattr(module, "SOURCE", source)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_pump.so")
    module.LIBRARY.write_bytes(b"an older one")
    return module


def test_it_is_built(native: ModuleType) -> None:
    if shutil.which(native.compiler()[0]) is None:
        pytest.skip("no C compiler")
    assert native.build() is None
    assert ctypes.CDLL(str(native.LIBRARY)).warmcast_pump_layout() == 2


@pytest.mark.parametrize("compiler", ["false", "/none/cc"])
def test_without_a_compiler(
    native: ModuleType, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert native.build().startswith(f"{compiler}: ")
    assert [file.name for file in native.SOURCE.parent.iterdir()] == ["pump.c"]


def test_a_source_that_does_not_compile(native: ModuleType) -> None:
    native.SOURCE.write_text("int main(void) { return x; }")
    assert native.build().startswith(f"{native.compiler()[0]}: ")
    assert [file.name for file in native.SOURCE.parent.iterdir()] == ["pump.c"]
