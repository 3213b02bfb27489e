"""The white-box agent loop: a real process against the real proxy; its history only ever grows."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from clawgym_jax.core.interfaces import McpServer
from clawgym_jax.core.types import Completion, Finish, Role
from clawgym_jax.harness.agent_loop import AgentLoop
from clawgym_jax.harness.mcp import corpus_server
from clawgym_jax.proxy.breaks import extends
from tests.harness.playing import Played, play, table
from tests.proxy.support import Asked, Say, ScriptedEngine, call_text, completion, tiny_codec

CORPUS = {
    "corpus/rivers.md": b"# Rivers\n\nThe Elbe flows into the North Sea near Cuxhaven.\n",
    "corpus/towns/cuxhaven.txt": b"Cuxhaven is a town at a river's mouth.\n" * 300,
    "corpus/picture.bin": b"\0Elbe Elbe Elbe",
}


def run(
    script: Sequence[Say],
    inputs: Mapping[str, bytes] | None = None,
    servers: Sequence[McpServer] = (),
    window_tok: int = 60_000,
    **settings: Any,
) -> Played:
    async def scene() -> Played:
        async with table() as proxy:
            engine = ScriptedEngine(tiny_codec(), list(script))
            harness = AgentLoop(**settings)
            files = inputs or {}
            return await play(
                proxy, harness, engine, "Do it.", files, window_tok=window_tok, servers=servers
            )

    return asyncio.run(scene())


def results_of(played: Played) -> list[str]:
    """What the tools said, as the last prompt has it."""
    text = tiny_codec().decode(played.trace.calls[-1].prompt_ids)
    return [part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def assert_appends(played: Played) -> None:
    calls = played.trace.calls
    assert not played.trace.failure
    for before, after in itertools.pairwise(calls):
        assert extends(after.prompt_ids, before) and not after.breaks, after.call_id


def bash(command: str) -> str:
    return call_text("bash", {"command": command})


def test_read_edit_parallel_malformed_done() -> None:
    played = run(
        [
            "<think>\nI look.\n</think>\n\n" + call_text("read_file", {"path": "notes.txt"}),
            call_text("edit_file", {"path": "notes.txt", "old": "beta", "new": "gamma"}),
            call_text("write_file", {"path": "out/a/b.txt", "content": "b\n"})
            + "\n"
            + bash("printf c > c.txt; echo two"),
            call_text("edit_file", {"path": "notes.txt", "old": "a", "new": "x"})
            + call_text("read_file", {"path": 3})
            + call_text("read_file", {"way": "notes.txt"})
            + call_text("fly", {}),
            call_text("list_files", {}),
            "All done.",
        ],
        {"notes.txt": b"alpha\nbeta\n"},
    )
    assert (played.returncode, played.stdout) == (0, "All done.\n"), played.stderr
    assert played.files["notes.txt"] == b"alpha\ngamma\n"
    assert (played.files["out/a/b.txt"], played.files["c.txt"]) == (b"b\n", b"c")
    assert_appends(played)
    assert [call.role for call in played.trace.calls] == [Role.MAIN] * 6
    read, edited, written, ran, twice, typed, unknown, no_tool, listed = results_of(played)
    assert read == "alpha\nbeta"
    assert (edited, written, ran) == ("written", "written", "two")
    assert "found it 4 times" in twice
    assert "must be of type string" in typed and "'path' is missing" in unknown
    assert no_tool.startswith("error: no tool fly, expected one of bash")
    assert listed == "c.txt\nnotes.txt\nout/a/b.txt"


def test_arguments_that_are_no_json_are_answered() -> None:
    """The proxy hands a broken call on as the model wrote it, or leaves it in the text."""
    broken = call_text("read_file", '{"path": "no')
    played = run([broken + bash("echo went on"), "Done."])
    assert played.returncode == 0, played.stderr
    assert_appends(played)
    assert results_of(played)[-1] == "went on"


def test_the_python_session_keeps_its_variables() -> None:
    said = [
        "x = 20\nprint('set')",
        "import os, subprocess\nsubprocess.run(['echo', 'child'])\nx + 22",
        "1 / 0",
        "input()",
        "import os; os._exit(3)",
        "'x' in globals()",
    ]
    played = run([*(call_text("python", {"code": code}) for code in said), "Done."])
    assert_appends(played)
    first, second, third, fourth, fifth, sixth = results_of(played)
    assert first == "set"
    assert second == "child\n42"
    assert third.startswith("Traceback") and "ZeroDivisionError" in third
    assert "interpreter.py" not in third
    assert "EOFError" in fourth
    assert fifth == "it ended; the session is new and its variables are gone"
    assert sixth == "False"


def test_tools_stop_in_time_and_are_short() -> None:
    played = run(
        [
            bash("echo before; sleep 60"),
            call_text("python", {"code": "import time; time.sleep(60)"}),
            bash("seq 100000; exit 3"),
            bash("sleep 2 & echo started"),
            "Done.",
        ],
        tool_timeout_s=1.0,
        output_chars=200,
    )
    assert_appends(played)
    slow, stuck, long, background = results_of(played)
    assert slow == "before\nstopped after 1 s"
    assert stuck.startswith("stopped after 1 s")
    assert long.startswith("1\n2\n") and "characters left out" in long and len(long) < 300
    assert long.endswith("100000\nexit status 3")
    assert background == "started"


def test_the_key_is_not_among_the_tools_variables() -> None:
    code = "import os; sorted(name for name in os.environ if 'KEY' in name)"
    played = run([bash("env"), call_text("python", {"code": code}), "Done."])
    env, keys = results_of(played)
    assert "HOME=" in env and "AGENT_LOOP_KEY" not in env
    assert keys == "[]"


def test_search_and_fetch_over_a_folder() -> None:
    played = run(
        [
            call_text("search", {"query": "Where does the Elbe flow?"}),
            call_text("fetch", {"name": "rivers.md"}),
            call_text("fetch", {"name": "towns/cuxhaven.txt", "offset": 6000}),
            call_text("fetch", {"name": "../notes.txt"}),
            call_text("search", {"query": "zebra"}),
            "Into the North Sea.",
        ],
        {**CORPUS, "notes.txt": b"secret"},
        corpus="{workspace}/corpus",
        output_chars=20_000,
    )
    assert_appends(played)
    found, whole, page, outside, nothing = results_of(played)
    assert found.startswith("1. rivers.md (offset 0)\n# Rivers The Elbe flows")
    assert "picture" not in found
    assert "near Cuxhaven." in whole
    assert page.startswith("Cuxhaven") or "Cuxhaven is" in page
    assert "go on with" not in page  # the last one
    assert "error: no document ../notes.txt" in outside
    assert nothing == "nothing found for 'zebra'"


def test_only_the_tools_that_are_asked_for() -> None:
    played = run([call_text("bash", {"command": "ls"}), "Done."], tools=("read_file",))
    assert results_of(played) == ["error: no tool bash, expected one of read_file"]
    assert '"name": "bash"' not in tiny_codec().decode(played.trace.calls[0].prompt_ids)


def test_tools_of_an_mcp_server() -> None:
    played = run(
        [
            call_text("library__search", {"query": "North Sea"}),
            call_text("library__fetch", {"name": "nowhere"}),
            call_text("library__fly", {}),
            "Found it.",
        ],
        CORPUS,
        servers=[corpus_server("library", "{workspace}/corpus")],
    )
    assert (played.returncode, played.stdout) == (0, "Found it.\n"), played.stderr
    assert_appends(played)
    found, nowhere, no_tool = results_of(played)
    assert found.startswith("1. rivers.md")
    assert nowhere.startswith("error: no document nowhere")
    assert "no tool library__fly" in no_tool and "library__search" in no_tool


RUDE = """
import json, sys

