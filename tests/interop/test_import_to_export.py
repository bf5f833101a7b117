"""A published folder through the commands: in, greedy text, training, and out again."""

import json
import shutil

import numpy as np
import pytest
import tokenizers

import export_hf
import generate
import import_hf
import published
import train
from fastweights import interop
from fastweights.errors import UserError

SOURCE = published.DATA / "published" / "tiny_qwen3_5"
FIELDS = ("steps=2", "data.length=16", "eval.max_batches=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`source`, with a tokenizer whose words say their ids, and `run`, made from it."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(SOURCE, folder / "source")
    words = {word(i): i for i in range(512)}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=word(0)))
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found.save(str(folder / "source" / interop.TOKENIZER))
    fields = [f"--config.{field}" for field in FIELDS]
    assert import_hf.main([str(folder / "source"), "--workdir", str(folder / "run"), *fields]) == 0
    return folder


def word(token):
    return "</s>" if token == 1 else f"w{token}"


def text(tokens):
    return " ".join(map(word, tokens))


def test_greedy_text_of_a_file_and_of_a_prompt(folder, tmp_path, capsys):
    stored = published.read(SOURCE).reference
    masks = stored["greedy_batch_mask"] == 1
    prompts = [
        text(ids[mask]) for ids, mask in zip(stored["greedy_batch_prompt"], masks, strict=True)
    ]
    assert len(set(map(len, prompts))) == 2
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    common = ["--workdir", str(folder / "run"), "--max_new_tokens", "16", "--chunk", "8"]
    generate.main([*common, "--input", str(lines), "--output", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for record, tokens in zip(records, stored["greedy_batch_new_tokens"], strict=True):
        assert record["text"].split() == text(tokens).split()
    capsys.readouterr()
    generate.main([*common, "--prompt", prompts[1]])
    assert capsys.readouterr().out == records[1]["text"] + "\n"


def test_its_own_end_tokens_end_a_text(folder, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    common = ["--workdir", str(run), "--prompt", text([5, 6, 7]), "--max_new_tokens", "4"]
    generate.main(common)
    first, *_ = tokens = capsys.readouterr().out.split()
    assert len(tokens) == 4
    for ids in (int(first[1:]), [3, int(first[1:])]):
        told = {"eos_token_id": ids}
        (run / "interop" / "files" / "generation_config.json").write_text(json.dumps(told))
        generate.main(common)
        assert capsys.readouterr().out.split() == []


def test_it_goes_out_where_other_devices_are(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    config = json.loads((run / "config.json").read_text())
    config["mesh"]["fsdp"] = 3
    (run / "config.json").write_text(json.dumps(config))
    export_hf.main(["--workdir", str(run), "--out", str(tmp_path / "out")])
    published.assert_same_folder(tmp_path / "out", folder / "source")


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (lambda at: shutil.rmtree(at / "aside"), "its folder aside is gone"),
        (lambda at: shutil.rmtree(at / "files"), "its folder files is gone"),
        (lambda at: edit(at / "record.json"), "model_type 'other' is not known"),
    ],
)
def test_a_broken_record_is_told(folder, tmp_path, breaks, told):
    shutil.copytree(folder / "run" / "interop", tmp_path / "interop")
    breaks(tmp_path / "interop")
    with pytest.raises(UserError, match=f"{told}.*; import again"):
        interop.load_record(tmp_path)


def edit(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "other"}))


def test_it_goes_out_as_it_came_in_and_trains_from_there(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    export_hf.main(["--workdir", str(run), "--out", str(tmp_path / "start")])
    published.assert_same_folder(tmp_path / "start", folder / "source")
    train.main(["--workdir", str(run)])
    export_hf.main(["--workdir", str(run), "--out", str(tmp_path / "tuned")])
    before, after = (interop.open_checkpoint(tmp_path / name) for name in ("start", "tuned"))
    assert before.published == after.published
    for name in before.published:
        assert not np.array_equal(before.read(name), after.read(name)), name
