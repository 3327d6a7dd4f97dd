"""The pieces of a Python function or class that a fault may change, each with a name of its kind.

A piece is found by its kind and its number among those of its kind in the function, so that other names,
another layout or another file leave a fault as it is. Knows nothing of faults and tests.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitOr: "|", ast.BitXor: "^", ast.BitAnd: "&", ast.MatMult: "@",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Not: "not",
    ast.USub: "-", ast.UAdd: "+", ast.Invert: "~",
}  # fmt: skip
STATEMENTS: dict[type[ast.stmt], str] = {
    ast.Return: "return", ast.Raise: "raise", ast.If: "if", ast.For: "for", ast.AsyncFor: "for",
    ast.While: "while", ast.With: "with",
    ast.AsyncWith: "with", ast.Try: "try", ast.Continue: "continue", ast.Break: "break",
    ast.Delete: "del", ast.Assert: "assert", ast.Import: "import", ast.ImportFrom: "import", ast.Pass: "pass",
    ast.Global: "global", ast.Nonlocal: "nonlocal", ast.Match: "match",
}  # fmt: skip
EXPRESSIONS: dict[type[ast.expr], str] = {
    ast.Compare: "comparison", ast.IfExp: "conditional", ast.Lambda: "lambda", ast.Slice: "slice",
    ast.ListComp: "comprehension", ast.SetComp: "comprehension", ast.DictComp: "comprehension",
    ast.GeneratorExp: "comprehension", ast.JoinedStr: "f-string", ast.Tuple: "tuple", ast.List: "list",
    ast.Dict: "dict", ast.Set: "set", ast.Starred: "starred", ast.Await: "await", ast.Yield: "yield",
    ast.YieldFrom: "yield", ast.NamedExpr: "walrus",
}  # fmt: skip
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of the source.

    node: what stands there; of an operator the whole expression. block: the statements among which it is one,
    or the expressions of a list of arguments, elements or conditions; empty for others.
    """

    kind: str
    start: int
    end: int
    node: ast.AST
    block: Sequence[ast.AST] = ()


