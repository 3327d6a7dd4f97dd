"""Changes of Python source: a piece of a function is replaced or dropped."""

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from tools.planted_faults.changes import Change, Edit, edited
from tools.planted_faults.python_pieces import Piece, PythonSource, Scope

PLACEHOLDER = re.compile(r"@((?:[a-z_]+(?:\[\d+\])?\.)*[a-z_]+(?:\[\d+\])?)?")
STEP = re.compile(r"([a-z_]+)(?:\[(\d+)\])?\.?")
UNSAID = {"ctx", "kind", "type_comment", "type_params"}
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.List, ast.Dict, ast.Set)


def find_edit(source: PythonSource, scope: Scope, change: Change) -> Edit:
    """What a change does. Raises ValueError if there is no such piece, or it cannot be dropped."""
    alike = [piece for piece in source.pieces(scope) if piece.kind == change.at]
    if len(alike) < change.nth:
        raise ValueError(f"of {change.at} there are {len(alike)}, not {change.nth}")
    piece = alike[change.nth - 1]
    return edit_of(source, piece, change.to)


def edit_of(source: PythonSource, piece: Piece, to: str | None) -> Edit:
    """The replacement of `piece` by `to`, or its removal."""
    old = repr(_meaning(piece.node))
    if to is None:
        return Edit(*_dropped(source, piece), old)
    if not isinstance(piece.node, ast.stmt) or piece.kind.startswith("operator"):
        return Edit(piece.start, piece.end, _filled(source, piece, to), old)
    indent = " " * piece.node.col_offset
    lines = _filled(source, piece, to).split("\n")
    text = "\n".join([lines[0], *(indent + line if line else line for line in lines[1:])])
    return Edit(piece.start, piece.end, text, old)


def _meaning(node: object) -> object:
    """What a node says, in a form that is the same in all versions of Python, unlike those of `ast`."""
    if isinstance(node, list):
        return [_meaning(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in UNSAID]
    return [
        type(node).__name__,
        *((name, _meaning(value)) for name, value in fields if value not in (None, [])),
    ]


def means_the_same(source: PythonSource, edits: Sequence[Edit]) -> bool:
    """Whether the source says the same with all edits. Raises SyntaxError if it would no longer be Python."""
    ranges = [(*source.range_of(node), node) for node in source.tree.body]
    first, last = min(edit.start for edit in edits), max(edit.end for edit in edits)
    touched = [(start, end, node) for start, end, node in ranges if start <= last and end >= first]
    start, end = min(start for start, _, _ in touched), max(end for _, end, _ in touched)
    moved = [replace(edit, start=edit.start - start, end=edit.end - start) for edit in edits]
    new = ast.parse(edited(source.text[start:end], moved))
    return are_alike(new.body, [node for _, _, node in touched])


def are_alike(first: object, second: object) -> bool:
    """Whether two trees are equal but for their places in the text; seldom are they read to their ends."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list):
        assert isinstance(second, list)
        return len(first) == len(second) and all(map(are_alike, first, second))
    if isinstance(first, ast.AST):
        return all(
            are_alike(getattr(first, name, None), getattr(second, name, None)) for name in first._fields
        )
    return first == second


def _dropped(source: PythonSource, piece: Piece) -> tuple[int, int, str]:
    """The bytes that go with a piece, and what stands there then."""
    place = next((i for i, node in enumerate(piece.block) if node is piece.node), None)
    if place is None:
        raise ValueError(f"{piece.kind} cannot be dropped")
    if isinstance(piece.node, ast.stmt):
        if len(piece.block) == 1:
            return piece.start, piece.end, "pass"
        start = source.text.rfind(b"\n", 0, piece.start) + 1
        end = source.text.find(b"\n", piece.end) + 1
        return start, end or len(source.text), ""
    if len(piece.block) == 1:
        return piece.start, piece.end, ""
    start, end = _in_parentheses(source, piece.node)
    if place + 1 < len(piece.block):
        return start, _in_parentheses(source, piece.block[place + 1])[0], ""
    return _in_parentheses(source, piece.block[place - 1])[1], end, ""


def _in_parentheses(source: PythonSource, node: ast.AST) -> tuple[int, int]:
    """The bytes of one of several operands, arguments or elements, with the parentheses around it alone."""
    text = source.text
    start, end = source.range_of(node)
    while True:
        left = len(text[:start].rstrip()) - 1
        right = len(text) - len(text[end:].lstrip())
        if text[left : left + 1] != b"(" or text[right : right + 1] != b")":
            return start, end
        start, end = left, right + 1


def _filled(source: PythonSource, piece: Piece, to: str) -> str:
    """`to` with @ for what stands there now, and @left, @args[1] … for a part of that."""
    lines = []
    for line in to.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        filled = PLACEHOLDER.sub(lambda found: _text_of(source, piece, found, to), line)
        lines.append(textwrap.indent(filled, indent).removeprefix(indent) if indent else filled)
    return "\n".join(lines)


def _text_of(source: PythonSource, piece: Piece, found: re.Match[str], to: str) -> str:
    """What a placeholder stands for. Names behind the last part that there is are attributes of its text."""
    node, rest = piece.node, found[1] or ""
    while step := STEP.match(rest):
        part = _part_of(node, step)
        if isinstance(part, list) and all(isinstance(each, ast.stmt) for each in part):
            return "\n".join(_dedented(source, statement) for statement in part)
        if not isinstance(part, ast.AST):
            break
        node, rest = part, rest[step.end() :]
    if isinstance(node, ast.stmt):
        return _dedented(source, node)
    text = source.segment(node)
    is_alone = found[0] == to or isinstance(node, ATOMS)
    return (text if is_alone else f"({text})") + (f".{rest}" if rest else "")


def _part_of(node: ast.AST, step: re.Match[str]) -> object:
    value = getattr(node, step[1], None)
    return value[int(step[2])] if step[2] and isinstance(value, list) else value


def _dedented(source: PythonSource, statement: ast.stmt) -> str:
    indent = " " * statement.col_offset
    return "\n".join(line.removeprefix(indent) for line in source.segment(statement).split("\n"))
