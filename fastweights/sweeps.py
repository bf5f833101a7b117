"""Sweeps: points from axes, their names, and which of them train as one program.

A sweep config has a `sweep()` beside `get_config`, which gives one dict of dotted overrides a
point; `grid` makes them from axes. The key `arg` hands `get_config` its argument.
"""

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastweights import config as config_lib
from fastweights import flops
from fastweights.errors import UserError, check
from fastweights.files import read_json, write_atomic
from fastweights.training import group, run_folder

SEEDS = (0, 1, 2)
GROUPS = ".groups"
ARG = "arg"


def learning_rates(top: float, count: int = 4) -> tuple[float, ...]:
    """`count` rates from `top` down, half a decade apart, of two digits."""
    check(
        top > 0 and count >= 1,
        f"learning_rates({top}, {count}) has no rates; give a positive rate and at least 1.",
    )
    return tuple(float(f"{top * 10 ** (-i / 2):.1e}") for i in range(count))[::-1]


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """One point for each combination of the axes' values, the first axis slowest.

    An axis names a config field, or several, separated by commas, that change together; its values
    are then tuples: {"model.pattern,model.num_layers": [("GA", 4), ("GGGA", 4)], "seed": SEEDS}.

    Raises:
      UserError: an axis without values, two axes for one field, or a value of the wrong length.
    """
    check(bool(axes), "grid() got no axes; give at least one field with its values.")
    choices, names = [], []
    for axis, values in axes.items():
        fields = [field.strip() for field in axis.split(",")]
        check(
            isinstance(values, Collection) and not isinstance(values, str) and len(values) > 0,
            f"axis '{axis}' has no values but {values!r}; give a list of at least one.",
        )
        found = [value if len(fields) > 1 else (value,) for value in values]
        for value in found:
            check(
                isinstance(value, tuple | list) and len(value) == len(fields),
                f"axis '{axis}' has the value {value!r}; it names {len(fields)} fields, so give a "
                f"tuple of {len(fields)}.",
            )
        choices.append([dict(zip(fields, value, strict=True)) for value in found])
        names += fields
    twice = sorted({name for name in names if names.count(name) > 1})
    check(not twice, f"two axes name the field {', '.join(twice)}; name each in one axis.")
    return [
        {field: value for part in parts for field, value in part.items()}
        for parts in itertools.product(*choices)
    ]


def matched(
    spec: str, points: Sequence[Mapping[str, Any]], *, by: str, field: str, target: int = 0
) -> list[dict[str, Any]]:
    """The points with an integer field set so that all models have as many parameters or bytes.

    Args:
      spec: the sweep config's own path.
      points: from `grid`.
      by: "parameters", or "state": the bytes that one sequence of the training length is kept in.
      field: such as "model.mlp_dim" or "model.mixers.G.value_head_dim".
      target: what to match; 0 takes the first point's own number.

    Raises:
      UserError: an unknown `by`, or a model that no value of the field brings within 5 %.
    """
    check(by in ("parameters", "state"), f"matched() got by='{by}'; use 'parameters' or 'state'.")

    def count(point: Mapping[str, Any]) -> int:
        full, fields = _spelt(spec, point)
        config = config_lib.load(full, fields)
        if by == "parameters":
            return flops.param_counts(config.model)["total"]
        return flops.state_bytes(config.model, config.data.length)["total"]

    target = target or count(points[0])
    found = []
    for point in points:

        def sized(size: int, point: Mapping[str, Any] = point) -> int:
            return count({**point, field: size})

        low, high = 1, 2
        while high < 2**20 and sized(high) < target:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sized(middle) < target else (low, middle)
        best = min((low, high), key=lambda size: abs(sized(size) - target))
        check(
            abs(sized(best) - target) <= 0.05 * target,
            f"no {field} gives the sweep point '{run_name(point)}' {target} in {by} (nearest: "
            f"{sized(best)} at {best}); match by another field or target.",
        )
        found.append({**point, field: best, "matched": by})
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, the spec and overrides that give its config."""

    name: str
    spec: str
    fields: tuple[str, ...]
    config: config_lib.Config


def read_points(spec: str, overrides: Sequence[str]) -> list[Point]:
    """The points of a sweep config; all are checked before any runs.

    Raises:
      UserError: no sweep() in the file, two points of one name, a point that is no valid config, or
        an override of a field that the points set.
    """
    points: dict[str, Point] = {}
    found = config_lib.call_config_file(spec, "sweep", pass_arg=False)
    check(
        isinstance(found, list | tuple) and all(isinstance(point, dict) for point in found),
        f"{spec}: sweep() gives {found!r:.80}; it must yield one dict of overrides a run.",
    )
    for point in found:
        name = run_name(point)
        check(name not in points, f"{spec}: two points of sweep() are both '{name}'; drop one.")
        clash = [override for override in overrides if override.partition("=")[0] in point]
        check(
            not clash,
            f"--config.{clash[0] if clash else ''} would change nothing: {spec} gives each point a "
            "value of its own; choose points with --only, or change the file.",
        )
        full, set_fields = _spelt(spec, point)
        fields = (*overrides, *set_fields)
        try:
            points[name] = Point(name, full, fields, config_lib.load(full, fields))
        except UserError as error:
            raise UserError(f"{spec}: sweep point '{name}': {error}") from error
    check(bool(points), f"{spec}: sweep() yields no point; yield one dict of overrides a run.")
    return list(points.values())


def _spelt(spec: str, point: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Spec with argument, and overrides, of a point."""
    fields = [f"{path}={value}" for path, value in point.items() if path != ARG]
    return f"{spec}:{point[ARG]}" if ARG in point else spec, fields


