"""What a user would write in vectorised PyTorch from the same FP8 bytes: the comparison on the CPU."""

import torch
from torch import Tensor


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, scale: float, rows_at_once: int = 16) -> Tensor:
    """q [L,H,576] bf16, cache [pages,page,656] u8, slots [L,K] i64 -> [L,H,512] f32.

    The whole cache is dequantised once, as many rows share its keys; then a few rows at a time are gathered.
    """
    records = cache.view(-1, 656)
    latent = records[:, :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    latent = (latent * records[:, 512:528].view(torch.float32).unsqueeze(-1)).flatten(-2)
    keys = torch.cat([latent, records[:, 528:].view(torch.bfloat16).float()], -1)
    outs = []
    for rows in torch.arange(q.shape[0]).split(rows_at_once):
        picked = keys[slots[rows]]
        logits = torch.matmul(q[rows].float(), picked.mT) * scale
        outs.append(torch.matmul(logits.softmax(-1), picked[..., :512]))
    return torch.cat(outs)


def scores(q8: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, rows_at_once: int = 16) -> Tensor:
    """q8 [L,Hi,128] u8, weights [L,Hi], keys [S,128] u8, scales [S] -> [L,S] f32; a few rows at a time."""
    k = keys.view(torch.float8_e4m3fn).float()
    outs = []
    for rows in torch.arange(q8.shape[0]).split(rows_at_once):
        q = q8[rows].view(torch.float8_e4m3fn).float()
        products = torch.matmul(q, k.t()).relu_()
        outs.append(torch.matmul(weights[rows].unsqueeze(1), products).squeeze(1) * scales)
    return torch.cat(outs)
