"""generate.py, and the harness as an eval, on one run; the decode benchmark at tiny sizes."""

import json
import sys
import types

import jax
import numpy as np
import pytest

import bench_decode
import eval as eval_command
import generate
import runs
import train
from fastweights import config as config_lib
from fastweights import evals, flops, model
from fastweights.errors import UserError
from fastweights.evals import harness
from fastweights.generation.weights import for_decoding, unrolled
from fastweights.sharding import MeshConfig, make_mesh
from runs import TINY

PLAIN = ("model.pattern=A", "model.num_layers=1", "steps=2", "eval.max_batches=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on text of two steps."""
    workdir = tmp_path_factory.mktemp("generation") / "run"
    train.main(runs.train_command(workdir, *PLAIN, spec=f"{TINY}:text")[1:])
    return workdir


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    return str(path)


COMMON = ("--max_new_tokens", "6", "--burst", "4", "--chunk", "8", "--rows", "2")


def test_a_prompt_and_a_file_of_prompts_give_the_same_texts(run, tmp_path, capsys):
    prompts = ["The ", "def f(x", "a longer prompt than these"]
    lines = write_lines(tmp_path / "in.jsonl", *({"prompt": p, "id": p[:1]} for p in prompts))
    command = ["--workdir", str(run), *COMMON]
    out = tmp_path / "out.jsonl"
    generate.main([*command, "--input", lines, "--output", str(out)])
    told = capsys.readouterr()
    assert told.out == ""
    for part in ("prefill 37 tokens at", "decode 18 at", "caches", "(2 rows)"):
        assert part in told.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["prompt"], r["id"]) for r in records] == [(p, p[:1]) for p in prompts]
    assert all(r["finish"] == "length" and r["tokens"] == 6 for r in records)

    generate.main([*command, "--prompt", prompts[1]])
    assert capsys.readouterr().out == records[1]["text"] + "\n"
    # Without an output file the lines go to stdout; a stop string ends each text.
    stop = records[1]["text"][2]
    generate.main([*command, "--input", lines, "--stop", stop])
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again[1]["finish"] == "stop" and again[1]["text"] == records[1]["text"].split(stop)[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give either --prompt or --input"),
        (["--prompt", "a", "--input", "b"], "give either --prompt or --input"),
        (["--prompt", ""], "prompt 0 is empty; give it at least one token"),
        (["--prompt", "a", "--top_p", "2"], "top_p is 2.0; use a share"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--step", "9"], r"no checkpoint of step 9; it has \[2\]"),
        (["--prompt", "a", "--max_new_tokens", "0"], "new_tokens is 0; use 1 or more"),
        (["--prompt", "a", "--config.steps=3"], "takes no --config overrides"),
        (["--input", "nowhere.jsonl"], "--input 'nowhere.jsonl' can't be read"),
    ],
)
def test_what_cannot_be_generated_is_named(run, arguments, told):
    with pytest.raises(UserError, match=told):
        generate.main(["--workdir", str(run), *arguments])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", r"line 1 of '.*' is not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', r"line 2 of '.*' is {\"text\": \"b\"}; write"),
        ('{"prompt": 3}', "line 1 of .*; write"),
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ""}', "prompt 1 is empty"),
        (r'{"prompt": "a\ud800"}', "prompt 0 holds half a letter"),
    ],
)
def test_a_bad_file_of_prompts_is_named_by_its_line(run, tmp_path, content, told):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    out = tmp_path / "out.jsonl"
    out.write_text("of a run before")
    with pytest.raises(UserError, match=told):
        generate.main(
            ["--workdir", str(run), "--input", str(path), "--output", str(out), "--rows", "1"]
        )
    assert out.read_text() == "of a run before"


def test_letters_that_end_lines_elsewhere_do_not_end_one_here(tmp_path):
    record = {"prompt": "a\u2028b\u0085c"}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    assert generate.read_prompts(path) == [record]


def test_a_run_without_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(config_lib.to_json(config_lib.load(TINY)))
    with pytest.raises(UserError, match=r"data.kind is 'mqar', which has no tokenizer; .*json"):
        generate.main(["--workdir", str(tmp_path), "--prompt", "a"])


@pytest.fixture
def answers(run):
    config = config_lib.load(f"{TINY}:text", PLAIN)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    context = evals.Context(config, model.abstract_model(config.model)[0], mesh, run)
    params = model.init_params(config.model, jax.random.key(0))
    return harness.Answers(context, params), config.model, params