def run_name(point: Mapping[str, Any]) -> str:
    """`pattern=GA,lr=0.003,seed=0`: the last part of each field; an `arg` stands for itself.

    Fields that end alike keep as many parts as tell them apart: `A.num_heads=2,G.num_heads=4`.
    """

    def short(path: str) -> str:
        parts = path.split(".")
        ends = (".".join(parts[-size:]) for size in range(1, len(parts) + 1))
        others = [other for other in point if other != path]
        alone = (end for end in ends if not any(f".{o}".endswith(f".{end}") for o in others))
        return next(alone, path)

    return ",".join(
        str(value) if path == ARG else f"{short(path)}={value}" for path, value in point.items()
    )


def state(workdir: pathlib.Path, point: Point) -> str:
    """ "done", "failed" or "open": how far the point has come with this config."""
    folder = workdir / point.name
    if not (folder / "config.json").is_file():
        return "failed" if run_folder.failure(folder) else "open"
    changed = config_lib.differences(run_folder.load_config(folder), point.config)
    if not all(config_lib.is_safe(name) and name != "steps" for name in changed):
        return "open"
    if run_folder.is_done(folder):
        return "done"
    return "failed" if run_folder.failure(folder) else "open"


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one process trains: a point, or several as one program in a folder of the group."""

    points: tuple[Point, ...]
    folder: pathlib.Path

    @property
    def name(self) -> str:
        if len(self.points) == 1:
            return self.points[0].name
        return f"{self.points[0].name} and {len(self.points) - 1} more"


def plan(workdir: pathlib.Path, points: Sequence[Point], most: int) -> list[Unit]:
    """What is left to train: groups that were begun, then new groups and single runs.

    A group's state is of its members and of no others, so one that was begun stays as it is, also
    when the sweep has got more points since.

    Args:
      workdir: folder of the runs.
      points: all of the sweep; those that are done or failed are left out.
      most: members of a group at most.
    """
    by_name = {point.name: point for point in points}
    units = []
    for path in sorted((workdir / GROUPS).glob("*/group.json")):
        noted = read_json(path)
        if all(name in by_name and _noted(by_name[name]) == noted[name] for name in noted):
            unit = Unit(tuple(by_name.pop(name) for name in noted), path.parent)
            if any(state(workdir, point) == "open" for point in unit.points):
                units.append(unit)
    rest = [point for point in by_name.values() if state(workdir, point) == "open"]
    alike: dict[str, list[Point]] = {}
    for point in rest:
        common = group.shared(point.config) if most > 1 else None
        key = point.name if common is None else config_lib.to_json(common)
        alike.setdefault(key, []).append(point)
    for members in alike.values():
        for part in itertools.batched(members, most):
            units.append(_unit(workdir, part))
    return units


def _unit(workdir: pathlib.Path, points: tuple[Point, ...]) -> Unit:
    if len(points) == 1:
        return Unit(points, workdir / points[0].name)
    text = config_lib.json_text({point.name: _noted(point) for point in points})
    return Unit(points, workdir / GROUPS / hashlib.sha256(text.encode()).hexdigest()[:12])


def _noted(point: Point) -> list[Any]:
    return [point.spec, list(point.fields)]


def note_group(unit: Unit) -> None:
    """Writes what a process needs to train a group; it marks the group as begun."""
    unit.folder.mkdir(parents=True, exist_ok=True)
    noted = {point.name: _noted(point) for point in unit.points}
    write_atomic(unit.folder / "group.json", config_lib.json_text(noted))


def read_group(folder: pathlib.Path) -> dict[pathlib.Path, config_lib.Config]:
    """Run folder -> config of a group's members."""
    runs = folder.parent.parent
    return {
        runs / name: config_lib.load(spec, fields)
        for name, (spec, fields) in read_json(folder / "group.json").items()
    }
