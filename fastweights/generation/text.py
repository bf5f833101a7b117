"""From prompts as text to texts: streaming pieces that are whole letters, stop strings, reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched

import numpy as np

from fastweights.data.tokenizer import Tokenizer
from fastweights.errors import check
from fastweights.generation.engine import Engine

UNFINISHED_LETTER = "\N{REPLACEMENT CHARACTER}"
# Tokens decoded along before the new ones, for tokenizers whose first token loses its space; more
# than any letter has.
CONTEXT = 8


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came after one prompt.

    Attributes:
      text: without the stop string and what follows it.
      tokens: generated tokens, the one that ended it included.
      finish: "stop" (a stop string), "end" (an end token) or "length".
    """

    text: str
    tokens: int
    finish: str


class TextStream:
    """Turns one row's tokens into text piece by piece.

    A piece never ends inside a letter that takes several tokens, nor inside what may still become a
    stop string.

    Args:
      tokenizer: what decodes.
      prompt: the row's prompt.
      stop: strings that end the text; not part of it.
      end_ids: tokens that end it beside the tokenizer's; not part of it either.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | np.ndarray,
        stop: Sequence[str],
        end_ids: Sequence[int] = (),
    ):
        self._end_ids = {tokenizer.eod_id, *end_ids}
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._recent = [int(i) for i in prompt[-CONTEXT:]]
        # Of the recent tokens these are in the text already.
        self._settled = len(self._recent)
        self._held = ""
        self._parts: list[str] = []
        self.tokens = 0
        self.finish = ""

    def push(self, ids: Iterable[int]) -> str:
        """Takes new tokens; returns the text that is now certain, perhaps none."""
        new = ""
        for token in ids:
            if self.finish:
                break
            self.tokens += 1
            if int(token) in self._end_ids:
                self.finish = "end"
                new += self._take(self._decoded(final=True), final=True)
                break
            self._recent.append(int(token))
            new += self._take(self._decoded(), final=False)
        return new

    def close(self) -> str:
        """Ends the text where it is; returns what was held back."""
        if self.finish:
            return ""
        self.finish = "length"
        return self._take(self._decoded(final=True), final=True)

    @property
    def completion(self) -> Completion:
        return Completion("".join(self._parts), self.tokens, self.finish)

    def _decoded(self, final: bool = False) -> str:
        """Text of the tokens that are not settled yet, and settles them; "" inside a letter."""
        before = self._tokenizer.decode(self._recent[: self._settled])
        text = self._tokenizer.decode(self._recent)
        pending = len(self._recent) - self._settled
        if text.endswith(UNFINISHED_LETTER) and pending < CONTEXT and not final:
            return ""
        # What is decoded next needs a few tokens before it and no more.
        self._recent = self._recent[-CONTEXT:]
        self._settled = len(self._recent)
        return text[len(before) :]

    def _take(self, piece: str, final: bool) -> str:
        """Adds a piece; returns what no stop string can take back."""
        text = self._held + piece
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            text, self._held, self.finish = text[: min(found)], "", "stop"
        elif final:
            self._held = ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parts.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def complete(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    stop: Sequence[str] = (),
    end_ids: Sequence[int] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> Iterator[Completion]:
    """Completes prompts batch by batch, in order.

    Args:
      engine: compiled for at least the longest prompt.
      tokenizer: what encoded the prompts.
      prompts: token ids, one array a prompt.
      stop: strings that end a text.
      end_ids: tokens that do, beside the tokenizer's end of a document.
      on_text: called with a prompt's number and each new piece of its text.

    Raises:
      UserError: an empty stop string, or as `Engine.generate`.
    """
    check(all(stop), "a stop string is empty; leave it out or give it a letter.")
    number = 0
    for batch in batched(prompts, engine.rows):
        streams = [TextStream(tokenizer, ids, stop, end_ids) for ids in batch]

        def tell(row: int, piece: str, first: int = number) -> None:
            if piece and on_text:
                on_text(first + row, piece)

        for tokens_BN in engine.generate(batch, number):
            for row, (stream, ids) in enumerate(zip(streams, tokens_BN, strict=True)):
                tell(row, stream.push(ids))
            if all(stream.finish for stream in streams):
                break
        for row, stream in enumerate(streams):
            tell(row, stream.close())
            yield stream.completion
        number += len(batch)
