"""Writes Codex's own model catalogue with one change, then becomes Codex.

    python3 codex_catalog.py MODEL CATALOGUE codex exec ...

For MODEL, tools of sub-agents and of MCP servers are declared in the request instead of hidden
behind a search that only the API's maker serves. The catalogue holds the maker's prompts, so it is
read from the program where it runs, never stored with us.
"""

import json
import os
import subprocess
import sys


def main() -> None:
    model, path, *command = sys.argv[1:]
    shown = subprocess.run([command[0], "debug", "models"], stdout=subprocess.PIPE, check=True)
    models = json.loads(shown.stdout)["models"]
    chosen = [entry for entry in models if entry["slug"] == model]
    if not chosen:
        known = ", ".join(entry["slug"] for entry in models)
        sys.exit(f"codex: expected one of the models {known}, got {model!r}")
    chosen[0]["supports_search_tool"] = False
    with open(path, "w") as file:
        json.dump({"models": chosen}, file)
    os.execvp(command[0], command)


main()
