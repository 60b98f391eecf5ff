from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.utils.prompt_cleaning import clean_prompt


@pytest.mark.parametrize(
    ("pasted", "plain"),
    [
        ("a  red\n\tfox ", "a red fox"),
        ("the foxâ€™s tail", "the fox's tail"),
        ("&amp;quot;a&amp;nbsp;fox&amp;quot;", '"a fox"'),
        ("a &lt;b&gt; fox", "a <b> fox"),
        ("", ""),
    ],
)
def test_pasted_text_becomes_plain(pasted, plain):
    assert clean_prompt(pasted) == plain
    assert clean_prompt(plain) == plain
