"""Kernels and dispatch table of sm100, Emitted by kgen."""
