"""Tasks of lm-evaluation-harness as evals: `harness:TASK`, with the extra `harness` installed.

The harness makes the requests and counts; this module answers them with the run's model over the
caches of `fastweights.generation`. Texts are never cut: a cache is made as long as the longest
request, and what a model cannot do at that length shows in its score.
"""

from __future__ import annotations

import importlib
import json
import logging
import pathlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastweights.data import DataConfig, run_tokenizer
from fastweights.errors import UserError, check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.generation import Engine, SamplingConfig, Scorer, complete

PREFIX = "harness:"
MAX_NEW_TOKENS = 256


class HarnessEval:
    """One task by its name in the harness, or by the path of its YAML file."""

    def __init__(self, name: str):
        self.task = name.removeprefix(PREFIX)
        check(bool(self.task), f"eval '{name}' names no task; write {PREFIX}TASK.")

    def check_fits(self, data: DataConfig) -> None:
        """Raises `UserError` without the harness; any data will do, tasks bring their own."""
        del data
        _import_harness()

    def evaluate(self, context: Context, params: Any) -> Result:
        """Runs the task; metrics as the harness names them, one row each with its standard error.

        Raises:
          UserError: a task that the harness does not know or can't load.
        """
        lm_eval = _import_harness()
        answers = Answers(context, params)
        try:
            found = lm_eval.simple_evaluate(
                make_model(answers), tasks=[self._load()], log_samples=False
            )
        except UserError:
            raise
        except Exception as error:  # What a task's loading raises has no class of its own.
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"the harness could not run '{self.task}' ({type(error).__name__}: {reason}); "
                "check the task's name and its data."
            ) from error
        rows, metrics = [], {}
        for task, values in found["results"].items():
            for key, value in values.items():
                name, _, filtered = key.partition(",")
                if name.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                if not filtered:  # counts of examples and the like
                    continue
                error = values.get(f"{name}_stderr,{filtered}")
                error = float(error) if isinstance(error, (int, float)) else None
                rows.append({"slice": task, "metric": key, "value": float(value), "stderr": error})
                metrics[f"{task}/{name}" if filtered == "none" else f"{task}/{key}"] = float(value)
        check(bool(rows), f"the harness reported no number for '{self.task}'; look at its task.")
        return Result(metrics, rows)

    def _load(self) -> Any:
        """The task's name, or what its YAML file says."""
        if not self.task.endswith(".yaml"):
            return self.task
        import yaml  # Comes with the harness.

        return yaml.safe_load(pathlib.Path(self.task).read_text())


class Answers:
    """A run's model answering requests given as plain tuples, in their order."""

    def __init__(self, context: Context, params: Any):
        self._model, self._params, self._rows = context.config.model, params, context.rows
        self._tokenizer = run_tokenizer(context.config.data, context.workdir)

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of continuations."""
        return self._score([self._pair(*request) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[tuple[str]]) -> list[float]:
        """Log-likelihood of whole texts, each after an end-of-document token."""
        pairs = [self._pair("", text) for (text,) in requests]
        return [likelihood for likelihood, _ in self._score(pairs)]

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Continuations up to a stop string; options of each request as the harness names them."""
        groups = defaultdict(list)
        for number, (_, options) in enumerate(requests):
            groups[json.dumps(options, sort_keys=True)].append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            options = requests[numbers[0]][1]
            prompts = self._encode([requests[n][0] for n in numbers])
            prompts = [ids if len(ids) else np.array([self._tokenizer.eod_id]) for ids in prompts]
            found = self._generate(prompts, options)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def _generate(self, prompts: list[np.ndarray], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        sampled = options.get("do_sample", False)
        sampling = SamplingConfig(
            temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
            top_k=int(options.get("top_k", 0)),
            top_p=float(options.get("top_p", 1.0)),
        )
        engine = Engine(
            self._model,
            self._params,
            rows=self._rows,
            prompt_length=max(map(len, prompts)),
            new_tokens=int(options.get("max_gen_toks", MAX_NEW_TOKENS)),
            vocab_size=self._tokenizer.vocab_size,
            sampling=sampling,
        )
        stop = [until] if isinstance(until, str) else until
        return _by_length(
            prompts,
            len,
            lambda ordered: [
                done.text for done in complete(engine, self._tokenizer, ordered, stop=stop)
            ],
        )

    def _score(self, texts: list[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        if not texts:
            return []
        longest = max(len(ids) for ids, _ in texts)
        scorer = Scorer(self._model, self._params, rows=self._rows, length=longest)
        return [tuple(score) for score in _by_length(texts, lambda t: len(t[0]), scorer.score)]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._tokenizer.encode_many(texts)

    def _pair(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """Both texts as one row of tokens, and how many of its last tokens continue.

        Spaces at the end of the context belong to the word behind them. The tokens are those of the
        joined text, so that a token may not begin in one and end in the other unscored.
        """
        bare = context.rstrip()
        whole, before = self._encode([context + continuation, bare])
        if not len(before):
            before = np.array([self._tokenizer.eod_id])
            whole = np.concatenate([before, whole])
        return whole, len(whole) - len(before)


def _by_length(items: list[Any], length: Callable, answer: Callable) -> list[Any]:
    """`answer(items)`, asked in order of falling length, so that batches hold little padding."""
    order = sorted(range(len(items)), key=lambda i: -length(items[i]))
    found = [None] * len(items)
    for i, result in zip(order, answer([items[i] for i in order]), strict=True):
        found[i] = result
    return found


def make_model(answers: Answers) -> Any:
    """`answers` as the harness wants a model to be."""
    lm_eval = _import_harness()

    class Model(lm_eval.api.model.LM):
        def loglikelihood(self, requests):
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests):
            return answers.loglikelihood_rolling([request.args for request in requests])

        def generate_until(self, requests):
            return answers.generate_until([request.args for request in requests])

    return Model()


def _import_harness() -> Any:
    try:
        lm_eval = importlib.import_module("lm_eval")
        importlib.import_module("lm_eval.api.model")
    except ImportError as error:
        raise UserError(
            f"evals of the form {PREFIX}TASK need lm-evaluation-harness ({error}); install it with "
            'pip install "fastweights[harness]".'
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    return lm_eval
