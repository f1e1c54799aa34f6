"""The run-time half of kgen: validation, look-up, workspace and launch.

Everything in this package is shipped: `kgen emit` copies it, file for file, into `generated/`. It therefore imports
torch, triton, the standard library and its own siblings (relatively), and nothing else of kgen.
"""
