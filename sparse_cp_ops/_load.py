"""Loads the compiled libraries once and remembers what could not be loaded, and why."""

from dataclasses import dataclass
from pathlib import Path

import torch

PACKAGE_DIR = Path(__file__).parent


@dataclass(frozen=True)
class LibraryStatus:
    """Whether a compiled library is there and loaded; ``reason`` says why it is not."""

    name: str
    built: bool
    loaded: bool
    reason: str = ""


def _load_cpu() -> LibraryStatus:
    path = PACKAGE_DIR / "_C.so"
    if not path.is_file():
        raise ImportError(
            f"sparse_cp_ops: {path.name} is missing from {PACKAGE_DIR}: the package was not built. "
            "Run `pip install --no-build-isolation .` in the source tree."
        )
    torch.ops.load_library(str(path))
    return LibraryStatus("_C", built=True, loaded=True)


def _load_cuda() -> LibraryStatus:
    path = PACKAGE_DIR / "_C_cuda.so"
    if not path.is_file():
        return LibraryStatus("_C_cuda", False, False, "not built (nvcc was not found, or SPARSE_CP_OPS_CUDA=0)")
    if not torch.backends.cuda.is_built():
        return LibraryStatus("_C_cuda", True, False, f"torch {torch.__version__} is a CPU build")
    if not torch.cuda.is_available():
        return LibraryStatus("_C_cuda", True, False, "torch sees no CUDA device")
    torch.ops.load_library(str(path))
    return LibraryStatus("_C_cuda", built=True, loaded=True)


CPU_STATUS = _load_cpu()
CUDA_STATUS = _load_cuda()
