"""What a training step needs on a target, read from the program that its compiler makes.

Nothing runs: the step of `train.py` is compiled for devices that need not exist.
"""

import collections
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fastweights import flops, sharding
from fastweights.config import Config
from fastweights.targets import Target
from fastweights.training import optim
from fastweights.training.state import make_blueprint
from fastweights.training.step import compile_step

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Plan(NamedTuple):
    """One device's part of a step.

    Attributes:
      bytes: by kind: parameters, optimiser, batch, temporaries (activations, gradients and what the
        compiler sets aside), new outputs.
      work: floating-point operations (`flops.py`: nothing recomputed is counted).
      collectives: bytes that come out of each kind of collective, and how many there are; loops
        counted as often as they turn.
      seconds: lower bounds of the step's time, by what bounds it.
      compile_seconds: of the compiler here.
    """

    bytes: dict[str, float]
    work: float
    collectives: dict[str, tuple[float, int]]
    seconds: dict[str, float]
    compile_seconds: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def fits(self, target: Target) -> bool:
        return self.total <= target.chip.memory


def plan_step(config: Config, target: Target) -> Plan:
    """Compiles the step of `config` for the target's devices and its mesh.

    Raises:
      UserError: as `sharding.make_mesh` and `sharding.check_batch`.
    """
    mesh = sharding.make_mesh(config.mesh, target.devices)
    sharding.check_batch(config.batch_size // config.accum_steps, mesh, config.data.length)
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)
    started = time.perf_counter()
    compiled = compile_step(config, blueprint, tx, mesh)
    seconds = time.perf_counter() - started

    stats: Any = compiled.memory_analysis()
    sizes = {
        "parameters": _bytes_of(blueprint.abstract["params"]),
        "optimiser": _bytes_of(blueprint.abstract["opt"]),
    }
    sizes["batch"] = stats.argument_size_in_bytes - sum(sizes.values())
    sizes["temporaries"] = stats.temp_size_in_bytes
    # The donated state is both argument and output.
    sizes["new outputs"] = stats.output_size_in_bytes - stats.alias_size_in_bytes

    tokens = config.batch_size * config.data.length
    work = tokens * flops.train_flops_per_token(config.model, config.data.length)
    work /= len(target.devices)
    moved = collectives(compiled.as_text() or "")
    kind = target.devices[0].device_kind
    bounds = {
        "compute": work / (flops.peak_flops(kind) or np.inf),
        # The state is read and written once at least, the batch read.
        "memory": (stats.argument_size_in_bytes + stats.output_size_in_bytes)
        / (flops.peak_bandwidth(kind) or np.inf),
        "network": sum(size for size, _ in moved.values()) / target.chip.network,
    }
    return Plan(sizes, work, moved, bounds, seconds)


def _bytes_of(tree) -> float:
    return float(
        sum(
            np.prod(x.sharding.shard_shape(x.shape), dtype=float) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def _size(shape: str) -> float:
    """Bytes of the largest array in an HLO shape: started collectives name operand and result."""
    sizes = [0.0]
    for kind, dims in _SHAPE.findall(shape):
        width = _BYTES.get(kind) or float(re.sub(r"\D", "", kind) or 8) / 8
        sizes.append(width * np.prod([int(x) for x in dims.split(",") if x], dtype=float))
    return max(sizes)


def collectives(text: str) -> dict[str, tuple[float, int]]:
    """Bytes and number of each kind of collective in a compiled module's text."""
    bodies: dict[str, list[str]] = collections.defaultdict(list)
    name = entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*)?-> .*\{$|(ENTRY )?%?([\w.\-]+) \{$", line)
        if head and not line.startswith(" "):
            name = head[2] or head[5]
            entry = name if line.startswith("ENTRY") else entry
        else:
            bodies[name].append(line)
    found: dict[str, list[float]] = {kind: [0.0, 0] for kind in COLLECTIVES}

    def walk(name: str, times: int) -> None:
        for line in bodies[name]:
            op = re.search(r"= (.*?) ([a-z][\w\-]*)\(", line)
            if not op:
                continue
            kind = op[2].removesuffix("-start")
            if kind in found:
                found[kind][0] += times * _size(op[1])
                found[kind][1] += times
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line) if kind == "while" else None
            called = re.findall(
                r"(?:body|to_apply|calls|branch_computations|async_computation)=\{?%?([\w.\-]+)",
                line,
            )
            for other in called:
                if other in bodies:
                    walk(other, times * (int(turns[1]) if turns else 1))

    walk(entry, 1)
    return {kind: (size, int(count)) for kind, (size, count) in found.items() if count}
