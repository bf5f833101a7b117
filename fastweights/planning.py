"""What training and decoding need on a target, read from the programs that its compiler makes.

Nothing runs: the step of `train.py`, or those of generation, are compiled for devices that need not
exist.
"""

import collections
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import flops, sharding
from fastweights.config import Config
from fastweights.generation.engine import read_on
from fastweights.generation.weights import place_rows, unrolled
from fastweights.model import abstract_model, bind
from fastweights.targets import BETWEEN_HOSTS, Target
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
EACH_ITS_OWN = ("all-to-all", "collective-permute")  # no two devices get the same
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Plan(NamedTuple):
    """One device's part of a step.

    Attributes:
      bytes: by kind: parameters, optimiser or caches, batch, temporaries (activations, gradients
        and what the compiler sets aside), new outputs.
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

    tokens = config.batch_size * config.data.length
    work = tokens * flops.train_flops_per_token(config.model, config.data.length)
    held = {
        "parameters": _bytes_of(blueprint.abstract["params"]),
        "optimiser": _bytes_of(blueprint.abstract["opt"]),
    }
    stats: Any = compiled.memory_analysis()
    # The state is read and written once at least, the batch read.
    touched = stats.argument_size_in_bytes + stats.output_size_in_bytes
    return _read(compiled, held, work, touched, seconds, target)


def plan_decode(config: Config, target: Target, chunk: int) -> dict[str, Plan]:
    """Compiles what generation runs, "prefill" of `chunk` tokens a row and "decode" of one.

    `config.batch_size` rows are generated at once, behind `config.data.length` tokens of context.

    Raises:
      UserError: as `plan_step`.
    """
    mesh = sharding.make_mesh(config.mesh, target.devices)
    rows, context = config.batch_size, config.data.length
    model = unrolled(config.model)
    graphdef, shapes, axes = abstract_model(model)

    def placed(path, x, placement):
        narrow = path[-1].key in optim.MATRICES
        dtype = jnp.dtype(model.dtype) if narrow else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=placement)

    placements = sharding.param_shardings(axes, shapes, mesh)
    params = jax.tree_util.tree_map_with_path(placed, shapes, placements)
    placement = place_rows(params, rows)

    def fresh(params):
        return bind(graphdef, params).init_cache(rows, context)

    def step(cache, params, *tokens):
        return read_on(bind(graphdef, params), cache, *tokens)

    cache = placement.shapes(jax.eval_shape(fresh, params))
    held = {"parameters": _bytes_of(params), "caches": _bytes_of(cache)}
    counts = flops.decode_bytes(model, rows, context)
    touched = counts["parameters"] * held["parameters"] / _bytes_of(params, whole=True)
    touched += (counts["state"] + counts["kv"]) * held["caches"] / _bytes_of(cache, whole=True)
    outs = (placement.of(cache), placement.rows)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=outs)
    plans = {}
    # Prompts are padded at their front, and so come with the numbers of their documents.
    for name, length, given in (("prefill", min(chunk, context), 2), ("decode", 1, 1)):
        tokens_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=placement.rows)
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            compiled = jitted.lower(cache, params, *[tokens_BT] * given).compile()
        seconds = time.perf_counter() - started
        work = rows * length * flops.forward_flops_per_token(model, context)
        plans[name] = _read(compiled, held, work, touched, seconds, target)
    return plans


def _read(compiled, held, work: float, touched: float, seconds: float, target: Target) -> Plan:
    """The plan of a compiled program: what it holds by kind, the work of all devices, and how much
    of its memory a device must touch."""
    stats: Any = compiled.memory_analysis()
    held = held | {
        "batch": stats.argument_size_in_bytes - sum(held.values()),
        "temporaries": stats.temp_size_in_bytes,
        # The donated state is both argument and output.
        "new outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
    }

    work /= len(target.devices)
    text = compiled.as_text() or ""
    moved, leaving = collectives(text), {}
    if target.hosts > 1:
        leaving = collectives(text, len(target.devices) // target.hosts)
    kind = target.devices[0].device_kind
    bounds = {
        "compute": work / (flops.peak_flops(kind) or np.inf),
        "memory": touched / (flops.peak_bandwidth(kind) or np.inf),
        "network": max(
            sum(size for size, _ in moved.values()) / target.chip.network,
            sum(size for size, _ in leaving.values()) / BETWEEN_HOSTS,
        ),
    }
    return Plan(held, work, moved, bounds, seconds)


def _bytes_of(tree, *, whole: bool = False) -> float:
    """Of a device's parts, or of the arrays."""

    def size(x) -> float:
        shape = x.shape if whole else x.sharding.shard_shape(x.shape)
        return np.prod(shape, dtype=float) * x.dtype.itemsize

    return float(sum(map(size, jax.tree.leaves(tree))))


