"""Copying in order, in reverse, and from many stacks at once.

    selective_copy   . a . . b c . | > > >        targets a b c; where they stood says nothing
    palindrome       a b c | c b                  targets c b a, from the bar on
    stack            +1 a +2 b +1 c -1 . -2 .     targets c at -1, b at -2

Selective copying is MAD's (arXiv:2403.17844) and Griffin's (arXiv:2402.19427); palindromes and
stacks are of the Kimi Linear report (arXiv:2510.26692).

Array legend: N examples, T tokens, C copied, H half a palindrome, S stacks, D depth, P steps.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig
from fastweights.tasks.draws import Array, Draws, interleave

DEPTH = 16  # of a stack; a push on a full one becomes a pop


@dataclasses.dataclass(frozen=True)
class SelectiveCopyConfig(TaskConfig):
    """Entries are (length, copied). Token 0 is blank, V - 1 the prompt, the rest are copied."""

    NAME: ClassVar[str] = "selective_copy"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "copied")

    vocab_size: int = 16
    train: tuple[tuple[int, int, float], ...] = ((64, 8, 1.0),)
    test: tuple[tuple[int, int], ...] = ((64, 8), (128, 8))

    def check_entry(self, field: str, length: int, copied: int) -> None:
        check(
            copied >= 1 and 2 * copied <= length,
            f"{self.NAME}.{field} copies {copied} tokens in {length}; copy at least 1, and give "
            f"at least {2 * max(copied, 1)} tokens.",
        )
        check(
            self.vocab_size >= 4,
            f"{self.NAME}.vocab_size is {self.vocab_size}; it must be at least 4.",
        )

    def part(self, length: int, copied: int) -> Slice:
        return Slice(length, choices=self.vocab_size - 2, marks=(("C", copied),))

    def answers(self, part: Slice) -> int:
        return part.marks[0][1]

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, copied = draws.xp, part.marks[0][1]
        before = part.length - copied
        items_NC = draws.integers(1, self.vocab_size - 1, (count, copied))
        place_NC = xp.sort(draws.distinct(count, before, copied), axis=1)
        shown_NT = draws.put(xp.zeros((count, before), np.int32), place_NC, items_NC)
        tail, head = ((0, 0), (0, copied)), ((0, 0), (before, 0))
        tokens_NT = xp.pad(shown_NT, tail, constant_values=self.vocab_size - 1)
        return tokens_NT, xp.pad(items_NC, head, constant_values=-1)


@dataclasses.dataclass(frozen=True)
class PalindromeConfig(TaskConfig):
    """Entries are lengths, twice the number of tokens to reverse. Token V - 1 is the bar."""

    NAME: ClassVar[str] = "palindrome"

    vocab_size: int = 16
    train: tuple[tuple[int, float], ...] = ((32, 1.0),)
    test: tuple[int, ...] = (32, 64)

    def check_entry(self, field: str, length: int) -> None:
        check(
            length >= 2 and length % 2 == 0,
            f"{self.NAME}.{field} has the length {length}; it must be even and at least 2.",
        )
        check(
            self.vocab_size >= 4,
            f"{self.NAME}.vocab_size is {self.vocab_size}; it must be at least 4.",
        )

    def part(self, length: int) -> Slice:
        return Slice(length, choices=self.vocab_size - 2)

    def answers(self, part: Slice) -> int:
        return part.length // 2

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, half = draws.xp, part.length // 2
        items_NH = draws.integers(1, self.vocab_size - 1, (count, half))
        back_NH = items_NH[:, ::-1]
        bar_N1 = xp.full((count, 1), self.vocab_size - 1, np.int32)
        tokens_NT = xp.concatenate([items_NH, bar_N1, back_NH[:, :-1]], axis=1)
        return tokens_NT, xp.pad(back_NH, ((0, 0), (half, 0)), constant_values=-1)


@dataclasses.dataclass(frozen=True)
class StackConfig(TaskConfig):
    """Entries are lengths, two tokens a step: which stack to push on or to pop, and the value.

    A pop is followed by the filler 0, and what it takes off is the answer asked for at it. Stacks
    are chosen evenly and pushes and pops alike, but that an empty stack is pushed on.

    Attributes:
      stacks: how many there are; the report has 64, in up to 2,048 tokens.
      values: different values.
    """

    NAME: ClassVar[str] = "stack"

    train: tuple[tuple[int, float], ...] = ((64, 1.0),)
    test: tuple[int, ...] = (64, 128)
    stacks: int = 8
    values: int = 16

    def __post_init__(self):
        super().__post_init__()
        check(
            self.stacks >= 1 and self.values >= 2,
            f"stack has {self.stacks} stacks and {self.values} values; give at least 1 and 2.",
        )

    @property
    def vocab_size(self) -> int:
        """The filler, the values, then a token for a push on each stack and one for a pop."""
        return 1 + self.values + 2 * self.stacks

    def check_entry(self, field: str, length: int) -> None:
        check(
            length >= 4 and length % 2 == 0,
            f"stack.{field} has the length {length}; it must be even and at least 4.",
        )

    def part(self, length: int) -> Slice:
        return Slice(length, choices=self.values)

    def answers(self, part: Slice) -> int:
        return part.length // 4

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, steps = draws.xp, part.length // 2
        which_NP = draws.integers(0, self.stacks, (count, steps))
        pop_NP = draws.integers(0, 2, (count, steps))
        values_NP = draws.integers(1, self.values + 1, (count, steps))
        stack_S, depth_D = xp.arange(self.stacks)[None], xp.arange(DEPTH)[None]

        def step(carry, which_N, pop_N, value_N):
            memory_NSD, depth_NS = carry
            chosen_NS = which_N[:, None] == stack_S
            depth_N = (chosen_NS * depth_NS).sum(axis=1)
            pops_N = ((pop_N == 1) & (depth_N > 0)) | (depth_N == DEPTH)
            top_ND = (depth_N - pops_N)[:, None] == depth_D
            cell_NSD = chosen_NS[:, :, None] & top_ND[:, None, :]
            answer_N = xp.where(pops_N, (cell_NSD * memory_NSD).sum(axis=(1, 2)), -1)
            written_NSD = cell_NSD & ~pops_N[:, None, None]
            memory_NSD = xp.where(written_NSD, value_N[:, None, None], memory_NSD)
            depth_NS = depth_NS + chosen_NS * xp.where(pops_N, -1, 1)[:, None]
            return (memory_NSD, depth_NS), answer_N

        empty = (
            xp.zeros((count, self.stacks, DEPTH), np.int32),
            xp.zeros((count, self.stacks), np.int32),
        )
        _, answers_NP = draws.scan(step, empty, (which_NP, pop_NP, values_NP))
        pops_NP = answers_NP >= 0
        named_NP = 1 + self.values + which_NP + self.stacks * pops_NP
        tokens_NT = interleave(draws, named_NP, xp.where(pops_NP, 0, values_NP))
        return tokens_NT, interleave(draws, answers_NP, xp.full_like(answers_NP, -1))
