"""Host time of CpPlan.build: the checks, the planner and the enqueued copy, with and without expand_cp_plan.

    python benchmarks/plan.py [--device cuda]

The bound is 50 us at 64 requests, whatever the token count (without expand_cp_plan, a kernel of its own).
"""

import argparse
import functools
import time
from collections.abc import Callable
from unittest import mock

import torch

from sparse_cp_ops.context_parallel import CpPlan, plan
from sparse_cp_ops.ops import CpPlanRows

BOUND_US = 50.0


def median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if i % 100 == 99 and torch.cuda.is_available():
            torch.cuda.synchronize()  # outside the measured time: a full launch queue would be measured instead
    return sorted(times)[repeats // 2] * 1e6


def measure(requests: int, tokens: int, device: str, repeats: int) -> tuple[float, float]:
    """Median host time of a build without and with expand_cp_plan."""
    build = functools.partial(
        CpPlan.build,
        torch.full((requests,), tokens, dtype=torch.int32),
        torch.full((requests,), 4096, dtype=torch.int32),
        cp_rank=1,
        cp_size=8,
        block_table=torch.zeros(requests, -(-(tokens + 4096) // 64), dtype=torch.int32, device=device),
        max_positions=163_840,
        device=device,
    )
    whole = median_us(build, repeats if tokens * requests < 50_000 else 1 + repeats // 10)
    rows = plan.expand_cp_plan(torch.zeros(1, 2, dtype=torch.int32), 0, 1, "zigzag", 1, 1)

    def no_expansion(*_: object) -> CpPlanRows:
        return rows

    with mock.patch.object(plan, "expand_cp_plan", new=no_expansion):
        return median_us(build, repeats), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"CpPlan.build on {arguments.device}, median of {arguments.repeats}, bound {BOUND_US:g} us without expansion")
    print(f"{'requests':>8} {'tokens each':>11} {'host us':>8} {'with expand_cp_plan':>20}")
    for requests, tokens in [(1, 100), (1, 100_000), (64, 1), (64, 100), (64, 10_000)]:
        with torch.inference_mode():
            host, whole = measure(requests, tokens, arguments.device, arguments.repeats)
        print(f"{requests:>8} {tokens:>11} {host:>8.1f} {whole:>20.1f}")


if __name__ == "__main__":
    main()
