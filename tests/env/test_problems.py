"""Problems from folders, tables, lines and the generator: in order, or refused with the file and what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from env.decontaminate import fingerprint, same_problems
from env.problems import ProblemError, load, load_file, load_folder, load_jsonl, load_parquet, write_folder, write_jsonl
from env.records import Problem

pytestmark = pytest.mark.budget(20)

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


# KernelBench's repository ---------------------------------------------------------------------------------------------


def test_repository_of_kernelbench_its_folder_and_one_level_can_be_given(tmp_path):
    put(tmp_path / "KernelBench" / "level1" / "1_a.py")
    put(tmp_path / "KernelBench" / "level2" / "1_b.py")
    put(tmp_path / "KernelBench" / "level2" / "__init__.py", "")
    put(tmp_path / "KernelBench" / "level2" / ".ipynb_checkpoints" / "1_b.py", "x")
    put(tmp_path / "scripts" / "run.py", "print()")
    put(tmp_path / "KernelBench" / "helper.py", "print()")
    assert [p.id for p in load(tmp_path)] == ["level1/1_a", "level2/1_b"]
    assert [p.id for p in load(tmp_path / "KernelBench")] == ["level1/1_a", "level2/1_b"]
    (one,) = load(tmp_path / "KernelBench" / "level2")
    assert (one.id, one.level) == ("1_b", 2)


def test_own_problems_beside_levels_count_and_broken_files_within_levels_are_named(tmp_path):
    put(tmp_path / "level1" / "1_a.py")
    put(tmp_path / "mine.py")
    assert [p.id for p in load(tmp_path)] == ["level1/1_a", "mine"]
    bad = put(tmp_path / "level1" / "2_b.py", "x = 1")
    with pytest.raises(ProblemError, match=r"2_b\.py: not a KernelBench problem"):
        load(tmp_path)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ProblemError, match=r"2_b\.py: not text in UTF-8"):
        load(tmp_path)


def test_folder_named_like_a_file_and_link_to_nowhere(tmp_path):
    put(tmp_path / "1_a.py")
    (tmp_path / "2_b.py").mkdir()
    (tmp_path / "3_c.py").symlink_to(tmp_path / "nowhere.py")
    assert [p.id for p in load(tmp_path)] == ["1_a"]
    with pytest.raises(ProblemError, match=r"2_b\.py: can't be read \(Is a directory\)"):
        load_file(tmp_path / "2_b.py")


def test_other_entry_point_is_looked_for_as_a_word(tmp_path):
    path = put(tmp_path / "a.py", SOURCE.replace("class Model", "class Net"))
    assert load_file(path, entry_point="Net").entry_point == "Net"
    with pytest.raises(ProblemError, match="no 'class Model'"):
        load_file(path)
    put(path, SOURCE.replace("class Model", "class Models"))
    with pytest.raises(ProblemError, match="no 'class Model'"):
        load_file(path)
    put(path, SOURCE.replace("class Model", "# class Model"))
    with pytest.raises(ProblemError, match="no 'class Model'"):
        load_file(path)


# Broken ones among sound ones -----------------------------------------------------------------------------------------


def test_paths_may_be_text(tmp_path):
    path = put(tmp_path / "level3" / "1_a.py")
    assert load_file(str(path)) == load_file(path)
    assert load_file(str(path), str(tmp_path)).id == "level3/1_a"


def test_all_bad_files_of_a_folder_are_named_with_a_way_on(tmp_path):
    put(tmp_path / "level1" / "1_a.py")
    put(tmp_path / "level1" / "2_b.py", "x = 1")
    put(tmp_path / "level1" / "3_c.py", SOURCE.replace("def get_inputs", "de get_inputs"))
    (tmp_path / "level1" / "4_d.py").write_bytes(b"\xff\xfe")
    put(tmp_path / "aside.py", "print()")
    with pytest.raises(ProblemError) as error:
        load(tmp_path)
    told = str(error.value)
    for words in (
        "2_b.py: not a KernelBench problem: it has no 'class Model'",
        "3_c.py: not a KernelBench problem: SyntaxError: invalid syntax (line 9: 'de get_inputs():')",
        "4_d.py: not text in UTF-8",
        "1 of 4 are sound",
        "--skip-broken",
    ):
        assert words in told
    assert "aside" not in told
    broken = []
    assert [problem.id for problem in load(str(tmp_path), broken)] == ["level1/1_a"]
    assert [words.partition(".py:")[0][-3:] for words in broken] == ["2_b", "3_c", "4_d"]


def test_many_bad_files_are_named_up_to_ten_and_counted(tmp_path):
    put(tmp_path / "good.py")
    for number in range(15):
        put(tmp_path / f"{number}.py", "x = 1")
    with pytest.raises(ProblemError) as error:
        load(tmp_path)
    assert str(error.value).count("not a KernelBench problem") == 10 and "and 5 more" in str(error.value)


def test_where_nothing_is_sound_nothing_is_left_out(tmp_path):
    put(tmp_path / "1.py", "x = 1")
    put(tmp_path / "2.py", "x = 2")
    broken = []
    with pytest.raises(ProblemError, match="nothing in it is a problem") as error:
        load(tmp_path, broken)
    assert "1.py" in str(error.value) and "2.py" in str(error.value) and broken == []


def test_bad_lines_and_rows_are_named_or_left_out_as_well(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"id": "x", "reference": SOURCE}), "{", '{"id": "y", "reference": "x = 1"}']))
    with pytest.raises(ProblemError, match=r"(?s)a\.jsonl:2: .*a\.jsonl:3: .*1 of 3 are sound"):
        load(path)
    broken = []
    assert [problem.id for problem in load(path, broken)] == ["x"] and len(broken) == 2

    rows = table(tmp_path / "tables" / "b.parquet", code=[SOURCE, None, "x = 1"], id=[1, 2, 3])
    with pytest.raises(ProblemError, match=r"(?s)row 1: code is empty.*row 2: not a KernelBench"):
        load(rows)
    rows.with_name("c.parquet").write_bytes(b"PAR1")
    broken = []
    assert [problem.id for problem in load(rows.parent, broken)] == ["1"]
    assert ["row 1" in broken[0], "row 2" in broken[1], "c.parquet: not a parquet" in broken[2]] == [True] * 3


# Tables ---------------------------------------------------------------------------------------------------------------


def table(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_table_of_kernelbench(tmp_path):
    path = table(
        tmp_path / "level_1-00000-of-00001.parquet",
        code=[SOURCE, SOURCE + "# b\n"], level=[1, 1], name=["1_a", "2_b"], problem_id=[1, 2],
    )  # fmt: skip
    found = load(path)
    assert [(p.id, p.level, p.name, p.origin) for p in found] == [
        ("level1/1_a", 1, "1_a", "parquet"),
        ("level1/2_b", 1, "2_b", "parquet"),
    ]
    assert found[1].source == SOURCE + "# b\n"


def test_folder_of_tables(tmp_path):
    for level in (2, 1):
        table(tmp_path / "data" / f"level_{level}.parquet", code=[SOURCE], level=[level], name=["1_a"], problem_id=[1])
    assert [p.id for p in load(tmp_path)] == ["level1/1_a", "level2/1_a"]
    table(tmp_path / "data" / "level_3.parquet", code=[SOURCE], level=[2], name=["1_a"], problem_id=[1])
    with pytest.raises(ProblemError, match=r"level_3\.parquet: row 0: the id level2/1_a is taken already \(.*level_2"):
        load(tmp_path)


def test_table_with_general_names(tmp_path):
    net = SOURCE.replace("Model", "Net")
    path = table(
        tmp_path / "a.parquet", reference=[net, SOURCE], id=["x", "y"], entry_point=["Net", None], other=[1, 2]
    )
    assert [(p.id, p.entry_point) for p in load_parquet(path)] == [("x", "Net"), ("y", "Model")]
    assert [p.id for p in load(table(tmp_path / "b.parquet", source=[SOURCE], problem_id=[7]))] == ["7"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": ["x"], "answer": ["y"]}, "no column code, reference or source (columns found: prompt, answer)"),
        ({"code": [SOURCE], "level": [1]}, "no id, name or problem_id that is text or a number (columns found: code"),
        ({"code": [SOURCE, None], "id": [1, 2]}, "row 1: code is empty, not text"),
        ({"code": [5], "id": [1]}, "row 0: code is a int, not text"),
        ({"code": [SOURCE, SOURCE], "id": [1, 1]}, "row 1: the id 1 is taken already"),
        ({"code": ["x = 1"], "id": [1]}, "row 0: not a KernelBench problem: it has no 'class Model'"),
        ({"code": [SOURCE], "id": [1], "entry_point": ["a b"]}, "entry_point is 'a b'"),
        ({"code": [SOURCE], "id": [1], "level": ["hard"]}, "level is 'hard'"),
        ({"code": [SOURCE], "id": [[1]]}, "no id"),
        ({"code": [], "id": []}, "no rows (columns: code, id)"),
    ],
)
def test_table_that_holds_no_problems_names_what_it_has(tmp_path, columns, words):
    path = table(tmp_path / "a.parquet", **columns)
    with pytest.raises(ProblemError) as error:
        load(path)
    assert words in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not a table", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_damaged_table_is_named(tmp_path, data):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(ProblemError, match=r"a\.parquet: not a parquet table that can be read"):
        load(path)


def test_cut_table_is_named(tmp_path):
    path = table(tmp_path / "a.parquet", code=[SOURCE], id=[1])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ProblemError, match=r"a\.parquet: not a parquet table"):
        load(path)


def test_without_pyarrow_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ProblemError, match=r"a\.parquet: reading parquet needs pyarrow.*pip install pyarrow"):
        load(tmp_path / "a.parquet")


# Lines ----------------------------------------------------------------------------------------------------------------


def test_plain_lines_and_records_may_stand_in_one_file(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"id": "x", "reference": SOURCE},
        {"id": 7, "reference": SOURCE.replace("Model", "Net"), "entry_point": "Net", "level": 2, "more": [1]},
        Problem(id="y", source="anything").to_json(),
        {"id": "z", "reference": SOURCE + "# \u2028 \x85\n"},
    ]
    path.write_text(
        "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8"
    )
    assert [(p.id, p.entry_point) for p in load(path)] == [("x", "Model"), ("7", "Net"), ("y", "Model"), ("z", "Model")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": 5, "source": "x"}', "id is a int, not str"),
        ('{"id": "a", "source": null}', "source is empty, not str"),
        ('{"id": "a", "source": "x", "level": "1"}', "level is a str, not int"),
        ('{"id": "a", "source": "x", "version": 99}', "version 99; this program knows up to"),
        ('{"id": "a", "reference": "x = 1"}', "no 'class Model'"),
        ('{"reference": "x"}', "columns found: reference"),
        ('{"id": "a", "reference": 7}', "reference is a int"),
        ('{"prompt": "a"}', "keys found: prompt"),
        ("[" * 100_000, "not a problem record"),
        ("NaN", "not a problem record"),
    ],
)
def test_bad_lines_say_why(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ProblemError) as error:
        load(path)
    assert f"{path}:2: " in str(error.value) and words in str(error.value)


def test_ids_of_lines_are_distinct(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"id": "x", "reference": SOURCE}) + "\n") * 2)
    with pytest.raises(ProblemError, match=r"a\.jsonl:2: the id x is taken already \(.*a\.jsonl:1\)"):
        load(path)


# One name for all -----------------------------------------------------------------------------------------------------


def test_load_takes_one_file_and_the_generator(tmp_path):
    assert load(put(tmp_path / "a.py"))[0].id == "a"
    assert len(load("generator:train:3")) == 3
    assert load("generator:train:3") == load("generator:train:3:0:cpu") != load("generator:train:3:1")
    assert load("generator:heldout:8:0:gpu")[0].source != load("generator:heldout:8")[0].source


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("generator:", "write generator:train:20"),
        ("generator:train", "write generator:train:20"),
        ("generator:train:0", "write generator:train:20"),
        ("generator:train:-5", "write generator:train:20"),
        ("generator:train:1.5", "write generator:train:20"),
        ("generator:test:5", "unknown split 'test'"),
        ("generator:train:5:0:tpu", "unknown size 'tpu'"),
        ("generator:train:5:0:cpu:x", "write generator:train:20"),
        ("nowhere", "no such file or folder"),
        ("", "."),
    ],
)
def test_load_says_what_it_takes(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProblemError) as error:
        load(spec)
    assert words in str(error.value)


def test_load_refuses_other_kinds_of_file(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ProblemError, match=r"a\.csv: problems come from"):
        load(tmp_path / "a.csv")


# The same problem twice -----------------------------------------------------------------------------------------------


def named(key: str, source: str) -> Problem:
    return Problem(id=key, source=source)


WRITTEN_OTHERWISE = '''"""Some words."""
import torch
class Net(torch.nn.Module):   # renamed
    """More words."""
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        "and more"
        return (data)
def get_inputs():
    return [ torch.ones( 1 ) ]
def get_init_inputs(): return []
'''


def test_the_same_problem_is_found_however_it_is_written():
    a = [named("a1", SOURCE), named("a2", SOURCE.replace("ones(1)", "ones(2)"))]
    b = [named("b1", WRITTEN_OTHERWISE), named("b2", SOURCE.replace("return x", "return x + 1")), named("b3", SOURCE)]
    assert same_problems(a, b) == [("a1", "b1"), ("a1", "b3")]
    assert same_problems(a, []) == same_problems([], b) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ones(1)", "ones(2)"),
        ("ones", "zeros"),
        ("return x", "return -x"),
        ("return []", "return [1]"),
        ("self, x", "self, y, x"),
    ],
)
def test_another_computation_or_size_is_another_problem(old, new):
    assert fingerprint(named("a", SOURCE)) != fingerprint(named("b", SOURCE.replace(old, new)))


def test_swapped_arguments_are_another_problem():
    minus = SOURCE.replace("self, x", "self, x, y").replace("return x", "return x - y")
    assert fingerprint(named("a", minus)) != fingerprint(named("b", minus.replace("x - y", "y - x")))


@pytest.mark.parametrize("source", ["class Model(", "x = 1\0", "x = '\ud800'", "x = " + "-" * 50_000 + "1", ""])
def test_text_that_is_no_python_is_compared_as_text(source):
    assert same_problems([named("a", source)], [named("b", source + "  \n")]) == [("a", "b")]
    assert same_problems([named("a", source)], [named("b", source + "y")]) == []


def test_training_and_heldout_problems_of_the_generator_are_apart():
    assert same_problems(load("generator:train:30"), load("generator:heldout:20:5")) == []


def test_readers_of_problems_need_no_torch():
    code = "import sys, env.problems, env.decontaminate; assert not {'torch', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
