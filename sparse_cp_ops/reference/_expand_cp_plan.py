import torch
from torch import Tensor

from sparse_cp_ops.ops._expand_cp_plan import CpPlanRows

_INT32_MAX = 2**31 - 1


def expand_cp_plan(
    request_table: Tensor, cp_rank: int, cp_size: int, split: str, local_rows: int, total_tokens: int
) -> CpPlanRows:
    """See :func:`sparse_cp_ops.ops.expand_cp_plan`; places token after token, as the splits are told in words."""
    table = request_table.long().clamp(min=0).tolist()
    gathered = {name: torch.full((cp_size, local_rows), fill, dtype=torch.int32) for name, fill in _PADS.items()}
    restore = torch.full((total_tokens,), -1, dtype=torch.int32)
    token = 0
    first_row = 0
    for request, (prefix_len, new_len) in enumerate(table):
        chunk = -(-new_len // (2 * cp_size))
        for offset in range(new_len):
            if split == "zigzag":
                index, within = divmod(offset, chunk)
                rank, row = index, first_row + within
                if index >= cp_size:
                    rank, row = 2 * cp_size - 1 - index, row + chunk
            else:
                row, rank = divmod(token, cp_size)
            kv_len = prefix_len + offset + 1
            if row < local_rows and kv_len <= _INT32_MAX:
                gathered["req_ids"][rank, row] = request
                gathered["positions"][rank, row] = kv_len - 1
                gathered["kv_lens"][rank, row] = kv_len
                gathered["token_ids"][rank, row] = token
                if token < total_tokens:
                    restore[token] = rank * local_rows + row
            token += 1
        first_row += 2 * chunk
    rows = (*(rows[cp_rank] for rows in gathered.values()), gathered["req_ids"], gathered["positions"], restore)
    return CpPlanRows(*(tensor.flatten().to(request_table.device, copy=True) for tensor in rows))


_PADS = {"req_ids": -1, "positions": 0, "kv_lens": 0, "token_ids": -1}
