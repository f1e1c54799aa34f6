"""Kernels and dispatch table of sm90, Emitted by kgen."""
