"""The device mesh and where every array lies on it; the only file that names mesh axes.

Modules annotate parameters with logical axes ("embed", "heads", ...) and `RULES` says which mesh
axis each one is cut along. Weights are cut over `fsdp` (their model width) and `tensor` (heads,
hidden units, vocabulary); the rows of batches over `data` and `fsdp` together, their tokens over
`sequence`. The mesh uses Auto axis types: the compiler places the collectives, guided by
`constrain`; only what mixes tokens or is a kernel is cut by hand (`on_each_device`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fastweights.errors import UserError, check

SEQUENCE = "sequence"
AXES = ("data", "fsdp", "tensor", SEQUENCE)

# Logical axis -> mesh axis or axes. Axes named None in an annotation are replicated: norms, gates
# and short convolutions are small, and a gather a layer would cost more than their copies.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "batch": ("data", "fsdp"),
    "tokens": SEQUENCE,
    # Rows made of the slices of rows that lie on different devices.
    "slices": (SEQUENCE, "data", "fsdp"),
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        sizes = dataclasses.astuple(self)
        for axis, size in zip(AXES, sizes, strict=True):
            check(
                size == -1 or size >= 1,
                f"Mesh axis {axis} is {size}; give a positive number, or -1 for the rest.",
            )
        check(
            sizes.count(-1) <= 1, f"Mesh {sizes} has more than one -1; leave one axis open at most."
        )

    def resolve(self, num_devices: int) -> tuple[int, ...]:
        """The sizes with the open axis filled in.

        Raises:
          UserError: the fixed axes do not divide the number of devices, or do not use them all.
        """
        sizes = dataclasses.astuple(self)
        fixed = math.prod(size for size in sizes if size != -1)
        if -1 in sizes:
            check(
                num_devices % fixed == 0,
                f"Mesh {sizes} fixes {fixed} devices, which does not divide the {num_devices} "
                "present; change the fixed axes.",
            )
        else:
            check(
                num_devices == fixed,
                f"Mesh {sizes} takes {fixed} devices but {num_devices} are present; "
                "set one axis to -1 or change the sizes.",
            )
        return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh `(data, fsdp, tensor, sequence)` over `devices` (all of them by default)."""
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh(
        config.resolve(len(devices)), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def _spec(logical_axes: Sequence[str | None], name: str) -> PartitionSpec:
    """Mesh axes of one array, from its logical axes."""
    entries, taken = [], {}
    for logical in logical_axes:
        if logical is not None and logical not in RULES:
            raise UserError(
                f"{name} has the unknown logical axis {logical!r}; known axes are "
                f"{', '.join(sorted(RULES))}."
            )
        entry = None if logical is None else RULES[logical]
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            check(
                axis not in taken,
                f"{name} puts two of its axes, {taken.get(axis)!r} and {logical!r}, on the mesh "
                f"axis {axis!r}; annotate one of them with None.",
            )
            taken[axis] = logical
        entries.append(entry)
    return PartitionSpec(*entries)


def _axis_size(mesh: Any, entry: str | tuple[str, ...] | None) -> int:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[axis] for axis in axes)


def _cuts_tokens(length: int, mesh: Any) -> bool:
    """Rows of other lengths than a run trains on, as evals have them, stay whole."""
    parts = _axis_size(mesh, RULES["tokens"])
    return parts > 1 and length % parts == 0


def _fit(shape: Sequence[int], logical_axes: Sequence[str | None], mesh: Any, name: str):
    """The partition spec of an array of this shape, or a sentence why it cannot be cut so."""
    check(
        len(shape) == len(logical_axes),
        f"{name} has {len(shape)} dimensions but {len(logical_axes)} logical axes "
        f"{tuple(logical_axes)}; name every dimension.",
    )
    logical_axes = [
        None if logical == "tokens" and not _cuts_tokens(size, mesh) else logical
        for size, logical in zip(shape, logical_axes, strict=True)
    ]
    spec = _spec(logical_axes, name)
    for dim, (size, logical, entry) in enumerate(zip(shape, logical_axes, spec, strict=True)):
        parts = _axis_size(mesh, entry)
        check(
            size % parts == 0,
            f"{name} cannot be cut: its dimension {dim} ({logical}) is {size}, which mesh axis "
            f"{entry!r} of size {parts} does not divide; change the size or the mesh.",
        )
    return spec


