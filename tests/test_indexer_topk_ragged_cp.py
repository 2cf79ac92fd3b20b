import torch
from indexer_cases import random_case

from sparse_cp_ops import ops, reference


def test_matches_sorted_scores(device: str) -> None:
    case = random_case([(0, 700), (1, 63), (1, 64), (1, 65), (-1, 0), (0, 1), (1, 0), (0, 400)]).to(device)
    selected = ops.indexer_topk_ragged_cp(*case.tensors, 64).cpu()
    scores = ops.indexer_scores_ragged_cp(*case.tensors, 700).cpu()
    assert torch.equal(selected, reference.select_topk(scores, [700, 63, 64, 65, 0, 1, 0, 400], 64))