def sizes(shapes: str) -> list[float]:
    """Bytes of each array named in a piece of HLO text."""
    found = []
    for kind, dims in _SHAPE.findall(shapes):
        width = _BYTES.get(kind) or float(re.sub(r"\D", "", kind) or 8) / 8
        found.append(width * np.prod([int(x) for x in dims.split(",") if x], dtype=float))
    return found


def _groups(line: str) -> list[np.ndarray]:
    """The devices of each group of a collective; none where it does not say."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        names, counts = zip(*re.findall(r"'(\w+)'=(\d+)", named[1]), strict=True)
        dims = [int(count) for count in counts]
        inside = [names.index(name) for name in re.findall(r"'(\w+)'", named[2])]
        outside = [axis for axis in range(len(dims)) if axis not in inside]
        ids = np.arange(np.prod(dims)).reshape(dims).transpose(outside + inside)
        return list(ids.reshape(-1, np.prod([dims[axis] for axis in inside], dtype=int)))
    iota = re.search(r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        dims = [int(x) for x in iota[2].split(",")]
        axes = [int(x) for x in iota[3].split(",")] if iota[3] else range(len(dims))
        ids = np.arange(np.prod(dims)).reshape(dims).transpose(axes)
        return list(ids.reshape(int(iota[1]), -1))
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    groups = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    return [np.array([int(x) for x in group.split(",")]) for group in groups]


class Instruction(NamedTuple):
    """One of a compiled module; `times` counts the turns of the loops around it."""

    shape: str
    kind: str
    line: str
    times: int


def instructions(text: str) -> Iterator[Instruction]:
    """What a compiled module's text runs, from its entry on."""
    bodies: dict[str, list[str]] = collections.defaultdict(list)
    name = entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*)?-> .*\{$|(ENTRY )?%?([\w.\-]+) \{$", line)
        if head and not line.startswith(" "):
            name = head[2] or head[5]
            entry = name if line.startswith("ENTRY") else entry
        else:
            bodies[name].append(line)

    def turns(line: str) -> int:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if known:
            return int(known[1])
        # TPU modules do not say; a loop there counts from 0 to a constant of its condition.
        condition = re.search(r"condition=%?([\w.\-]+)", line)
        lines = bodies[condition[1]] if condition else []
        limits = [int(n) for n in re.findall(r"s32\S* constant\((\d+)\)", "\n".join(lines))]
        return max(limits, default=1)

    def walk(name: str, times: int) -> Iterator[Instruction]:
        for line in bodies[name]:
            op = re.search(r"= (.*?) ([a-z][\w\-]*)\(", line)
            if not op:
                continue
            yield Instruction(op[1], op[2], line, times)
            inside = times * turns(line) if op[2] == "while" else times
            called = re.findall(
                r"(?:body|to_apply|calls|branch_computations|async_computation)=\{?%?([\w.\-]+)",
                line,
            )
            for other in called:
                if other in bodies:
                    yield from walk(other, inside)

    yield from walk(entry, 1)


def collectives(text: str, host: int = 0) -> dict[str, tuple[float, int]]:
    """Bytes and number of each kind of collective in a compiled module's text.

    With `host` devices a host, only of those that leave one, and what a device's own adapter need
    bring of it: members of a group on one host can share what they all get.
    """
    found: dict[str, list[float]] = {kind: [0.0, 0] for kind in COLLECTIVES}
    for shape, op, line, times in instructions(text):
        kind = op.removesuffix("-start")
        groups = _groups(line) if host and kind in found else []
        stays = bool(groups) and all(len(set(group // host)) == 1 for group in groups)
        shared = 1
        if groups and kind not in EACH_ITS_OWN:
            shared = min(min(collections.Counter(group // host).values()) for group in groups)
        if kind in found and not stays:
            # Started ones name operand and result.
            found[kind][0] += times * max(sizes(shape), default=0.0) / shared
            found[kind][1] += times
    return {kind: (size, int(count)) for kind, (size, count) in found.items() if count}