def test_answers_to_the_harness_are_those_of_the_full_forward(answers):
    """Continuations, their spaces, empty contexts, whole texts and generation."""
    found, config, params = answers
    graphdef, _, _ = model.abstract_model(config)
    apply = jax.jit(lambda p, t: jax.nn.log_softmax(model.bind(graphdef, p)(t)[0]))

    def expected(context, text):
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        before = np.frombuffer(context.encode(), np.uint8).astype(np.int64)
        before = before if len(before) else np.array([256])
        whole = np.zeros(16, np.int64)
        whole[: len(before) + len(ids)] = np.concatenate([before, ids])
        log_p = np.asarray(apply(params, whole[None])[0])[len(before) - 1 :][: len(ids)]
        greedy = bool(np.all(log_p.argmax(axis=1) == ids))
        return log_p[np.arange(len(ids)), ids].sum(), greedy

    # One letter that is what the model itself would write.
    padded = np.zeros((26, 16), np.int64)
    padded[:, 0] = 97 + np.arange(26)
    best = np.asarray(apply(params, padded))[:, 0].argmax(axis=1)
    own = next((chr(97 + i), chr(b)) for i, b in enumerate(best) if b < 128)
    pairs = [("abc", " de"), ("", "xy"), own, ("end  ", "ing")]
    # A space at the end of a context belongs to what follows.
    want = [expected(*pair) for pair in [*pairs[:3], ("end", "  ing")]]
    assert [greedy for _, greedy in want] == [False, False, True, False]
    for (likelihood, greedy), (w, g) in zip(found.loglikelihood(pairs), want, strict=True):
        np.testing.assert_allclose(likelihood, w, rtol=1e-4)
        assert greedy == g
    rolling = found.loglikelihood_rolling([("ab",), ("abcdef",)])
    np.testing.assert_allclose(
        rolling, [expected("", "ab")[0], expected("", "abcdef")[0]], rtol=1e-4
    )

    requests = [("ab", {"max_gen_toks": 5, "until": []}), ("b", {"max_gen_toks": 2}), ("", {})]
    requests[2] = ("", requests[0][1])
    texts = found.generate_until(requests)
    assert all(texts) and len(texts[1].encode()) <= len(texts[0].encode())
    stop = texts[0][1:3]
    (cut,) = found.generate_until([("ab", {"max_gen_toks": 5, "until": [stop]})])
    assert cut == texts[0].split(stop)[0]


@pytest.fixture
def stub(monkeypatch):
    """A harness of one task: it asks one question of each kind and reports what it was told."""
    package, api, kinds = (types.ModuleType(n) for n in ("lm_eval", "api", "model"))

    def simple_evaluate(lm, tasks, log_samples):
        request = types.SimpleNamespace
        if tasks != ["tiny"]:
            raise KeyError(tasks[0])
        ((likelihood, _),) = lm.loglikelihood([request(args=("a", "b"))])
        (whole,) = lm.loglikelihood_rolling([request(args=("b",))])
        (text,) = lm.generate_until([request(args=("a", {"max_gen_toks": 3}))])
        return {
            "results": {
                "tiny": {
                    "alias": "tiny",
                    "sample_len": 1,
                    "acc,none": likelihood,
                    "acc_stderr,none": "N/A",
                    "ppl,strict": whole,
                    "ppl_stderr,strict": 0.5,
                    "length,none": len(text),
                }
            }
        }

    package.simple_evaluate, package.api, api.model = simple_evaluate, api, kinds
    kinds.LM = type("LM", (), {})
    for module, name in ((package, "lm_eval"), (api, "lm_eval.api"), (kinds, "lm_eval.api.model")):
        monkeypatch.setitem(sys.modules, name, module)


def test_a_harness_task_is_an_eval(run, stub, capsys):
    eval_command.main(["--workdir", str(run), "--evals", "harness:tiny,ppl"])
    stored = json.loads((run / "evals" / "harness-tiny-2.json").read_text())
    assert stored["eval"] == "harness:tiny"
    assert [(r["slice"], r["metric"], r["stderr"]) for r in stored["rows"]] == [
        ("tiny", "acc,none", None), ("tiny", "ppl,strict", 0.5), ("tiny", "length,none", None)
    ]  # fmt: skip
    assert set(stored["metrics"]) == {"tiny/acc", "tiny/ppl,strict", "tiny/length"}
    assert stored["metrics"]["tiny/acc"] < 0
    assert "harness:tiny at step 2" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"the harness could not run 'huge' \(KeyError: 'huge'\)"):
        eval_command.main(["--workdir", str(run), "--evals", "harness:huge"])


def test_without_the_harness_one_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'need lm-evaluation-harness .*"fastweights\[harness\]"'):
        eval_command.main(["--workdir", str(run), "--evals", "harness:tiny"])
    with pytest.raises(UserError, match="names no task; write harness:TASK"):
        eval_command.main(["--workdir", str(run), "--evals", "harness:"])


