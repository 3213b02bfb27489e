#!/usr/bin/env bash
# The mean of the checks that check.py prints, on the last line.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python3 "$here/check.py" "$(dirname "$here")" | python3 -c \
  'import json, sys; checks = json.load(sys.stdin); print(sum(map(float, checks.values())) / len(checks))'
