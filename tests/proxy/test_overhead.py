"""What a call costs the proxy: its own CPU time, the client being another process."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from tests.proxy.support import LOOK, stage

CALLS = 150
LIMIT_MS = 3.0
CLIENT = """
import http.client, json, sys
host, path, key, calls = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
tools = json.loads(sys.argv[5])
connection = http.client.HTTPConnection(host)
history = [{"role": "user", "content": "Copy the file in/ketu to out/liso.txt."}]
for index in range(calls):
    body = {"model": "m", "messages": history, "tools": tools, "stream": True}
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200 and b"[DONE]" in response.read()
    if index % 4 == 3:
        history = history[:1]
    else:
        history += [
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": f"and {index}"},
        ]
"""


async def cpu_ms_per_call() -> tuple[float, float]:
    """(CPU milliseconds of this process, milliseconds that the trace names), per call."""
    async with stage(*["done"] * CALLS) as s:
        host = s.proxy.origin.removeprefix("http://")
        path = f"/e/ep{'/v1/chat/completions'}"
        arguments = [host, path, s.endpoint.key, str(CALLS), json.dumps([LOOK])]
        began = time.process_time()
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *arguments)
        assert await client.wait() == 0
        spent = time.process_time() - began
        trace = await s.proxy.close_episode("ep")
    assert len(trace.calls) == CALLS
    return 1000 * spent / CALLS, 1000 * trace.overhead_s / CALLS


def test_a_call_costs_little() -> None:
    """Best of three, because the machine may be busy."""
    best = min((asyncio.run(cpu_ms_per_call()) for _ in range(3)), key=lambda pair: pair[0])
    print(f"{best[0]:.2f} ms CPU a call, {best[1]:.2f} ms by the proxy's own clock")
    assert best[0] <= LIMIT_MS