def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in "abcde"] + [3, {}]
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if number is None or method is None:
        continue
    print("a line that is no message", flush=True)
    say({"method": "notifications/message", "params": {}})
    say({"id": "theirs", "method": "ping"})
    say({"id": "more", "method": "roots/list"})
    say({"id": number - 1, "result": {"late": True}})
    if method == "tools/list":
        at = int(message["params"].get("cursor", 0))
        more = {"nextCursor": str(at + 2)} if at == 0 else {}
        say({"id": number, "result": {"tools": TOOLS[at:at + 2 + at * 9], **more}})
    elif method == "tools/call" and message["params"]["name"] == "a":
        image = {"type": "image", "data": "", "mimeType": "image/png"}
        say({"id": number, "result": {"content": [{"type": "text", "text": "one"}, image]}})
    elif method == "tools/call" and message["params"]["name"] == "b":
        say({"id": number, "result": {"content": [], "structuredContent": {"x": 1}}})
    elif method == "tools/call" and message["params"]["name"] == "c":
        say({"id": number, "error": {"code": 1, "message": "not today"}})
    elif method == "tools/call" and message["params"]["name"] == "e":
        say({"id": number, "result": [{"content": 3}]})
    elif method == "tools/call":
        sys.exit()
    else:
        say({"id": number, "result": {}})
