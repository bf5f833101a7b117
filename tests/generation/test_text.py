"""Streams of text: whole letters only, stop strings wherever tokens are cut, reasons to end."""

import numpy as np
import pytest
import tokenizers

from fastweights.data import load_tokenizer
from fastweights.data.tokenizer import ByteTokenizer
from fastweights.errors import UserError
from fastweights.generation import TextStream, complete
from fastweights.generation.text import CONTEXT

BYTES = ByteTokenizer()
TEXT = "Ä naïve 漢字 🙂 costs 3 €, <end> is no end"


def encode(text: str) -> np.ndarray:
    return BYTES.encode_many([text])[0]


def stream(ids, stop=(), prompt="", size=1, tokenizer=BYTES):
    """(pieces, completion) of ids pushed `size` at a time."""
    row = TextStream(tokenizer, tokenizer.encode_many([prompt])[0], stop)
    pieces = [row.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, row.close()], row.completion


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("prompt", ["", "what a 漢"])
def test_pieces_are_whole_letters_and_join_to_the_text(size, prompt):
    pieces, done = stream(encode(TEXT), prompt=prompt, size=size)
    assert "".join(pieces) == done.text == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert (done.tokens, done.finish) == (len(encode(TEXT)), "length")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("<end>",), TEXT.split("<end>")[0]),
        (("字 🙂",), "Ä naïve 漢"),
        # The one that comes first in the text ends it, whatever their order.
        (("<end>", "costs", "<"), TEXT.split("costs")[0]),
        (("sts", "costs"), TEXT.split("costs")[0]),
        (("never",), TEXT),
        (("no end.", "<end> was"), TEXT),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(size, stop, kept):
    pieces, done = stream(encode(TEXT), stop, size=size)
    assert "".join(pieces) == done.text == kept
    assert done.finish == ("length" if kept == TEXT else "stop")
    if kept != TEXT and size == 1:
        # It ends with the token that completes the stop string.
        met = next(s for s in stop if TEXT.startswith(s, len(kept)))
        assert done.tokens == len(encode(kept + met))


def test_what_may_become_a_stop_string_is_held_back():
    row = TextStream(BYTES, encode(""), ["aab"])
    assert [row.push(encode(letter)) for letter in "xaaa"] == ["x", "", "", "a"]
    assert row.push(encode("c")) == "aac"
    assert row.push(encode("aa")) == "" and row.close() == "aa"


def test_the_end_of_document_token_ends_the_text():
    ids = np.concatenate([encode("ab"), [BYTES.eod_id], encode("cd")])
    for size in (1, 5):
        pieces, done = stream(ids, size=size)
        assert "".join(pieces) == done.text == "ab"
        assert (done.tokens, done.finish) == (3, "end")


def test_bytes_that_are_no_letters_do_not_hold_the_text_up():
    """A model may write any bytes: each comes out as a replacement character in the end."""
    pieces, done = stream(np.full(40, 0xFF))
    assert done.text == "\N{REPLACEMENT CHARACTER}" * 40
    assert max(map(len, pieces)) <= CONTEXT


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer that marks spaces in front of words and drops the first one of a text."""
    words = ["</s>", "▁a", "▁dog", "▁", "s", "<sep>"]
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="</s>")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    found.decoder = tokenizers.decoders.Metaspace()
    found.add_special_tokens(["<sep>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.save(str(path))
    return path


def test_the_space_before_the_first_new_word_stays(sentencepiece):
    pieces, done = stream([2, 1, 2], prompt="a", tokenizer=load_tokenizer(sentencepiece))
    assert pieces == [" dog", " a", " dog", ""]
    assert done.text == " dog a dog"


def test_special_tokens_are_text_in_data_and_tokens_in_prompts(sentencepiece):
    tokenizer = load_tokenizer(sentencepiece)
    assert 5 not in tokenizer.encode_many(["a<sep>"])[0]
    tokenizer.read_special_tokens()
    assert tokenizer.encode_many(["a<sep>"])[0].tolist() == [1, 5]


class Scripted:
    """Answers as an engine does: prompt i goes on with text i, two tokens at a time."""

    rows = 2

    def __init__(self, *texts):
        self.texts, self.steps = [encode(text) for text in texts], 0

    def generate(self, prompts, first_index):
        texts = self.texts[first_index : first_index + len(prompts)]
        for at in range(0, max(map(len, texts)), 2):
            self.steps += 1
            yield [text[at : at + 2] for text in texts]


def test_batches_are_completed_in_order_and_end_when_all_rows_have():
    engine = Scripted("ab. and on and on", "abcd. more", "abc", "x. y", "last one.")
    heard = {}
    done = complete(
        engine,
        BYTES,
        [encode("p")] * 5,
        stop=["."],
        on_text=lambda number, piece: heard.setdefault(number, []).append(piece),
    )
    found = list(done)
    assert [(c.text, c.finish) for c in found] == [
        ("ab", "stop"), ("abcd", "stop"), ("abc", "length"), ("x", "stop"), ("last one", "stop")
    ]  # fmt: skip
    assert {n: "".join(pieces) for n, pieces in heard.items()} == {
        n: c.text for n, c in enumerate(found)
    }
    # The first two had both stopped after six tokens.
    assert engine.steps == 3 + 2 + 5


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="a stop string is empty"):
        next(complete(Scripted("a"), BYTES, [encode("p")], stop=[".", ""]))
