"""How published tensors and this package's parameters hold the same numbers.

A family's table is a list of `Row`s: a tensor's name and shape as published, the parameters it
holds and the form that leads from one to the other. Linear weights are published as [out, in] and
kept as [in, out]; several of them may lie in one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from fastweights.model import ModelConfig
from fastweights.pattern import Layout

Path = tuple[str, ...]


class Form(Protocol):
    """From a published tensor to parameters and back; views where that is possible."""

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]: ...

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Same:
    """One parameter, as published."""

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0]


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Norm weights of another convention: published is ours plus `by`."""

    by: float

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor.astype(np.float32) - np.float32(self.by)]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].astype(np.float32) + np.float32(self.by)


@dataclasses.dataclass(frozen=True)
class Shaped:
    """One parameter of another shape with the same order of numbers."""

    published: tuple[int, ...]
    ours: tuple[int, ...]

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor.reshape(self.ours)]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].reshape(self.published)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels that lie below each other: published [groups * sum(sizes), in].

    Each of the groups holds `sizes[0]` rows of the first kernel, then `sizes[1]` of the second, and
    so on; kernel i is [in, groups * sizes[i]] here.
    """

    sizes: tuple[int, ...]
    groups: int = 1

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        width = tensor.shape[1]
        rows = tensor.reshape(self.groups, sum(self.sizes), width)
        parts = np.split(rows, np.cumsum(self.sizes)[:-1], axis=1)
        return [part.reshape(-1, width).T for part in parts]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        width = parts[0].shape[0]
        rows = [
            part.T.reshape(self.groups, size, width)
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return np.concatenate(rows, axis=1).reshape(-1, width)


@dataclasses.dataclass(frozen=True)
class Taps:
    """Depthwise convolutions side by side: published [sum(sizes), 1, taps], ours [taps, size] each.

    With `last` the published axis of one stands last, as MLX writes it.
    """

    sizes: tuple[int, ...]
    last: bool = False

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        taps = tensor[:, :, 0] if self.last else tensor[:, 0]
        return [part.T for part in np.split(taps, np.cumsum(self.sizes)[:-1])]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        taps = np.concatenate([part.T for part in parts])
        return taps[:, :, None] if self.last else taps[:, None]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Vectors behind each other: published [sum(sizes)]."""

    sizes: tuple[int, ...]

    def split(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return np.split(tensor, np.cumsum(self.sizes)[:-1])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter, or the slice of it at `index` of its leading axes (layer, expert)."""

    path: Path
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """Published tensors and the parameters they hold.

    Attributes:
      names: without what stands before `layers`, `lm_head` and so on; several names are tensors
        that `form` sees one below the other.
      shapes: of each.
      params: what they hold, in the form's order.
      form: leads from one to the other.
      wide: kept in float32 whatever the others' dtype.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    params: tuple[Param, ...]
    form: Form
    wide: bool = False

    def split(self, tensors: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The parameters out of the tensors of `names`."""
        return self.form.split(tensors[0] if len(tensors) == 1 else np.concatenate(tensors))

    def join(self, parts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The tensors of `names` out of the parameters."""
        whole = self.form.join(parts)
        return np.split(whole, np.cumsum([shape[0] for shape in self.shapes])[:-1])


class Layer:
    """Makes the rows of one layer: `layer("mlp.up_proj.weight", (I, D), "mlp.up.kernel", form)`."""

    def __init__(self, layout: Layout, number: int):
        group = len(layout.group) * layout.num_groups
        if number < group:
            place, self._index = number % len(layout.group), (number // len(layout.group),)
            self._path = ("groups", f"layer_{place}")
        else:
            self._index, self._path = (), ("tail", f"layer_{number - group}")
        self._prefix = f"layers.{number}."

    def __call__(
        self,
        names: str | Sequence[str],
        shape: tuple[int, ...] | Sequence[tuple[int, ...]],
        params: str | Sequence[str],
        form: Form,
        *,
        expert: int | None = None,
        wide: bool = False,
    ) -> Row:
        """`params` are dotted; several names come with as many shapes."""
        one = isinstance(names, str)
        index = self._index + (() if expert is None else (expert,))
        return Row(
            tuple(self._prefix + name for name in ([names] if one else names)),
            (tuple(shape),) if one else tuple(shape),  # type: ignore[arg-type]
            tuple(
                Param((*self._path, *name.split(".")), index)
                for name in ([params] if isinstance(params, str) else params)
            ),
            form,
            wide,
        )


def top(name: str, shape: tuple[int, ...], param: str, form: Form) -> Row:
    """The row of a tensor outside the layers."""
    return Row((name,), (shape,), (Param(tuple(param.split("."))),), form)


MAMBA_NAMES = ("embeddings", "norm_f")


def outer(
    config: ModelConfig, norm: Form, *, names: tuple[str, str] = ("embed_tokens", "norm")
) -> Table:
    """The rows of embedding and last norm, by these names, and of the head."""
    V, D = config.vocab_size, config.d_model
    yield top(f"{names[0]}.weight", (V, D), "embedding", Same())
    yield top(f"{names[1]}.weight", (D,), "final_norm.scale", norm)
    if not config.tie_embeddings:
        yield top("lm_head.weight", (V, D), "head", Kernels((V,)))


def swiglu(layer: Layer, width: int, hidden: int, *, at: str = "mlp", to: str = "mlp"):
    """The rows of a SwiGLU whose tensors stand under `at` and whose parameters under `to`."""
    kernel = Kernels((hidden,))
    yield layer(f"{at}.gate_proj.weight", (hidden, width), f"{to}.gate.kernel", kernel)
    yield layer(f"{at}.up_proj.weight", (hidden, width), f"{to}.up.kernel", kernel)
    yield layer(f"{at}.down_proj.weight", (width, hidden), f"{to}.down.kernel", Kernels((width,)))


Table = Iterator[Row]
