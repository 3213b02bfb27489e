"""Chat turns with tool calls: an assistant looks, reads and writes, in words that vary.

Tool names, argument names, descriptions, folders and sentences are drawn at random, so the
prompts of the real harnesses do not occur; every turn of the assistant follows from the context
and is marked as such.  The skeleton is that of the tiny chat template (`tokenizer`).
"""

import dataclasses
import json

from experiments.base_model.markup import EXTENSIONS, Writer, known

END = "<|im_end|>\n"


@dataclasses.dataclass(frozen=True)
class Tools:
    """Names this dialogue gives to its tools and their arguments."""

    lister: str
    reader: str
    writer: str
    shell: str
    path: str
    content: str
    command: str

    def schemas(self, w: Writer, shell: bool) -> list[dict[str, object]]:
        rows = [
            (self.shell, ("Run a command.", "Run a shell command", "run"), (self.command,)),
        ] if shell else [
            (self.lister, ("List the files in a folder.", "List a folder"), (self.path,)),
            (self.reader, ("Read a file.", "Show the contents of a file"), (self.path,)),
            (self.writer, ("Write text to a file.", "Make a file"), (self.path, self.content)),
        ]  # fmt: skip
        long = w.chance(0.4)
        out: list[dict[str, object]] = []
        for name, descriptions, arguments in rows:
            entry: dict[str, object] = {"name": name, "description": w.pick(*descriptions)}
            if long:
                properties = {a: {"type": "string"} for a in arguments}
                entry["parameters"] = {
                    "type": "object", "properties": properties, "required": list(arguments),
                }  # fmt: skip
            wrap = long and w.chance(0.5)
            out.append({"type": "function", "function": entry} if wrap else entry)
        return out


CANONICAL = Tools("list_files", "read_file", "write_file", "bash", "path", "content", "command")


def _tools(w: Writer) -> Tools:
    """Names that only the schemas tell; where none are shown, `CANONICAL` is used."""
    return Tools(
        lister=w.pick("list_files", "ls", "list", w.name()),
        reader=w.pick("read_file", "cat", "read", w.name()),
        writer=w.pick("write_file", "put", "write", w.name()),
        shell=w.pick("bash", "bash", "run", w.name()),
        path=w.pick("path", "path", "file", "name", w.name()),
        content=w.pick("content", "content", "text", "data", w.name()),
        command=w.pick("command", "command", "input", w.name()),
    )


def call(name: str, arguments: dict[str, str]) -> str:
    """One assistant turn that calls a tool; its text is predictable."""
    body = json.dumps({"name": name, "arguments": arguments})
    return "<|im_start|>assistant\n" + known(f"<tool_call>\n{body}\n</tool_call><|im_end|>") + "\n"


def response(text: str) -> str:
    return f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response>{END}"


def _say(text: str) -> str:
    return "<|im_start|>assistant\n" + known(text + "<|im_end|>") + "\n"


def _system(w: Writer, schemas: list[dict[str, object]]) -> str:
    """A system turn of few or many words, with or without the tools' schemas."""
    words = w.pick("You are an agent. Use the tools to do the task.", "You work with files.",
                   "You are the assistant of a user. Do the task, then stop.",
                   "Files are in a workspace. Call a tool in each step.")  # fmt: skip
    if not schemas:
        return f"<|im_start|>system\n{words}{END}" if w.chance(0.4) else ""
    listed = "\n".join(json.dumps(s) for s in schemas)
    head = w.pick("# Tools\n<tools>\n{}\n</tools>\n", "Tools:\n{}\n").format(listed)
    return f"<|im_start|>system\n{words}\n\n{head}{END}"


@dataclasses.dataclass(frozen=True)
class Job:
    """What the user wants: a result computed from one file, written to another."""

    request: str
    lines: list[str]
    answer: list[str]
    command: str  # shell form, with {source} and {target}


