"""Problems from folders and JSON lines: found in order, refused with the file and what it lacks."""

from __future__ import annotations

import pytest

from env.problems import ProblemError, load_file, load_folder, load_jsonl, write_folder, write_jsonl
from env.records import Problem

pytestmark = pytest.mark.budget(5)

SOURCE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x


def get_inputs():
    return [torch.ones(1)]


def get_init_inputs():
    return []
"""


def put(path, source=SOURCE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


def test_numbers_are_ordered_as_numbers(tmp_path):
    for name in ("level1/10_b.py", "level1/2_a.py", "level1/1_c.py", "level2/1_d.py", "level10/1_e.py"):
        put(tmp_path / name)
    problems = load_folder(tmp_path)
    assert [p.id for p in problems] == ["level1/1_c", "level1/2_a", "level1/10_b", "level2/1_d", "level10/1_e"]
    assert [p.level for p in problems] == [1, 1, 1, 2, 10]
    assert [p.name for p in problems] == ["1_c", "2_a", "10_b", "1_d", "1_e"]
    assert {p.origin for p in problems} == {"folder"} and {p.source for p in problems} == {SOURCE}


def test_names_that_start_with_letters_and_digits_can_be_mixed(tmp_path):
    for name in ("a.py", "1.py", "10.py", "b/2.py", "2/x.py"):
        put(tmp_path / name)
    assert len(load_folder(tmp_path)) == 5


def test_other_files_are_left_alone(tmp_path):
    put(tmp_path / "1_a.py")
    (tmp_path / "readme.md").write_text("no problem")
    (tmp_path / "1_a.json").write_text("{}")
    assert [p.id for p in load_folder(str(tmp_path))] == ["1_a"]


def test_byte_order_mark_is_taken_off(tmp_path):
    put(tmp_path / "1.py", "\ufeff" + SOURCE)
    assert load_folder(tmp_path)[0].source == SOURCE


def test_missing_folder_says_what_to_set(tmp_path):
    with pytest.raises(ProblemError, match=r"nowhere: no such folder.*problems\.path.*KERNELBENCH_DIR"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(ProblemError, match="no such folder"):
        load_folder(put(tmp_path / "a.py"))


def test_folder_without_problems(tmp_path):
    with pytest.raises(ProblemError, match=r"holds no \.py files"):
        load_folder(tmp_path)


@pytest.mark.parametrize("lost", ["class Model", "def get_inputs", "def get_init_inputs"])
def test_file_that_is_no_problem_is_named(tmp_path, lost):
    put(tmp_path / "1_good.py")
    bad = put(tmp_path / "2_bad.py", SOURCE.replace(lost, "class Other"))
    with pytest.raises(ProblemError) as error:
        load_folder(tmp_path)
    assert str(bad) in str(error.value) and lost in str(error.value)


def test_source_is_text_only_and_never_run(tmp_path):
    put(tmp_path / "1.py", SOURCE + "\nraise SystemExit('ran')\n")
    assert load_file(tmp_path / "1.py").id == "1"


def problems() -> list[Problem]:
    return [
        Problem(id="b", source=SOURCE, level=2, name="é"),
        Problem(id="a", source="x\n", entry_point="Net", precision="fp16"),
    ]


def test_json_lines_round_trip(tmp_path):
    path = tmp_path / "deep" / "problems.jsonl"
    write_jsonl(problems(), path)
    assert load_jsonl(path) == problems()
    assert [p.name for p in path.parent.iterdir()] == ["problems.jsonl"], "the temporary file is gone"


def test_writing_twice_gives_the_same_bytes(tmp_path):
    write_jsonl(problems(), tmp_path / "a")
    write_jsonl(problems(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("line", ["{", "[]", "5", '{"id": "a"}', '{"id": "a", "source": "x", "speed": 3}'])
def test_bad_line_is_named(tmp_path, line):
    path = tmp_path / "problems.jsonl"
    write_jsonl(problems()[:1], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ProblemError, match=r"problems\.jsonl:2: not a problem record"):
        load_jsonl(path)


def test_folder_round_trip(tmp_path):
    written = [Problem(id="level1/2_a", source=SOURCE), Problem(id="level1/10_b", source=SOURCE + "# b\n")]
    write_folder(written, tmp_path)
    assert [(p.id, p.source, p.level) for p in load_folder(tmp_path)] == [(p.id, p.source, 1) for p in written]


def test_identity_is_what_a_problem_computes_and_not_its_name():
    a = Problem(id="a", source=SOURCE)
    assert a.sha256 == Problem(id="b", source=SOURCE, name="other", level=3).sha256
    assert a.sha256 != Problem(id="a", source=SOURCE + "\n").sha256
    assert a.sha256 != Problem(id="a", source=SOURCE, entry_point="Net").sha256
    assert a.sha256 != Problem(id="a", source=SOURCE, precision="fp16").sha256
