"""launch/serve.py as a person runs it: started, spoken to in three protocols, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from clawgym_jax.proxy.call_log import read_calls

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "launch" / "serve.py"
KEY = "a-key-of-my-own-1"


def launch(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_three_clients_and_a_log(tmp_path: Path) -> None:
    small = ["engine.window_tok=512", "rollout.limits.window_tok=512", "engine.slots=1"]
    shapes = ["engine.prefill_chunks=128", "engine.kv_buckets=128"]
    overrides = [f"--override={item}" for item in (*shapes, *small)]
    flags = [f"--workdir={tmp_path}", "--port=0", f"--key={KEY}", "--metrics_port=0"]
    server = launch(*flags, *overrides)
    assert server.stdout and server.stderr
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("curl"):
            break
    said = "".join(lines)
    found = re.search(r"http://127\.0\.0\.1:\d+/e/[\w-]+", said)
    assert found, said + server.stderr.read()
    for name in ("Claude Code", "Codex", "OpenClaw", "OpenAI", KEY):
        assert name in said
    url = found[0]
    user = {"role": "user", "content": "Hello"}
    with anthropic.Anthropic(base_url=url, auth_token=KEY) as claude:
        claude.messages.create(model="m", max_tokens=3, messages=[user])
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as gpt:
        gpt.chat.completions.create(model="m", max_tokens=3, messages=[user])
        gpt.responses.create(model="m", max_output_tokens=3, input="Hello")
    refused = httpx.post(f"{url}/v1/chat/completions", json={}, headers={"x-api-key": "k"})
    assert refused.status_code == 401
    metrics = re.search(r"http://127\.0\.0\.1:\d+/metrics", said)
    assert metrics and "clawgym_queue_seconds_count 3.0" in httpx.get(metrics[0]).text
    server.send_signal(signal.SIGINT)
    rest, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    result = json.loads(rest.splitlines()[-1])
    calls = read_calls(tmp_path / "calls.log")
    assert result["calls"] == len(calls) == 3
    assert [call.protocol for call in calls] == ["anthropic", "openai-chat", "openai-responses"]
    assert result["sampled_tok"] == sum(call.completion_tok for call in calls)
    prompts = {tuple(call.prompt_ids.tolist()) for call in calls}
    assert len(prompts) == 1  # three protocols, one conversation
    report = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "report.py"), f"--workdir={tmp_path}", "--calls",
         "--full"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    assert "Hello" in report.stdout and "not settled" not in report.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--key=short"], "expected at least 16 letters"),
        (["--model=/nowhere"], "expected 'tiny_base' or a Hugging Face folder"),
    ],
)
def test_wrong_flags_say_what_was_expected(tmp_path: Path, arguments: list[str], said: str) -> None:
    server = launch(f"--workdir={tmp_path}", "--port=0", *arguments)
    _, errors = server.communicate(timeout=120)
    assert server.returncode == 1 and said in errors, errors
