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

    def encoded_for_f16(self) -> "IndexerCase":
        """Queries as precision "f16" expects them: those of 448 times 2^-9, at most 0.875 in size."""
        values = self.q_fp8.view(torch.float8_e4m3fn).float() * 2.0**-9
        return replace(self, q_fp8=values.to(torch.float8_e4m3fn).view(torch.uint8))


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


FLOAT_MAX = torch.finfo(torch.float32).max
# Head h of the query picks dimension h of a key, with this weight. The dot product is then 1 and the key's scale
# decides the score: its size for weights 1 and -1, -0.0 by underflow, infinities by overflow.
HEAD_WEIGHTS = torch.tensor([1, -1, -(2.0**-10), 4, -4, 0, 0, 0])


def case_with_scores(scores: Tensor, page_size: int = 64, lengths: list[int] | None = None) -> IndexerCase:
    """One request whose key j scores float32 ``scores[j]`` in every row, bit for bit: any number, infinity or NaN.

    Rows see ``lengths`` keys, one row of all keys by default.
    """
    count = len(scores)
    lengths = [count] if lengths is None else lengths
    negative_zero = (scores == 0) & scores.signbit()
    kind = torch.where(scores < 0, 1, 0)
    kind[negative_zero], kind[scores == torch.inf], kind[scores == -torch.inf] = 2, 3, 4
    scales = scores.abs()
    scales[negative_zero], scales[scores.isinf()], scales[scores.isnan()] = 2.0**-149, FLOAT_MAX, 1
    one = torch.ones(()).to(torch.float8_e4m3fn).view(torch.uint8)
    keys = torch.zeros(count, INDEX_DIM, dtype=torch.uint8)
    keys[torch.arange(count), kind] = one
    keys[scores.isnan()] = 0x7F

    queries = torch.zeros(len(lengths), 8, INDEX_DIM, dtype=torch.uint8)
    queries[:, torch.arange(8), torch.arange(8)] = one
    table, pages = random_block_table([count], page_size), num_pages([count], page_size)
    slots = slots_of(table, 0, count, page_size)
    cache = torch.zeros(pages, page_size * (INDEX_DIM + 4), dtype=torch.uint8)
    values = torch.zeros(pages * page_size, INDEX_DIM, dtype=torch.uint8)
    values[slots] = keys
    all_scales = torch.zeros(pages * page_size)
    all_scales[slots] = scales
    cache[:, : page_size * INDEX_DIM] = values.view(pages, -1)
    cache[:, page_size * INDEX_DIM :] = all_scales.view(pages, -1).view(torch.uint8)
    return IndexerCase(
        queries,
        HEAD_WEIGHTS.repeat(len(lengths), 1),
        cache,
        table,
        torch.zeros(len(lengths), dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
    )