class PythonSource:
    """A module's text. Raises SyntaxError if it is none."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.tree = ast.parse(text)
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._line_starts = starts

    def range_of(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node, decorators included."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.ExceptHandler | ast.alias)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first: ast.expr | ast.stmt | ast.AST = node
        start = self._line_starts[node.lineno - 1] + node.col_offset
        if isinstance(node, SCOPES) and node.decorator_list:
            first = node.decorator_list[0]
            assert isinstance(first, ast.expr)
            start = self._line_starts[first.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def segment(self, node: ast.AST) -> str:
        start, end = self.range_of(node)
        return self.text[start:end].decode()

    def scope(self, name: str) -> Scope:
        """The function or class of a qualified name, without one the module; of several alike the last.

        Raises ValueError if there is none.
        """
        found: Scope = self.tree
        for part in name.split(".") if name else ():
            inside = [node for node in _scopes_in(found) if node.name == part]
            if not inside:
                raise ValueError(f"there is no {name}")
            found = inside[-1]
        return found

    def pieces(self, scope: Scope) -> list[Piece]:
        """All pieces of a scope, by their place; of those that begin together the longest first."""
        found = [*self._pieces_below(scope)]
        return sorted(found, key=lambda piece: (piece.start, -piece.end))

    def _pieces_below(self, node: ast.AST) -> Iterator[Piece]:
        yield from self._roles_in(node)
        for name, value in ast.iter_fields(node):
            below = value if isinstance(value, list) else [value]
            block = _block_of(node, name, below)
            for child in below:
                if isinstance(child, ast.stmt):
                    yield Piece(_statement_kind(child), *self.range_of(child), child, block)
                elif isinstance(child, ast.expr):
                    yield from self._expression_pieces(child, block)
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from self._pieces_below(child)

    def _expression_pieces(self, node: ast.expr, block: Sequence[ast.AST]) -> Iterator[Piece]:
        for operator, start, end in self._operators_of(node):
            yield Piece(f"operator {operator}", start, end, node)
        yield Piece(_expression_kind(node), *self.range_of(node), node, block)

    def _operators_of(self, node: ast.expr) -> Iterator[tuple[str, int, int]]:
        """Operators between operands, with their places."""
        if isinstance(node, ast.Compare):
            operands, operators = [node.left, *node.comparators], [OPERATORS[type(each)] for each in node.ops]
        elif isinstance(node, ast.BinOp):
            operands, operators = [node.left, node.right], [OPERATORS[type(node.op)]]
        elif isinstance(node, ast.BoolOp):
            operands = node.values
            operators = [OPERATORS[type(node.op)]] * (len(operands) - 1)
        else:
            return
        for operator, before, after in zip(operators, operands, operands[1:], strict=False):
            start, end = self.range_of(before)[1], self.range_of(after)[0]
            pattern = re.escape(operator).replace(r"\ ", r"\s+")
            found = re.search(pattern, self.text[start:end].decode())
            assert found is not None
            yield operator, start + found.start(), start + found.end()

    def _roles_in(self, node: ast.AST) -> Iterator[Piece]:
        """Pieces named by what they are for: a condition, what is returned, what a name is given."""
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield Piece("condition", *self.range_of(node.test), node.test)
        if isinstance(node, ast.comprehension):
            for each in node.ifs:
                yield Piece("condition", *self.range_of(each), each)
        if isinstance(node, ast.Return) and node.value is not None:
            yield Piece("returned value", *self.range_of(node.value), node.value)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            yield Piece(f"value of {_target_name(node)}", *self.range_of(node.value), node.value)
        if isinstance(node, ast.AugAssign):
            start, end = self.range_of(node.target)[1], self.range_of(node.value)[0]
            operator = f"{OPERATORS[type(node.op)]}="
            at = start + self.text[start:end].index(operator.encode())
            yield Piece(f"operator {operator}", at, at + len(operator), node)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield Piece("iterable", *self.range_of(node.iter), node.iter)
        if isinstance(node, ast.Call):
            name, given = last_name(node.func), [*node.args, *node.keywords]
            for number, argument in enumerate(node.args, 1):
                yield Piece(f"argument {number} of {name}", *self.range_of(argument), argument, given)
            for keyword in node.keywords:
                yield Piece(f"keyword {keyword.arg}", *self.range_of(keyword.value), keyword.value)
                yield Piece(f"argument {keyword.arg} of {name}", *self.range_of(keyword), keyword, given)
        if isinstance(node, ast.Subscript):
            yield Piece(f"index of {last_name(node.value)}", *self.range_of(node.slice), node.slice)
        if isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = [*zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True)]
            defaults += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
            for parameter, default in defaults:
                yield Piece(f"default of {parameter.arg}", *self.range_of(default), default)
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            yield Piece("exception", *self.range_of(node.type), node.type)


def last_name(node: ast.expr) -> str:
    """The name by which an expression is known: of a.b(c)[d] `b`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
        return last_name(node.value)
    if isinstance(node, ast.Tuple | ast.List) and node.elts:
        return last_name(node.elts[0])
    return type(node).__name__.lower()


def _scopes_in(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _scopes_in(child)


def _block_of(node: ast.AST, field: str, below: Sequence[ast.AST]) -> Sequence[ast.AST]:
    """The neighbours among which a child can be dropped; see `Piece`."""
    if below and isinstance(below[0], ast.stmt):
        return below
    if isinstance(node, ast.Call):
        return [*node.args, *node.keywords] if field == "args" else ()
    is_listed = isinstance(node, ast.Tuple | ast.List | ast.Set | ast.BoolOp) and field in ("elts", "values")
    return below if is_listed else ()


def _target_name(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> str:
    return last_name(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _statement_kind(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return f"assignment to {_target_name(node)}"
    if isinstance(node, ast.Expr):
        return f"statement {last_name(node.value)}"
    if isinstance(node, SCOPES):
        return f"definition of {node.name}"
    return STATEMENTS[type(node)]


def _expression_kind(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return f"name {node.id}"
    if isinstance(node, ast.Attribute):
        return f"attribute {node.attr}"
    if isinstance(node, ast.Constant):
        return f"constant {node.value!r}"
    if isinstance(node, ast.Call):
        return f"call of {last_name(node)}"
    if isinstance(node, ast.Subscript):
        return f"element of {last_name(node.value)}"
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp):
        return f"operation {OPERATORS[type(node.op)]}"
    return EXPRESSIONS.get(type(node), type(node).__name__.lower())
