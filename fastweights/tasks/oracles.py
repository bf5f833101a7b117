"""A solver for each task that reads tokens as a model does and must score 1.0.

Each is written from what the task says, not from how its examples are made: it gets the config and
the tokens of one example, and answers at every position with a prediction, -1 where it has none.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fastweights.tasks import copying, hops, lookup, mad, mqar_variants, state_and_recall
from fastweights.tasks.base import TaskConfig
from fastweights.tasks.batches import Batch
from fastweights.tasks.solvers import fill
from fastweights.tasks.state_tracking import permutations

Oracle = Callable[[Any, list[int]], list[int]]


def solve(config: TaskConfig, batch: Batch) -> np.ndarray:
    """The oracle's predictions_RL, int32."""
    oracle = ORACLES[config.NAME]
    return fill(batch, lambda tokens_T: oracle(config, tokens_T.tolist()))


def _mqar(config: Any, tokens: list[int]) -> list[int]:
    """Answers every key with the token that followed its first appearance."""
    memory: dict[int, int] = {}
    found = [-1] * len(tokens)
    for t in range(0, len(tokens), 2):
        if tokens[t] in memory:
            found[t] = memory[tokens[t]]
        else:
            memory[tokens[t]] = tokens[t + 1]
    return found


def _overwrite(config: mqar_variants.OverwriteConfig, tokens: list[int]) -> list[int]:
    """The token after a key is a value only where the key is written."""
    memory: dict[int, int] = {}
    found = [-1] * len(tokens)
    for t, (token, after) in enumerate(itertools.pairwise([*tokens, 0])):
        if after >= config.vocab_size // 2:
            memory[token] = after
        else:
            found[t] = memory.get(token, -1)
    return found


def _composed(config: mqar_variants.ComposedConfig, tokens: list[int]) -> list[int]:
    memory: dict[tuple[int, int], int] = {}
    found = [-1] * len(tokens)
    for t in range(1, len(tokens)):
        key = (tokens[t - 1], tokens[t])
        after = tokens[t + 1] if t + 1 < len(tokens) else 0
        if after >= config.vocab_size // 2:
            memory[key] = after
        found[t] = memory.get(key, -1)
    return found


def _in_context(config: mad.InContextRecallConfig, tokens: list[int]) -> list[int]:
    memory: dict[int, int] = {}
    found = []
    for token, after in itertools.pairwise([*tokens, -1]):
        found.append(memory.get(token, -1))
        if token < config.keys:
            memory[token] = after
    return found


def _fuzzy(config: mad.FuzzyRecallConfig, tokens: list[int]) -> list[int]:
    """Runs of keys and values alternate; a run that came before goes on as it did then."""
    memory: dict[tuple[int, ...], tuple[int, ...]] = {}
    half, found = config.vocab_size // 2, [-1] * len(tokens)
    runs = [tuple(run) for _, run in itertools.groupby(tokens, lambda token: token >= half)]
    t = 0
    for i, run in enumerate(runs):
        if i % 2 == 0:
            whole = [n for n in range(1, len(run) + 1) if run[:n] in memory]
            if whole:
                value = memory[run[: whole[0]]]
                for j, token in enumerate(value):
                    place = t + whole[0] - 1 + j
                    if place < len(tokens):
                        found[place] = token
            elif i + 1 < len(runs):
                memory[run] = runs[i + 1]
        t += len(run)
    return found


def _memorize(config: mad.MemorizeConfig, tokens: list[int]) -> list[int]:
    return [int(config.value_of[token]) if token else -1 for token in tokens]


def _compression(config: mad.CompressionConfig, tokens: list[int]) -> list[int]:
    return [*tokens[:-1], -1]


def _selective_copy(config: copying.SelectiveCopyConfig, tokens: list[int]) -> list[int]:
    prompt = config.vocab_size - 1
    items = [token for token in tokens if token not in (0, prompt)]
    return [-1] * (len(tokens) - len(items)) + items


def _palindrome(config: copying.PalindromeConfig, tokens: list[int]) -> list[int]:
    half = len(tokens) // 2
    return [-1] * half + tokens[:half][::-1]