def param_shardings(logical_axes: Any, abstract_params: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for every parameter.

    Args:
      logical_axes: nested dict with a tuple of logical axis names (or None) a parameter.
      abstract_params: the same tree with anything that has a `shape`.
      mesh: from `make_mesh`.

    Raises:
      UserError: a dimension that its mesh axis does not divide, or two dimensions of one parameter
        on one mesh axis; the sentence names the parameter, the dimension and the axis.
    """

    def one(path, leaf, axes):
        name = "Parameter " + "/".join(str(key.key) for key in path)
        return NamedSharding(mesh, _fit(leaf.shape, axes, mesh, name))

    return jax.tree_util.tree_map_with_path(one, abstract_params, logical_axes)


def batch_sharding(mesh: Mesh, length: int | None = None) -> NamedSharding:
    """Rows over `data` and `fsdp`; every other dimension whole.

    With the rows' length in tokens, for arrays [rows, length, ...], the tokens over `sequence`,
    if it divides them.
    """
    cut = length is not None and _cuts_tokens(length, mesh)
    return NamedSharding(mesh, _spec(("batch", "tokens") if cut else ("batch",), "A batch"))


def check_batch(rows: int, mesh: Mesh, length: int | None = None) -> None:
    """Raises `UserError` unless `rows` rows at a time, of `length` tokens, can be cut over it."""
    parts = _axis_size(mesh, RULES["batch"])
    check(
        rows % parts == 0,
        f"A batch of {rows} rows cannot be cut over data x fsdp = {parts} devices; make it a "
        f"multiple of {parts} (training: batch_size / accum_steps).",
    )
    parts = _axis_size(mesh, RULES["tokens"])
    check(
        length is None or length % parts == 0,
        f"Rows of {length} tokens cannot be cut over sequence = {parts} devices; make data.length "
        f"a multiple of {parts}, or mesh.sequence a divisor of it.",
    )


def share_of_rows(mesh: Mesh) -> tuple[int, int]:
    """Which of equal parts of a batch's rows this process's devices need: (index, count).

    Processes that cut heads or tokens between them need the same rows.
    """
    parts = _axis_size(mesh, RULES["batch"])
    held = batch_sharding(mesh).addressable_devices_indices_map((parts,)).values()
    rows = [index[0].start or 0 for index in held if index is not None]
    first, size = min(rows), max(rows) + 1 - min(rows)
    return (0, 1) if parts % size or first % size else (first // size, parts // size)


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes; does nothing outside `jax.set_mesh`.

    Without it the compiler may gather whole activations ("involuntary full rematerialization").
    Tokens that the mesh does not divide stay whole.

    Raises:
      UserError: as `param_shardings`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or np.prod(list(mesh.shape.values())) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _fit(x.shape, logical_axes, mesh, "An activation"))


def cuts_tokens(length: int) -> bool:
    """Whether the devices here hold slices of rows of so many tokens, and not whole rows."""
    return length % devices("tokens") == 0 and devices("tokens") > 1


def slices_as_rows(x: jax.Array) -> jax.Array:
    """[rows, length, ...] as [N x rows, length / N, ...] where N devices hold slices of a row.

    All first slices come first, so that each device keeps what it has.
    """
    rows, length, *rest = x.shape
    if not cuts_tokens(length):
        return x
    x = x.reshape(rows, devices("tokens"), part(length, "tokens"), *rest)
    x = jnp.moveaxis(x, 1, 0).reshape(-1, part(length, "tokens"), *rest)
    return constrain(x, "slices", *[None] * (x.ndim - 1))


def rows_of_slices(x: jax.Array, length: int) -> jax.Array:
    """Undoes `slices_as_rows` for rows of `length` tokens."""
    if not cuts_tokens(length):
        return x
    rest = x.shape[2:]
    x = x.reshape(devices("tokens"), -1, part(length, "tokens"), *rest)
    x = jnp.moveaxis(x, 0, 1).reshape(-1, length, *rest)
    return constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))


def row_axis(length: int) -> str:
    """The logical axis of rows of `length` tokens once `slices_as_rows` has seen them."""
    return "slices" if cuts_tokens(length) else "batch"


def shares(rows: int, logical: str) -> int:
    """On how many devices lie different ones of `rows` rows; 1 if they cannot be cut."""
    return rows // part(rows, logical) if rows else 1


def by_device(x: jax.Array, logical: str, *axes: str | None) -> jax.Array:
    """[rows, ...] as [S, rows / S, ...], the first axis cut over the S devices that rows lie on.

    Args:
      x: its first axis is `logical`.
      axes: of all its axes but that, which the others have in the result.
    """
    rows = x.shape[0]
    count = shares(rows, logical)
    x = x.reshape(count, rows // count, *x.shape[1:])
    return constrain(x, logical if count > 1 else None, None, *axes)


def _open_axes(mesh: Any) -> dict[str, AxisType]:
    """Mesh axes of more than one device that no `shard_map` around has cut yet."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: kind for name, size, kind in kinds if size > 1 and kind != AxisType.Manual}


def is_whole() -> bool:
    """Whether code here sees all of its arrays that its device has: nothing is left to be cut."""
    return not _open_axes(jax.sharding.get_abstract_mesh())


def obstacle_to_cutting() -> str | None:
    """Why `on_each_device` cannot cut a call here, in half a sentence; None if it can."""
    axes = _open_axes(jax.sharding.get_abstract_mesh())
    strange = [name for name, kind in axes.items() if name not in AXES or kind != AxisType.Auto]
    if strange:
        return f"kernels are cut over Auto mesh axes {', '.join(AXES)}, not over {strange[0]!r}"
    return None


def part(size: int, logical: str) -> int:
    """What each device has of a dimension once `on_each_device` has cut it."""
    parts = devices(logical)
    return size if size % parts else size // parts


def _open_part(logical: str) -> tuple[str, ...]:
    """The open mesh axes that a logical axis is cut along."""
    entry, axes = RULES[logical], _open_axes(jax.sharding.get_abstract_mesh())
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name in axes)


