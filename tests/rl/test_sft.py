"""SFT: what is trained on, in which order, at which rate; and that a killed run ends in the same bytes."""

import json
import math
import sys
import types

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl
from rl import checkpoint, seeding, sft
from rl.config import Config, load_recipe
from rl.learner import Learner
from rl.records import DamagedRecords, Trajectory, Turn, append_trajectories

pytestmark = pytest.mark.budget(45)


def tiny_model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
    )


def config(**overrides) -> Config:
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return load_recipe("mini-cpu", ["sft.epochs=3", "sft.batch_tokens=60", "sft.lr=3e-3", *pairs])


def copies(count):
    """Prompt of three random tokens, then the same three: learnable, and only by reading the prompt."""
    rng = seeding.rng(0, "copies")
    prompts = [[rng.randrange(1, 31) for _ in range(3)] for _ in range(count)]
    return [sft.Example([*prompt, 0, *prompt, 31], [4, 5, 6, 7]) for prompt in prompts]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_examples_keep_completion_tokens_and_cut_at_the_context():
    ids, mask = [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]
    assert sft.example(ids, mask, 100) == sft.Example(ids, [2, 3, 5])
    assert sft.example(ids, mask, 4) == sft.Example([1, 2, 3, 4], [2, 3])
    assert sft.example(ids, mask, 2) is None
    assert sft.example([1, 2], [1, 0], 100) is None  # nothing predicts the first token
    with pytest.raises(ValueError, match="2 ids and 1 mask"):
        sft.example([1, 2], [1], 100)


def test_epochs_hold_every_example_once_within_the_budget_and_differ():
    rng = seeding.rng(0, "lengths")
    lengths = [rng.randint(1, 40) for _ in range(60)]
    first, again = (sft.epoch_batches(lengths, 64, seed=1, epoch=0) for _ in range(2))
    second = sft.epoch_batches(lengths, 64, seed=1, epoch=1)
    assert first == again
    assert first != second
    for batches in (first, second):
        assert sorted(i for batch in batches for i in batch) == list(range(60))
        assert all(sum(lengths[i] for i in batch) <= 64 for batch in batches)
    assert sft.epoch_batches([100, 100], 64, 1, 0) in ([[0], [1]], [[1], [0]])


def test_a_step_reports_the_mean_loss_over_trained_tokens_whatever_the_micro_batches():
    examples = copies(6)
    model = tiny_model().eval()
    with torch.no_grad():
        total, right = 0.0, 0
        for e in examples:
            logprobs = model(input_ids=torch.tensor([e.ids])).logits[0].double().log_softmax(-1)
            total -= sum(logprobs[p - 1, e.ids[p]].item() for p in e.target_positions)
            right += sum(int(logprobs[p - 1].argmax()) == e.ids[p] for p in e.target_positions)
    for limit in (1, 24, 4096):
        model = tiny_model().eval()
        settings = config(train__micro_batch_tokens=limit)
        values = sft.train_step(Learner(model, settings, temperature=1.0), examples, 1e-3)
        assert values["sft/loss"] == pytest.approx(total / 24, rel=1e-5)
        assert values["sft/accuracy"] == pytest.approx(right / 24)


def test_prompts_are_not_trained_on(tmp_path):
    """Two data sets that differ in the tokens after which nothing is trained give the same weights."""
    weights = []
    for last in (5, 9):
        model = tiny_model()
        sft.train(model, [sft.Example([1, 2, 3, last], [2])], config(), tmp_path / str(last))
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_training_learns_to_copy(tmp_path):
    examples = copies(150)
    sft.train(tiny_model(), examples, config(sft__epochs=10, sft__batch_tokens=120, sft__lr=1e-2), tmp_path)
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == list(range(1, len(metrics) + 1))
    assert metrics[0]["sft/loss"] > 3
    assert metrics[-1]["sft/loss"] < 1.5
    assert metrics[-1]["sft/accuracy"] > 0.5
    assert len(lines(tmp_path / "wall.jsonl")) == len(metrics)


