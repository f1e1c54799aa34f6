"""Kernels and dispatch table of sm121, Emitted by kgen."""
