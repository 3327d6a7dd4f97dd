"""What is said to each agent, which steps the model takes then, and what the agent must send of them.

An agent's tools are called under its own names for them, and every kind of result goes into its history: a
text, a picture, what an MCP server says, an error, an edit. Texts in `shown` must be in the last request of
their turn, so that a tool that the agent did not run fails the run.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.agents.mcp_server import PIXEL
from tools.agents.steps import Call, CustomCall, Say, Step

COLOUR: Final = "The colour of the door is green."
PAINTED: Final = "The colour of the door is blue."
NOTE: Final = "The notes say of doors: seven."
LOST: Final = "The notes on doors are lost."
LONG_PROMPT, LONG_FILE = (
    2600,
    660,
)  # functions of `_code`: what a command line holds, and what agents read at once


@dataclass(frozen=True)
class Turn:
    """A prompt, the steps that answer it, and texts in its last request and, after it, in door.txt."""

    prompt: str
    steps: tuple[Step, ...] = (Say("Yes."),)
    shown: tuple[str, ...] = ()
    written: str = ""
    begins: bool = False  # a new conversation, as the first turn does


def prepare(work: Path) -> None:
    """Write the files that the conversations are about."""
    (work / "door.txt").write_text(f"{COLOUR}\n")
    (work / "door.png").write_bytes(base64.b64decode(PIXEL))


def claude_code(work: Path) -> list[Turn]:
    """Claude Code looks for tools of MCP servers with ToolSearch before it may call them."""
    lookup, broken = "mcp__notes__lookup", "mcp__notes__broken"
    search = Call("ToolSearch", {"query": f"select:{lookup},{broken}", "max_results": 5})
    edit = {
        "file_path": f"{work}/door.txt",
        "old_string": "green",
        "new_string": "blue",
        "replace_all": False,
    }
    return [
        Turn("Are you there?"),
        Turn("Read door.txt.", (Call("Read", {"file_path": f"{work}/door.txt"}), Say("Green.")), (COLOUR,)),
        Turn(
            "Look at door.png.", (Call("Read", {"file_path": f"{work}/door.png"}), Say("Red.")), ('"image"',)
        ),
        Turn(
            "What do the notes say of doors?",
            (search, Call(lookup, {"topic": "doors"}), Say("Seven.")),
            (NOTE, "tool_reference"),
        ),
        Turn(
            "Now try what does not work.",
            (
                Call("Read", {"file_path": f"{work}/window.txt"}),
                Call("Bash", {"command": "echo no window >&2; exit 3", "description": "Fails"}),
                Call(broken, {"topic": "doors"}),
                Say("Nothing of it works."),
            ),
            ("no window", LOST, '"is_error": true'),
        ),
        Turn("Paint it.", (Call("Edit", edit), Say("Blue.")), written=PAINTED),
        Turn("Thank you."),
    ]


def codex(work: Path) -> list[Turn]:
    """Codex has tools of MCP servers in namespaces, and `apply_patch` as a custom tool."""
    patch = "*** Begin Patch\n*** Update File: door.txt\n@@\n-{}\n+{}\n*** End Patch"
    patch = patch.format(COLOUR, PAINTED)
    return [
        Turn("Are you there?"),
        Turn("Read door.txt.", (Call("exec_command", {"cmd": "cat door.txt"}), Say("Green.")), (COLOUR,)),
        Turn(
            "Look at door.png.",
            (Call("view_image", {"path": f"{work}/door.png"}), Say("Red.")),
            ('"input_image"',),
        ),
        Turn(
            "What do the notes say of doors?",
            (Call("lookup", {"topic": "doors"}, namespace="mcp__notes"), Say("Seven.")),
            (NOTE,),
        ),
        Turn(
            "Now try what does not work.",
            (
                Call("view_image", {"path": f"{work}/window.png"}),
                Call("exec_command", {"cmd": "echo no window >&2; exit 3"}),
                Call("broken", {"topic": "doors"}, namespace="mcp__notes"),
                Say("Nothing of it works."),
            ),
            ("no window", LOST),
        ),
        Turn("Paint it.", (CustomCall("apply_patch", patch), Say("Blue.")), written=PAINTED),
        Turn("Thank you."),
    ]


def opencode(work: Path) -> list[Turn]:
    """opencode joins the name of an MCP server and that of its tool."""
    edit = {"filePath": f"{work}/door.txt", "oldString": "green", "newString": "blue"}
    return [
        Turn("Are you there?"),
        Turn("Read door.txt.", (Call("read", {"filePath": f"{work}/door.txt"}), Say("Green.")), (COLOUR,)),
        Turn(
            "Look at door.png.",
            (Call("read", {"filePath": f"{work}/door.png"}), Say("Red.")),
            ('"image_url"',),
        ),
        Turn(
            "What do the notes say of doors?",
            (Call("notes_lookup", {"topic": "doors"}), Say("Seven.")),
            (NOTE,),
        ),
        Turn(
            "Now try what does not work.",
            (
                Call("read", {"filePath": f"{work}/window.txt"}),
                Call("bash", {"command": "echo no window >&2; exit 3", "description": "Fails"}),
                Call("notes_broken", {"topic": "doors"}),
                Say("Nothing of it works."),
            ),
            ("no window", LOST),
        ),
        Turn("Paint it.", (Call("edit", edit), Say("Blue.")), written=PAINTED),
        Turn("Thank you."),
    ]


def _too_long(work: Path, readings: list[Step]) -> list[Turn]:
    """A prompt that is longer than a small context, and a conversation whose files fill it.

    An agent says of the first that it is too long, and begins another conversation. It shortens the second.
    """
    for number in range(len(readings)):
        (work / f"long{number}.py").write_text(_code(LONG_FILE))
    files = [Turn("Read the next file.", (reading, Say("It is long."))) for reading in readings]
    return [
        Turn(_code(LONG_PROMPT)),
        Turn("Are you there?", begins=True),
        *files,
        Turn("Thank you."),
    ]


def _code(num_functions: int) -> str:
    """Lines of Python, which the bundled model has words for: about 13 tokens a function."""
    return "".join(f"def function_{n}(self):\n    return self.value\n\n" for n in range(num_functions))


@dataclass(frozen=True)
class Conversations:
    """What is said to one agent: with its tools, and beyond a small context."""

    with_tools: Callable[[Path], list[Turn]]
    too_long: Callable[[Path], list[Turn]]


# As many files as fill the context of each agent, whose own instructions differ in length.
CONVERSATIONS: Final[Mapping[str, Conversations]] = {
    "claude-code": Conversations(
        claude_code,
        lambda work: _too_long(work, [Call("Read", {"file_path": f"{work}/long{n}.py"}) for n in range(3)]),
    ),
    "codex": Conversations(
        codex,
        lambda work: _too_long(work, [Call("exec_command", {"cmd": f"cat long{n}.py"}) for n in range(4)]),
    ),
    "opencode": Conversations(
        opencode,
        lambda work: _too_long(work, [Call("read", {"filePath": f"{work}/long{n}.py"}) for n in range(3)]),
    ),
}
