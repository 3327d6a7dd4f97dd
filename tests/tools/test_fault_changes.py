"""Changes of sources: what a kind and a number find, and what stands there afterwards."""

import pytest

from tools.planted_faults import python_changes, token_changes
from tools.planted_faults.changes import Change, Edit, edited
from tools.planted_faults.python_pieces import PythonSource

PYTHON = '''"""A module."""

LIMIT = 8


class Pool:
    size: int = 4

    @property
    def free(self) -> int:
        return self.size - self.used

    def take(self, count, default=2, *, wait=True):
        """What is taken, größer als nichts."""
        if count > self.free and not wait:
            raise ValueError(f"{count > 1} of {self.free}")
        taken = [self.pop(i, last=i == count - 1) for i in range(count) if i < LIMIT]
        self.used += count
        for each in taken:
            self.note(each)
        return taken[0] if default else taken


def other(a, b):
    def inner(x):
        return x < a < b

    with open(a) as file:
        try:
            return inner(file)
        except OSError:
            return None
    return a or b
'''


def changed(function: str, *changes: Change, text: str = PYTHON) -> str:
    source = PythonSource(text)
    edits = [python_changes.find_edit(source, source.scope(function), change) for change in changes]
    return edited(source.text, edits).decode()


@pytest.mark.parametrize(
    ("function", "at", "nth", "to", "old", "new"),
    [
        ("Pool.take", "operator >", 1, ">=", "count > self.free", "count >= self.free"),
        ("Pool.take", "operator and", 1, "or", "self.free and not", "self.free or not"),
        ("Pool.take", "operator +=", 1, "-=", "used += count", "used -= count"),
        ("Pool.take", "operation -", 1, "@left", "i == count - 1)", "i == count)"),
        ("Pool.take", "operation and", 1, "@values[1]", "count > self.free and not wait", "not wait"),
        ("Pool.take", "comparison", 1, None, "count > self.free and not wait", "not wait"),
        ("Pool.take", "operation not", 1, None, " and not wait:", ":"),
        ("Pool.take", "operation not", 1, "not @", "not wait:", "not (not wait):"),
        ("Pool.take", "condition", 2, "True", "if i < LIMIT", "if True"),
        ("Pool.take", "condition", 3, "wait", "if default else", "if wait else"),
        ("Pool.take", "constant 1", 1, "2", "count - 1", "count - 2"),
        ("Pool.take", "default of wait", 1, "False", "wait=True", "wait=False"),
        ("Pool.take", "argument 1 of range", 1, "@ + 1", "range(count)", "range(count + 1)"),
        ("Pool.take", "argument last of pop", 1, None, "(i, last=i == count - 1)", "(i)"),
        ("Pool.take", "argument 1 of pop", 1, None, "(i, last=i == count - 1)", "(last=i == count - 1)"),
        ("Pool.take", "keyword last", 1, "False", "last=i == count - 1", "last=False"),
        ("Pool.take", "iterable", 2, "@[1:]", "each in taken", "each in taken[1:]"),
        ("Pool.take", "returned value", 1, "@orelse", "taken[0] if default else taken", "taken"),
        ("Pool.take", "index of taken", 1, "-1", "taken[0]", "taken[-1]"),
        ("Pool.take", "call of note", 1, "@func.value.free", "self.note(each)", "self.free"),
        ("Pool.take", "assignment to used", 1, None, "        self.used += count\n", ""),
        ("Pool.take", "statement note", 1, None, "self.note(each)", "pass"),
        ("Pool.take", "statement note", 1, "a()\n@", "self.note(each)", "a()\n            self.note(each)"),
        ("Pool.take", "for", 1, "@body", "for each in taken:\n            self.note", "self.note"),
        ("Pool.take", "element of taken", 1, "taken", "return taken[0]", "return taken"),
        ("Pool", "value of size", 1, "5", "size: int = 4", "size: int = 5"),
        ("", "value of LIMIT", 1, "9", "LIMIT = 8", "LIMIT = 9"),
        ("Pool.free", "operator -", 1, "+", "size - self", "size + self"),
        ("other.inner", "operator <", 2, "<=", "a < b", "a <= b"),
        ("other", "exception", 1, "ValueError", "except OSError", "except ValueError"),
        ("other", "operator or", 1, "and", "a or b", "a and b"),
    ],
)  # fmt: skip
def test_a_piece_of_python_is_replaced_or_dropped(
    function: str, at: str, nth: int, to: str | None, old: str, new: str
) -> None:
    assert PYTHON.count(old) == 1
    assert changed(function, Change(at, nth, to)) == PYTHON.replace(old, new)


@pytest.mark.parametrize(
    ("text", "at", "left"),
    [
        ("a and (not b)", "operation not", "a"),
        ("a and (not b) and c", "operation not", "a and c"),
        ("(not a) and b", "operation not", "b"),
        ("a and (not b)", "name a", "(not b)"),
        ("((a)) or f((b), c)", "call of f", "((a))"),
        ("g(a, (not b))", "operation not", "g(a)"),
        ("g((not a), b)", "operation not", "g(b)"),
        ("g(not a)", "operation not", "g()"),
    ],
)
def test_an_operand_is_dropped_with_parentheses_of_its_own(text: str, at: str, left: str) -> None:
    source = PythonSource(f"def h():\n    return {text}\n")
    edit = python_changes.find_edit(source, source.scope("h"), Change(at))
    assert edited(source.text, [edit]).decode() == f"def h():\n    return {left}\n"


