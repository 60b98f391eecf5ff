import io

from sglang.multimodal_gen.runtime.utils import terminal_progress
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent
from sglang.multimodal_gen.runtime.utils.terminal_progress import TerminalProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_with_clock() -> tuple[terminal_progress._Lines, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return terminal_progress._Lines(stream, clock), stream, clock


def test_a_log_gets_a_line_when_work_ends():
    stream = io.StringIO()
    with TerminalProgress(stream) as progress:
        progress(ProgressEvent("load", 4_000_000, 14_000_000, "vae"))
        progress(ProgressEvent("load", 14_000_000, 14_000_000, "transformer"))
        for step in range(5):
            progress(ProgressEvent("denoise", step, 4, "denoising"))
    assert stream.getvalue() == "load: 14.0/14.0 MB, 0.0 s\ndenoising: 4/4, 0.0 s\n"


def test_a_log_hears_now_and_then_about_long_work():
    lines, stream, clock = lines_with_clock()
    for second in range(0, 13):
        clock.now = float(second)
        lines.show(ProgressEvent("load", second * 10**9, 24 * 10**9, "transformer"))
    assert stream.getvalue().splitlines() == [
        "load transformer: 5.0/24.0 GB, 5.0 s",
        "load transformer: 10.0/24.0 GB, 10.0 s",
    ]


def test_the_same_work_may_come_again():
    lines, stream, clock = lines_with_clock()
    for start in (0.0, 60.0):
        clock.now = start
        lines.show(ProgressEvent("decode", 0, 2, "decoding"))
        clock.now = start + 1
        lines.show(ProgressEvent("decode", 2, 2, "decoding"))
    assert stream.getvalue() == "decoding: 2/2, 1.0 s\n" * 2


def test_work_without_a_size_is_just_done():
    lines, stream, _ = lines_with_clock()
    lines.show(ProgressEvent("load", 0, 0, "tokenizer"))
    assert stream.getvalue() == "load: done, 0.0 s\n"


def test_a_terminal_gets_one_bar_for_each_phase(capsys):
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress(ProgressEvent("load", 4_000_000, 14_000_000, "transformer"))
        progress(ProgressEvent("load", 6_000_000, 14_000_000, "vae [fp32]"))
        print("the result")
        progress(ProgressEvent("denoise", 20, 20, "denoising"))
    last = stream.getvalue().rsplit("\x1b[2K", 2)
    drawn = "".join(last[1:])
    assert "load vae [fp32]" in drawn
    assert "6.0/14.0 MB" in drawn
    assert "transformer" not in drawn
    assert "20/20" in drawn
    assert stream.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
    assert capsys.readouterr().out == "the result\n"


def test_bars_are_taken_down_after_an_error():
    stream = Terminal()
    progress = TerminalProgress(stream)
    progress(ProgressEvent("denoise", 0, 20, "denoising"))
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert stream.getvalue().endswith("\x1b[?25h")
