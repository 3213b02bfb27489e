"""The smallest HTTP server that answers Chat Completions: a null engine for other proxies."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

ANSWER = {
    "id": "chatcmpl0",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "I look at the next file."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 20000, "completion_tokens": 40, "total_tokens": 20040},
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(ANSWER).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        while True:
            asked = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = asked.partition("content-length: ")[2].partition("\r\n")[0]
            await reader.readexactly(int(length or 0))  # a probe has none
            writer.write(head.encode() + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
