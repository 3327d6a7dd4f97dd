"""A contract for import-linter: no module imports itself by way of others.

`acyclic_siblings` of import-linter takes a folder for one module, so that two folders of a room that use each
other's files would be a circle. This contract follows modules, and imports for types alone count as well.
"""

from collections.abc import Iterator

import grimp
from importlinter import Contract, ContractCheck, fields, output


class AcyclicModules(Contract):
    """Kept if the imports within each of `rooms` have no circle. A room is a package, with all below it."""

    type_name = "acyclic_modules"

    rooms = fields.SetField(subfield=fields.StringField())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Its metadata has the circles, as lists of modules."""
        found = [circle for room in sorted(self.rooms) for circle in circles(graph, str(room))]
        return ContractCheck(kept=not found, metadata={"circles": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints a line for each circle."""
        for circle in check.metadata["circles"]:
            output.print_error(" → ".join([*circle, circle[0]]))
        output.new_line()


def circles(graph: grimp.ImportGraph, room: str) -> Iterator[list[str]]:
    """A shortest circle through each module of the room that is in one and in none before it."""
    modules = graph.find_descendants(room) | {room}
    seen: set[str] = set()
    for module in sorted(modules):
        if module in seen:
            continue
        way = _way_back(graph, module, modules)
        if way:
            seen.update(way)
            yield way


def _way_back(graph: grimp.ImportGraph, module: str, modules: set[str]) -> list[str]:
    """The modules from `module` to the one that imports it, by imports within `modules`; none: no circle."""
    ways = [[module]]
    reached: set[str] = set()
    while ways:
        way = ways.pop(0)
        for imported in sorted(graph.find_modules_directly_imported_by(way[-1]) & modules):
            if imported == module:
                return way
            if imported not in reached:
                reached.add(imported)
                ways.append([*way, imported])
    return []
