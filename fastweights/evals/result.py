"""What an eval returns."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Result:
    """Numbers of one eval.

    Attributes:
      metrics: a few scalars to log and plot.
      rows: the table by slice; all rows have the same columns, the first names the slice.
    """

    metrics: dict[str, float]
    rows: list[dict[str, float | int | str | None]]
