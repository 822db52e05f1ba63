"""metrics.jsonl, console, report: what a run leaves behind."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from banyan.config.resolve import defaults
from banyan.log.console import Console, duration
from banyan.log.jsonl import JsonLines, read
from banyan.log.loggers import RunLog
from banyan.report.charts import Series, line_chart, ticks
from banyan.report.report import write_report
from banyan.report.summary import summarise
from shell_files import ROOT


def test_resuming_drops_a_torn_line_and_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(1, 6):
        first.write(step, {"x": step / 2, "bad": float("nan")})
    first.close()
    path.write_text(path.read_text()[:-9])  # a kill in the middle of the last line
    again = JsonLines(path)
    again.start(3)
    again.write(4, {"x": 9.0})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3] == {"step": 4, "x": 9.0}
    assert lines[0]["bad"] is None


def test_a_new_run_keeps_the_older_file_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for value in (1.0, 2.0):
        log = JsonLines(path)
        log.write(1, {"x": value})
        log.close()
    assert read(path) == [{"step": 1, "x": 2.0}]
    assert read(tmp_path / "metrics.previous.jsonl") == [{"step": 1, "x": 1.0}]
    assert read(tmp_path / "none.jsonl") == []


def test_one_plain_line_per_step_without_a_terminal():
    stream = io.StringIO()
    console = Console(4, stream)
    metrics = {
        "timing_s/step": 2.0,
        "critic/score/mean": 0.25,
        "perf/throughput": 1234.5,
        "trie/ratio": 1.64,
    }
    console.step(1, metrics)
    console.step(2, {**metrics, "val-core/gsm/acc/mean@1": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/4  reward 0.250  1,234 tokens/s  sharing 1.64x  2.0 s  ")
    assert lines[0].endswith(" left")
    assert lines[1] == "validation after step 2: gsm/acc/mean@1 0.500"
    assert len(lines) == 3


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    console = Console(4, Terminal())
    console.step(1, {"timing_s/step": 2.0, "critic/score/mean": 0.25})
    console.say("a line [not markup]")
    assert console._progress.tasks[0].completed == 1
    console.close()
    console.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_have_units(seconds, text):
    assert duration(seconds) == text


def test_trackers_that_are_not_driven_are_said_once(tmp_path, capsys):
    log = RunLog(tmp_path, ["console", "wandb", "mlflow"], 2)
    log.log(1, {"timing_s/step": 1.0})
    log.log(2, {"timing_s/step": 1.0})
    log.close()
    assert capsys.readouterr().out.count("trainer.logger=wandb, mlflow: equivalent") == 1
    assert (tmp_path / "run.log").read_text().count("wandb") == 1


class Page(HTMLParser):
    """Collects tags, checks that they close in order, and finds references out of the page."""

    VOID = ("meta", "line", "polyline", "circle")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.references, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_run(directory):
    metrics = JsonLines(directory / "metrics.jsonl")
    metrics.write(0, {"val-core/gsm/acc/mean@1": 0.1})
    for step in range(1, 9):
        values = {
            "critic/score/mean": step / 10,
            "actor/entropy": 2.0 / step,
            "timing_s/gen": 1.0,
            "timing_s/step": 2.0,
        }
        values |= {"trie/logical_tokens": 100.0, "trie/unique_tokens": 40.0, "actor/kl_loss": None}
        metrics.write(step, values)
    metrics.write(9, {"val-core/gsm/acc/mean@1": 0.6})
    metrics.close()
    samples = JsonLines(directory / "samples.jsonl")
    samples.write(
        1,
        {
            "validation": False,
            "input": "2 < 3 & 4?",
            "output": "<b>5</b>",
            "gts": "5",
            "score": 1.0,
        },
    )
    samples.close()


def test_the_report_is_one_page_that_needs_no_network(tmp_path):
    write_run(tmp_path)
    path = write_report(tmp_path, defaults(), {"last_step": 9, "stopped_early": False})
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.references == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 4
    text = "".join(page.text)
    assert "Finished after step 9." in text
    assert "0.100 → 0.600" in text
    assert "320 of 800" in text
    assert "<b>5</b>" in text  # escaped, so it is text and not a tag
    assert "actor_rollout_ref.rollout.temperature" in text
    assert len(path.read_bytes()) < 2_000_000


def test_a_run_without_steps_has_no_report(tmp_path):
    assert write_report(tmp_path, defaults(), {}) is None


def test_the_summary_ends_with_where_the_results_are(tmp_path):
    write_run(tmp_path)
    lines = summarise(
        tmp_path, {"last_step": 9, "checkpoint": "run/global_step_9"}, tmp_path / "report.html"
    )
    assert lines[-2:] == ["checkpoint: run/global_step_9", f"report: {tmp_path / 'report.html'}"]
    assert any(
        line.startswith("validation gsm/acc/mean@1") and "0.100 → 0.600" in line for line in lines
    )
    assert any(line.startswith("time per stage: rollout 8 s") for line in lines)


def test_charts_cover_their_values():
    assert ticks(0, 9.5, 5) == [0, 5, 10]
    assert ticks(3, 3, 5)[0] <= 3 <= ticks(3, 3, 5)[-1]
    assert ticks(1, 60, 6, whole=True)[-1] >= 60
    assert line_chart("t", "", [Series("a", [])]) == ""
    assert "<polyline" in line_chart("t", "s", [Series("a", [(1.0, 5.0)])])


def test_every_metric_of_the_core_has_its_sentence():
    page = (ROOT / "docs/guides/metrics.md").read_text()
    sources = [path.read_text() for path in (ROOT / "src/banyan/train").glob("*.cpp")]
    text = "\n".join(sources)
    single = set(re.findall(r'metrics\["([\w/]+)"\]', text))
    spread = set(re.findall(r'\.write\("([\w/]+)", metrics\)', text))
    assert len(single) > 30
    assert len(spread) >= 5
    for name in single:
        tail = name.rsplit("_", 1)[-1]
        assert f"`{name}`" in page or f"`_{tail}`" in page, f"{name} is missing in metrics.md"
    for name in spread:
        assert f"`{name}/mean`" in page, f"{name}/mean is missing in metrics.md"
