"""Kinds of synthetic documents without dialogue: tables, listings, transcripts, small skills.

Each function takes a `Writer` and returns marked text (`markup`).  Formats vary on purpose and
are none of the prompts that a harness sends; what is shared with them is the skill: copy,
look up, first, last, count, complete a path, escape a newline.
"""

import json
from collections.abc import Callable

from experiments.base_model.markup import EXTENSIONS, Writer, known

Kind = Callable[[Writer], str]


def repeat(w: Writer) -> str:
    """Random names (at times odd separators between them), then the same again."""
    n = w.count(3, 60, 9)
    separator = w.pick(" ", " ", "", "\n", ", ", "/", '", "', "=", "\\n")
    text = separator.join(w.name() if w.chance(0.9) else w.value() for _ in range(n))
    again = "\n" + w.pick("", "again ", "so: ", "> ", "copy\n")
    copies = 2 if n < 12 and w.chance(0.3) else 1
    return text + again + (known(text + "\n") * copies)


def table(w: Writer) -> str:
    """key=value lines, then questions about them."""
    n = w.count(2, 14, 14)
    keys, values = w.names(n), [w.value() for _ in range(n)]
    joint = w.pick("=", "=", "=", ": ", " = ", " -> ", ",", " is ", "\t")
    lines = [k + joint + v for k, v in zip(keys, values, strict=True)]
    ask = w.pick("{k}? {v}", "value of {k}: {v}", "{k}{j}{v}", "the value of {k} is {v}",
                 "get {k}\n{v}", 'grep "{k}"\n{k}{j}{v}', "$ grep {k}\n{k}{j}{v}",
                 "key {k} has {v}", '{"key": "{k}", "value": "{v}"}', "echo {k} > {v}",
                 'find {k} -> "{v}"')  # fmt: skip
    text = w.pick("", "", "table\n", "data:\n", "# keys and values\n") + "\n".join(lines) + "\n"
    text += w.pick("", "\n", "---\n")
    for i in w.rng.sample(range(n), max(1, min(n, w.size // 30))):
        asked = ask.replace("{k}", keys[i]).replace("{j}", joint)
        before, after = asked.split("{v}")
        text += before + known(values[i] + after + "\n")
    return text


def csv(w: Writer) -> str:
    """A table with a header, then cells asked for by row and column."""
    columns = w.rng.randint(2, 3)
    rows = w.count(2, 8, 12 * columns)
    header = w.names(columns)
    body = [[w.value() if c else w.name() for c in range(columns)] for _ in range(rows)]
    text = ",".join(header) + "\n" + "".join(",".join(r) + "\n" for r in body)
    for row in w.rng.sample(body, max(1, rows // 2)):
        c = w.rng.randrange(1, columns)
        text += f"{header[c]} of {row[0]}: " + known(row[c] + "\n")
    if w.chance(0.4):
        text += "rows: " + known(f"{rows}\n")
    return text


def json_object(w: Writer) -> str:
    """An object and the same as lines, in either direction, or lookups in it."""
    n = w.count(2, 8, 16)
    pairs = dict(zip(w.names(n), (w.value() for _ in range(n)), strict=True))
    compact, lines = json.dumps(pairs), "".join(f"{k}={v}\n" for k, v in pairs.items())
    if w.chance(0.3):
        return lines + w.pick("", "as json: ", "json\n") + known(compact + "\n")
    if w.chance(0.4):
        return compact + "\n" + w.pick("", "lines:\n") + known(lines)
    text = compact + "\n"
    for key in w.sample(list(pairs), max(1, n // 2)):
        text += w.pick("{k}: ", "get {k}\n", '"{k}": "').format(k=key) + known(pairs[key] + "\n")
    return text


def listing(w: Writer) -> str:
    """A folder's files, then stems to be completed to names and paths."""
    n = w.count(2, 10, 9)
    stems = w.names(n)
    files = [s + w.rng.choice(EXTENSIONS[:4]) for s in stems]
    folder = w.pick("in", "data", "src", "tmp", w.name(), w.name())
    path = w.chance(0.5)
    shown = [f"{folder}/{f}" if path and w.chance(0.5) else f for f in files]
    separator = w.pick("\n", "\n", "\n", " ", ", ", "\\n", '", "')
    text = w.pick(f"$ ls {folder}\n", f"{folder}/\n", f"files in {folder}:\n", "ls\n", "")
    text += separator.join(shown) + "\n"
    for i in w.rng.sample(range(n), max(1, n // 2)):
        verb = w.pick("cat", "head -n 1", "wc -l <", "read", "open", "file", "cp", '"path":')
        if w.chance(0.6):
            text += f"{stems[i]}: {verb} " + known(f"{folder}/{files[i]}\n")
        else:
            text += f"{verb} {folder}/{stems[i]}" + known(files[i][len(stems[i]) :] + "\n")
    return text


def _content(w: Writer, most: int) -> list[str]:
    """Lines of a file: plain names, or key=value."""
    n = w.rng.randint(2, most)
    if w.chance(0.5):
        return w.names(n)
    return [f"{k}={w.value()}" for k in w.names(n)]


def shell(w: Writer) -> str:
    """A transcript: files are shown, then commands whose output follows from them."""
    lines = _content(w, max(2, min(9, w.size // 16)))
    folder, stem, target = w.pick("in", "data", w.name()), w.name(), w.name()
    extension = w.rng.choice(EXTENSIONS[:4])
    path, to = f"{folder}/{stem}{extension}", f"out/{target}.txt"
    prompt = w.pick("$ ", "> ", "")
    text = f"{prompt}ls {folder}\n{stem}{extension}\n" if w.chance(0.4) else ""
    text += f"{prompt}cat {path}\n" + "\n".join(lines) + "\n"
    done = 0
    while done < max(1, w.size // 60):
        done += 1
        command, output = _command(w, lines, path, to)
        text += prompt + command + ("\n" + known(output) if output else known("\n"))
    return text


def _command(w: Writer, lines: list[str], path: str, to: str) -> tuple[str, str]:
    """A command on a file of `lines`, and what it (or a look at its result) prints."""
    key = w.rng.choice(lines)
    commands = {
        f"head -n 1 {path}": lines[0],
        f"tail -n 1 {path}": lines[-1],
        f"wc -l < {path}": str(len(lines)),
        f"grep {key.split('=')[0]} {path}": key,
        f"cat {path}": "\n".join(lines),
        f"cp {path} {to}\ncat {to}": "\n".join(lines),
        f"head -n 1 {path} > {to} && cat {to}": lines[0],
        f"wc -l < {path} > {to}\ncat {to}": str(len(lines)),
    }
    command = w.rng.choice(list(commands))
    return command, commands[command] + "\n"


def ends(w: Writer) -> str:
    """First and last of some lines."""
    lines = _content(w, max(2, min(12, w.size // 9)))
    text = w.pick("", "lines:\n", "text\n", "<\n") + "\n".join(lines) + w.pick("\n", "\n>\n")
    asked = [("first", lines[0]), ("last", lines[-1])]
    w.rng.shuffle(asked)
    form = w.pick("{} line: ", "the {} line is ", "{}: ", "{}\n", 'echo {} "', '{{"{}": "')
    for which, line in asked[: w.rng.randint(1, 2)]:
        text += form.format(which) + known(line + "\n")
    return text


def count(w: Writer) -> str:
    """How many lines, for small numbers, between delimiters of many kinds."""
    lines = _content(w, 9)
    if len(lines) * 7 > w.size:
        lines = w.names(min(len(lines), 9))
    begin, end = w.rng.choice(
        [("", ""), ("<tool_response>\n", "</tool_response>\n"), ("lines\n", ""), ("<\n", ">\n"),
         ("<tool_response>\n", "</tool_response>\n"), ("$ cat in/x.txt\n", ""), ("[\n", "]\n"),
         ("---\n", "---\n"), ('"', '"\n')]
    )  # fmt: skip
    escaped = begin == '"'
    body = ("\\n" if escaped else "\n").join(lines) + ("" if escaped else "\n")
    ask = w.pick("lines: ", "count: ", "how many lines? ", "wc -l\n", "the number of lines is ",
                 "wc -l < in/x\n", '{"content": "', "has ", "number of lines ", "echo ",
                 '"lines": "')  # fmt: skip
    return begin + body + end + ask + known(f"{len(lines)}\n")


def sorting(w: Writer) -> str:
    """Names in any order, then in alphabetical order."""
    items = w.names(w.count(2, 6, 10))
    return "\n".join(items) + "\nsorted\n" + known("\n".join(sorted(items)) + "\n")


def escape(w: Writer) -> str:
    """Lines as the inside of a JSON string, or the other way round."""
    lines = _content(w, max(2, min(9, w.size // 14)))
    raw, escaped = "\n".join(lines) + "\n", "\\n".join(lines)
    if w.chance(0.7):
        return (
            raw + w.pick('"', '{"content": "', '{"text": "', '"data": "') + known(escaped + '"\n')
        )
    return '"' + escaped + '"\n' + w.pick("", "cat\n", "lines\n") + known(raw)


def instruction(w: Writer) -> str:
    """A sentence and the command or call that does it."""
    x, y, folder = w.value(), w.name(), w.pick("out", "out", "tmp", w.name())
    to = f"{folder}/{y}{w.rng.choice(EXTENSIONS[:3])}"
    said = w.pick(
        "Write {x} to {t}",
        "Put {x} in {t}",
        "Save {x} to the file {t}",
        "Make {t} hold {x}",
        "write {x} into {t}",
        "The file {t} has to be {x}",
    )
    done = w.pick("echo {x} > {t}", "$ echo {x} > {t}", '{{"path": "{t}", "content": "{x}"}}',
                  'echo "{x}" > {t}', '{{"text": "{x}", "file": "{t}"}}', "{t}: {x}")  # fmt: skip
    return said.format(x=x, t=to) + ".\n" + known(done.format(x=x, t=to) + "\n")
