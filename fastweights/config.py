"""One configuration: a `ConfigDict` at the edge, frozen dataclasses inside.

Each room owns the dataclass of its own options and the checks on them; this module joins them
into `Config`, offers them to config files as a locked `ConfigDict` (`defaults`), applies dotted
command-line overrides (`load`) and freezes the result (`freeze`). A config file is a Python file
with `get_config(arg=None) -> ConfigDict`; `path.py:arg` hands it the text behind the colon.
"""

import ast
import dataclasses
import difflib
import json
import math
import pathlib
import runpy
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fastweights import evals
from fastweights.data.pipeline import DataConfig
from fastweights.errors import UserError, check
from fastweights.model import ModelConfig
from fastweights.sharding import MeshConfig
from fastweights.training.checkpoint import CheckpointConfig
from fastweights.training.metrics import LogConfig
from fastweights.training.optim import OptimConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
      seed: of the parameters and of the data order.
      steps: optimiser steps in all.
      batch_size: rows a step, over all devices and processes.
      accum_steps: microbatches a step; gradients are weighted by their number of target tokens.
      loss_chunk: positions whose logits exist at one time: of each row, or, of a task's batch on
        one device, of all its answers together; 0 means all of them.
      z_loss: weight of the mean squared log-partition, 0 for none.
      balance_loss: weight of how unevenly experts are used (`MixtureOfExperts`), 0 for none.
      matched: what `sweeps.matched` made equal in the runs of a sweep, for tables; "" for nothing.
    """

    seed: int = 0
    steps: int = 1000
    batch_size: int = 64
    accum_steps: int = 1
    loss_chunk: int = 0
    z_loss: float = 0.0
    balance_loss: float = 0.0
    matched: str = ""
    model: ModelConfig = dataclasses.field(
        default_factory=lambda: ModelConfig(
            vocab_size=257, d_model=256, num_layers=4, pattern="GGGA"
        )
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    eval: evals.EvalConfig = dataclasses.field(default_factory=evals.EvalConfig)

    def __post_init__(self):
        for name in ("steps", "batch_size", "accum_steps"):
            value = getattr(self, name)
            check(value >= 1, f"{name} is {value}; set it to 1 or more.")
        check(self.loss_chunk >= 0, f"loss_chunk is {self.loss_chunk}; use 0 (whole row) or more.")
        check(
            self.batch_size % self.accum_steps == 0,
            f"batch_size {self.batch_size} is not divisible by accum_steps {self.accum_steps}; "
            "change either of them.",
        )
        for name in ("z_loss", "balance_loss"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"{name} is {value}; use 0 (none) or a weight above.")
        check(
            self.balance_loss == 0 or self.model.mlp == "moe",
            f"balance_loss is {self.balance_loss} but model.mlp is '{self.model.mlp}', which has "
            "no experts to balance; set it to 0.",
        )
        check(
            self.model.decoder == self.data.decoder,
            f"model.decoder is '{self.model.decoder}' but data.kind is '{self.data.kind}', whose "
            f"models have '{self.data.decoder}'; set model.decoder={self.data.decoder}.",
        )
        check(self.steps < 2**31, f"steps is {self.steps}; it must be less than 2**31.")
        evals.check_fits(self.eval.final, self.data)
        if self.eval.every:
            evals.check_fits(self.eval.during, self.data)
        if self.checkpoint.keep_best:
            name = self.checkpoint.best_metric
            check(
                self.eval.every > 0 and name.split("/")[0] in evals.split_names(self.eval.during),
                f"checkpoint.best_metric is '{name}' but the evals in training are "
                f"'{self.eval.during}' every {self.eval.every} steps, so that there is no best to "
                "keep; name a metric of theirs, or set checkpoint.keep_best=0.",
            )


# A resumed run may differ from its stored config in these fields and no others: they change
# neither the parameters' meaning nor the order of the data.
SAFE = ("steps", "mesh.", "checkpoint.", "log.", "eval.")
# Ends of fields that say how a model is computed, not what it computes.
FREE = ("model.remat", ".implementation", ".chunk_size")


def defaults() -> ConfigDict:
    """Every field with its default, as a locked, typed `ConfigDict` for a config file to edit."""
    return ConfigDict(_as_dict(Config()), convert_dict=True).lock()


def freeze(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Turns a `ConfigDict` (or a stored config's dict) into the checked dataclass.

    Raises:
      UserError: an unknown or missing field, a wrong type, or a value that a check refuses.
    """
    tree = config.to_dict() if isinstance(config, ConfigDict) else config
    return _build(Config(), tree, "")


