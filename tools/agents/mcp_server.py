"""A server of the Model Context Protocol over stdin and stdout, for agents to find and call.

It takes the standard library only. Its tools: `lookup`, which answers with a text and a picture, and
`broken`, whose calls fail.
"""

import json
import sys
from typing import Any

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
TOPIC = {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}
TOOLS = [
    {"name": "lookup", "description": "Looks a topic up in the notes.", "inputSchema": TOPIC},
    {"name": "broken", "description": "Looks a topic up in notes that are lost.", "inputSchema": TOPIC},
]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None for a method that this server does not have."""
    if method == "initialize":
        return {
            "protocolVersion": params.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        topic = params.get("arguments", {}).get("topic", "")
        if params["name"] == "broken":
            return {"content": [{"type": "text", "text": f"The notes on {topic} are lost."}], "isError": True}
        text = {"type": "text", "text": f"The notes say of {topic}: seven."}
        return {"content": [text, {"type": "image", "data": PIXEL, "mimeType": "image/png"}]}
    return {} if method == "ping" else None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue  # a notification
        result = answer(message["method"], message.get("params") or {})
        body = (
            {"result": result}
            if result is not None
            else {"error": {"code": -32601, "message": "no such method"}}
        )
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **body}), flush=True)


if __name__ == "__main__":
    main()