"""


def test_an_mcp_server_without_manners() -> None:
    server = McpServer("rude", ("python3", "{home}/rude.py"), files={"rude.py": RUDE.encode()})
    names = ("a", "b", "c", "e", "d", "a")
    calls = "".join(call_text(f"rude__{name}", {}) for name in names)
    played = run([calls, "Done."], servers=[server])
    assert played.returncode == 0, played.stderr
    assert_appends(played)
    one, two, refused, odd, ended, gone = results_of(played)
    assert (one, two) == ("one\n[image left out]", '{"x": 1}')
    assert refused == "error: tools/call: not today"
    assert odd.startswith("error: tools/call: {")
    assert ended == "error: tools/call: the server has ended"
    assert gone.startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/program"], "cannot start /no/such/program"),
        (["true"], "the server has ended"),
        (["sleep", "60"], "initialize: no answer within 0.5 s"),
    ],
)
def test_a_server_that_does_not_work_ends_the_run(argv: list[str], said: str) -> None:
    played = run(["unused"], servers=[McpServer("broken", argv)], tool_timeout_s=0.5)
    assert played.returncode == 1 and said in played.stderr
    assert played.trace.calls == ()


def test_an_answer_that_was_cut_is_gone_on_with() -> None:
    def cut(_: Asked) -> Completion:
        return completion(tiny_codec().encode_rendered("I will now").tolist(), Finish.LENGTH)

    played = run([cut, "Done."])
    assert (played.returncode, played.stdout) == (0, "Done.\n")
    assert_appends(played)
    assert "cut off at the limit" in tiny_codec().decode(played.trace.calls[1].prompt_ids)


def test_too_many_turns() -> None:
    played = run([bash("true")] * 3, max_turns=3)
    assert (played.returncode, played.stderr) == (2, "too many turns\n")
    assert len(played.trace.calls) == 3


def test_a_prompt_beyond_the_window_ends_the_run() -> None:
    played = run([bash("seq 100000")] * 9, window_tok=8000)
    assert played.returncode == 1 and "maximum context length is 8000" in played.stderr
    assert_appends(played)


def test_compaction_on_request() -> None:
    script = [bash("seq 900"), bash("true"), "Counted to 900.", "Done."]
    played = run(script, compact_at_tok=2000)
    assert played.returncode == 0, played.stderr
    first, second, summary, after = played.trace.calls
    roles = [call.role for call in played.trace.calls]
    assert roles == [Role.MAIN, Role.MAIN, Role.COMPACTION, Role.MAIN]
    assert extends(second.prompt_ids, first) and extends(summary.prompt_ids, second)
    assert after.breaks == ("compaction",)
    assert "Done so far:\nCounted to 900." in tiny_codec().decode(after.prompt_ids)
