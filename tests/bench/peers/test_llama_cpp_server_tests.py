"""The adapter to llama.cpp's tests of its server: what flags and completions become, and why tests fail."""

import json
from pathlib import Path

import pytest

from bench.peers.llama_cpp_server_tests import load_reasons, merged, summary
from bench.peers.llama_server_native import answer_of, lines_of, request_of
from bench.peers.llama_server_stand_in import OWN_TEMPLATE, translate


def test_flags_become_options_of_serve(tmp_path: Path) -> None:
    flags = "--port 81 --host 127.0.0.1,::1 --ctx-size 512 --parallel 2 --alias a --no-slots --mmproj-url x"
    found = translate([*flags.split(), "--chat-template", "{{ 1 }}", "--reasoning", "off"], tmp_path)
    assert (found.host, found.port, found.dropped) == ("127.0.0.1", 81, ("--mmproj-url",))
    options = dict(zip(found.options[::2], found.options[1::2], strict=True))
    assert Path(options.pop("--chat-template")).read_text() == "{{ 1 }}"
    assert json.loads(options.pop("--chat-template-kwargs")) == {"enable_thinking": False}
    assert options == {"--parallel": "2", "--ctx-size": "256", "--alias": "a"}


@pytest.mark.parametrize(("more", "size"), [("--kv-unified", "512"), ("--parallel 4", "128"), ("", "512")])
def test_a_context_is_shared_by_the_slots_unless_it_is_one(tmp_path: Path, more: str, size: str) -> None:
    options = translate([*f"--port 81 --ctx-size 512 {more}".split()], tmp_path).options
    assert options[options.index("--ctx-size") + 1] == size


def test_large_models_have_a_template_that_knows_tools(tmp_path: Path) -> None:
    def template(*flags: str) -> str | None:
        options = translate(["--port", "81", "--jinja", *flags], tmp_path).options
        return options[options.index("--chat-template") + 1] if "--chat-template" in options else None

    assert template("--hf-repo", "someone/Large-GGUF") == str(OWN_TEMPLATE)
    assert Path(template("--hf-repo", "someone/Qwen-Coder-GGUF") or "").name == "Qwen3-Coder.jinja"
    assert template("--hf-repo", "ggml-org/tiny") is None
    assert template("--hf-repo", "someone/Large-GGUF", "--chat-template-file", "/a/b") == "/a/b"


def test_completions_are_asked_for_and_read_in_openai_s_form() -> None:
    body = {"prompt": {"prompt_string": "a"}, "n_predict": 3, "n_probs": 2, "logit_bias": [[7, -1.5]]}
    assert request_of(body) == {"prompt": "a", "max_tokens": 3, "logprobs": 2, "logit_bias": {"7": -1.5}}
    assert "max_tokens" not in request_of({"prompt": "a", "n_predict": -1})
    choice = {"index": 0, "text": "x", "finish_reason": "length", "stop_reason": None}
    answer = {"choices": [choice], "usage": {"completion_tokens": 1}, "timings": {"predicted_n": 1}}
    whole = answer_of(answer)
    assert isinstance(whole, dict)
    assert (whole["content"], whole["stop_type"], whole["timings"]) == ("x", "limit", {"predicted_n": 1})
    both = answer_of({**answer, "choices": [choice, {**choice, "index": 1, "stop_reason": "END"}]})
    assert isinstance(both, list)
    assert [each["stop_type"] for each in both] == ["limit", "word"]


def test_streams_keep_what_is_no_completion() -> None:
    chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    lines = [b": keep-alive", b"", b"data: " + json.dumps(chunk).encode(), b"data: [DONE]"]
    comment, blank, event, done = lines_of(lines)
    assert (comment, blank, done) == (lines[0], lines[1], lines[3])
    assert json.loads(event.removeprefix(b"data: ")) == {"index": 0, "content": "x", "stop": False}


def test_failures_have_reasons_by_name_or_by_case() -> None:
    outcomes = [
        {"test": f"test_b::{name}", "outcome": outcome, "error": "E"}
        for name, outcome in (("x[0]", "failed"), ("x[1]", "passed"), ("y[2]", "failed"), ("z", "failed"))
    ]
    found = summary(outcomes, {"test_b::x[0]": "first", "test_b::x[1]": "no", "test_b::y": "second"})
    assert found["files"] == {"test_b": {"passed": 1, "failed": 3, "skipped": 0, "slow": 0}}
    assert [each["reason"] for each in found["failures"]] == ["first", "second", "unexplained"]


def test_files_that_are_not_run_keep_their_result() -> None:
    before = {
        "files": {"test_a": {"failed": 1, "commit": "old"}, "test_b": {"failed": 1, "commit": "old"}},
        "failures": [{"test": f"test_{name}::x", "reason": "old"} for name in "ab"],
        "dropped_flags": ["--a"],
    }
    found = {
        "files": {"test_a": {"failed": 1}},
        "failures": [{"test": "test_a::x", "reason": "new"}],
        "dropped_flags": ["--b"],
    }
    both = merged(found, before)
    assert [each["reason"] for each in both["failures"]] == ["new", "old"]
    assert both["files"]["test_b"]["commit"] == "old" != both["files"]["test_a"]["commit"]
    assert both["dropped_flags"] == ["--a", "--b"]
    assert merged(found, {})["dropped_flags"] == ["--b"]


def test_the_table_of_reasons_names_each_test_once() -> None:
    reasons, without = load_reasons()
    assert reasons
    assert not set(without) & {test.partition("::")[0] for test in reasons}