def devices(logical: str) -> int:
    """Over how many devices the compiler, or `on_each_device`, cuts what can be cut so often."""
    return _axis_size(jax.sharding.get_abstract_mesh(), _open_part(logical))


def on_each_device(call: Callable[..., Any], args: Sequence[Any], axes: Any, out_axes: Any) -> Any:
    """call(*args), each device with its own part: for what the compiler cannot cut.

    Args:
      call: a function of arrays in which no row and no head depends on another, and tokens only
        through collectives on the mesh axis of "tokens".
      args: arrays or None.
      axes: for each argument a tuple of logical axes, or None a dimension.
      out_axes: the same for each result, a tuple of tuples.

    A logical axis that does not divide one of its dimensions is cut nowhere; that work is then done
    on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # With the axes of one device: a TPU kernel is refused where any axis is the compiler's to cut.
    names = {name for name, kind in kinds.items() if kind != AxisType.Manual}
    if not names or (mesh.size == 1 and len(names) == len(kinds)):
        return call(*args)
    present = [(x, a) for x, a in zip(args, axes, strict=True) if x is not None]
    whole = {
        logical
        for x, of_dims in present
        for size, logical in zip(x.shape, of_dims, strict=True)
        if logical is not None and size % devices(logical)
    }

    def spec(of_dims):
        return PartitionSpec(*(None if a is None or a in whole else _open_part(a) for a in of_dims))

    in_specs = tuple(None if x is None else spec(a) for x, a in zip(args, axes, strict=True))
    out_specs = tuple(spec(a) for a in out_axes)
    # Kernels know no varying axes, so the check of them is off.
    cut = jax.shard_map(
        call, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )
    return cut(*args)
