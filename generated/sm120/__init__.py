"""Kernels and dispatch table of sm120, Emitted by kgen."""
