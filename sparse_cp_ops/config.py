"""Configuration types: plain C++ values, immutable, hashable, with versioned pickles (no torch inside).

``ParallelismConfig`` holds the sizes and ranks of every kind of parallelism, ``PrefillCPConfig`` how prefill rows are
shared among ranks. Both validate their values at construction (ValueError naming the field) and compare by value.
Pickles hold the fields in the constructor's order: a state written before the last field existed loads, one with more
fields than this version knows loads with a UserWarning, anything else raises and names what is wrong.
"""

from sparse_cp_ops._config import CPRotateMethod, FMHAType, ParallelismConfig, PrefillCPConfig

__all__ = ["CPRotateMethod", "FMHAType", "ParallelismConfig", "PrefillCPConfig"]
