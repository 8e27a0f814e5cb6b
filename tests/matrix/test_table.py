"""No cell is left out in silence, and a new row or column is one entry."""

from __future__ import annotations

from django_redislock import lock

from . import disturbances  # noqa: F401  (it notes the columns)
from .cell import Cell
from .columns import DISTURBANCES, Disturbance
from .holders import HOLDERS, LACKS, row
from .table import ALL, CELLS, verdicts


def test_every_cell_runs_or_is_left_out_for_a_reason_of_the_list():
    assert len(ALL) == len(HOLDERS) * len(DISTURBANCES)
    assert len({each.id for each in ALL}) == len(ALL)
    running = set(CELLS)
    left_out = [each for each in ALL if each not in running]
    assert len(left_out) + len(CELLS) == len(ALL)
    assert {each.left_out for each in left_out} <= set(LACKS.values())


def test_every_row_and_every_column_has_cells_that_run():
    assert {each.row for each in CELLS} == set(HOLDERS)
    assert {each.column for each in CELLS} == set(DISTURBANCES)


def test_a_new_way_to_hold_gets_all_its_cells_by_one_entry():
    new = row("pretended", lambda at: lock(at.name, **at.options), lacks="fence")
    cells = verdicts([*HOLDERS, new], DISTURBANCES)
    mine = [each for each in cells if each.row is new]
    assert len(mine) == len(DISTURBANCES)
    assert {each.column for each in mine if each.left_out} == {
        column for column in DISTURBANCES if column.needs & {"fence", "task"}
    }


def test_a_new_disturbance_gets_all_its_cells_by_one_entry():
    def nothing(cell: Cell) -> None:
        cell.holder().leave()

    new = Disturbance("pretended", nothing, frozenset({"block"}))
    cells = verdicts(HOLDERS, [*DISTURBANCES, new])
    mine = [each for each in cells if each.column is new]
    assert len(mine) == len(HOLDERS)
    assert {each.row for each in mine if each.left_out} == {each for each in HOLDERS if "block" in each.lacks}
