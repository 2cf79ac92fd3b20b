"""Benchmarks of the whole attention layer: ``python -m sparse_cp_ops bench-layer``. Needs the extra ``bench``."""