def test_a_run_killed_within_an_epoch_ends_in_the_same_bytes(tmp_path, monkeypatch):
    examples = copies(20)
    whole = tiny_model()
    sft.train(whole, examples, config(), tmp_path / "whole")

    steps, plain = [], sft.train_step

    def killed(*args):
        steps.append(1)
        if len(steps) > 5:  # three steps an epoch: in the second
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(sft, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        sft.train(tiny_model(), examples, config(), tmp_path / "broken")
    monkeypatch.setattr(sft, "train_step", plain)
    assert checkpoint.newest(tmp_path / "broken" / "checkpoints").name == "step_00001"
    resumed = tiny_model()
    sft.train(resumed, examples, config(), tmp_path / "broken")
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    names = [tmp_path / run / "metrics.jsonl" for run in ("whole", "broken")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_gradient_that_is_not_finite_says_what_to_do():
    learner = Learner(tiny_model(), config())
    learner.model.model.embed_tokens.weight.data[0] = math.inf
    with pytest.raises(FloatingPointError, match=r"lower sft\.lr"):
        sft.train_step(learner, copies(2), 1e-3)


def test_no_examples_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no example"):
        sft.train(tiny_model(), [], config(), tmp_path)


class Tokenizer:
    """One token a character; enough of a tokenizer to be saved."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def text_side(monkeypatch):
    """Stands in for the text half of the project, whose own tests cover it; returns the calls that arrived."""
    calls = []

    def build_initial(settings, texts, folder):
        calls.append(("build", texts))
        tiny_model().save_pretrained(folder)

    def load(folder, device):
        calls.append(("load", folder))
        return Qwen3ForCausalLM.from_pretrained(folder), Tokenizer()

    class Chat:
        def __init__(self, tokenizer):
            assert isinstance(tokenizer, Tokenizer)

        def encode_trajectory(self, trajectory):
            ids, mask = [], []
            for turn in trajectory.turns:
                for text, trained in ((turn.prompt_text, 0), (turn.completion_text, 1)):
                    ids += [ord(letter) % 32 for letter in text]
                    mask += [trained] * len(text)
            return [(ids, mask)]

    for name, module in (
        ("modeling", types.SimpleNamespace(build_initial=build_initial, load=load)),
        ("prompts", types.SimpleNamespace(Chat=Chat)),
    ):
        monkeypatch.setitem(sys.modules, f"rl.{name}", module)
        monkeypatch.setattr(rl, name, module, raising=False)
    return calls


def prepare_run(run, settings, completions=("abcd", "efgh", "ijkl")):
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(settings.to_json()))
    turns = [Turn([], [], [], 0, "stop", "prompt", text) for text in completions]
    append_trajectories(run / "collect" / "trajectories.jsonl", [Trajectory("p", i, [t]) for i, t in enumerate(turns)])


def test_the_stage_writes_a_model_folder_then_done_and_repeats_to_the_byte(tmp_path, text_side):
    for name in ("first", "second"):
        prepare_run(tmp_path / name, config())
        sft.main(tmp_path / name)
    assert [call[0] for call in text_side] == ["build", "load"] * 2
    assert text_side[0][1] == ["prompt", "abcd", "prompt", "efgh", "prompt", "ijkl"]
    folder = tmp_path / "first" / "sft"
    names = {path.name for path in folder.iterdir()}
    assert {"model", "metrics.jsonl", "wall.jsonl", "DONE"} <= names
    assert not [name for name in names if name.startswith(".tmp")]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "model").iterdir()
    }
    for file in ("metrics.jsonl", "model/model.safetensors"):
        assert (folder / file).read_bytes() == (tmp_path / "second" / "sft" / file).read_bytes()


def test_the_stage_takes_a_given_model_folder(tmp_path, text_side):
    given = tmp_path / "given"
    tiny_model().save_pretrained(given)
    prepare_run(tmp_path / "run", config(model__path=f'"{given}"'))
    sft.main(tmp_path / "run")
    assert text_side == [("load", given)]


def test_trajectories_that_do_not_fit_are_cut_and_counted(tmp_path, text_side, capsys):
    prepare_run(tmp_path, config(), completions=("abcd", "x" * 40))
    found = sft.collected(tmp_path / "collect" / "trajectories.jsonl")
    examples = sft.load_examples(found, Tokenizer(), context=20)
    assert [len(e.ids) for e in examples] == [10, 20]
    assert "1 of 2 trajectories are longer than model.context = 20" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"raise model\.context"):
        sft.load_examples(found, Tokenizer(), context=6)


def test_missing_data_says_which_stage_to_run(tmp_path, text_side):
    (tmp_path / "config.json").write_text(json.dumps(config().to_json()))
    with pytest.raises(FileNotFoundError, match=r"rl\.collect"):
        sft.main(tmp_path)


GOOD = json.dumps(Trajectory("p", 0, [Turn([], [], [], 0, "stop", "prompt", "abcd")]).to_json())


def changed(**fields):
    """The good line with a field of its trajectory, or of its turn, changed."""
    data = json.loads(GOOD)
    for name, value in fields.items():
        (data if name in data else data["turns"][0])[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD[: len(GOOD) // 2], "not a trajectory"),
        ("", "not a trajectory"),
        ("[" * 100_000, "not a trajectory"),
        ("9" * 5000, "not a trajectory"),
        ("\udcff", "not a trajectory"),
        ("3", "not a trajectory of this version"),
        ("{}", "not a trajectory of this version"),
        (changed(turns=5), "not a trajectory of this version"),
        (changed(turns=[5]), "not a trajectory of this version"),
        (changed(turns=[]), "a trajectory without turns"),
        (changed(prompt_text=None), r"prompt_text of turn 1 must be text, and is 'None' \(NoneType\)"),
        (changed(completion_text=7), r"completion_text of turn 1 must be text, and is '7' \(int\)"),
        (changed(prompt_ids=["a"]), "prompt_ids of turn 1 must be a list of token ids"),
        (changed(completion_ids=None), "completion_ids of turn 1"),
        (changed(logprobs=[None]), "logprobs of turn 1 must be a list of numbers"),
        (changed(finish_reason="tired"), "finish_reason of turn 1 must be one of"),
        (changed(verdict={"status": "fine"}), "verdict of turn 1 must be a verdict with a known status"),
        (changed(verdict="correct"), "verdict of turn 1"),
        (changed(reward=math.inf), "reward of turn 1 must be a finite number or null"),
        (changed(masks="mrs"), "masks of turn 1 must be a list of texts"),
        (changed(problem_id=3), "problem_id must be text"),
        (changed(sample_index=-1), "sample_index must be a whole number from 0"),
        (changed(ended="bored"), "ended must be one of"),
        (changed(version=9), "version must be 1, and is '9'"),
    ],
)
def test_a_damaged_line_is_told_with_its_file_and_number(tmp_path, text_side, line, words):
    prepare_run(tmp_path, config())
    path = tmp_path / "collect" / "trajectories.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n{GOOD}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedRecords, match=rf"{path}:2: {words}"):
        sft.main(tmp_path)
    assert text_side == [] and not (tmp_path / "sft" / "init").exists()


def test_a_last_line_that_a_kill_cut_is_left_out_and_said(tmp_path, caplog):
    path = tmp_path / "trajectories.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:40]}")
    assert len(sft.collected(path)) == 1
    assert f"{path}:2: the last line is cut short" in caplog.text


def test_an_empty_file_says_to_collect_again(tmp_path, text_side):
    prepare_run(tmp_path, config())
    path = tmp_path / "collect" / "trajectories.jsonl"
    path.write_text("")
    with pytest.raises(DamagedRecords, match=rf"{path} holds no trajectory: .*remove .*collect/DONE and collect again"):
        sft.main(tmp_path)
    assert not (tmp_path / "sft" / "init").exists()


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text(changed(completion_text="a \ud83d b") + "\n")
    ((turn,),) = [trajectory.turns for trajectory in sft.collected(path)]
    assert turn.completion_text == "a ? b"


def test_a_finished_stage_returns_at_once(tmp_path, capsys):
    (tmp_path / "sft" / "model").mkdir(parents=True)
    checkpoint.mark_done(tmp_path / "sft")
    with pytest.raises(checkpoint.CheckpointError, match="DONE is there, but"):
        sft.main(tmp_path)
    (tmp_path / "sft" / "model" / "config.json").write_text("{}")
    sft.main(tmp_path)
    assert "done before" in capsys.readouterr().out
