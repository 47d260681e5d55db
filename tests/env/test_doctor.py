"""The doctor tries what it reports, says what is missing in words, and its exit code is the answer to "may I?"."""

from __future__ import annotations

import json

import pytest

from env import doctor, doctor_probes, isolation
from env.worker import ForkServer

# Three examinations, each with a fork server of its own that imports torch.
pytestmark = pytest.mark.budget(80)


@pytest.fixture(scope="module")
def examined():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(isolation.LAYERS_OFF, raising=False)
        return doctor.examine("cpu")


def named(report: dict, area: str) -> dict[str, dict]:
    return {finding["name"]: finding for finding in report["findings"] if finding["area"] == area}


def test_everything_is_tried_and_reported(examined):
    assert examined["minimum_met"] and examined["missing"] == []
    tried = named(examined, "tried")
    assert set(tried) == {
        "read a file of yours", "read the project", "list other workers", "write outside its folder",
        "reach the network", "signal the judge", "read the judge's memory", "trace the judge",
        "leave a process behind", "fill the memory", "fork bomb",
    }  # fmt: skip
    assert all(finding["detail"].startswith("refused") for finding in tried.values() if finding["ok"])
    assert tried["fill the memory"]["detail"] == "refused: ended at its limit of 0.75 GiB of host memory"
    layers = named(examined, "layer")
    assert set(layers) >= {"seccomp", "own uid", "pid namespace", "nothing outlives it"}
    assert named(examined, "measure")["Triton's interpreter"] == {
        "area": "measure", "name": "Triton's interpreter", "ok": True, "detail": "right values", "advice": "",
    }  # fmt: skip
    assert json.loads(json.dumps(examined)) == examined


def test_table(examined):
    text = doctor.render(examined)
    assert max(map(len, text.splitlines())) <= 160
    for words in ("Layers around a worker", "Tried from inside a worker", "Measurement", "torch ", "minimum"):
        assert words in text
    for finding in examined["findings"]:
        assert finding["name"] in text
        if finding["ok"] is False:
            assert finding["advice"], f"{finding['name']} is missing and nobody says what to do"


@pytest.fixture
def quick(monkeypatch):
    """What takes long and isn't asked here is left out."""
    monkeypatch.setattr(doctor, "measurable", lambda device: [])
    monkeypatch.setattr(doctor, "_exhaust", lambda server: [])


def test_what_is_missing_fails_the_examination(monkeypatch, capsys, quick):
    off = ("user namespace", "mount namespace", "network namespace", "seccomp", "writes only to scratch", "own uid")
    monkeypatch.setenv(isolation.LAYERS_OFF, ",".join(off))
    assert doctor.main(["--json", "--device", "cpu"]) == 1
    report = json.loads(capsys.readouterr().out)
    tried, layers = named(report, "tried"), named(report, "layer")
    assert [name for name in off[2:] if layers[name]["ok"]] == []
    # Tried, not only believed: the layers are off, so it was possible.
    for name in ("read the project", "reach the network"):
        assert tried[name]["ok"] is False and tried[name]["detail"].startswith("done") and tried[name]["advice"]
    text = doctor.render(report)
    assert "NOT met" in text and "no network" in text and "a worker could reach the network" in text
    assert "turned off by" in text and "POSSIBLE" in text


def test_every_layer_has_advice(fork_server):
    assert isinstance(fork_server, ForkServer)
    assert set(fork_server.isolation) - set(doctor_probes.ADVICE) == set()
    assert "user namespace" in doctor_probes.ADVICE


def test_what_could_not_be_tried_is_not_taken_for_refused(monkeypatch, quick):
    monkeypatch.setattr(doctor, "_facts", lambda server, source: {"": "the worker ended: killed"})
    report = doctor.examine("cpu")
    assert not report["minimum_met"] and len(report["missing"]) == 2
    assert report["missing"][1] == "a worker may reach the network (couldn't be tried: the worker ended: killed)"
    row = next(line for line in doctor.render(report).splitlines() if line.startswith("  reach the network"))
    assert row.split(maxsplit=3)[3].startswith("UNKNOWN   couldn't be tried") and "POSSIBLE" not in row


def test_an_examination_that_is_stopped_claims_nothing(monkeypatch, capsys):
    def stopped(device: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", stopped)
    assert doctor.main([]) == 130
    shown = capsys.readouterr()
    assert shown.out == "" and "stopped by Ctrl-C" in shown.err


def test_machine_that_cannot_start_workers(monkeypatch, quick):
    def broken(*_: object, **__: object) -> None:
        raise doctor.WireError("the far end closed the channel")

    monkeypatch.setattr(doctor, "ForkServer", broken)
    report = doctor.examine("cpu")
    assert not report["minimum_met"] and "no worker can be started" in report["missing"][0]
    assert "no worker can be started" in doctor.render(report)
