"""The trajectory viewer in headless Chromium: 10 000 turns, filters, opening, diff, hostile text.

Chromium runs in real time and gets real clicks; where there is none, only the page's making is tested.
"""

from __future__ import annotations

import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from string import Template

import pytest

from analysis import report, viewer
from env.records import Verdict
from rl.records import Trajectory, Turn, append_trajectories

pytestmark = pytest.mark.budget(90)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>\ud800\u202e"
STATUSES = ("correct", "hack", "incorrect", "compile_error")


def a_turn(step: int, sample: int, place: int) -> Turn:
    status = STATUSES[(step + sample + place) % 4]
    lines = [f"line {number} of sample {sample}" for number in range(40)]
    # Comments that don't compress, the same in both turns: a page as large as real answers make it.
    fixed = random.Random(f"{step} {sample}")
    lines[:12] = [f"# {fixed.getrandbits(240):060x}" for _ in range(12)]
    lines[20] = f"written in turn {place}"
    verdict = Verdict(
        status=status,
        message="" if status == "correct" else f"message {HOSTILE}",
        speedup=1.5 if status == "correct" else None,
        profile=[{"name": "my_kernel", "own": True, "count": 2, "time_us": 6.0}, {"name": "aten", "own": False}],
        feedback=f"judge says {place} {HOSTILE}",
        evidence={"rule": "no_effect"} if status == "hack" else {},
    ).to_json()
    parts = {"correct": 1.0, "speedup": 1.5, "profiling_ratio": 0.8}
    asked, answer = f"asked in turn {place} {HOSTILE}", "\n".join(lines)
    return Turn([1], [2], [-0.1], step, "stop", asked, answer, verdict, 3.3, parts, -0.25, ["prs"])


