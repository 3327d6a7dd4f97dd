"""Circles of imports are found within a room, of any length, and nothing else is called one."""

import grimp
import pytest

from tools.import_contracts import AcyclicModules, circles


def graph_of(*imports: tuple[str, str]) -> grimp.ImportGraph:
    """Of modules below a.room, b and so on: (importer, imported)."""
    graph = grimp.ImportGraph()
    for module in {"room", "other", *(module for pair in imports for module in pair)}:
        graph.add_module(module)
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    return graph


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ([("room.a", "room.b"), ("room.b", "room.c"), ("room.a", "room.c")], []),
        ([("room.a", "room.b"), ("room.b", "room.a")], [["room.a", "room.b"]]),
        (
            [("room.a", "room.b"), ("room.b", "room.f.c"), ("room.f.c", "room.a"), ("room.f.c", "room.d")],
            [["room.a", "room.b", "room.f.c"]],
        ),
        ([("room.a", "room"), ("room", "room.a")], [["room", "room.a"]]),
        # Two folders that use each other's files are no circle of modules.
        ([("room.f.a", "room.g.a"), ("room.g.b", "room.f.b")], []),
        # What goes by way of another room is for the contract of layers.
        ([("room.a", "other.a"), ("other.a", "room.a")], []),
        ([("room.a", "other.a"), ("other.a", "other.b"), ("other.b", "other.a")], []),
        (
            [("room.a", "room.b"), ("room.b", "room.a"), ("room.c", "room.d"), ("room.d", "room.c")],
            [["room.a", "room.b"], ["room.c", "room.d"]],
        ),
    ],
)
def test_circles_of_a_room(imports: list[tuple[str, str]], expected: list[list[str]]) -> None:
    graph = graph_of(*imports)
    assert list(circles(graph, "room")) == expected
    contract = AcyclicModules("no circles", {}, {"rooms": ["room"]})
    assert contract.check(graph, verbose=False).kept == (not expected)
