"""Kernels for TPUs in Pallas' Mosaic TPU: `rule.py` puts those of the rules together.

Nothing is imported here, so that `support.py` can be asked without Pallas.
"""