def _stack(config: copying.StackConfig, tokens: list[int]) -> list[int]:
    stacks: dict[int, list[int]] = {}
    found = [-1] * len(tokens)
    for t in range(0, len(tokens), 2):
        pops, name = divmod(tokens[t] - 1 - config.values, config.stacks)
        if pops:
            found[t] = stacks[name].pop()
        else:
            stacks.setdefault(name, []).append(tokens[t + 1])
    return found


def _k_hop(config: hops.KHopConfig, tokens: list[int]) -> list[int]:
    """Edges are pairs of nodes; a hop in front of a node makes a query."""
    after: dict[int, int] = {}
    found = [-1] * len(tokens)
    for t in range(0, len(tokens) - 1, 2):
        first, node = tokens[t], tokens[t + 1]
        if first > config.max_hops:
            after[first] = node
        elif first:
            for _ in range(first):
                node = after[node]
            found[t + 1] = node
    return found


def _parity(config: Any, tokens: list[int]) -> list[int]:
    return [sum(tokens[: t + 1]) % 2 for t in range(len(tokens))]


def _permuted(config: Any, tokens: list[int]) -> list[int]:
    """Moves things about, one token after the other."""
    elements = permutations(config.THINGS)
    where, found = tuple(range(config.THINGS)), []
    for token in tokens:
        where = tuple(elements[token][place] for place in where)
        found.append(elements.index(where))
    return found


def _mod_arith(config: state_and_recall.ModArithConfig, tokens: list[int]) -> list[int]:
    """Has Python evaluate each prefix."""
    spelt = [str(token) if token < 5 else "+-*"[token - 5] for token in tokens]
    return [
        -1 if t % 2 else eval("".join(spelt[: t + 1])) % 5  # of digits and signs alone
        for t in range(len(tokens))
    ]


def _parity_retrieval(
    config: state_and_recall.ParityRetrievalConfig, tokens: list[int]
) -> list[int]:
    values: dict[int, tuple[int, int]] = {}
    ones, found = 0, [-1] * len(tokens)
    for t, token in enumerate(tokens):
        if token in (1, 2):
            ones += token == 2
        elif 2 < token < config.vocab_size // 2:
            if token in values:
                found[t] = values[token][ones % 2]
            else:
                values[token] = (tokens[t + 1], tokens[t + 2])
    return found


def _phonebook(config: lookup.PhonebookConfig, tokens: list[int]) -> list[int]:
    numbers: dict[tuple[int, int], list[int]] = {}
    found = [-1] * len(tokens)
    for t in range(0, len(tokens) - 9, 10):
        asks = int(tokens[t] == lookup.ASK)
        first, last, *number = tokens[t + asks : t + asks + 9]
        if asks:
            found[t + 2 : t + 9] = numbers[first, last]
        elif first:
            numbers[first, last] = number
    return found


def _niah(config: lookup.NIAHConfig, tokens: list[int]) -> list[int]:
    """Reads the needles before the questions at the end, and answers these with their values."""
    text = bytes(tokens).decode("latin-1")
    number = (
        "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        if config.variant == "single_3"
        else (r"\d{7}")
    )
    sentence = re.compile(rf" The code of ([a-z]{{6}}) is ({number}(?: {number})*)")
    told = list(sentence.finditer(text))
    asked = len({m[1] for m in told}) if config.variant == "multi_query" else 1
    found = [-1] * len(tokens)
    for question in told[-asked:]:
        values = [m[2] for m in told[:-asked] if m[1] == question[1]]
        answer = " ".join(values)
        start = question.start(2)
        found[start - 1 : start - 1 + len(answer)] = answer.encode()
    return found


ORACLES: dict[str, Oracle] = {
    "mqar": _mqar,
    "mqar_overwrite": _overwrite,
    "mqar_composed": _composed,
    "in_context_recall": _in_context,
    "noisy_recall": _in_context,
    "fuzzy_recall": _fuzzy,
    "memorize": _memorize,
    "compression": _compression,
    "selective_copy": _selective_copy,
    "palindrome": _palindrome,
    "stack": _stack,
    "k_hop": _k_hop,
    "parity": _parity,
    "mod_arith": _mod_arith,
    "s3": _permuted,
    "s5": _permuted,
    "parity_retrieval": _parity_retrieval,
    "phonebook": _phonebook,
    "niah": _niah,
}
