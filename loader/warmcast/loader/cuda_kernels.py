"""Kernels of our own: compiled by the NVRTC that torch brings, launched by the driver.

By ctypes, because it is at a worker's boot: nothing has to be imported, and NVRTC compiles without
the interpreter's lock, so that the weights come in meanwhile.

Source: NVRTC's and the CUDA driver's C interfaces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from warmcast.loader import driver, kernel_cache
from warmcast.manifests.errors import WarmcastError

_SHARED_MOST = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING = 48 << 10
"""Bytes of shared memory that every kernel may have."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel whose arguments have 64 bits each, in the context that was current when compiled."""

    _function: driver.Handle

    def allow_shared(self, nbytes: int) -> None:
        """Let a launch ask for so much dynamic shared memory."""
        if nbytes > _WITHOUT_ASKING:
            result = driver.waiting().cuFuncSetAttribute(self._function, _SHARED, nbytes)
            driver.check("cuFuncSetAttribute", result)

    def launch(
        self, blocks: int, threads: int, *arguments: int, shared: int = 0, stream: int
    ) -> None:
        """Launch on a stream, given by its handle; nobody waits for the kernel."""
        values = (driver.U64 * len(arguments))(*arguments)
        begin, width = ctypes.addressof(values), ctypes.sizeof(driver.U64)
        places = (ctypes.c_void_p * len(arguments))(
            *range(begin, begin + width * len(arguments), width)
        )
        # A first launch may load the kernel, and that may wait for what else runs on the GPU: for a
        # broadcast, say, whose owner then needs the interpreter's lock to end it in time.
        result = driver.waiting().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, shared, stream, places, None
        )
        driver.check("cuLaunchKernel", result)


def compiled(
    source: str, names: Sequence[str], device: torch.device, macros: Mapping[str, int] | None = None
) -> list[Kernel]:
    """The kernels of these names, which the source declares ``extern "C"``.

    The device's context is the current one. Raises :class:`WarmcastError` with the compiler's log.
    They stay for the life of the process, and on disk for the next (see :mod:`kernel_cache`).
    """
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in (macros or {}).items()]
    about = (source, *options, torch.version.cuda or "")
    cuda = driver.waiting()  # a module's loading may wait for the GPU
    module = driver.Handle()
    image = kernel_cache.kept(*about)
    # One that another driver left may be none for this.
    if image is None or cuda.cuModuleLoadData(ctypes.byref(module), image):
        image = _cubin(source, options)
        driver.check("cuModuleLoadData", cuda.cuModuleLoadData(ctypes.byref(module), image))
        kernel_cache.keep(image, *about)
    kernels = []
    for name in names:
        function = driver.Handle()
        result = cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        driver.check(f"cuModuleGetFunction of {name}", result)
        kernels.append(Kernel(function))
    return kernels


def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have where it is asked for."""
    value = ctypes.c_int()
    result = driver.prompt().cuDeviceGetAttribute(ctypes.byref(value), _SHARED_MOST, device.index)
    driver.check("cuDeviceGetAttribute", result)
    return value.value


def _cubin(source: str, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"warmcast.cu", 0, None, None
        )
    )
    try:
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise WarmcastError(
                "kernels", expected="to compile", found=" ".join(log.decode().split())[:500]
            )
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(length: Any, content: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(length(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(content(program, buffer))
    return buffer.raw


@cache
def _nvrtc() -> Any:
    """NVRTC: the one that torch was built with, else one that the system finds."""
    major = (torch.version.cuda or "").partition(".")[0]
    torchs = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"  # linked to torch's NVRTC
    for name in (str(torchs), f"libnvrtc.so.{major}", "libnvrtc.so"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise WarmcastError("kernels", expected="NVRTC, as torch for CUDA brings it", found="none")


def _check(result: int) -> None:
    if result:
        text = _nvrtc().nvrtcGetErrorString(result).decode(errors="replace")
        raise WarmcastError("NVRTC", expected="success", found=text)