def load(spec: str, overrides: Iterable[str] = ()) -> Config:
    """The config of `spec` (`path.py` or `path.py:arg`) with `a.b=value` overrides, checked."""
    return freeze(load_dict(spec, overrides))


def load_dict(spec: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """As `load`, not yet frozen: what a sweep edits further."""
    config = call_config_file(spec, "get_config", pass_arg=True)
    check(
        isinstance(config, ConfigDict),
        f"get_config in {spec} returned {type(config).__name__}; it must return a ConfigDict.",
    )
    _apply(config, overrides)
    return config


def override(config: Config, overrides: Iterable[str]) -> Config:
    """A stored config with `a.b=value` overrides."""
    changed = ConfigDict(_as_dict(config), convert_dict=True).lock()
    _apply(changed, overrides)
    return freeze(changed)


def _apply(config: ConfigDict, overrides: Iterable[str]) -> None:
    for item in overrides:
        path, separator, text = item.partition("=")
        check(bool(separator), f"override '{item}' has no '='; write --config.{path}=value.")
        set_field(config, path, text)


def call_config_file(spec: str, function: str, *, pass_arg: bool) -> Any:
    """Calls `function` of the config file in `spec`; its own mistakes come back as one sentence."""
    path, _, arg = spec.partition(":")
    check(pathlib.Path(path).is_file(), f"config file '{path}' does not exist; check the path.")
    try:
        module = runpy.run_path(path)
        check(function in module, f"config file '{path}' defines no {function}(); add it.")
        result = module[function](*([arg or None] if pass_arg else []))
        # A generator's own mistakes belong here as well.
        return list(result) if isinstance(result, Generator) else result
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file raises is a user's mistake
        message = str(error).replace("\n", " ")
        raise UserError(
            f"config file '{path}' failed with {type(error).__name__}: {message}; fix that file."
        ) from error


def defines(spec: str, function: str) -> bool:
    """Whether a config file, known to load, has a function of that name."""
    return function in runpy.run_path(spec.partition(":")[0])


def parse_arg(arg: str | None, **options: Any) -> ConfigDict:
    """Reads `size=150m,runlocal`: a bare name means True, a value takes its default's type.

    Every config file hands its argument here, with or without options, so that none is ignored.
    """
    parsed = ConfigDict(options)
    for item in filter(None, (arg or "").split(",")):
        name, separator, text = item.partition("=")
        check(bool(options), f"config argument '{item}' does not exist; this config takes none.")
        if name not in options:
            raise UserError(_unknown("config argument", name, options))
        check(
            bool(separator) or isinstance(options[name], bool),
            f"config argument '{name}' has no value; write {name}=VALUE, such as the default "
            f"{name}={options[name]}.",
        )
        parsed[name] = _coerce(name, text, options[name]) if separator else True
    return parsed


def set_field(config: ConfigDict, path: str, value: Any) -> None:
    """Sets one dotted field; text is read as the type of the field's present value."""
    holder: Any = config
    *parents, leaf = path.split(".")
    for depth, name in enumerate([*parents, leaf]):
        inside = isinstance(holder, ConfigDict)
        if not inside or name not in holder:
            known = _flatten(config.to_dict())
            raise UserError(_unknown("config field", path, known))
        if depth < len(parents):
            holder = holder[name]
    current = holder[leaf]
    check(
        not isinstance(current, ConfigDict),
        f"config field '{path}' is a group of fields; set one of: "
        f"{', '.join(sorted(current)) if isinstance(current, ConfigDict) else ''}.",
    )
    holder[leaf] = _coerce(path, value, current) if isinstance(value, str) else value


def to_json(config: Config) -> str:
    return json_text(_as_dict(config))


def json_text(tree: Any) -> str:
    return json.dumps(tree, indent=2) + "\n"


def from_json(text: str) -> Config:
    return freeze(json.loads(text))


def flat(config: Config) -> dict[str, Any]:
    """All leaf fields by dotted name."""
    return _flatten(json.loads(to_json(config)))


def differences(stored: Config, wanted: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (stored, wanted) of each leaf field that differs."""
    old, new = flat(stored), flat(wanted)
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def is_safe(name: str) -> bool:
    """Whether a resumed run may change the field `name`."""
    return any(name == safe or (safe[-1] == "." and name.startswith(safe)) for safe in SAFE)


def _as_dict(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _as_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat_tree = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat_tree |= _flatten(value, f"{prefix}{name}.")
        else:
            flat_tree[prefix + name] = value
    return flat_tree


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with the nearest that does."""
    known = sorted(known)
    # A typo in any part counts, so compare whole paths first and last parts second.
    near = difflib.get_close_matches(name, known, 1, 0.6)
    if not near:
        leaf = name.rsplit(".", 1)[-1]
        near = [p for p in known if difflib.get_close_matches(leaf, [p.split(".")[-1]])][:1]
    if near:
        return f"{what} '{name}' does not exist; did you mean '{near[0]}'?"
    # What its group has; groups inside are named and not their fields.
    group = name.rpartition(".")[0]
    while group and not any(p.startswith(f"{group}.") for p in known):
        group = group.rpartition(".")[0]
    start = f"{group}." if group else ""
    beside = {start + p.removeprefix(start).partition(".")[0] for p in known if p.startswith(start)}
    return f"{what} '{name}' does not exist; known: {', '.join(sorted(beside))}."


def _coerce(path: str, text: str, current: Any) -> Any:
    """Reads `text` as the type of `current`."""
    kind = type(current)
    if kind is str:
        return text
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind in (int, float):
            return kind(text)
        return _tuples(kind(ast.literal_eval(text)))
    except (ValueError, KeyError, SyntaxError, TypeError):
        raise UserError(
            f"config field '{path}' takes a value of type {kind.__name__}, got '{text}'; "
            f"its present value is {current!r}."
        ) from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _build(default: Any, tree: Any, prefix: str) -> Any:
    """Builds a dataclass like `default` from nested dicts, checking names and types."""
    check(
        isinstance(tree, Mapping),
        f"config field '{prefix[:-1]}' is {tree!r}; it must be a group of fields.",
    )
    fields = [field.name for field in dataclasses.fields(default)]
    for name in tree:
        if name not in fields:
            raise UserError(_unknown("config field", prefix + name, (prefix + n for n in fields)))
    values = {}
    for name in fields:
        reference = getattr(default, name)
        if name not in tree:
            # A config stored before the field existed means the field's default.
            values[name] = reference
        elif dataclasses.is_dataclass(reference):
            values[name] = _build(reference, tree[name], f"{prefix}{name}.")
        else:
            values[name] = _typed(prefix + name, tree[name], reference)
    return type(default)(**values)


def _typed(path: str, value: Any, reference: Any) -> Any:
    kind = type(reference)
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, (list, tuple)):
        return _tuples(value)
    check(
        type(value) is kind,
        f"config field '{path}' takes a value of type {kind.__name__}, got {value!r}; "
        f"its default is {reference!r}.",
    )
    return value
