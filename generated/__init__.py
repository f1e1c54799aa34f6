"""Sparse-MLA attention kernels, Emitted by kgen: `from generated.dispatch import sparse_mla`. Needs torch and triton only."""
