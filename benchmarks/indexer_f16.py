"""What the indexer's ``precision="f16"`` does to scores and picks.

    python benchmarks/indexer_f16.py [--rows 256] [--keys 32768] [--topk 2048]

Queries and keys are encoded as the ops do it; scores are compared with those of the same bytes in double precision, in
units of a row's standard deviation, picks with the exact best of these and with those of the vectors before encoding.
"""

import argparse

import torch
from torch import Tensor

from sparse_cp_ops import ops

HEADS = 64


def encoded(vectors: Tensor, absmax: float) -> tuple[Tensor, Tensor]:
    """e4m3 bytes with the given largest magnitude a vector, and their scales."""
    scale = vectors.abs().amax(-1) / absmax
    return (vectors / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scale


def random_vectors(rows: int, keys: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Independent normal queries [rows, heads, 128], keys [keys, 128] and weights [rows, heads]."""
    return (
        torch.randn(rows, HEADS, 128, device=device),
        torch.randn(keys, 128, device=device),
        torch.randn(rows, HEADS, device=device),
    )


def peaked_vectors(rows: int, keys: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in topics of 64 that change along the text, queries that look for two of 200, and keys that stand out."""
    topics = torch.nn.functional.normalize(torch.randn(200, 128, device=device), dim=1) * 11
    k = topics[torch.arange(keys, device=device) // 64 % 200] + torch.randn(keys, 128, device=device)
    k[torch.randperm(keys, device=device)[: keys // 300]] *= 4
    wanted = topics[torch.randint(0, 200, (rows, 2), device=device)].mean(1)
    return wanted.unsqueeze(1) + torch.randn(rows, HEADS, 128, device=device), k, torch.rand(rows, HEADS, device=device)


def double_scores(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor) -> Tensor:
    """[rows, keys] in double precision."""
    k, k_scale = k.double(), k_scale.double()
    rows = [
        (torch.relu(q_row.double() @ k.T) * w.double().unsqueeze(1)).sum(0) for q_row, w in zip(q, weights, strict=True)
    ]
    return torch.stack(rows) * k_scale


def percent_not_in(picks: Tensor, others: Tensor) -> float:
    """How many of the picks of a row are not among the others, over all rows."""
    missing = sum(int((~torch.isin(a, b)).sum()) for a, b in zip(picks, others, strict=True))
    return 100.0 * missing / picks.numel()


def report(name: str, q: Tensor, k: Tensor, weights: Tensor, topk: int) -> None:
    """Print one line a precision."""
    keys, device = len(k), k.device
    k8, k_scale = encoded(k, 448.0)
    cache = torch.cat([k8.view(keys // 64, -1), k_scale.view(keys // 64, 64).contiguous().view(torch.uint8)], 1)
    table = torch.arange(keys // 64, dtype=torch.int32, device=device).unsqueeze(0)
    requests = torch.zeros(len(q), dtype=torch.int32, device=device)
    lengths = torch.full((len(q),), keys, dtype=torch.int32, device=device)
    unquantised = double_scores(q, k, weights, torch.ones(keys, device=device)).topk(topk, 1).indices
    picked = {}
    for precision, absmax in (("fp32", 448.0), ("f16", 0.875)):
        q8, q_scale = encoded(q, absmax)
        arguments = (q8, weights * q_scale, cache, table, requests, lengths)
        scores = ops.indexer_scores_ragged_cp(*arguments, keys, precision)
        picks = ops.indexer_topk_ragged_cp(*arguments, topk, 0, precision).long()
        exact = double_scores(
            q8.view(torch.float8_e4m3fn).float(), k8.view(torch.float8_e4m3fn).float(), weights * q_scale, k_scale
        )
        deviation = exact.std(1, keepdim=True)
        error = (scores.double() - exact) / deviation
        best = exact.topk(topk, 1)
        below_cut = ((best.values[:, -1:] - exact.gather(1, picks)) / deviation).clamp(min=0)
        picked[precision] = picks
        print(
            f"{name}, {precision}: score error rms {float(error.pow(2).mean().sqrt()):.1e}, "
            f"max {float(error.abs().max()):.1e}; "
            f"picks that exact scores would not make {percent_not_in(picks, best.indices):.3f} %, "
            f"at most {float(below_cut.max()):.1e} below the cut; "
            f"that scores before encoding would not make {percent_not_in(picks, unquantised):.2f} %"
        )
    print(f"{name}: picks of f16 that fp32 does not make {percent_not_in(picked['f16'], picked['fp32']):.3f} %")


def main() -> None:
    """Parse arguments and report both kinds of scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--keys", type=int, default=32768, help="a multiple of 64")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name, make in (("random", random_vectors), ("peaked", peaked_vectors)):
        report(name, *make(arguments.rows, arguments.keys, arguments.device), arguments.topk)


if __name__ == "__main__":
    main()