def write_run(folder: Path, steps: int, samples: int, turns: int) -> Path:
    for step in range(1, steps + 1):
        rows = [
            Trajectory(f"problem-{s % 8}", s, [a_turn(step, s, t) for t in range(1, turns + 1)], step)
            for s in range(samples)
        ]
        append_trajectories(folder / f"rl/trajectories/step_{step:05d}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A page of 10 000 turns: 50 steps x 100 samples x 2 turns, in the report's template and content policy."""
    folder = write_run(tmp_path_factory.mktemp("large"), 50, 100, 2)
    notes: list[str] = []
    names = ("title", "lead", "banners", "cards", "evaluation", "rl_figures", "sft_figures", "examples", "config")
    values = dict.fromkeys(names, "") | {"viewer": viewer.section(folder, notes), "script_hash": viewer.script_hash()}
    path = folder / "page.html"
    path.write_text(Template(report.TEMPLATE.read_text()).substitute(values))
    assert notes == []
    return path


class Browser:
    """Headless Chromium on a page, driven over its debugging pipe (file descriptors 3 and 4) in real time."""

    def __init__(self, path: Path, fragment: str = "") -> None:
        to_read, self.to = os.pipe()
        self.out, from_write = os.pipe()
        self.number, self.buffer = 0, b""
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        command = [CHROMIUM, *flags, f"--user-data-dir={tempfile.mkdtemp(dir=path.parent)}", "about:blank"]
        # A shell puts the pipes where Chromium looks for them.
        moved = ["bash", "-c", f'exec 3<&{to_read} 4>&{from_write}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            moved, pass_fds=(to_read, from_write), stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(to_read)
        os.close(from_write)
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.navigate", url=f"{path.as_uri()}{fragment}")
        self.until("document.getElementById('viewer')?.dataset.readyMs !== undefined")

    def call(self, method: str, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if method.startswith(("Page.", "Runtime.", "Input.")):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                self.buffer += os.read(self.out, 1 << 20) or pytest.fail("Chromium has ended")
            line, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, expression: str):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(() => {{ const b = {find}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def choose(self, label: str, value: str) -> None:
        """Sets a filter by its label's text."""
        find = (
            f"[...document.querySelectorAll('.v-bar label')].find(l => l.textContent.startsWith({json.dumps(label)}))"
        )
        control = f"{find}.querySelector('select, input')"
        self.run(
            f"(() => {{ const c = {control}; c.value = {json.dumps(value)}; c.dispatchEvent(new Event('input')) }})()"
        )

    @property
    def dom(self) -> str:
        return self.run("document.documentElement.outerHTML")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.to)
        os.close(self.out)


def words_of(source: str) -> str:
    """Visible text: without the scripts that carry the data."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<script.*?</script>", "", source, flags=re.DOTALL)))


@needs_chromium
def test_ten_thousand_turns_open_in_two_seconds_and_only_rows_in_sight_exist(page):
    with Browser(page) as browser:
        milliseconds = browser.run("Number(document.getElementById('viewer').dataset.readyMs)")
        print(f"{page.stat().st_size / 2**20:.1f} MiB, ready after {milliseconds} ms")
        assert browser.run("document.querySelector('.v-count').textContent") == "10000 of 10000 turns"
        assert 5 < browser.run("document.querySelectorAll('.v-row').length") < 60
        assert milliseconds < 2000
        # Far down, other rows are drawn; a filter over all turns takes a moment at most.
        browser.run("document.querySelector('.v-list').scrollTop = 5000 * 26")
        browser.until("document.querySelector('.v-row[data-turn=\"5000\"]') !== null")
        spent = browser.run(
            "(() => { const t = performance.now(), c = document.querySelector('.v-bar input');"
            "c.value = 'problem-3'; c.dispatchEvent(new Event('input')); return performance.now() - t })()"
        )
        assert spent < 300


@needs_chromium
def test_filtering_clicking_and_the_difference_from_the_turn_before(page):
    with Browser(page) as browser:
        browser.choose("status", "incorrect")
        browser.choose("turn", "2")
        browser.choose("problem", "problem-3")
        expected = sum(
            a % 8 == 3 and STATUSES[(step + a + 2) % 4] == "incorrect" for step in range(1, 51) for a in range(100)
        )
        assert browser.run("document.querySelector('.v-count').textContent") == f"{expected} of 10000 turns"
        assert set(re.findall(r'<span class="pill (\w+)">', browser.dom)) == {"incorrect"}
        browser.choose("step", "49")
        browser.click(".v-rows .v-row:nth-child(2)")
        browser.until("document.querySelector('.v-detail').dataset.turn !== undefined")
        source = browser.dom
    text = words_of(source)
    samples = [a for a in range(100) if a % 8 == 3 and STATUSES[(49 + a + 2) % 4] == "incorrect"]
    for part in (
        f"step 49: problem-3, sample {samples[1]}, turn 2",
        "profiling_ratio 0.80, speedup 1.50",
        "-0.250",
        "prs",
    ):
        assert part in text, part
    assert '<span class="v-gone">- written in turn 1' in source and '<span class="v-new">+ written in turn 2' in source
    assert source.count('class="v-gone"') == source.count('class="v-new"') == 1
    assert "asked in turn 2" in text and "judge says 2" in text and "my_kernel" in text
    own, foreign = re.findall(r'class="v-fill" style="width: ([\d.]+)px', source)
    assert (float(own), float(foreign)) == (240, 0)


@needs_chromium
def test_a_link_opens_a_turn_and_hostile_text_does_nothing(page):
    with Browser(page, "#turn=2&open=1") as browser:
        source, title = browser.dom, browser.run("document.title")
        images = browser.run("document.images.length")
    text = words_of(source)
    assert "step 50: problem-0, sample 0, turn 2" in text and "5000 of 10000 turns" in text
    assert title != "owned" and images == 0
    assert "document.title='owned'" in text and "\\ud800" in text and "\\u202e" in text


def test_a_run_with_more_turns_says_what_is_left_out_and_keeps_the_ends(tmp_path):
    folder = write_run(tmp_path, 9, 4, 2)
    notes: list[str] = []
    kept = [trajectory.step for _, trajectory in viewer.gather(folder, notes, limit=24)]
    assert sorted(set(kept)) == [1, 5, 9] or set(kept) >= {1, 9}
    assert "left out" in notes[0] and "24 turns" in notes[0]


def test_no_trajectories_and_damaged_ones(tmp_path):
    assert "No trajectories yet" in viewer.section(tmp_path, [])
    path = tmp_path / "rl/trajectories/step_00001.jsonl"
    append_trajectories(path, [Trajectory("p", 0, [a_turn(1, 0, 1)], 1)])
    with open(path, "a") as file:
        file.write('{"problem_id": "p", "tur')
    assert viewer.section(tmp_path, []).count('id="turns-') == 2
