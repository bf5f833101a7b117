"""What a family of published models is to the reader and the writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastweights.interop.fields import Fields
from fastweights.interop.tensors import Form, Same, Shifted, Table
from fastweights.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """What a table depends on beside the model.

    Attributes:
      norm: form of the norms that follow the family's convention, and here the model's.
      head_norm: the same where ours are always centred, as those of single heads are.
      shapes: of the tensors of a checkpoint that is read or was imported; empty for a model from
        scratch. A table asks it where one family is published in two ways.
      mlx: the checkpoint says that MLX wrote it.
    """

    norm: Form = dataclasses.field(default_factory=Same)
    head_norm: Form = dataclasses.field(default_factory=Same)
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    mlx: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      name: for people.
      model_types: names in `config.json`; the first is written.
      letters: mixers that it is made of.
      prefix: stands before all names but the head's in what is written from scratch.
      centred: whether norm weights are published as w of (1 + w).
      read: (fields, tied) -> the model.
      write: the config.json of a model, which `read` turns into the same model if it can be
        expressed.
      table: (model, context) -> rows.
      tied_by_default: what a config without `tie_word_embeddings` means.
      unwrap: the text model's part of a config.
    """

    name: str
    model_types: tuple[str, ...]
    letters: str
    prefix: str
    centred: bool
    read: Callable[[Fields, bool], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Callable[[ModelConfig, Context], Table]
    tied_by_default: bool = False
    unwrap: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config

    def context(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], mlx: bool
    ) -> Context:
        """The context of a model's table.

        MLX writes weights that are centred elsewhere with their 1 added, and says so in the file's
        format tag; the numbers themselves are never asked, for they may look like either.
        """
        published = self.centred and not mlx

        def form(ours: bool) -> Form:
            return Same() if ours == published else Shifted(1.0 if ours else -1.0)

        return Context(form(config.norm == "centred"), form(True), shapes, mlx)
