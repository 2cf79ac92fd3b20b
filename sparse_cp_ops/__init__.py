"""DeepSeek sparse attention over an FP8 paged KV cache, with context-parallel prefill and prefix reuse.

Importing the package registers the ops under ``torch.ops.sparse_cp_ops``; ``sparse_cp_ops.ops`` has typed wrappers.
"""

from sparse_cp_ops import _load as _load  # isort: skip  (registers the schemas)
from sparse_cp_ops import _autograd as _autograd  # isort: skip
from sparse_cp_ops import ops  # isort: skip

__version__ = "0.1.0"

__all__ = ["__version__", "ops"]