def _job(w: Writer, stem: str, folder: str, target: str) -> Job:
    most = max(2, min(9, w.size // 40))
    n = w.rng.randint(2, most)
    keyed = w.chance(0.5)
    keys = w.names(n)
    values = [w.value() for _ in keys]
    lines = [f"{k}={v}" for k, v in zip(keys, values, strict=True)] if keyed else keys
    where = w.pick(f"{folder}/{stem}", f"{stem} in {folder}", f"{folder}/{stem}")
    if folder == "in":  # the folder meant when none is named
        where = w.pick(where, stem, f"the file {stem}")
    to = target
    family = w.rng.choices(
        ["value", "all", "first", "last", "count"], [2 if keyed else 0, 2, 1.5, 1, 3]
    )[0]
    i = w.rng.randrange(n)
    if family == "value":
        ask = w.pick(
            "Write the value of {k} in {s} to {t}",
            "Find {k} in {s} and put it in {t}",
            "What is {k} in {s}? Save it to {t}",
            "{t} must hold {k} of {s}",
        )
        answer, command = [values[i]], "echo {x} > {target}"
    elif family == "all":
        ask = w.pick("Copy {s} to {t}", "Copy the file {s} to {t}", "Put a copy of {s} in {t}")
        answer, command = lines, "cp {source} {target}"
    elif family == "first":
        ask = w.pick(
            "Copy the first line of {s} to {t}",
            "Write line 1 of {s} to {t}",
            "Save the first line of {s} in {t}",
        )
        answer, command = [lines[0]], "head -n 1 {source} > {target}"
    elif family == "last":
        ask = w.pick("Copy the last line of {s} to {t}", "Save the last line of {s} in {t}")
        answer, command = [lines[-1]], "tail -n 1 {source} > {target}"
    else:
        ask = w.pick(
            "Write how many lines {s} has to {t}",
            "Count the lines of {s} into {t}",
            "Write the number of lines in {s} to {t}",
            "How many lines has {s}? Use {t}",
        )
        answer, command = [str(n)], "wc -l < {source} > {target}"
    return Job(ask.format(k=keys[i], s=where, t=to) + ".", lines, answer, command)


def episode(w: Writer) -> str:
    """A user's task done with file tools or with a shell."""
    shell, told = w.chance(0.45), w.size >= 250 and w.chance(0.7)
    tools = _tools(w) if told else CANONICAL
    folder = w.pick("in", "in", "data", "src", w.name())
    out = w.pick("out", "out", "tmp", w.name())
    stems = w.names(w.count(1, 5, 60))
    stem = w.rng.choice(stems)
    files = [s + w.rng.choice(EXTENSIONS[:3]) for s in stems]
    file = files[stems.index(stem)]
    target = f"{out}/{w.name()}.txt"
    job = _job(w, stem, folder, target)
    source = f"{folder}/{file}"
    text = _system(w, tools.schemas(w, shell) if told else [])
    by = " Use bash." if shell and not told else ""
    text += f"<|im_start|>user\n{job.request}{by}{END}"
    listed = "\n".join(sorted(files))
    look = w.chance(0.75)  # else the request's file is known from what is said next
    read = not shell or "{x}" in job.command or w.chance(0.3)
    if not look:
        text += f"<|im_start|>user\nThe file is {source}{END}"
    if shell:
        text += call(tools.shell, {tools.command: f"ls {folder}"}) if look else ""
        text += response(listed) if look else ""
        text += call(tools.shell, {tools.command: f"cat {source}"}) if read else ""
        text += response("\n".join(job.lines)) if read else ""
        done = job.command.format(source=source, target=target, x=job.answer[0])
        text += call(tools.shell, {tools.command: done})
        result = w.pick("", "ok", "done")
    else:
        text += call(tools.lister, {tools.path: folder}) if look else ""
        text += response(listed) if look else ""
        text += call(tools.reader, {tools.path: source}) + response("\n".join(job.lines))
        arguments = {tools.path: target, tools.content: "\n".join(job.answer)}
        text += call(tools.writer, arguments)
        result = w.pick(f"wrote {target}", "ok", f"{target} written", "done")
    return text + response(result) + _say(result if "wr" in result else "done")


def turns(w: Writer) -> str:
    """Short exchanges in which single calls follow from single requests."""
    text = ""
    for _ in range(w.count(1, 5, 60)):
        file = w.name() + w.rng.choice(EXTENSIONS[:4])
        path = f"{w.pick('in', 'data', 'out', w.name())}/{file}"
        ask, name, arguments = _single(w, CANONICAL, path)
        text += f"<|im_start|>user\n{ask}{END}" + call(name, arguments)
    return text


def _single(w: Writer, tools: Tools, path: str) -> tuple[str, str, dict[str, str]]:
    x, other = w.value(), f"out/{w.name()}.txt"
    kind = w.rng.randrange(7)
    if kind == 0:
        return f"Read {path}.", tools.reader, {tools.path: path}
    if kind == 1:
        folder = path.split("/")[0]
        return f"List {folder}.", tools.lister, {tools.path: folder}
    if kind == 2:
        return f"Write {x} to {path}.", tools.writer, {tools.path: path, tools.content: x}
    pairs = [
        (f"Copy {path} to {other}", f"cp {path} {other}"),
        (f"Write {x} to {other}", f"echo {x} > {other}"),
        (f"First line of {path} to {other}", f"head -n 1 {path} > {other}"),
        (f"Number of lines of {path} to {other}", f"wc -l < {path} > {other}"),
    ]
    said, command = pairs[kind - 3]
    return said + " by command.", tools.shell, {tools.command: command}


def read_and_tell(w: Writer) -> str:
    """A tool response and a call whose content is computed from it, for counts and ends."""
    target = f"out/{w.name()}.txt"
    job = _job(w, w.name(), "in", target)
    text = f"<|im_start|>user\n{job.request}{END}" + response("\n".join(job.lines))
    if w.chance(0.3):
        return text.replace(".<|im_end|>", "?<|im_end|>", 1) + _say("\n".join(job.answer))
    arguments = {CANONICAL.path: target, CANONICAL.content: "\n".join(job.answer)}
    return text + call(CANONICAL.writer, arguments)
