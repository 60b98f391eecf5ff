from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.entrypoints.cli.text_file import read_text_file
from sglang.multimodal_gen.runtime.utils.errors import UserError


def test_text_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    assert read_text_file(str(tmp_path / "a.txt"), "the file", limit=100) == "caf\u00e9"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "has no name"),
        ("  ", "has no name"),
        ("missing", "No such file"),
        ("/dev/zero", "larger than 0 MiB"),
        ("-", "/dev/stdin"),
        (".", "Is a directory"),
        ("a\0b", "null byte"),
        ("~nobody-of-that-name/x", "home directory"),
    ],
)
def test_what_is_no_text_file_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        read_text_file(name, "the file", limit=100)
