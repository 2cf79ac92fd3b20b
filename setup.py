"""Builds the three libraries of sparse_cp_ops.

_C       schemas and CPU kernels (LibTorch stable ABI, independent of the Python and torch minor versions)
_C_cuda  CUDA kernels (stable ABI; compiles without a GPU and against a CPU build of torch)
_config  configuration types and planner (pybind11, no torch)

SPARSE_CP_OPS_CUDA=auto|0|1 decides about _C_cuda: auto builds it when nvcc is found, 1 fails without nvcc.
"""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from torch.utils import cpp_extension

CUDA_MODE = os.environ.get("SPARSE_CP_OPS_CUDA", "auto")
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
# No FMA contraction: CPU and CUDA must round RoPE, Hadamard and scaling alike (docs/semantics.md).
CXX_FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
ARCH_FLAGS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_80,code=compute_80",
    "-gencode=arch=compute_90a,code=sm_90a",
]


def find_cuda_home() -> str | None:
    """Toolkit root from CUDA_HOME, /usr/local/cuda, or the real nvcc behind PATH (which may be a shell wrapper)."""
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for home in candidates:
        if home and (Path(home) / "bin" / "nvcc").is_file() and (Path(home) / "include" / "cuda_runtime.h").is_file():
            return home
    return None


if CUDA_MODE not in ("auto", "0", "1"):
    sys.exit(f"SPARSE_CP_OPS_CUDA: expected auto, 0 or 1, got {CUDA_MODE!r}")
cuda_home = None if CUDA_MODE == "0" else find_cuda_home()
if CUDA_MODE == "1" and cuda_home is None:
    sys.exit("SPARSE_CP_OPS_CUDA=1, but nvcc was not found: put it on PATH or set CUDA_HOME")
if cuda_home:
    cpp_extension.CUDA_HOME = cuda_home  # None in a CPU build of torch


class BuildExtension(cpp_extension.BuildExtension):  # type: ignore[misc]
    """Plain names for the libraries that don't depend on Python, the ABI suffix for the pybind11 module."""

    def get_ext_filename(self, ext_name: str) -> str:
        self.no_python_abi_suffix = not ext_name.endswith("_config")
        return str(super().get_ext_filename(ext_name))

    def build_extensions(self) -> None:
        """Drop CUDA objects older than a header they include: in a CPU build of torch ninja does not track those."""
        for built in glob(f"{self.build_temp}/csrc/cuda/**/*.o", recursive=True):
            rule = Path(built).with_suffix(".d")
            included = rule.read_text().replace("\\\n", " ").split(": ", 1)[1].split() if rule.is_file() else HEADERS
            if any(not os.path.exists(f) or os.path.getmtime(f) > os.path.getmtime(built) for f in included):
                os.remove(built)
        super().build_extensions()


HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True))

extensions = [
    cpp_extension.CppExtension(
        "sparse_cp_ops._C",
        sorted(["csrc/schemas.cpp", *glob("csrc/cpu/*.cpp")]),
        depends=HEADERS,
        extra_compile_args={"cxx": CXX_FLAGS + STABLE_ABI},
        py_limited_api=True,
    ),
    Extension(
        "sparse_cp_ops._config",
        sorted(glob("csrc/config/*.cpp") + glob("csrc/planner/*.cpp")),
        include_dirs=[pybind11.get_include()],
        depends=HEADERS,
        extra_compile_args={"cxx": CXX_FLAGS},
        language="c++",
    ),
]
if cuda_home:
    # Relaxed constexpr: the kernels use the constexpr functions of kv_record.h.
    nvcc_flags = ["-MMD", "-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr", "--threads=2"]
    nvcc_flags += ["-Xcompiler=-fvisibility=hidden", *ARCH_FLAGS]
    extensions.append(
        cpp_extension.CppExtension(
            "sparse_cp_ops._C_cuda",
            sorted(glob("csrc/cuda/**/*.cu", recursive=True) + glob("csrc/cuda/**/*.cpp", recursive=True)),
            depends=HEADERS,
            include_dirs=[f"{cuda_home}/include"],
            library_dirs=[f"{cuda_home}/lib64"],
            libraries=["cudart_static", "rt", "dl", "pthread"],
            # Without --no-as-needed a library built against a CPU wheel does not find the CUDA shims elsewhere.
            extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
            extra_compile_args={
                "cxx": [*CXX_FLAGS, *STABLE_ABI, "-DUSE_CUDA"],
                "nvcc": [*nvcc_flags, *STABLE_ABI, "-DUSE_CUDA"],
            },
            py_limited_api=True,
        )
    )

setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension})
