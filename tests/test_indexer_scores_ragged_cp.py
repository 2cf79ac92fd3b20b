import pytest
import torch
from indexer_cases import random_case

from sparse_cp_ops import ops, reference


def cosine_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = actual.double().flatten(), expected.double().flatten()
    return 1 - (2 * (a @ b) / (a @ a + b @ b)).item()


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
def test_scores_match_fp64(device: str, heads: int, page_size: int) -> None:
    case = random_case([(0, 1), (0, 300), (-1, 0), (1, 129), (1, 130), (0, 299)], heads, page_size, "fp32")
    scores = ops.indexer_scores_ragged_cp(*case.to(device).tensors, 333).cpu()
    expected = reference.indexer_scores_ragged_cp(*case.tensors, 333)
    visible = expected > -torch.inf
    assert torch.equal(visible, scores > -torch.inf)
    assert cosine_difference(scores[visible], expected[visible]) < 5e-6
