"""One op called by hand: sparse attention of three rows over an FP8 cache of 100 tokens."""

import torch

import sparse_cp_ops  # noqa: F401  (registers torch.ops.sparse_cp_ops)

ops = torch.ops.sparse_cp_ops
table = torch.cat([torch.ones(100, 32), torch.zeros(100, 32)], dim=1)  # RoPE by angle 0
cache = torch.zeros(2, 64, 656, dtype=torch.uint8)  # two pages of 64 tokens, 656 bytes each
latent, k_rope = torch.randn(100, 512).bfloat16(), torch.randn(100, 64).bfloat16()
positions, block_table = torch.arange(100, dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)

records = torch.empty(100, 656, dtype=torch.uint8)
ops.pack_mla_kv(latent, k_rope, positions, table, records, True, "ue8m0")
ops.write_kv_cache(records, None, torch.zeros_like(positions), positions, block_table, cache, None)

q = torch.randn(3, 16, 576).bfloat16()  # rows at positions 97, 98 and 99, 16 heads
picks = torch.arange(64, dtype=torch.int32).repeat(3, 1)  # the keys that each of them attends to
request, kv_lens = torch.zeros(3, dtype=torch.int32), torch.tensor([98, 99, 100], dtype=torch.int32)
out, lse = ops.sparse_mla_fp8_cp(q, cache, picks, block_table, request, kv_lens, 192**-0.5)

keys = torch.cat([latent, k_rope], dim=1)[:64].float()
exact = torch.softmax(q.float() @ keys.T * 192**-0.5, dim=-1) @ keys[:, :512]
print(f"{list(out.shape)}, relative difference to unquantised attention: {(out - exact).norm() / exact.norm():.3f}")
