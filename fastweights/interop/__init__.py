"""Published hybrids in and out: checkpoints in safetensors as transformers reads and writes them.

One file a family (`qwen3_5.py`, `qwen3_next.py`, `olmo_hybrid.py`, `mamba2.py`, `mamba.py`) holds
its table of tensors and its config; `checkpoint.py` opens a folder, `load.py` reads it, `export.py`
writes one.
"""

from fastweights.interop.checkpoint import Checkpoint, open_checkpoint
from fastweights.interop.export import entries, export_imported, export_new, tensors_of
from fastweights.interop.express import express
from fastweights.interop.load import load_params
from fastweights.interop.record import TOKENIZER, end_ids
from fastweights.interop.record import load as load_record
from fastweights.interop.record import save as save_record

# Fields in which an imported run may differ from what the source's config says.
DTYPE_FIELDS = ("model.dtype", "model.param_dtype")

__all__ = [
    "DTYPE_FIELDS",
    "TOKENIZER",
    "Checkpoint",
    "end_ids",
    "entries",
    "export_imported",
    "export_new",
    "express",
    "load_params",
    "load_record",
    "open_checkpoint",
    "save_record",
    "tensors_of",
]