def test_a_statement_keeps_the_indentation_of_its_block() -> None:
    text = changed("Pool.take", Change("assignment to used", to="for _ in range(2):\n    @\nelse:\n    pass"))
    block = "for _ in range(2):\n            self.used += count\n        else:\n            pass"
    assert text == PYTHON.replace("self.used += count", block)


def test_several_changes_are_of_the_function_as_it_was() -> None:
    text = changed("Pool.take", Change("operator >", to=">="), Change("name count", 2, "default"))
    expected = PYTHON.replace("count > self.free and", "count >= self.free and").replace(
        "i == count - 1", "i == default - 1"
    )
    assert text == expected
    with pytest.raises(ValueError, match="overlap"):
        changed("Pool.take", Change("condition", to="True"), Change("operator >", to="<"))


@pytest.mark.parametrize(
    ("function", "at", "nth", "message"),
    [
        ("Pool.give", "condition", 1, "there is no Pool.give"),
        ("Pool.take", "condition", 4, "of condition there are 3, not 4"),
        ("Pool.take", "operator >", 2, "of operator > there are 1"),  # the other one is in a formatted text
        ("Pool.take", "condition", 1, "condition cannot be dropped"),
    ],
)
def test_what_is_not_there_is_refused(function: str, at: str, nth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(function, Change(at, nth))


CUDA = """// over int32_t
#include <cstdint>
#define KEPT(x) ((x) < 4)

namespace coldstream {
namespace {

struct alignas(16) Pair {
  int first = 1;
  bool operator()(int a) const { return a < first; }
};

// Sorts < by size.
template <int Size, typename T = Pair>
__global__ void __launch_bounds__(128) sort(const T* x, int n) {
  if (threadIdx.x < n && x[0] < 3) return;  // n < 4
  for (int i = 0; i<n; ++i) { __syncthreads(); write(x, "a < b"); }
}

}  // namespace

class Server {
 public:
  explicit Server(int n) : n_(n), list_{n} { start(); }
  int size() const;

 private:
  int n_ = 0;
};

int Server::size() const { return n_ << 1; }

}  // namespace coldstream
"""


@pytest.mark.parametrize(
    ("function", "at", "nth", "to", "old", "new"),
    [
        ("sort", "<", 2, "<=", "threadIdx.x < n", "threadIdx.x <= n"),
        ("sort", "<", 4, ">", "i<n", "i>n"),
        ("sort", "__syncthreads();", 1, None, "__syncthreads();", ""),
        ("sort", "x, \"a < b\"", 1, "@, n", 'write(x, "a < b")', 'write(x, "a < b", n)'),
        ("sort", "x[0] < 3", 1, "true", "x[0] < 3", "true"),
        ("Pair", "1", 1, "2", "first = 1", "first = 2"),
        ("Pair::operator()", "<", 1, ">", "a < first", "a > first"),
        ("Server::Server", "start()", 1, "stop()", "start()", "stop()"),
        ("Server::size", "<< 1", 1, None, "n_ << 1", "n_ "),
        ("", "n_ = 0", 1, "n_ = 1", "n_ = 0", "n_ = 1"),
    ],
)  # fmt: skip
def test_tokens_of_a_function_are_replaced_or_dropped(
    function: str, at: str, nth: int, to: str | None, old: str, new: str
) -> None:
    assert CUDA.count(old) == 1
    edit = token_changes.find_edit(CUDA, function, Change(at, nth, to))
    assert edited(CUDA.encode(), [edit]).decode() == CUDA.replace(old, new)


def test_tokens_that_are_not_there_are_refused() -> None:
    for function, at, nth in (("merge", "<", 1), ("sort", "<", 5), ("sort", "n < 4", 1)):
        with pytest.raises(ValueError, match="there"):
            token_changes.find_edit(CUDA, function, Change(at, nth, ">"))


SCRIPT = """const LINK = /^https?:/;
export const hasKey = () => key !== "";
export function render(node, { depth = 0 } = {}) {
  if (depth > 3) { return `${node} > x`; }
}
"""


def test_functions_of_scripts_are_found() -> None:
    edit = token_changes.find_edit(SCRIPT, "render", Change(">", to=">="))
    assert edited(SCRIPT.encode(), [edit]).decode() == SCRIPT.replace("depth > 3", "depth >= 3")


def test_edits_may_not_overlap() -> None:
    assert edited("äbc".encode(), [Edit(2, 3, "", "b"), Edit(0, 2, "ö", "ä")]).decode() == "öc"
    with pytest.raises(ValueError, match="overlap"):
        edited(b"abc", [Edit(0, 2, "", "ab"), Edit(1, 2, "", "b")])
