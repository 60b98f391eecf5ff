"""A Chromium that tests drive, and what they ask of a page again and again."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update",
         "--disable-sync"]  # fmt: skip


def chromium_path() -> str | None:
    """Where the system's Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


needs_chromium = pytest.mark.skipif(chromium_path() is None, reason="no Chromium is installed")


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A browser; each context of it has a profile of its own that goes with it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def visit(
    browser: Any, url: str, *, allowed: tuple[str, ...] = (), **options: Any
) -> Iterator[Any]:
    """A page that is ready; a complaint of the page or the browser fails the test.

    ``allowed`` are parts of complaints that the test causes.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((url, "blob:", "data:"))
            else complaints.append(f"asked {request.url}")
        ),
    )
    try:
        page.goto(url)
        yield page
        left = [text for text in complaints if not any(part in text for part in allowed)]
        assert not left, left
    finally:
        context.close()


def ready(page: Any) -> None:
    """Wait until the form is there."""
    page.wait_for_selector("html[data-ready]", state="attached")


def ask(page: Any, prompt: str = "a fox", **numbers: object) -> None:
    """Fill the form in, and run it from the keyboard."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for name, value in numbers.items():
        page.locator(f"input[name={name}]").first.fill(str(value))
    page.keyboard.press("Control+Enter")


def works(page: Any) -> list[dict[str, Any]]:
    """What the page's database holds, newest first, without the pictures."""
    return page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.open("sglang-gallery").onsuccess = (opened) => {
            const store = opened.target.result.transaction("works").objectStore("works");
            const plain = ({ blob, thumb, ...work }) => ({ ...work, bytes: blob.size });
            store.index("created").getAll().onsuccess = (all) => resolve(
              all.target.result.reverse().map(plain));
          };
        })"""
    )
