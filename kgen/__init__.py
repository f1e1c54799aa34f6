"""kgen: from a model and a GPU to frozen, verified, self-contained sparse-MLA attention kernels."""

__version__ = "0.1.0"
