"""Kernels for Hopper GPUs in Pallas' Mosaic GPU: `rule.py` puts them together.

Nothing is imported here, so that `support.py` can be asked without Pallas.
"""
