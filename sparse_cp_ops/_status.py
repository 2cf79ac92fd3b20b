"""What is built, what can run on this machine, and why not."""

import os
import platform

import torch

import sparse_cp_ops
from sparse_cp_ops import _load
from sparse_cp_ops._config import value_checks_enabled


def _cuda_lines() -> list[str]:
    status = _load.CUDA_STATUS
    if not status.loaded:
        return [f"_C_cuda  {'built, not loaded' if status.built else 'missing'}: {status.reason}"]
    lines = ["_C_cuda  loaded"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"  cuda:{index}  {properties.name}, sm_{properties.major}{properties.minor}, kernels: {kernel_set(index)}"
        )
    return lines


def kernel_set(device_index: int) -> str:
    """Name of the kernel set that runs on a CUDA device, or why there is none."""
    major, minor = torch.cuda.get_device_capability(device_index)
    wanted = os.environ.get("SPARSE_CP_OPS_ARCH") or "auto"
    if wanted not in ("auto", "portable", "sm90"):
        return f"none: SPARSE_CP_OPS_ARCH: expected auto, portable or sm90, got {wanted!r}"
    if major < 8:
        return f"none: compute capability {major}.{minor} is below 8.0"
    if wanted == "sm90" and (major, minor) != (9, 0):
        return f"none: SPARSE_CP_OPS_ARCH=sm90 on compute capability {major}.{minor}"
    return "sm90" if (major, minor) == (9, 0) and wanted != "portable" else "portable"


def _optional(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return "not installed"


def status_report() -> str:
    """The report of ``python -m sparse_cp_ops``, one fact a line."""
    lines = [
        f"sparse_cp_ops {sparse_cp_ops.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "",
        f"_C       loaded: CPU kernels on {torch.get_num_threads()} threads",
        _config_line(),
        *_cuda_lines(),
        "",
        f"transformers integration: transformers {_optional('transformers')}",
        f"context parallelism: torch.distributed {_distributed()}",
        "value checks (SPARSE_CP_OPS_CHECK): " + ("on" if value_checks_enabled() else "off"),
    ]
    return "\n".join(lines)


def _config_line() -> str:
    try:
        import sparse_cp_ops.config  # noqa: F401
    except ImportError as error:
        return f"_config  missing: {error} (config, CpPlan and the modules need it)"
    return "_config  loaded: configuration types and planner"


def _distributed() -> str:
    if not torch.distributed.is_available():
        return "is not in this build of torch"
    backends = [
        name
        for name, available in (
            ("gloo", torch.distributed.is_gloo_available()),
            ("nccl", torch.distributed.is_nccl_available()),
        )
        if available
    ]
    return "with " + ", ".join(backends) if backends else "without gloo and nccl"
