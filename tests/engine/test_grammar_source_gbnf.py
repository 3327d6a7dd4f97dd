"""GBNF grammars match what llama.cpp's documentation says of them."""

import pytest

from coldstream.engine.grammar_source import MAX_GBNF_RULES, lark_of_gbnf
from coldstream.engine.regular_languages import byte_matcher

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root ::= (expr "=" num "\n")+
expr ::= term ([-+*/] term)*
term ::= num | "(" expr ")"
num ::= [0-9]+
"""


def matches(grammar: str, text: str) -> bool:
    matcher = byte_matcher(lark_of_gbnf(grammar))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    num_valid = matcher.validate_tokens(data)
    matcher.consume_tokens(data[:num_valid])
    return num_valid == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "yes" | "no"', "no", "maybe"),
        ('root ::= [a-z]+ "end"', "endend", "en"),  # characters, not the longest lexeme
        (JSON, '{"a": [1, 2.5e3, "x\\n"], "b": {}}', '{"a": }'),
        (SUMS, "1+(2*3)=5\n", "1+=5\n"),
        (r'root ::= "\u00e9" [\u4e00-\u9fff]+ .', "é中国\n", "e中!"),
        (r'root ::= "\x41\U0001F600"', "A😀", "A"),
        ("root ::= item{2,3} # a comment with \"quotes\"\nitem ::= [^,]+ ','?".replace("'", '"'), "a,b", ","),
        ('root ::= "a\nb"', "a\nb", "ab"),
        ('root ::= foo-bar\nfoo-bar ::= "x"', "x", "y"),
    ],
)
def test_what_a_grammar_matches(grammar: str, right: str, wrong: str) -> None:
    assert matches(grammar, right)
    assert not matches(grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('foo ::= "a"', "'root' not found"),
        ("root ::= bar", "'bar' not found"),
        ('root ::= "a', "Unexpected end"),
        ('root = "a"', "Expected ::="),
        ("root ::= " + "(" * 20_000, "nested too deeply"),
        (r'root ::= "\ud800"', "is no character"),
        ("\n".join(f'r{i} ::= "a"' for i in range(MAX_GBNF_RULES + 1)), "at most"),
    ],
)
def test_what_is_no_gbnf_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lark_of_gbnf(grammar)
