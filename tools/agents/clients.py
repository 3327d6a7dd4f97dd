"""The coding agents: what npm installs of each, its configuration for a server, and the command of a turn."""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.agents import mcp_server

KEY: Final = "dummy"  # the server asks for none, and agents do not start without one
MCP_NAME: Final = "notes"
MCP_COMMAND: Final = (sys.executable, str(Path(mcp_server.__file__)))
TURN_S: Final = 600.0


@dataclass(frozen=True)
class Site:
    """Where an agent runs: its home and work folders, its server, and the model's name and context."""

    home: Path
    work: Path
    url: str
    model: str
    context: int


@dataclass(frozen=True)
class Client(ABC):
    """A coding agent. `version` is the one that its results are of."""

    name: str
    package: str
    version: str
    executable: str  # in the folder of npm's commands

    @abstractmethod
    def configure(self, site: Site) -> None:
        """Write the files of its configuration below the home folder."""

    @abstractmethod
    def environment(self, site: Site) -> dict[str, str]:
        """What it takes beside the variables of every program."""

    @abstractmethod
    def arguments(self, site: Site, prompt: str, is_first: bool) -> list[str]:
        """The command line of a turn, which begins a conversation or goes on with the last one."""

    def run(
        self, bin_folder: Path, site: Site, prompt: str, is_first: bool
    ) -> subprocess.CompletedProcess[str]:
        """One turn. Raises subprocess.TimeoutExpired, with the agent killed, after TURN_S seconds."""
        command = [str(bin_folder / self.executable), *self.arguments(site, prompt, is_first)]
        home = {"HOME": str(site.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb"}
        return subprocess.run(
            command,
            cwd=site.work,
            env=home | self.environment(site),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )


class ClaudeCode(Client):
    """Anthropic's agent, over /v1/messages."""

    def configure(self, site: Site) -> None:
        server = {"type": "stdio", "command": MCP_COMMAND[0], "args": list(MCP_COMMAND[1:])}
        (site.home / "mcp.json").write_text(json.dumps({"mcpServers": {MCP_NAME: server}}))

    def environment(self, site: Site) -> dict[str, str]:
        models = (
            "ANTHROPIC_MODEL",
            *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")),
        )
        silent = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
        return {
            "ANTHROPIC_BASE_URL": site.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            **dict.fromkeys(models, site.model),
            **dict.fromkeys((*silent, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"), "1"),
            "ENABLE_TOOL_SEARCH": "true",  # off by default where the server is not Anthropic's
            "IS_SANDBOX": "1",  # without it root may not skip permissions
        }

    def arguments(self, site: Site, prompt: str, is_first: bool) -> list[str]:
        how = ["--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        servers = ["--strict-mcp-config", "--mcp-config", str(site.home / "mcp.json")]
        return ["-p", prompt, *([] if is_first else ["--continue"]), *how, *servers]


class Codex(Client):
    """OpenAI's agent, over /v1/responses."""

    def configure(self, site: Site) -> None:
        folder = site.home / ".codex"
        folder.mkdir()
        (folder / "models.json").write_text(json.dumps({"models": [_codex_model(site)]}))
        lines = [
            f"model = {json.dumps(site.model)}",
            'model_provider = "coldstream"',
            f"model_catalog_json = {json.dumps(str(folder / 'models.json'))}",
            "check_for_update_on_startup = false",
            "[analytics]",
            "enabled = false",
            "[model_providers.coldstream]",
            'name = "coldstream"',
            f"base_url = {json.dumps(site.url + '/v1')}",
            'wire_api = "responses"',
            'env_key = "COLDSTREAM_API_KEY"',
            f"[mcp_servers.{MCP_NAME}]",
            f"command = {json.dumps(MCP_COMMAND[0])}",
            f"args = {json.dumps(MCP_COMMAND[1:])}",
        ]
        (folder / "config.toml").write_text("\n".join(lines) + "\n")

    def environment(self, site: Site) -> dict[str, str]:
        return {"COLDSTREAM_API_KEY": KEY}

    def arguments(self, site: Site, prompt: str, is_first: bool) -> list[str]:
        how = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *how, prompt] if is_first else ["exec", "resume", "--last", *how, prompt]


def _codex_model(site: Site) -> dict[str, object]:
    """What Codex must know of a model that is not OpenAI's; without it `apply_patch` is not offered."""
    return {
        "slug": site.model,
        "display_name": site.model,
        "description": "Served by coldstream.",
        "base_instructions": "You are a coding agent. You work in the user's folder with the tools below.",
        "context_window": site.context,
        "input_modalities": ["text", "image"],
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "truncation_policy": {"mode": "tokens", "limit": 10000},
        "supported_reasoning_levels": [],
        "supports_parallel_tool_calls": True,
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }


class Opencode(Client):
    """The agent of opencode.ai, over /v1/chat/completions."""

    def configure(self, site: Site) -> None:
        kinds = {"input": ["text", "image"], "output": ["text"]}
        limits = {"context": site.context, "output": 4096}
        model = {
            "name": site.model,
            "tool_call": True,
            "attachment": True,
            "modalities": kinds,
            "limit": limits,
        }
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "coldstream",
            "options": {"baseURL": f"{site.url}/v1", "apiKey": KEY},
            "models": {site.model: model},
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"coldstream": provider},
            "model": f"coldstream/{site.model}",
            "small_model": f"coldstream/{site.model}",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "mcp": {MCP_NAME: {"type": "local", "command": list(MCP_COMMAND), "enabled": True}},
        }
        (site.home / "opencode.json").write_text(json.dumps(config))

    def environment(self, site: Site) -> dict[str, str]:
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {
            "OPENCODE_CONFIG": str(site.home / "opencode.json"),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
        }

    def arguments(self, site: Site, prompt: str, is_first: bool) -> list[str]:
        return ["run", *([] if is_first else ["--continue"]), "--format", "json", prompt]


CLIENTS: Final[Mapping[str, Client]] = {
    client.name: client
    for client in (
        ClaudeCode("claude-code", "@anthropic-ai/claude-code", "2.1.332", "claude"),
        Codex("codex", "@openai/codex", "0.171.0", "codex"),
        Opencode("opencode", "opencode-ai", "1.18.33", "opencode"),
    )
}
