"""Text to token ids and back: bytes, or any `tokenizer.json` of Hugging Face `tokenizers`.

A tokenizer has `vocab_size`, `eod_id` (the token between documents) and two methods:
`encode_many(texts) -> list of int64 arrays` and `decode(ids) -> str`. Neither adds special tokens;
packing puts the end-of-document token in.
"""

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fastweights.errors import UserError, check

BYTES = "bytes"
TOKENIZER = "tokenizer.json"

# Names under which published tokenizers keep their end-of-document token, in order of preference.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    vocab_size: int
    eod_id: int

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are the ids 0..255; 256 ends a document. Vocabulary: 257."""

    vocab_size = 257
    eod_id = 256

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Bytes that are no UTF-8 (a document cut inside a letter) become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A `tokenizer.json` file. Its vocabulary size is one more than its highest id.

    Special tokens spelt out in a text are encoded as ordinary text, so that no document can hold
    the token that ends it.

    Raises:
      UserError: if the file is missing or no tokenizer, or names no end-of-document token.
    """

    def __init__(self, path: str | os.PathLike[str]):
        import tokenizers  # Takes a while to load and most runs read bytes.

        path = os.fspath(path)
        check(
            os.path.isfile(path),
            f"There is no tokenizer file {path!r}; give the path of a tokenizer.json, or 'bytes'.",
        )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # The library raises bare Exception for every bad file.
            raise UserError(
                f"{path!r} is no tokenizer that the tokenizers library can read ({error}); "
                "give a tokenizer.json, or 'bytes'."
            ) from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [name for name in EOD_NAMES if name in ids]
        check(
            bool(known),
            f"{path!r} has none of the end-of-document tokens {', '.join(EOD_NAMES)}; "
            "add one of them to its vocabulary.",
        )
        self.eod_id = ids[known[0]]
        self.vocab_size = max(ids.values()) + 1

    def read_special_tokens(self) -> None:
        """From now on a special token spelt out in a text is that token: for prompts."""
        self._tokenizer.encode_special_tokens = False

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        plain = [int(i) for i in ids if i != self.eod_id]
        return self._tokenizer.decode(plain, skip_special_tokens=False)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """`"bytes"`, or the path of a `tokenizer.json`."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)


def check_vocab(data_vocab: int, model_vocab: int) -> None:
    """Raises `UserError` when the data hold ids that the model has no embedding for."""
    check(
        data_vocab <= model_vocab,
        f"The data use {data_vocab} token ids but the model's vocab_size is {model_vocab}; "
        f"set it to at least {data_vocab}.",
    )
