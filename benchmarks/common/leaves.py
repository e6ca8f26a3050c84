"""A result's JSON as tables, whatever its layout: records that belong together are one table, and everything else is its scalar leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
LONGEST = 16  # of a list of scalars that is shown in one cell


@dataclass(frozen=True, slots=True)
class Table:
    """`path`: where in the JSON it is, names with dots between them. Rows have as many cells as there are columns."""

    path: str
    columns: list[str]
    rows: list[list[Scalar]]

    def column(self, name: str) -> list[Scalar]:
        return [row[self.columns.index(name)] for row in self.rows]


def tables_of(value: Any, path: str = "") -> list[Table]:
    """In the order of the JSON; the leaves of one object come before what is inside it."""
    if is_scalar(value):
        return [Table("", ["", "value"], [[path, shown(value)]])]
    items = list(value.items()) if isinstance(value, Mapping) else [(str(i), each) for i, each in enumerate(value)]
    if items and all(is_record(each) for _, each in items) and (len(items) > 1 or not isinstance(value, Mapping)):
        return [table_of(path, items, named=isinstance(value, Mapping))]
    leaves: list[list[Scalar]] = [[name, shown(each)] for name, each in items if is_scalar(each)]
    made = [Table(path, ["", "value"], leaves)] if leaves else []
    for name, each in items:
        if not is_scalar(each):
            made += tables_of(each, f"{path}.{name}" if path else name)
    return made


def table_of(path: str, items: Sequence[tuple[str, Mapping[str, Any]]], named: bool) -> Table:
    """One row for each record; `named`: the names are a column too."""
    columns = list(dict.fromkeys(column for _, record in items for column in record))
    rows = [[shown(record.get(column)) for column in columns] for _, record in items]
    if not named:
        return Table(path, columns, rows)
    return Table(path, ["", *columns], [[name, *row] for (name, _), row in zip(items, rows, strict=True)])


def is_scalar(value: Any) -> bool:
    """A short list of scalars is one as well."""
    if isinstance(value, list):
        return len(value) <= LONGEST and all(each is None or isinstance(each, str | int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def is_record(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(is_scalar(each) for each in value.values())


def shown(value: Any) -> Scalar:
    if isinstance(value, list):
        return ", ".join(text_of(each) for each in value)
    return value  # type: ignore[no-any-return]


def text_of(value: Scalar) -> str:
    """Four significant digits, and no digit before the point is left out."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000 else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
