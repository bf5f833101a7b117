"""Data: text and recall tasks as random-access datasets of packed batches."""

from fastweights.data.corpus import Corpus, Counts, open_corpus
from fastweights.data.pipeline import (
    DataConfig,
    TextConfig,
    eval_datasets,
    iterate,
    open_text,
    run_tokenizer,
    train_dataset,
    vocab_size,
)
from fastweights.data.tokenizer import Tokenizer, check_vocab, load_tokenizer

__all__ = [
    "Corpus",
    "Counts",
    "DataConfig",
    "TextConfig",
    "Tokenizer",
    "check_vocab",
    "eval_datasets",
    "iterate",
    "load_tokenizer",
    "open_corpus",
    "open_text",
    "run_tokenizer",
    "train_dataset",
    "vocab_size",
]
