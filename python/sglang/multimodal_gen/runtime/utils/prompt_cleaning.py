"""Prompts as people paste them, made plain: one way for all families that ask for it."""

from __future__ import annotations

import html
import re


def clean_prompt(text: str) -> str:
    """``text`` with wrong encodings mended, HTML entities read, and white space joined.

    Entities are read twice, since many a web page escapes them twice. Reference: the prompt
    cleaning of Diffusers' video pipelines, with ftfy installed.
    """
    import ftfy  # here: few requests need it

    mended = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", mended).strip()
