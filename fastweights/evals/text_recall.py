"""Recall asked of a language model as text, in its own tokenizer: needles, phone books, pairs.

Each prompt ends with (or, for pairs, has in it) answers that only its own text can tell. A token of
an answer counts when it is the model's likeliest, all tokens before it given; a prompt counts when
all of them do. Everything is scored twice, by one run over the whole prompt and by prefill and
then single tokens through the cache; both must agree.

Array legend: B prompts, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from fastweights.data import DataConfig, run_tokenizer
from fastweights.data.pipeline import TEXT
from fastweights.data.tokenizer import Tokenizer
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.generation.engine import Engine
from fastweights.generation.scoring import score_steps
from fastweights.tasks import lookup
from fastweights.tasks.base import IGNORE
from fastweights.tasks.batches import stream

Pieces = list[tuple[str, bool]]
"""A prompt as texts in a row; True marks answers."""

PROMPTS = 32
NEEDLES = 4  # of the variants with many
SEED = 0
TEXT_STREAM = 3

# fmt: off
FIRST_NAMES = ["Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Greta", "Hugo", "Ida", "Jonas",
               "Kira", "Lars", "Mona", "Nils", "Olga", "Paul"]
LAST_NAMES = ["Adler", "Berg", "Conrad", "Dorn", "Engel", "Falk", "Gross", "Hahn", "Iken", "Jung",
              "Koch", "Lang", "Moser", "Nagel"]
# fmt: on


@dataclasses.dataclass(frozen=True)
class TextRecall:
    """An eval of `PROMPTS` prompts a size; sizes are halved from the largest that fits.

    Attributes:
      name: of the eval.
      make: (generator, size) -> prompt. A size is what makes it long: characters of text, or lines.
      least: the smallest size that is worth asking.
      most: the largest that can be made.
    """

    name: str
    make: Callable[[np.random.Generator, int], Pieces]
    least: int
    most: int

    def check_fits(self, data: DataConfig) -> None:
        """Any data will do, for the tokenizer may lie in the run's folder; text has one already."""
        if data.kind == TEXT:
            self._check_least(run_tokenizer(data), data.length)

    def evaluate(self, context: Context, params: Any) -> Result:
        """Rows for the largest size whose prompts fit a training row, a half and a quarter of it.

        Raises:
          UserError: there is no tokenizer, it can't spell a prompt, or the smallest prompt does not
            fit a training row.
        """
        data = context.config.data
        tokenizer = run_tokenizer(data, context.workdir)
        largest = self._largest(tokenizer, data.length)
        rows = []
        for size in sorted({max(largest // part, self.least) for part in (4, 2, 1)}):
            batch = encode(self._prompts(size), tokenizer)
            rows.append({"slice": f"size {size}", **self._score(context, params, batch)})
        mean = float(np.mean([row["recall"] for row in rows]))
        agree = min(row["agree"] for row in rows)
        return Result({"mean": mean, "agree": agree}, rows)

    def _prompts(self, size: int) -> list[Pieces]:
        rng = stream(SEED, TEXT_STREAM, size)
        return [self.make(rng, size) for _ in range(PROMPTS)]

    def _largest(self, tokenizer: Tokenizer, length: int) -> int:
        """By halving: the largest size at which all prompts fit into `length` tokens."""

        def fits(size: int) -> bool:
            return self._longest(tokenizer, size) <= length

        self._check_least(tokenizer, length)
        low, high = self.least, self.least * 2
        while high < self.most and fits(high):
            low, high = high, high * 2
        high = min(high, self.most)
        while high - low > max(low // 16, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _longest(self, tokenizer: Tokenizer, size: int) -> int:
        return encode(self._prompts(size), tokenizer)["tokens"].shape[1]

    def _check_least(self, tokenizer: Tokenizer, length: int) -> None:
        shortest = self._longest(tokenizer, self.least)
        check(
            shortest <= length,
            f"the shortest prompts of the eval {self.name} have {shortest} tokens, and data.length "
            f"is {length}; lengthen the rows of the data, or leave the eval out.",
        )

    def _score(self, context: Context, params: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        pieces = [
            {name: values[i : i + context.rows] for name, values in batch.items()}
            for i in range(0, PROMPTS, context.rows)
        ]
        padded = [_fill_rows(piece, context.rows) for piece in pieces]
        scored = list(context.scores(params, padded))
        correct_BT, nll_BT = (
            np.concatenate([getattr(losses, name) for _, losses in scored])[:PROMPTS]
            for name in ("correct_BT", "nll_BT")
        )
        decoded_BT, decoded_nll_BT = decode(context, params, batch)
        asked_BT = batch["targets"] != IGNORE
        return {
            "length": batch["tokens"].shape[1],
            "recall": float(correct_BT[asked_BT].mean()),
            "whole": float((correct_BT | ~asked_BT).all(axis=1).mean()),
            "nll": float(nll_BT[asked_BT].mean()),
            "decoded": float(decoded_BT[asked_BT].mean()),
            "agree": float((correct_BT == decoded_BT)[asked_BT].mean()),
            "nll_gap": float(np.abs(nll_BT - decoded_nll_BT)[asked_BT].max()),
            "answers": int(asked_BT.sum()),
        }


def decode(
    context: Context, params: Any, batch: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Correctness and loss [B, T], by prefill up to the first answer and one token a call after it.

    Positions before the first answer hold False and 0.
    """
    tokens_BT, targets_BT = batch["tokens"], batch["targets"]
    asked_T = (targets_BT != IGNORE).any(axis=0)
    start, stop = int(asked_T.argmax()), int(np.flatnonzero(asked_T)[-1]) + 1
    model, steps = context.config.model, stop - start
    engine = Engine(model, params, rows=context.rows, prompt_length=start + 1, new_tokens=steps)
    prompts = list(tokens_BT[:, : start + 1])
    # What follows the last answer is asked for nothing, so that any token will do for it.
    after_BN = np.pad(tokens_BT, ((0, 0), (0, 1)))[:, start + 1 : stop + 1]
    correct_BT, nll_BT = np.zeros(targets_BT.shape, bool), np.zeros(targets_BT.shape)
    found = score_steps(engine, prompts, after_BN, targets_BT[:, start:stop])
    nll_BT[:, start:stop], correct_BT[:, start:stop] = found
    return correct_BT, nll_BT


def encode(prompts: list[Pieces], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """A batch of prompts, filled up at the end; the answers' tokens are the only targets.

    Not asked are tokens of spaces and dashes, which anyone can tell.

    Raises:
      UserError: the tokenizer does not give a prompt's text back.
    """
    texts = [text for pieces in prompts for text, _ in pieces]
    ids = iter(tokenizer.encode_many(texts))
    rows = []
    for pieces in prompts:
        parts = [(next(ids), is_answer) for _, is_answer in pieces]
        tokens = np.concatenate([part for part, _ in parts])
        answers = np.concatenate(
            [
                _asked(part, tokenizer) if is_answer else [False] * len(part)
                for part, is_answer in parts
            ]
        )
        text = "".join(text for text, _ in pieces)
        check(
            tokenizer.decode(tokens) == text,
            f"the tokenizer can't spell the prompt {text[-40:]!r}: it decodes to "
            f"{tokenizer.decode(tokens)[-40:]!r}; use one that keeps all characters, or bytes.",
        )
        rows.append((tokens[:-1], np.where(answers[1:], tokens[1:], IGNORE)))
    length = max(len(tokens) for tokens, _ in rows)

    def laid(row: np.ndarray, empty: int) -> np.ndarray:
        return np.pad(row, (0, length - len(row)), constant_values=empty).astype(np.int32)

    batch = {
        "tokens": np.stack([laid(tokens, 0) for tokens, _ in rows]),
        "targets": np.stack([laid(targets, IGNORE) for _, targets in rows]),
    }
    ones = np.ones_like(batch["tokens"])
    return batch | {"segment_ids": ones, "positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1}


def _asked(answer: np.ndarray, tokenizer: Tokenizer) -> list[bool]:
    return [bool(tokenizer.decode([token]).strip(" -")) for token in answer]


def _fill_rows(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    missing = ((0, rows - len(batch["tokens"])), (0, 0))
    empty = {"targets": IGNORE}
    return {
        name: np.pad(values, missing, constant_values=empty.get(name, 0))
        for name, values in batch.items()
    }


def _word(rng: np.random.Generator) -> str:
    """Three syllables."""
    consonants, vowels = lookup.CONSONANTS.decode(), lookup.VOWELS.decode()
    return "".join(
        consonants[rng.integers(len(consonants))] + vowels[rng.integers(len(vowels))]
        for _ in range(3)
    )


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Different ones."""
    words: dict[str, None] = {}
    while len(words) < count:
        words[_word(rng)] = None
    return list(words)


def _drawn(rng: np.random.Generator, form: str) -> str:
    """The form with a digit for each d and a hexadecimal one for each h."""
    letters = {"d": "0123456789", "h": "0123456789abcdef"}
    return "".join(letters[c][rng.integers(len(letters[c]))] if c in letters else c for c in form)


def _number(rng: np.random.Generator) -> str:
    return _drawn(rng, "d" * lookup.DIGITS)


def needles(rng: np.random.Generator, size: int, variant: str) -> Pieces:
    """`size` characters with a needle, or `NEEDLES`, at random places, then what is asked.

    The variants are those of the task (`lookup.NIAHConfig`): in noise, in text, a UUID; one of
    many keys, all values of one key in their order, all keys in random order.
    """
    text = lookup.NOISE.decode() * (2 + size // len(lookup.NOISE))
    if variant != "single_1":
        text = lookup.haystack().tobytes().decode()
    start = int(rng.integers(len(text) - size))
    hay = text[start : start + size]
    count = 1 if variant.startswith("single") else NEEDLES
    one_key = variant == "multi_value"
    words = _words(rng, 1) * count if one_key else _words(rng, count)
    questions = [f" The code of {word} is" for word in words]
    form = lookup.UUID.decode() if variant == "single_3" else "d" * lookup.DIGITS
    values = [_drawn(rng, form) for _ in words]

    parts = np.split(np.array(list(hay)), np.sort(rng.choice(size, count, replace=False)))
    told = "".join(parts[0])
    for question, value, after in zip(questions, values, parts[1:], strict=True):
        told += f"{question} {value}." + "".join(after)
    asked = [int(rng.integers(count))]
    if variant == "multi_query":
        asked = [int(i) for i in rng.permutation(count)]
    pieces: Pieces = [(told, False)]
    for i in asked:
        pieces.append((questions[i], False))
        for value in values if one_key else [values[i]]:
            pieces.append((f" {value}", True))
        pieces.append((".", False))
    return pieces[:-1]


def phone_book(rng: np.random.Generator, size: int) -> Pieces:
    """`size` lines of names and numbers, two looked up and one to look up."""
    everyone = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    names = [everyone[i] for i in rng.permutation(len(everyone))[:size]]
    book = {name: f" {_number(rng)}" for name in names}
    lines = "".join(f"{name}:{number}\n" for name, number in book.items())
    *shown, asked = [names[i] for i in rng.permutation(len(names))[:3]]
    shots = "".join(f"{name}:{book[name]}\n" for name in shown)
    return [(f"{lines}\n{shots}{asked}:", False), (book[asked], True)]


def pairs(rng: np.random.Generator, size: int) -> Pieces:
    """`size` words with a number each, then all of them again in another order."""
    words = {word: f" {rng.integers(10, 100)}" for word in _words(rng, size)}
    told = "".join(f"{word}{number}\n" for word, number in words.items())
    pieces: Pieces = [(f"{told}\n", False)]
    for i in rng.permutation(size):
        word = list(words)[i]
        pieces += [(f"{word}", False), (words[word], True), ("\n", False)]
    return pieces


def _niah(variant: str) -> TextRecall:
    name = "niah" if variant == "single_2" else f"niah_{variant}"
    return TextRecall(name, functools.partial(needles, variant=variant), least=32, most=200_000)


NIAH = {eval_.name: eval_ for eval_ in map(_niah, lookup.VARIANTS)}
PHONEBOOK = TextRecall("phonebook", phone_book, least=3, most=200)
MQAR_TEXT = TextRecall("mqar_text", pairs, least=2, most=400)
