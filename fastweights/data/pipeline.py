"""From a data config to batches: infinite for training, finite by name for evaluation.

A dataset is a `grain.MapDataset` whose element i is the i-th batch, so any batch can be had without
those before it and a run's place in its data is one number, its step.

Every process makes the same global batch and keeps its own consecutive rows, whatever the number of
processes. Evaluation batches all have the same shape; the last is filled up with rows of padding
(segment 0, no target).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import grain
import jax
import numpy as np

from fastweights import tasks
from fastweights.data.corpus import Corpus, corpus_in_memory, open_corpus
from fastweights.data.packing import to_batch
from fastweights.data.source import builtin_documents
from fastweights.data.tokenizer import BYTES, TOKENIZER, JsonTokenizer, Tokenizer, load_tokenizer
from fastweights.errors import UserError, check
from fastweights.tasks import TASKS, Batch, TaskConfig
from fastweights.tasks.base import IGNORE
from fastweights.tasks.batches import stream

TEXT = "text"
HELD_OUT = "held_out"

# Stands for infinity: more batches than any run takes.
ENDLESS = 2**40


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Which text.

    Attributes:
      path: a folder made by scripts/prepare_data.py; empty for the built-in text, which is the
        English help inside CPython.
      tokenizer: "bytes" or the path of a tokenizer.json, for the built-in text. Prepared data bring
        their own; a tokenizer.json beside them, as an imported model has, must be the same.
      held_out: for the built-in text, the share of its topics that is never trained on.

    Raises:
      UserError: if the held-out share is no share.
    """

    path: str = ""
    tokenizer: str = BYTES
    held_out: float = 0.1

    def __post_init__(self):
        check(
            0 < self.held_out < 1,
            f"text.held_out is {self.held_out}; it must lie between 0 and 1, for example 0.1.",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train and evaluate on.

    Attributes:
      kind: "text" or the name of a task.
      length: tokens of a row.
      on_device: make a task's training batches by the compiled program of `tasks.device_batch`.
        Runs of a sweep that differ in seed and learning rate alone then train as one program.
      text: options for kind "text".
      mqar, parity, ...: options for the kinds of these names.

    Raises:
      UserError: for an unknown kind or a length that holds no training example.
    """

    kind: str = "mqar"
    length: int = 256
    on_device: bool = False
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    mqar: tasks.MQARConfig = dataclasses.field(default_factory=tasks.MQARConfig)
    mqar_overwrite: tasks.OverwriteConfig = dataclasses.field(default_factory=tasks.OverwriteConfig)
    mqar_composed: tasks.ComposedConfig = dataclasses.field(default_factory=tasks.ComposedConfig)
    in_context_recall: tasks.InContextRecallConfig = dataclasses.field(
        default_factory=tasks.InContextRecallConfig
    )
    noisy_recall: tasks.NoisyRecallConfig = dataclasses.field(
        default_factory=tasks.NoisyRecallConfig
    )
    fuzzy_recall: tasks.FuzzyRecallConfig = dataclasses.field(
        default_factory=tasks.FuzzyRecallConfig
    )
    memorize: tasks.MemorizeConfig = dataclasses.field(default_factory=tasks.MemorizeConfig)
    compression: tasks.CompressionConfig = dataclasses.field(
        default_factory=tasks.CompressionConfig
    )
    selective_copy: tasks.SelectiveCopyConfig = dataclasses.field(
        default_factory=tasks.SelectiveCopyConfig
    )
    palindrome: tasks.PalindromeConfig = dataclasses.field(default_factory=tasks.PalindromeConfig)
    stack: tasks.StackConfig = dataclasses.field(default_factory=tasks.StackConfig)
    k_hop: tasks.KHopConfig = dataclasses.field(default_factory=tasks.KHopConfig)
    parity: tasks.ParityConfig = dataclasses.field(default_factory=tasks.ParityConfig)
    mod_arith: tasks.ModArithConfig = dataclasses.field(default_factory=tasks.ModArithConfig)
    s3: tasks.S3Config = dataclasses.field(default_factory=tasks.S3Config)
    s5: tasks.S5Config = dataclasses.field(default_factory=tasks.S5Config)
    parity_retrieval: tasks.ParityRetrievalConfig = dataclasses.field(
        default_factory=tasks.ParityRetrievalConfig
    )
    phonebook: tasks.PhonebookConfig = dataclasses.field(default_factory=tasks.PhonebookConfig)
    niah: tasks.NIAHConfig = dataclasses.field(default_factory=tasks.NIAHConfig)

    def __post_init__(self):
        kinds = (TEXT, *TASKS)
        check(
            self.kind in kinds,
            f"data.kind is {self.kind!r}; it must be one of {', '.join(kinds)}.",
        )
        check(self.length >= 1, f"data.length is {self.length}; it must be at least 1 token.")
        check(
            self.kind != TEXT or not self.on_device,
            "data.on_device is true but text is read on the host; set it to false.",
        )
        if self.kind != TEXT:
            tasks.check_fits(self.task, self.length)

    def answers(self, rows: int | None) -> int:
        """The most targets of a training batch of `rows` rows; with None, of one of its rows."""
        if self.kind == TEXT:
            return self.length * (rows or 1)
        return tasks.most_answers(self.task, rows, self.length)

    @property
    def decoder(self) -> str:
        """The `ModelConfig.decoder` that these data ask for."""
        return "none" if self.kind == TEXT else self.task.DECODER

    @property
    def task(self) -> TaskConfig:
        """The config of the task that `kind` names."""
        return getattr(self, self.kind)


def open_text(config: DataConfig) -> Corpus:
    """The corpus of a config of kind "text".

    Raises:
      UserError: if the prepared data are broken, or have another row length or tokenizer.
    """
    text = config.text
    if not text.path:
        return corpus_in_memory(
            builtin_documents,
            tokenizer=text.tokenizer,
            length=config.length,
            held_out=text.held_out,
        )
    corpus = open_corpus(text.path)
    if text.tokenizer != BYTES:
        wanted, found = pathlib.Path(text.tokenizer), pathlib.Path(text.path) / TOKENIZER
        check(wanted.is_file(), f"There is no tokenizer file '{wanted}'; correct text.tokenizer.")
        check(
            found.is_file() and found.read_bytes() == wanted.read_bytes(),
            f"the data at {text.path!r} were prepared with another tokenizer than text.tokenizer; "
            f"prepare them with --tokenizer {wanted}.",
        )
    check(
        corpus.length == config.length,
        f"data.length is {config.length} but the rows at {text.path!r} have {corpus.length} "
        "tokens; set data.length to that or prepare the data again.",
    )
    return corpus


def run_tokenizer(config: DataConfig, workdir: pathlib.Path | None = None) -> Tokenizer:
    """What encodes prompts for a run: `workdir`'s tokenizer.json if it has one, else the text's.

    Special tokens spelt out in a prompt are read as such, unlike in training data.

    Raises:
      UserError: there is none, or it is broken.
    """
    own = workdir and workdir / TOKENIZER
    if own and own.is_file():
        tokenizer = load_tokenizer(own)
    else:
        check(
            config.kind == TEXT,
            f"data.kind is '{config.kind}', which has no tokenizer; use a run on text, or put a "
            "tokenizer.json into the run's folder.",
        )
        # The built-in text need not be read for that.
        path = config.text.path
        tokenizer = open_text(config).tokenizer if path else load_tokenizer(config.text.tokenizer)
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.read_special_tokens()
    return tokenizer


def vocab_size(config: DataConfig) -> int:
    """Token ids in use: a model needs at least this vocabulary."""
    if config.kind == TEXT:
        return open_text(config).tokenizer.vocab_size
    return config.task.vocab_size


def train_dataset(
    config: DataConfig, *, seed: int, rows: int, process_index: int = 0, process_count: int = 1
) -> grain.MapDataset[Batch]:
    """Endless training batches; batch i is a pure function of (config, seed, i).

    Text is shuffled anew each epoch. Epochs follow each other without a gap, inside a batch too: no
    row is left out or padded.

    Args:
      config: what to train on.
      seed: of the data alone; independent of the model's.
      rows: rows of the global batch.
      process_index: which process' rows to keep.
      process_count: number of processes.

    Returns:
      Batches of `rows // process_count` rows.

    Raises:
      UserError: if the rows do not divide among the processes, or the data are broken.
    """
    mine = _own_rows(rows, process_index, process_count)
    stream(seed, 0)  # Refuses a seed out of range now rather than in the first batch.
    if config.kind == TEXT:
        corpus = open_text(config)
        # The order of rows is drawn for the global batch; only this process' rows are then read.
        order = grain.MapDataset.range(len(corpus.rows["train"])).seed(seed).shuffle().repeat()
        return order.batch(rows).map(lambda indices: _read(corpus, "train", indices[mine]))

    make_batch = tasks.train_batch
    if config.on_device:
        make_batch = jax.jit(tasks.device_batch, static_argnames=("config", "rows", "length"))

    def make(index: int) -> Batch:
        args = dict(seed=seed, index=index, rows=rows, length=config.length)
        batch = jax.device_get(make_batch(config.task, **args))
        return {name: values[mine] for name, values in batch.items()}

    return grain.MapDataset.range(ENDLESS).map(make)


def eval_datasets(
    config: DataConfig, *, rows: int, process_index: int = 0, process_count: int = 1
) -> dict[str, grain.MapDataset[Batch]]:
    """Evaluation batches by name: "held_out" for text, the slices' names for a task.

    Rows of a slice longer than `config.length` have the slice's length. A task's examples are made
    when first asked for.
    """
    mine = _own_rows(rows, process_index, process_count)
    if config.kind == TEXT:
        corpus = open_text(config)
        count = len(corpus.rows[HELD_OUT])

        def read(start: int) -> Batch:
            return _read(corpus, HELD_OUT, np.arange(start, start + rows)[mine])

        return {HELD_OUT: grain.MapDataset.range(0, count, rows).map(read)}

    datasets = {}
    for part in tasks.eval_slices(config.task):
        per_row = max(config.length, part.length) // part.length
        count = -(-config.task.test_examples // per_row)
        make = functools.cache(functools.partial(tasks.eval_rows, config.task, part, config.length))
        cut = functools.partial(_cut, make, rows=rows, mine=mine)
        datasets[part.name] = grain.MapDataset.range(0, count, rows).map(cut)
    return datasets


def iterate(dataset: grain.MapDataset[Batch], *, prefetch: int = 2) -> grain.DatasetIterator[Batch]:
    """An iterator whose state is the index of the next batch, made ready by one thread in advance.

    Orbax saves and restores it; `grain.experimental.set_next_index(iterator, step)` moves it.

    Args:
      dataset: from `train_dataset` or `eval_datasets`.
      prefetch: batches to hold ready.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    return iter(dataset.to_iter_dataset(options))


def _own_rows(rows: int, process_index: int, process_count: int) -> slice:
    check(rows >= 1, f"The batch has {rows} rows; it must have at least 1.")
    if rows % process_count:
        raise UserError(
            f"The batch has {rows} rows, which do not divide among {process_count} processes; "
            f"make it a multiple of {process_count}."
        )
    share = rows // process_count
    return slice(process_index * share, (process_index + 1) * share)


def _read(corpus: Corpus, split: str, indices: np.ndarray) -> Batch:
    """Reads rows into a batch; an index past the end gives a row of padding."""
    source = corpus.rows[split]
    nothing = np.zeros(0, np.int32)
    rows = [source[int(i)] if i < len(source) else nothing for i in indices]
    return to_batch(rows, corpus.length, corpus.tokenizer.eod_id)


def _cut(make: Callable[[], Batch], start: int, *, rows: int, mine: slice) -> Batch:
    """Batch rows from `start` on, filled up with padding to `rows`, of which `mine` are kept."""
    batch = {}
    for name, values_RL in make().items():
        found = values_RL[start : start + rows]
        empty = IGNORE if name == "targets" else 0
        padding = ((0, rows - len(found)), (0, 0))
        batch[name] = np.pad(found, padding, constant_values=empty)[mine]
    return batch
