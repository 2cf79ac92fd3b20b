"""Ceilings of this machine, measured in the same run as the ops: copy bandwidth and GEMM rates."""

import torch

from sparse_cp_ops.bench.timing import measure


def _copy_rate(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / measure(lambda: target.copy_(source), device).median_us * 1e6


def _host_copy_rate(size: int, device: torch.device) -> float:
    """Bytes/s of the slower direction between pinned host memory and the device."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    send = measure(lambda: there.copy_(host, non_blocking=True), device)
    receive = measure(lambda: host.copy_(there, non_blocking=True), device)
    return size / max(send.median_us, receive.median_us) * 1e6


def _gemm_rate(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> float:
    flop = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    return flop / measure(lambda: a @ b, device).median_us * 1e6


def _fp8_gemm_rate(n: int, device: torch.device) -> float:
    a = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)

    def run() -> torch.Tensor:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2.0 * n**3 / measure(run, device).median_us * 1e6


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """``copy`` (read plus written) and ``host copy`` (one way) in bytes/s, GEMM rates of the device in FLOP/s.

    CPU: ``fp32`` GEMM of 2048^3. CUDA: ``bf16`` and ``fp8`` GEMM of 8192^3 on random data.
    """
    ceilings = {"copy": _copy_rate(2**31 if device.type == "cuda" else 2**28, device)}
    if device.type == "cpu":
        ceilings["fp32"] = _gemm_rate(torch.randn(2048, 2048), torch.randn(2048, 2048), device)
        return ceilings
    ceilings["host copy"] = _host_copy_rate(2**28, device)
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    ceilings["bf16"] = _gemm_rate(matrix, matrix, device)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        ceilings["fp8"] = _fp8_gemm_rate(8192, device)
    return ceilings
