"""Benchmarks of the ops: ``python -m sparse_cp_ops bench``. Needs the extra ``bench`` (rich, matplotlib)."""
