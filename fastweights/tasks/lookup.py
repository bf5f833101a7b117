"""Looking things up in long contexts: a phone book, and needles in a haystack of text.

    phonebook   anna berg 5551234 / carl dorn ... / ? carl dorn 5...   the number, digit by digit
    niah        ... text ... The code of wokalu is 4072816. ... text ... The code of wokalu is 4...

Each digit of an answer is asked for at the token before it, and stands in the sequence after that,
as it would while text is written. Needles follow RULER (Hsieh et al. 2024, arXiv:2404.06654): three
kinds of single needles, and many keys, many values of one key, and many queries; over bytes of real
text, the English help inside CPython.

Array legend: N examples, T tokens, L lines, Q queries, M needles, D characters of a value.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig
from fastweights.tasks.draws import Array, Draws

DIGITS = 7
SHOTS = 2  # lines looked up before the last one
LINE = 2 + DIGITS + 1
FIRST_DIGIT, NEW_LINE, ASK, FIRST_NAME = 1, 11, 12, 13


@dataclasses.dataclass(frozen=True)
class PhonebookConfig(TaskConfig):
    """Entries are (length, lines). Every line has a first and a last name and seven digits.

    Tokens: 0 filler, 1 to 10 the digits, 11 end of line, 12 a question, then half first names, half
    last names. No two lines of an example have the same name.
    """

    NAME: ClassVar[str] = "phonebook"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "lines")

    vocab_size: int = 64
    train: tuple[tuple[int, int, float], ...] = ((256, 20, 1.0),)
    test: tuple[tuple[int, int], ...] = ((256, 20), (512, 40))

    @property
    def names(self) -> int:
        """First names, and as many last names."""
        return (self.vocab_size - FIRST_NAME) // 2

    def check_entry(self, field: str, length: int, lines: int) -> None:
        where = f"{self.NAME}.{field} has {lines} lines in {length} tokens"
        needed = LINE * (lines + SHOTS + 1)
        check(
            lines > SHOTS and length >= needed,
            f"{where}; give at least {SHOTS + 1} lines and {needed} tokens.",
        )
        check(
            self.names**2 >= lines,
            f"{where} but {self.NAME}.vocab_size {self.vocab_size} makes only "
            f"{max(self.names, 0) ** 2} names; raise it.",
        )

    def part(self, length: int, lines: int) -> Slice:
        return Slice(length, lines, choices=10)

    def answers(self, part: Slice) -> int:
        return (SHOTS + 1) * DIGITS

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, lines = draws.xp, part.pairs
        name_NL = draws.distinct(count, self.names**2, lines)
        first_NL = FIRST_NAME + name_NL // self.names
        last_NL = FIRST_NAME + self.names + name_NL % self.names
        digits_NLD = FIRST_DIGIT + draws.integers(0, 10, (count, lines, DIGITS))
        ends_NL = xp.full((count, lines), NEW_LINE, np.int32)
        book_NLC = xp.concatenate(
            [first_NL[:, :, None], last_NL[:, :, None], digits_NLD, ends_NL[:, :, None]], axis=2
        )
        asked_NQ = draws.distinct(count, lines, SHOTS + 1)
        found_NQC = xp.take_along_axis(book_NLC, asked_NQ[:, :, None], axis=1)[:, :, :-1]
        query_NQC = xp.concatenate([xp.full_like(found_NQC[:, :, :1], ASK), found_NQC], axis=2)
        # At the last name and each digit but the last, the next digit.
        wanted_NQC = xp.pad(found_NQC[:, :, 2:], ((0, 0), (0, 0), (2, 1)), constant_values=-1)
        parts = [x.reshape(count, -1) for x in (book_NLC, query_NQC, wanted_NQC)]
        rest = part.length - parts[0].shape[1] - parts[1].shape[1]
        tokens_NT = xp.pad(xp.concatenate(parts[:2], axis=1), ((0, 0), (0, rest)))
        around = ((0, 0), (parts[0].shape[1], rest))
        return tokens_NT, xp.pad(parts[2], around, constant_values=-1)


CONSONANTS, VOWELS = b"bcdfghjklmnprstvwz", b"aeiou"
SYLLABLES = len(CONSONANTS) * len(VOWELS)
BEFORE_KEY, BEFORE_VALUE, AFTER_VALUE = b" The code of ", b" is ", b"."
NOISE = (
    b" Rain falls on the hill. The river runs down to the sea. A quiet day, and the road is long."
)
KEY = 6
UUID = b"hhhhhhhh-hhhh-hhhh-hhhh-hhhhhhhhhhhh"  # h: a hexadecimal digit
VARIANTS = ("single_1", "single_2", "single_3", "multi_key", "multi_value", "multi_query")


@functools.cache
def haystack() -> np.ndarray:
    """Bytes of real text."""
    # The data room imports the tasks, so its text can only be had once both are there.
    from fastweights.data.source import builtin_documents

    return np.frombuffer("\n".join(builtin_documents()).encode(), np.uint8)


@dataclasses.dataclass(frozen=True)
class NIAHConfig(TaskConfig):
    """Entries are (length, needles); a token is a byte.

    Attributes:
      variant: "single_1": one needle with a number of seven digits in repeated noise; "single_2":
        in text; "single_3": in text, a UUID; "multi_key": all needles have different keys, one is
        asked for; "multi_value": all have the same key, all values are asked for in their order;
        "multi_query": different keys, all asked for in random order. Every single variant takes
        exactly one needle.
    """

    NAME: ClassVar[str] = "niah"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "needles")

    train: tuple[tuple[int, int, float], ...] = ((256, 1, 1.0),)
    test: tuple[tuple[int, int], ...] = ((256, 1), (512, 1), (1024, 1))
    variant: str = "single_2"

    def __post_init__(self):
        check(
            self.variant in VARIANTS,
            f"{self.NAME}.variant is {self.variant!r}; it must be one of {', '.join(VARIANTS)}.",
        )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def form(self) -> bytes:
        """A value with its changing characters as h or d."""
        return UUID if self.variant == "single_3" else b"d" * DIGITS

    @property
    def needle(self) -> int:
        """Bytes of a needle."""
        return len(BEFORE_KEY) + KEY + len(BEFORE_VALUE) + len(self.form) + len(AFTER_VALUE)

    def tail(self, needles: int) -> int:
        """Bytes of the questions and answers at the end."""
        if self.variant == "multi_value":
            return self.needle + (needles - 1) * (1 + len(self.form))
        return self.needle * (needles if self.variant == "multi_query" else 1)

    def check_entry(self, field: str, length: int, needles: int) -> None:
        where = f"{self.NAME}.{field} has {needles} needles in {length} bytes"
        single = self.variant.startswith("single")
        check(
            needles == 1 if single else 1 <= needles <= SYLLABLES,
            f"{where}; {self.variant} takes {'exactly 1' if single else f'1 to {SYLLABLES}'}.",
        )
        needed = needles * self.needle + self.tail(needles) + 1
        check(
            length >= needed,
            f"{where}; needles, question and answer are longer than that haystack, so give at "
            f"least {needed} bytes.",
        )

    def part(self, length: int, needles: int) -> Slice:
        return Slice(length, needles, choices=16 if self.variant == "single_3" else 10)

    def answers(self, part: Slice) -> int:
        told = part.pairs if self.variant in ("multi_value", "multi_query") else 1
        return told * (len(self.form) - self.form.count(b"-"))

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, needles = draws.xp, part.pairs
        width, body = self.needle, part.length - self.tail(part.pairs)
        keys_NMC = self._keys(draws, count, needles)
        values_NMD, changes_D = self._values(draws, count, needles)
        needle_NMC = _sentence(xp, keys_NMC, values_NMD)

        source = np.tile(np.frombuffer(NOISE, np.uint8), 2 + body // len(NOISE))
        if self.variant != "single_1":
            source = haystack()
            check(body < len(source), f"The haystack has {len(source)} bytes, fewer than {body}.")
        start_N1 = draws.integers(0, len(source) - body + 1, (count, 1))
        hay_NT = xp.asarray(source)[start_N1 + xp.arange(body)[None]].astype(np.int32)
        # Sorted places at least a needle's width apart.
        place_NM = xp.sort(draws.distinct(count, body - needles * (width - 1), needles), axis=1)
        place_NM = place_NM + (width - 1) * xp.arange(needles)[None]
        inside_NMC = place_NM[:, :, None] + xp.arange(width)[None, None]
        hay_NT = draws.put(
            hay_NT, inside_NMC.reshape(count, -1), needle_NMC.reshape(count, -1).astype(np.int32)
        )

        # What is asked: some needles again, each answer behind its question.
        asked = {"multi_query": needles}.get(self.variant, 1)
        order_NQ = draws.distinct(count, needles, asked)[:, :, None]
        again_NQC = xp.take_along_axis(needle_NMC, order_NQ, axis=1)
        answers_NT = again_NQC.reshape(count, -1)
        value_at = len(BEFORE_KEY) + KEY + len(BEFORE_VALUE)
        is_answer_C = np.zeros(width, bool)
        is_answer_C[value_at : width - len(AFTER_VALUE)] = changes_D
        is_answer_T = np.tile(is_answer_C, asked)
        if self.variant == "multi_value":
            # One question; the values in their order, a space between two.
            spaced_NMD = xp.concatenate(
                [values_NMD, xp.full_like(values_NMD[:, :, :1], 32)], axis=2
            )
            answers_NT = xp.concatenate(
                [needle_NMC[:, 0, :value_at], spaced_NMD.reshape(count, -1)], axis=1
            )
            is_answer_T = np.concatenate(
                [is_answer_C[:value_at], np.tile(np.append(changes_D, False), needles)]
            )
        tokens_NT = xp.concatenate([hay_NT, answers_NT.astype(np.int32)], axis=1)
        next_NT = xp.pad(tokens_NT[:, 1:], ((0, 0), (0, 1)))
        asks_T = np.pad(is_answer_T, (body, 0))
        asks_T = np.append(asks_T[1:], False)
        return tokens_NT, xp.where(xp.asarray(asks_T)[None], next_NT, -1)

    def _keys(self, draws: Draws, count: int, needles: int) -> Array:
        """Words of three syllables [N, M, KEY]: all different, or all the same for many values."""
        words = 1 if self.variant == "multi_value" else needles
        first_NM = draws.distinct(count, SYLLABLES, words)[:, :, None]
        rest_NM2 = draws.integers(0, SYLLABLES, (count, words, 2))
        syllable_NM3 = draws.xp.concatenate([first_NM, rest_NM2], axis=2)
        letters = [
            _letters(draws.xp, CONSONANTS)[syllable_NM3 // len(VOWELS)],
            _letters(draws.xp, VOWELS)[syllable_NM3 % len(VOWELS)],
        ]
        keys_NMC = draws.xp.stack(letters, axis=3).reshape(count, words, KEY)
        return draws.xp.broadcast_to(keys_NMC, (count, needles, KEY))

    def _values(self, draws: Draws, count: int, needles: int) -> tuple[Array, np.ndarray]:
        """Random values [N, M, D], and which of their characters change."""
        form_D = np.frombuffer(self.form, np.uint8)
        changes_D = np.isin(form_D, np.frombuffer(b"dh", np.uint8))
        alphabet = b"0123456789abcdef" if self.variant == "single_3" else b"0123456789"
        drawn_NMD = draws.integers(0, len(alphabet), (count, needles, len(form_D)))
        letters_NMD = _letters(draws.xp, alphabet)[drawn_NMD]
        fixed_D = draws.xp.asarray(form_D)[None, None]
        return draws.xp.where(
            draws.xp.asarray(changes_D)[None, None], letters_NMD, fixed_D
        ), changes_D


def _letters(xp: Any, text: bytes) -> Array:
    return xp.asarray(np.frombuffer(text, np.uint8))


def _sentence(xp: Any, keys_NMC: Array, values_NMD: Array) -> Array:
    """Needles [N, M, width]."""

    def fixed(text: bytes) -> Array:
        return xp.broadcast_to(_letters(xp, text)[None, None], (*keys_NMC.shape[:2], len(text)))

    parts = [fixed(BEFORE_KEY), keys_NMC, fixed(BEFORE_VALUE), values_NMD, fixed(AFTER_VALUE)]
    return xp.concatenate(parts, axis=2)
