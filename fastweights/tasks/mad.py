"""Recall, memorisation and compression after MAD (Poli et al. 2024, arXiv:2403.17844), per token.

    in_context_recall   k1 v3 k2 v1 k1 v3 ...      a key that stood before asks for its value
    noisy_recall        the same with tokens of no meaning strewn between the pairs
    fuzzy_recall        keys and values are motifs of one to three tokens
    memorize            k1 . k7 . ...              the value is in the training data, never in sight
    compression         a b c |                    targets a b c, out of the stream at the bar alone

Where recall is asked for, the sequence shows the answers afterwards, so it teaches while it tests.
MAD's selective copying is in copying.py.

Array legend: N examples, T tokens, P pairs, U units (pairs and noise), K keys, M motifs.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig, unasked
from fastweights.tasks.draws import Array, Draws, interleave

MOTIFS = (1, 2, 2, 3)  # sizes of the motifs that eight tokens are cut into
LONGEST = max(MOTIFS)


def seen_before(draws: Draws, items_NP: Array, kinds: int) -> Array:
    """Whether each item stood in an earlier place of its row, bool [N, P]."""
    hot_NPK = items_NP[:, :, None] == draws.xp.arange(kinds)[None, None]
    return ((hot_NPK.cumsum(axis=1) > 1) & hot_NPK).any(axis=2)


@dataclasses.dataclass(frozen=True)
class InContextRecallConfig(TaskConfig):
    """Entries are lengths. Half of the tokens that are no noise are keys, half values.

    As in MAD, each key's value is drawn on its own, so that several keys can have one: who answers
    with any value of the row is right more often than one time in as many values, and that is
    what chance is here. The value that has stood most often so far is right in 0.32 of 8 keys.

    Attributes:
      vocab_size: keys, values and noise together.
      noise_tokens: of them, tokens without meaning.
      noise_share: share of the sequence that they fill.
    """

    NAME: ClassVar[str] = "in_context_recall"

    vocab_size: int = 16
    train: tuple[tuple[int, float], ...] = ((128, 1.0),)
    test: tuple[int, ...] = (128, 256)
    noise_tokens: int = 0
    noise_share: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check(
            0 <= self.noise_share < 1 and (self.noise_tokens > 0 or self.noise_share == 0),
            f"{self.NAME}.noise_share is {self.noise_share} with {self.noise_tokens} noise_tokens; "
            "it must be at least 0 and less than 1, and above 0 there must be tokens for it.",
        )
        check(
            0 <= self.noise_tokens <= self.vocab_size - 4,
            f"{self.NAME}.vocab_size {self.vocab_size} leaves no two keys and two values beside "
            f"{self.noise_tokens} noise_tokens; raise it.",
        )

    @property
    def keys(self) -> int:
        return (self.vocab_size - self.noise_tokens) // 2

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 2, f"{self.NAME}.{field} has the length {length}; a pair takes at least 2.")

    def part(self, length: int) -> Slice:
        # A guess is the value of the pair before. Where a key is asked for, it stood there already.
        pairs, other = self.pairs(length), 1 - 1 / self.keys
        asked = pairs - self.keys * (1 - other**pairs)
        same = (pairs - 1) / self.keys / asked if asked > 0 else 0.0
        return Slice(length, choices=self.keys, floor=same + (1 - same) / self.keys)

    def pairs(self, length: int) -> int:
        return max(round(length * (1 - self.noise_share)) // 2, 1)

    def answers(self, part: Slice) -> int:
        return part.length // 2

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, length = draws.xp, part.length
        pairs = self.pairs(length)
        noise = length - 2 * pairs
        value_of_NK = self.keys + draws.integers(0, self.keys, (count, self.keys))
        keys_NP = draws.integers(0, self.keys, (count, pairs))
        values_NP = xp.take_along_axis(value_of_NK, keys_NP, axis=1)
        tokens_NT = (
            draws.integers(2 * self.keys, self.vocab_size, (count, length))
            if noise
            else (xp.zeros((count, length), np.int32))
        )
        # Units of one or two tokens in random order; where the pairs among them begin.
        is_pair_U = np.arange(pairs + noise) < pairs
        is_pair_NU = draws.shuffled(
            xp.broadcast_to(xp.asarray(is_pair_U)[None], (count, pairs + noise))
        )
        width_NU = 1 + is_pair_NU.astype(np.int32)
        start_NU = width_NU.cumsum(axis=1) - width_NU
        place_NP = xp.sort(xp.where(is_pair_NU, start_NU, length), axis=1)[:, :pairs]
        tokens_NT = draws.put(tokens_NT, place_NP, keys_NP)
        tokens_NT = draws.put(tokens_NT, place_NP + 1, values_NP)
        answers_NP = xp.where(seen_before(draws, keys_NP, self.keys), values_NP, -1)
        return tokens_NT, draws.put(unasked(draws, count, length), place_NP, answers_NP)


@dataclasses.dataclass(frozen=True)
class NoisyRecallConfig(InContextRecallConfig):
    """In-context recall with noise, by default a fifth of the sequence."""

    NAME: ClassVar[str] = "noisy_recall"

    vocab_size: int = 32
    noise_tokens: int = 16
    noise_share: float = 0.2


@dataclasses.dataclass(frozen=True)
class FuzzyRecallConfig(TaskConfig):
    """Entries are lengths. Each example cuts the key tokens into motifs, and so the value tokens.

    Motifs of an example have no token in common, so a key is known to be whole at its last token,
    where the first token of the value is asked for; each token of a value asks for the next.
    """

    NAME: ClassVar[str] = "fuzzy_recall"

    vocab_size: int = 16
    train: tuple[tuple[int, float], ...] = ((128, 1.0),)
    test: tuple[int, ...] = (128, 256)

    def __post_init__(self):
        super().__post_init__()
        check(
            self.vocab_size >= 16 and self.vocab_size % 16 == 0,
            f"fuzzy_recall.vocab_size is {self.vocab_size}; it must be a multiple of 16.",
        )

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 8, f"fuzzy_recall.{field} has the length {length}; it must be at least 8.")

    def part(self, length: int) -> Slice:
        return Slice(length, choices=self.vocab_size // 2)

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, half = draws.xp, self.vocab_size // 2
        motifs = half * len(MOTIFS) // sum(MOTIFS)
        units = part.length // 2 + 1  # Enough of the shortest.
        which_NU = draws.integers(0, motifs, (count, units))
        again_NU = seen_before(draws, which_NU, motifs)
        tokens, used, asked = [], [], []
        for first in (0, half):
            motif_NML, real_NML = self._motifs(draws, count, first, motifs)
            pick_NU1 = which_NU[:, :, None]
            tokens.append(xp.take_along_axis(motif_NML, pick_NU1, axis=1))
            used.append(xp.take_along_axis(real_NML, pick_NU1, axis=1))
            asked.append(used[-1] & again_NU[:, :, None] & (first > 0))
        flat = [
            xp.concatenate(arrays, axis=2).reshape(count, -1) for arrays in (tokens, used, asked)
        ]
        # Real entries first, in their order.
        order_NE = xp.argsort(~flat[1], axis=1, stable=True)[:, : part.length + 1]
        stream_NE, _, asked_NE = (xp.take_along_axis(x, order_NE, axis=1) for x in flat)
        return stream_NE[:, :-1], xp.where(asked_NE[:, 1:], stream_NE[:, 1:], -1)

    def _motifs(self, draws: Draws, count: int, first: int, motifs: int) -> tuple[Array, Array]:
        """Tokens [N, M, LONGEST] of each motif and which of them are real."""
        xp, half = draws.xp, self.vocab_size // 2
        tokens_NK = first + draws.distinct(count, half, half)
        sizes_M = xp.asarray(np.tile(MOTIFS, motifs // len(MOTIFS)))
        sizes_NM = draws.shuffled(xp.broadcast_to(sizes_M[None], (count, motifs)))
        inside_L = xp.arange(LONGEST)[None, None]
        place_NML = (sizes_NM.cumsum(axis=1) - sizes_NM)[:, :, None] + inside_L
        place_NE = xp.minimum(place_NML, half - 1).reshape(count, -1)
        motif_NE = xp.take_along_axis(tokens_NK, place_NE, axis=1)
        return motif_NE.reshape(count, motifs, LONGEST), inside_L < sizes_NM[:, :, None]


@dataclasses.dataclass(frozen=True)
class MemorizeConfig(TaskConfig):
    """Entries are lengths. A fixed map from keys to values, the same in training and evaluation.

    Here the token alone tells the answer, to whoever has learnt the map: nothing is recalled from
    the context.

    Attributes:
      map_seed: of the map.
    """

    NAME: ClassVar[str] = "memorize"
    CHEATERS: ClassVar[tuple[str, ...]] = ("majority", "position")

    vocab_size: int = 256
    train: tuple[tuple[int, float], ...] = ((32, 1.0),)
    test: tuple[int, ...] = (32,)
    map_seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.vocab_size >= 4 and self.map_seed >= 0,
            f"memorize has vocab_size {self.vocab_size} and map_seed {self.map_seed}; give at "
            "least 4 tokens and a seed of at least 0.",
        )

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 2, f"memorize.{field} has the length {length}; it must be at least 2.")

    def part(self, length: int) -> Slice:
        return Slice(length, choices=self.vocab_size // 2)

    @property
    def value_of(self) -> np.ndarray:
        """The value of each token below V // 2; token 0 is the filler and no key."""
        half = self.vocab_size // 2
        return half + np.random.default_rng(self.map_seed).permutation(half)

    def answers(self, part: Slice) -> int:
        return part.length // 2

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, pairs = draws.xp, part.length // 2
        keys_NP = draws.integers(1, self.vocab_size // 2, (count, pairs))
        answers_NP = xp.asarray(self.value_of)[keys_NP]
        rest = ((0, 0), (0, part.length % 2))
        tokens_NT = xp.pad(interleave(draws, keys_NP, xp.zeros_like(keys_NP)), rest)
        targets_NT = interleave(draws, answers_NP, xp.full_like(answers_NP, -1))
        return tokens_NT, xp.pad(targets_NT, rest, constant_values=-1)


@dataclasses.dataclass(frozen=True)
class CompressionConfig(TaskConfig):
    """Entries are lengths: random tokens, then the bar V - 1.

    The model's decoder is told a position and the stream at the bar, and must say what stood there.
    It never sees the token itself, so the cheater that does is not one. Unlike MAD, the bar is not
    asked for: it is always the same.
    """

    NAME: ClassVar[str] = "compression"
    CHEATERS: ClassVar[tuple[str, ...]] = ("majority", "position")
    DECODER: ClassVar[str] = "positions"

    vocab_size: int = 16
    train: tuple[tuple[int, float], ...] = ((32, 1.0),)
    test: tuple[int, ...] = (32,)

    def __post_init__(self):
        super().__post_init__()
        check(
            self.vocab_size >= 3,
            f"compression.vocab_size is {self.vocab_size}; it must be at least 3.",
        )

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 2, f"compression.{field} has the length {length}; it must be at least 2.")

    def part(self, length: int) -> Slice:
        return Slice(length, choices=self.vocab_size - 1)

    def answers(self, part: Slice) -> int:
        return part.length - 1

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        items_NP = draws.integers(0, self.vocab_size - 1, (count, part.length - 1))
        end = ((0, 0), (0, 1))
        tokens_NT = draws.xp.pad(items_NP, end, constant_values=self.vocab_size - 1)
        return tokens_NT, draws.xp.pad(items_NP, end, constant_values=-1)
