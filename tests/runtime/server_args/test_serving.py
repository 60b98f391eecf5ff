from __future__ import annotations

from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.entrypoints.cli.serve import read_options, serving_flags
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError

SNAPSHOT = Path(__file__).with_name("serving_flags.txt")


def test_the_flags_are_the_snapshot():
    """Adding a flag is a visible act: change the snapshot, and write a line in CHANGELOG.md."""
    lines = [
        f"{s.spelling} {s.value.metavar()} [{s.value.arity}] default={s.default!r}"
        for s in serving_flags()
    ]
    assert "\n".join(lines) + "\n" == SNAPSHOT.read_text()


def test_no_flag_is_claimed_twice():
    names = [s.name for s in (*serving_flags(), *server_flags())]
    assert len(names) == len(set(names))


def test_flags_and_a_file_become_both_records(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("port: 1234\nmax_queued_requests: 5\nbatching-max-size: 2\n")
    options = read_options(["--config", str(config), "--port", "99", "--device", "cpu"])
    assert options is not None
    server, serving = options
    assert (serving.http.port, serving.queue.max_queued_requests) == (99, 5)
    assert (server.batching.batching_max_size, server.platform.device) == (2, "cpu")
    config.write_text("prot: 1\n")
    with pytest.raises(UserError, match="Did you mean 'port'"):
        read_options(["--config", str(config)])


def test_help_lists_every_flag(capsys):
    assert read_options(["--help"]) is None
    shown = capsys.readouterr().out
    for spec in (*serving_flags(), *server_flags()):
        assert spec.spelling in shown


@pytest.mark.parametrize(
    "values",
    [{"port": -1}, {"host": ""}, {"public_url": "ftp://x"}, {"served_model_name": " "},
     {"batching_delay_ms": -1}, {"request_timeout": 0}, {"max_body_mb": 0}, {"file_ttl": 0},
     {"warmup_mode": "later"}, {"warmup_steps": 0}, {"max_images_per_request": 0}],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(values):
    with pytest.raises(InvalidArgument, match=next(iter(values))):
        ServingArgs.from_flat(**values)
