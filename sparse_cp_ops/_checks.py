"""The switch of the checks that read tensor values on the host."""

import os


def value_checks_enabled() -> bool:
    """Whether SPARSE_CP_OPS_CHECK is set to anything but 0; read at each call, as the ops do."""
    return os.environ.get("SPARSE_CP_OPS_CHECK", "0") not in ("", "0")
