"""`sglang bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.entrypoints.http.conftest import description as description
from runtime.entrypoints.http.conftest import start as start
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.server_args.bench_args import BenchServeArgs, BenchTrialArgs
from sglang.multimodal_gen.runtime.server_args.flags import flags_of
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

SNAPSHOTS = {
    BenchServeArgs: Path(__file__).with_name("bench_serve_flags.txt"),
    BenchTrialArgs: Path(__file__).with_name("bench_trial_flags.txt"),
}
MIX = """
- name: small
  body: {prompt: a fox, size: 64x48, num_inference_steps: 2, max_sequence_length: 16}
"""


@pytest.mark.parametrize("record", SNAPSHOTS)
def test_the_flags_are_the_snapshot(record):
    """Adding a flag is a visible act: change the snapshot, and write a line in CHANGELOG.md."""
    lines = [
        f"{s.spelling} {s.value.metavar()} [{s.value.arity}] default={s.default!r}"
        for s in flags_of(record)
    ]
    assert "\n".join(lines) + "\n" == SNAPSHOTS[record].read_text()
    assert all(spec.help.endswith(".") for spec in flags_of(record))


def test_a_server_is_measured_and_the_report_written(start, tmp_path, capsys):
    live = start()
    mix, output = tmp_path / "mix.yaml", tmp_path / "load.json"
    mix.write_text(MIX)
    words = ["--url", live.url, "--mix", str(mix), "--request-rate", "50", "100",
             "--num-requests", "10", "--output", str(output)]  # fmt: skip
    assert main(["bench", "serve", *words]) == 0
    report = json.loads(output.read_text())
    assert [one["request_rate"] for one in report["rates"]] == [50, 100]
    assert all(one["ok"] == one["compared"] == 10 for one in report["rates"])
    assert report["server"]["model"] == "tiny"
    said = capsys.readouterr().out
    assert "latency p99" in said
    assert "wrong, of those compared" in said


def test_a_bad_load_fails(start, tmp_path):
    live = start()
    live.runner.step_seconds = 1.0
    mix = tmp_path / "mix.yaml"
    mix.write_text(MIX)
    words = ["--url", live.url, "--mix", str(mix), "--num-requests", "1", "--no-check",
             "--request-rate", "50", "--request-timeout", "0.2"]  # fmt: skip
    assert main(["bench", "serve", *words]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "Did you mean 'serve'"),
        (["serve", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["serve", "--url", "ftp://x"], "http"),
        (["serve", "--url", "http://127.0.0.1:9", "--", "--port", "1"], "would start another"),
        (["serve", "--mix", "/nowhere.yaml"], "mix file"),
        (["serve", "--request-rate", "0"], "above 0"),
        (["serve", "--num-requests", "0"], "1..1e"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, words, said):
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_lists_what_can_be_measured(capsys):
    assert main(["bench", "--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["bench", "serve", "--help"]) == 0
    assert "sglang bench serve --url" in capsys.readouterr().out


def test_one_rate_is_a_rate():
    assert BenchServeArgs(request_rate=2).rates == (2.0,)
    with pytest.raises(InvalidArgument):
        BenchServeArgs(request_rate=())


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told_in_its_own_words(capsys):
    words = ["serve", "--num-requests", "1", "--", "--model-path", "/nowhere/at/all"]
    assert main(["bench", *words]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_told_before_the_load(tmp_path, capsys):
    line = ["bench", "serve", "--url", "http://127.0.0.1:9", "--output", str(tmp_path)]
    assert main(line) != 0
    assert "a folder has that name" in capsys.readouterr().err
