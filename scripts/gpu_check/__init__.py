"""The parts of `scripts/gpu.py`, a module each, and what they share.

A part is a module with `run(options, rows)`. It may import the package, torch, transformers, numpy and the modules of
tests/ that need nothing else: no Composer, no pytest, no network.
"""