def bench(capsys, *arguments):
    bench_decode.main(["--config", TINY, "--steps", "2", "--runs", "2", *arguments])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_decode_benchmark_prints_both_models_at_each_context(capsys):
    head, prefill, _, *rows = bench(
        capsys, "--contexts", "20,40", "--bandwidth", "1e7", "--prefill_length", "16"
    )
    assert "'GA'," in head and "'AA'}" in head
    assert prefill[:3] == ["prefill", "of", "16"]
    assert [(r[1], r[2]) for r in rows] == [
        ("20", "hybrid"), ("20", "twin"), ("40", "hybrid"), ("40", "twin")
    ]  # fmt: skip
    models = {"hybrid": config_lib.load(TINY).model}
    models["twin"] = bench_decode.twin(models["hybrid"])
    for batch, context, name, ms, speed, moved, floor, slower in rows:
        expected = flops.decode_bytes(models[name], 1, int(context))["total"]
        assert batch == "1" and int(moved.replace(",", "")) == expected
        seconds = float(ms) / 1e3
        np.testing.assert_allclose(float(speed), 1 / seconds, rtol=0.01)
        np.testing.assert_allclose(float(floor[:-1]), 100 * expected / 1e7 / seconds, rtol=0.02)
        assert slower == "0.0%" or context == "40"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--contexts", "20,x"], "--contexts is '20,x'; give whole numbers above 0"),
        (["--batches", "0"], "--batches is '0'"),
        (["--runs", "0"], "--runs is 0; use 1 or more"),
        (["--bandwidth", "-1"], "--bandwidth is -1.0; give bytes/s"),
        (["--config.model.pattern=G"], "pattern G has no A"),
    ],
)
def test_bad_benchmarks_are_refused(arguments, told):
    with pytest.raises(UserError, match=told):
        bench_decode.main(["--config", TINY, *arguments])


def test_a_benchmarks_cache_is_that_of_a_read_context():
    """Attention sees the whole context and goes on behind it."""
    config = unrolled(config_lib.load(TINY).model)
    case = bench_decode.Case(config, bench_decode.random_params(config), 2, 12, 2, 1)
    case.fill()
    layer = case.cache["tail"]["layer_1"]
    assert int(layer["index"]) == 12 and np.all(np.asarray(layer["position"]) == 12)
    held = np.asarray(layer["slot_document"])
    assert held.dtype == np.int32 and np.all(held[:, :12] == 1) and np.all(held[:, 12:] == 0)


def test_caches_that_do_not_fit_are_left_out():
    models = {"hybrid": config_lib.load(TINY).model}
    models["twin"] = bench_decode.twin(models["hybrid"])
    hybrid, both = (
        sum(flops.cache_bytes(model, 2, 100)["total"] for model in list(models.values())[:n])
        for n in (1, 2)
    )
    for spare, names in ((both, ["hybrid", "twin"]), (hybrid, ["hybrid"]), (0, [])):
        limit = int((1000 + spare) / 0.9) + 1
        assert bench_decode.fit(models, 1000, 2, 100, limit) == names
    assert bench_decode.fit(models, 1000, 2, 100, None) == ["hybrid", "twin"]


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_are_those_of_parameters_and_caches(tied):
    config = config_lib.load(TINY, [f"model.tie_embeddings={str(tied).lower()}"]).model
    graphdef, shapes, _ = model.abstract_model(config)
    params = jax.eval_shape(lambda p: for_decoding(config, p), shapes)
    if not tied:
        params["embedding"] = jax.ShapeDtypeStruct((3, config.d_model), params["embedding"].dtype)
    cache = jax.eval_shape(lambda p: model.bind(graphdef, p).init_cache(3, 10), shapes)

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    mixers = cache["groups"]
    attention = {n: mixers["layer_1"][n] for n in ("k", "v")}
    counts = flops.decode_bytes(config, 3, 10)
    assert counts["parameters"] == size(params)
    assert counts["state"] == 2 * size(mixers["layer_0"])
    assert counts["kv"] == size(attention) * 11 // 10
    assert counts["total"] == sum(counts[n] for n in ("parameters", "state", "kv"))
    with pytest.raises(UserError, match="asked for 0 sequences"):
        flops.decode_bytes(config, 0, 10)


def test_bandwidth_is_known_or_not_told():
    assert flops.peak_bandwidth("NVIDIA H200") == 4.8e12
    assert flops.peak_bandwidth("NVIDIA H100 PCIe") is None
    assert flops.peak_bandwidth("cpu") is None
