"""Inputs of the two indexer ops, with random or with prescribed scores."""

from dataclasses import dataclass, fields, replace

import torch
from builders import INDEX_DIM, num_pages, random_block_table, random_e4m3, random_indexer_cache, slots_of
from torch import Tensor


@dataclass(frozen=True)
class IndexerCase:
    """The six tensors both ops take, in the order of their signature."""

    q_fp8: Tensor
    q_weights: Tensor
    indexer_cache: Tensor
    block_table: Tensor
    req_ids: Tensor
    kv_lens: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def page_size(self) -> int:
        return self.indexer_cache.shape[1] // (INDEX_DIM + 4)

    def to(self, device: str) -> "IndexerCase":
        return IndexerCase(*(t.to(device) for t in self.tensors))

    def rows(self, index: Tensor | slice | list[int]) -> "IndexerCase":
        """The same cache and requests, other query rows."""
        return replace(
            self,
            q_fp8=self.q_fp8[index],
            q_weights=self.q_weights[index],
            req_ids=self.req_ids[index],
            kv_lens=self.kv_lens[index],
        )


def random_case(
    rows: list[tuple[int, int]], heads: int = 16, page_size: int = 64, scale_kind: str = "ue8m0"
) -> IndexerCase:
    """Random queries and keys; ``rows`` lists (req_id, kv_len), req_id -1 for a pad."""
    requests = max([request for request, _ in rows], default=-1) + 1
    longest = [max([length for r, length in rows if r == request], default=0) for request in range(requests)]
    return IndexerCase(
        random_e4m3((len(rows), heads, INDEX_DIM)),
        torch.randn(len(rows), heads),
        random_indexer_cache(num_pages(longest, page_size), page_size, scale_kind),
        random_block_table(longest, page_size),
        torch.tensor([request for request, _ in rows], dtype=torch.int32),
        torch.tensor([length for _, length in rows], dtype=torch.int32),
    )


def case_with_scores(scores: Tensor, page_size: int = 64, lengths: list[int] | None = None) -> IndexerCase:
    """One request whose key j scores ``scores[j]`` (positive and finite, or 0) in every row, bit for bit.

    Query and keys are one-hot, so the dot product is 1; the key's scale is the score.
    """
    lengths = [len(scores)] if lengths is None else lengths
    case = random_case([(0, length) for length in lengths], heads=8, page_size=page_size)
    one = torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    case.q_fp8.zero_()
    case.q_fp8[:, 0, 0] = one
    case.q_weights.zero_()
    case.q_weights[:, 0] = 1
    table = random_block_table([len(scores)], page_size)
    cache = torch.zeros(num_pages([len(scores)], page_size), page_size * (INDEX_DIM + 4), dtype=torch.uint8)
    cache[:, : page_size * INDEX_DIM : INDEX_DIM] = one
    slots = slots_of(table, 0, len(scores), page_size)
    scales = torch.zeros(cache.shape[0] * page_size)
    scales[slots] = scores.float()
    cache[:, page_size * INDEX_DIM :] = scales.view(torch.uint8).view(cache.shape[0], -1)
    return replace(case, indexer_cache=cache, block_table=table)
