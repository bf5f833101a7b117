"""Documents and tokenizers that the data tests share."""

import random

import pytest
import tokenizers


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Sixty documents of 1 to 400 characters with letters of one to four bytes."""
    draw = random.Random(0)
    alphabet = "abcdefgh \n\tÄß→漢🙂"
    return ["".join(draw.choices(alphabet, k=draw.randint(1, 400))) for _ in range(60)]


@pytest.fixture(scope="session")
def tokenizer_json(documents, tmp_path_factory) -> str:
    """The path of a byte-level BPE tokenizer, trained on the documents."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        documents,
        vocab_size=400,
        show_progress=False,
        special_tokens=["<pad>", "<|endoftext|>"],
    )
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    bpe.save(path)
    return path
