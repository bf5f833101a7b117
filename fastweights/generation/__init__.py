"""Text out of a model: prefill and decode over its caches, sampling, streaming."""

from fastweights.generation.engine import Engine, Timing
from fastweights.generation.sampling import SamplingConfig
from fastweights.generation.scoring import Score, Scorer
from fastweights.generation.text import Completion, TextStream, complete

__all__ = [
    "Completion",
    "Engine",
    "SamplingConfig",
    "Score",
    "Scorer",
    "TextStream",
    "Timing",
    "complete",
]
