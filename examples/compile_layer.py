"""The attention layer inside one's own module, under torch.compile: one graph for prompts of all lengths."""

import torch
from torch import Tensor, nn

from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, MlaConfig, PagedKvCache, SparseMlaImpl, get_mla_impl

CONFIG = MlaConfig(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=128,
    qk_nope_head_dim=64,
    v_head_dim=64,
    index_n_heads=8,
    index_topk=64,
    softmax_scale=128**-0.5,
    num_layers=1,
    max_positions=4096,
)


class Block(nn.Module):
    """A decoder layer of a user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(CONFIG.hidden_size)
        self.attention = MlaAttention(CONFIG, layer_id=0)
        self.mlp = nn.Sequential(nn.Linear(CONFIG.hidden_size, 512), nn.SiLU(), nn.Linear(512, CONFIG.hidden_size))

    def forward(self, hidden: Tensor, cache: PagedKvCache, impl: SparseMlaImpl, plan: CpPlan) -> Tensor:
        attended, _ = self.attention(self.norm(hidden), cache, impl, plan)
        hidden = hidden + attended
        return hidden + self.mlp(hidden)


@torch.inference_mode()  # not no_grad: there each op of the compiled layer costs the host more
def main() -> None:
    torch.manual_seed(0)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=count)
    impl = get_mla_impl(CONFIG, ParallelismConfig())
    caches = [PagedKvCache(num_layers=1, num_pages=16) for _ in range(2)]
    block_table = torch.arange(16, dtype=torch.int32)[None]
    for length in (300, 17, 512, 100):
        hidden = torch.randn(length, CONFIG.hidden_size)
        lens = torch.tensor([length], dtype=torch.int32)
        plan = impl.prepare(AttentionInputs(True, lens, torch.zeros_like(lens), block_table))
        out, eager = (run(hidden, cache, impl, plan) for run, cache in zip((compiled, block), caches, strict=True))
        difference = (out - eager).abs().max()
        print(f"{length:4} tokens: {len(graphs)} graphs so far, largest difference to eager {difference:.1e}")


if __name__ == "__main__":
    main()
