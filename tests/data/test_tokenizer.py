import numpy as np
import pytest
import tokenizers

from fastweights.data import check_vocab, load_tokenizer
from fastweights.errors import UserError

TEXTS = ["plain text", "Ä ß → 漢 🙂", "", "two\r\nlines\n", " spaces  kept ", "a<|endoftext|>b"]


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request):
    name = "bytes" if request.param == "bytes" else request.getfixturevalue("tokenizer_json")
    return load_tokenizer(name)


def test_text_comes_back_and_ids_fit(tokenizer):
    encoded = tokenizer.encode_many(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    for ids in encoded:
        assert ids.dtype == np.int64
        assert (ids >= 0).all() and (ids < tokenizer.vocab_size).all()
        assert tokenizer.eod_id not in ids, "a text must not be able to end its document"
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size


def test_decoding_leaves_the_document_ends_out(tokenizer):
    (ids,) = tokenizer.encode_many(["abc"])
    assert tokenizer.decode([tokenizer.eod_id, *ids, tokenizer.eod_id]) == "abc"


def test_bytes_are_the_utf8_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode_many(["é!"])[0].tolist() == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_json_vocabulary_counts_added_tokens(tokenizer_json, tmp_path):
    file = tokenizers.Tokenizer.from_file(tokenizer_json)
    before = load_tokenizer(tokenizer_json)
    file.add_tokens(["zzzz"])
    file.enable_truncation(2)
    file.enable_padding()
    file.save(str(tmp_path / "more.json"))
    after = load_tokenizer(tmp_path / "more.json")
    assert (after.vocab_size, after.eod_id) == (before.vocab_size + 1, before.eod_id)
    ids = after.encode_many(["zzzz and a text of many tokens"])[0]
    assert ids[0] == after.vocab_size - 1 and len(ids) > 2, "truncation in the file is not ours"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no tokenizer file .*nothing.json"),
        ("{", "no tokenizer that the tokenizers library can read"),
        ("eod", r"none of the end-of-document tokens <\|endoftext\|>"),
    ],
)
def test_bad_files_are_named(tmp_path, content, says):
    path = tmp_path / "nothing.json"
    if content == "eod":
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    elif content:
        path.write_text(content)
    with pytest.raises(UserError, match=says):
        load_tokenizer(path)


def test_a_model_with_too_few_embeddings_is_refused():
    check_vocab(257, 257)
    with pytest.raises(UserError, match="257 token ids but the model's vocab_size is 256"):
        check_vocab(257, 256)
