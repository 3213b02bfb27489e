"""The page: whole, well-formed, escaped, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.metrics_file import METRICS, read_metrics
from clawgym_jax.core.types import Delivery, Role
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.report.page import write_report
from clawgym_jax.report.run_data import find_codec, load_run, read_calls_of
from clawgym_jax.rollout.store import CALLS
from clawgym_jax.train.metrics import MetricsWriter
from tests.report.runs import (
    HOSTILE,
    SCORES,
    TOKENIZER,
    branching_calls,
    log_calls,
    log_episodes,
    record_of,
    step_metrics,
    whole_run,
    write_metrics,
)
from tests.tree.histories import make_call


class Reader(HTMLParser):
    """What a browser would see: tags, text, attributes that could load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.active += [k for k, _ in attrs if k.startswith("on") or k in ("src", "href", "style")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(path: Path) -> tuple[Reader, ET.Element]:
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader, ET.fromstring(text)


def words(page: ET.Element) -> str:
    return " ".join("".join(page.itertext()).split())


def test_a_whole_run_is_one_well_formed_page_with_every_part(tmp_path: Path) -> None:
    path = write_report(whole_run(tmp_path), TOKENIZER)
    assert path == tmp_path / "report.html"
    _, page = read(path)
    headings = [h.text for h in page.iter("h2")]
    assert headings == [
        "Results", "Curves", "Seconds", "Tokens", "Outcomes", "One prefix tree", "One transcript",
    ]  # fmt: skip
    text = words(page)
    for part in (
        "Finished: 3 of 3 training steps",
        "0.500 (0.29 to 0.71)",
        "0.800 (0.58 to 0.92)",
        "dropped: auxiliary call: sub-agent",
        "dead leaf",
        "5.0 times as many",
        "prefix breaks: retry",
        "done ✓ naïve",
    ):
        assert part in text, part
    assert not page.findall(".//p[@class='missing']")


def test_steps_that_train_the_value_model_only_are_steps_of_the_run(tmp_path: Path) -> None:
    progress = whole_run(tmp_path) / "progress.json"
    said = json.loads(progress.read_text(encoding="utf-8")) | {"steps": 4}
    progress.write_text(json.dumps(said), encoding="utf-8")
    _, page = read(write_report(tmp_path, TOKENIZER))
    assert "Finished: 3 of 4 training steps" in words(page)


def test_pictures_have_words_and_charts_have_tables(tmp_path: Path) -> None:
    _, page = read(write_report(whole_run(tmp_path), TOKENIZER))
    pictures = [s for s in page.iter("svg") if s.get("aria-hidden") != "true"]
    assert len(pictures) == 9
    assert all(s.get("role") == "img" and len(s.get("aria-label", "")) > 40 for s in pictures)
    charts = [f for f in page.iter("figure") if "Held-out" not in "".join(f.itertext())]
    assert len(charts) == 7
    assert all(f.find(".//table") is not None for f in charts)
    reward = next(f for f in charts if "Reward" in "".join(f.itertext()))
    rows = [[c.text for c in row] for row in reward.iter("tr")]
    assert rows == [
        ["step", "tiny_chat", "tiny_shell"],
        ["1", "0.1", "0.05"],
        ["2", "0.2", "–"],  # a NaN is a gap, not a zero
        ["3", "0.3", "0.15"],
    ]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    path = write_report(whole_run(tmp_path), TOKENIZER)
    reader, page = read(path)
    assert not {"script", "img", "link", "iframe", "object"} & set(reader.tags)
    assert reader.active == []
    raw = path.read_text(encoding="utf-8")
    policy = page.find("./head/meta[@http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert policy.get("content") == "default-src 'none'; style-src 'unsafe-inline'"
    assert "\x1b" not in raw and "\u202e" not in raw
    assert "<script" not in raw
    assert "<script>alert('x')</script>" in "".join(reader.texts)


@pytest.mark.parametrize("steps", [0, 1, 250])
def test_any_number_of_steps_can_be_drawn(tmp_path: Path, steps: int) -> None:
    write_metrics(tmp_path, steps)
    _, page = read(write_report(tmp_path, None))
    assert ("No training step is done yet." in words(page)) is (steps == 0)
    columns = [f for f in page.iter("figure") if "seconds go" in "".join(f.itertext())]
    drawn = len(columns[0].findall("./svg//rect")) if columns else 0
    assert drawn == {0: 0, 1: 7, 250: 50 * 7}[steps]


def test_parts_of_a_step_add_up_to_the_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    _, page = read(write_report(tmp_path, None))
    shares = {
        row[0].text: row[1].text
        for row in page.iter("tr")
        if len(row) == 3 and (row[2].text or "").endswith("%")
    }
    assert shares == {
        "serving": "8.00",
        "rest of the rollout": "2.00",
        "old log-probs": "1.50",
        "update": "4.00",
        "packing": "0.50",
        "publish": "0.25",
        "other": "0.75",
        "step": "17.00",
    }
    assert sum(float(v or 0) for v in shares.values()) == 2 * step_metrics(1)["step_s"]


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    _, page = read(write_report(tmp_path, None))
    said = [p.text or "" for p in page.findall(".//p[@class='missing']")]
    assert [line.split()[1] for line in said] == [
        "held-out", "training", "training", "training", "episode", "episode",
    ]  # fmt: skip
    assert "Nothing recorded yet" in words(page)


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    codec = ChatCodec.from_folder(TOKENIZER)
    calls = branching_calls(codec)
    log_calls(tmp_path, calls, delivered=False)
    log_episodes(tmp_path, [record_of(calls)])
    with (tmp_path / CALLS).open("ab") as file:
        file.write(b"\x40\x00\x00\x00torn")
    (tmp_path / "metrics.jsonl").write_text('{"stage": "train", "st', encoding="utf-8")
    (tmp_path / "progress.json").write_text(
        json.dumps({"before": {"tiny_chat": SCORES}}), encoding="utf-8"
    )
    _, page = read(write_report(tmp_path, TOKENIZER))
    text = words(page)
    assert "Not evaluated after training yet" in text
    assert "Not finished: no update yet" in text
    assert "openai-chat · pending" in text


def test_it_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    calls = [make_call(0, [5, 6], [7])]
    with RecordLog(tmp_path / CALLS) as log:
        log.append(calls[0])
        assert load_run(tmp_path).calls == 1
        log.append({"kind": "delivery", "call_id": "e.0", "delivery": "delivered", "at_s": 1.0})
        found = read_calls_of(tmp_path / CALLS, "e")
    assert [call.delivery for call in found] == [Delivery.DELIVERED]


def test_metrics_are_read_by_the_last_line_of_a_step(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    write_metrics(tmp_path, 3)
    with MetricsWriter(tmp_path) as resumed:
        resumed.write("train", 3, {"entropy": 9.0})
        resumed.write("train", 4, {"entropy": float("inf")})
    with (tmp_path / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"stage": "train", "step": 5, "entr')
    lines = read_metrics(tmp_path)
    assert [(x["stage"], x["step"], x.get("entropy")) for x in lines[-2:]] == [
        ("train", 3, 9.0), ("train", 4, None),
    ]  # fmt: skip


def test_without_a_tokenizer_the_harness_text_is_shown(tmp_path: Path) -> None:
    calls = [dataclasses.replace(make_call(0, [5, 6], [7, 8]), text=HOSTILE)]
    log_calls(tmp_path, calls)
    log_episodes(tmp_path, [record_of(calls)])
    _, page = read(write_report(tmp_path, None))
    assert "Token by token is not possible" in words(page)
    assert "<img src=x onerror=alert(1)>" in words(page)
    _, page = read(write_report(tmp_path, tmp_path))  # a folder without a tokenizer
    assert "tokenizer.json" in words(page)


def test_the_example_is_the_episode_with_branches(tmp_path: Path) -> None:
    plain = [make_call(i, [5, *range(6, 7 + i)], [9], episode="plain") for i in range(5)]
    forked = [make_call(i, [5, 6], [9], episode="forked") for i in range(3)]
    forked[1] = dataclasses.replace(forked[1], breaks=("retry",))
    helper = [make_call(0, [4], [9], episode="helper", role=Role.SUBAGENT)]
    log_calls(tmp_path, [*forked, *plain, *helper])
    log_episodes(tmp_path, [record_of(c) for c in (helper, forked, plain)])
    example = load_run(tmp_path).example
    assert example is not None and example.record.episode_id == "forked"


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    whole_run(tmp_path)
    first = write_report(tmp_path, TOKENIZER).read_bytes()
    assert write_report(tmp_path, TOKENIZER).read_bytes() == first
    assert not (tmp_path / "report.new").exists()


def test_the_tokenizer_is_the_final_models_or_the_base_models(tmp_path: Path) -> None:
    assert find_codec(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model": {"path": "tiny_base"}}', encoding="utf-8")
    assert find_codec(tmp_path) == TOKENIZER
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert find_codec(tmp_path) == tmp_path / "model"


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(tmp_path / "nowhere", None)


def test_the_report_never_loads_jax() -> None:
    code = "import sys, clawgym_jax.report.page, clawgym_jax.report.call_list\n"
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('jax' in sys.modules)"])
    assert done.returncode == 0


def test_the_value_model_has_its_curve_where_there_is_one(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    _, page = read(write_report(tmp_path, None))
    assert "Value model" not in words(page)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    more = [{**line, "explained_variance": 0.25, "values_s": 1.0} for line in lines]
    path.write_text("\n".join(map(json.dumps, more)) + "\n")
    _, page = read(write_report(tmp_path, None))
    assert "Value model" in words(page) and "0.25" in words(page)
