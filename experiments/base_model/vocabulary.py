"""The closed lists of strings that are one token each in the tiny tokenizer.

Not learned: a 1,024-token vocabulary is small enough to write down, and writing it down makes
the property we need provable: a space (or a quote, or a slash) merges only with what stands
here, so a name has the same tokens wherever it occurs.

Order is priority: what does not fit into the vocabulary is cut from the end of `WORDS`.
"""

# Punctuation that JSON, shell commands and tables repeat; matched longest first.
PUNCTUATION: tuple[str, ...] = (
    '": {"', '": "', '", "', '": [', '"}}', '{"', '"}', '"},', "}}", '":', '",', '["', '"]',
    '": {}', '"}}, "', '"}, "', "\\n", '\\"', "\\\\", "\\t", " >", " <", " |", " &&", " -n", " -l",
    " -c", " -la", " >>", " =", " :", "..", "...", "//", "->", " ->", "</", "\n\n", "  ", "    ",
    "---", "==", '"\n', "':", "',", ": ", ', "', " (",
)  # fmt: skip

EXTENSIONS: tuple[str, ...] = (".txt", ".csv", ".log", ".json", ".md", ".dat", ".cfg", ".py")

# "_" in front: the word with its leading space; bare otherwise. Most useful first.
WORDS: tuple[str, ...] = tuple(
    word.replace("_", " ", 1) if word.startswith("_") else word
    for word in """
    name arguments path content command description type object string properties required
    parameters function tools list_files read_file write_file bash ls cat head tail wc grep cp
    mv echo sort system user assistant in out data done wrote file files line lines value key
    text first last count folder You Use Write Copy List Read Put Save Show Find Look Give Get
    Set Run The How What Which Count Tell Task A In Call Calls Tools Reply true false null ok
    error Error _Use _Write _Copy _Read _List _Then _The _You _If _Do _Reply _store _open
    _stored _take _equals _single _hold _back _need _all _the _of _to _in _is _it _and _or
    _with _for _from _on _at _by _as _an _a _be _has _have _how _many _what _which _you _your
    _are _was _not _no _only _one _two _first _last _next _then _them _this _that _each _into
    _its _if _do _can _must _will _use _using _write _read _copy _list _show _run _find _get
    _put _make _save _set _look _see _tell _give _ask _call _calls _answer _reply _result
    _results _value _values _key _keys _name _names _named _file _files _folder _folders _line
    _lines _number _count _word _words _text _content _contents _path _command _commands _tool
    _tools _task _entry _entries _item _items _row _rows _table _data _directory _workspace
    _agent _works _work _same _exactly _whole _start _end _before _after _new _old _output
    _input _out _error _found _missing _written _wrote _done _string _type _object _order
    _sorted _sort _second _so _there _here _user _function _arguments _when _where _stop
    _finish _finished _empty _short _given _more _than _also _cat _head _tail _wc _grep _cp
    _echo _ls _under _shell _such _other _nothing _exists _any _job _holds _lists _writes
    _reads _runs _returns _called _inside _without _bytes _letters _ending _fields _field
    _records _record _stands _goes _three _four cd pwd tmp home id total size date time status
    item items row rows result results output input message tool task entry table words word
    number stem note source target filename filepath dir directory such Open open copy read
    write list find show run save put get set new old a of the to is for and with from that
    this it I It If Do Then First Last Store store answer Files contents Content workspace
    agent Agent now no yes on values keys names folders entries stored sorted _print _opens
    _made _creates
    _total _stem _size _every _off _about
    """.split()
)
