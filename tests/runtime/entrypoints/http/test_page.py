"""The page's files, without a browser; `test_page_in_chromium` has the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.entrypoints.http import page

STATIC = Path(page.__file__).with_name("static")
NAMES = sorted(path.name for path in STATIC.iterdir())
SCRIPTS = {path.name: path.read_text() for path in STATIC.glob("*.js")}
HTML = (STATIC / "index.html").read_text()


def test_each_file_comes_with_its_type_and_a_strict_policy(shared):
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    for path in ["/", *(f"/page/{name}" for name in NAMES)]:
        answer = shared.http.get(path)
        assert answer.status_code == 200, path
        kind = types["html" if path == "/" else path.rpartition(".")[2]]
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = shared.http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert shared.http.head(path).status_code == 200


@pytest.mark.parametrize(
    "name", ["page.py", "..%2fpage.py", "%2e%2e/app.py", "..%5capp.py", "static", "x%00.js", "."]
)
def test_nothing_else_of_the_file_system_is_served(shared, name):
    """CB-130"""
    shared.refusal(shared.http.get(f"/page/{name}"), 404)


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    for name in NAMES:
        text = (STATIC / name).read_text()
        hosts = re.findall(r"""(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}""", text)
        assert set(hosts) <= {"http://www.w3.org"}, name  # the name of SVG, which nobody fetches
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
            assert word not in text, f"{word} in {name}"
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", HTML)


def test_scripts_find_what_they_ask_for():
    """Each import leads to a file that has the name, each id is in the document."""
    ids = set(re.findall(r'\sid="([\w-]+)"', HTML))
    for name, text in SCRIPTS.items():
        assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids, name
        for names, module in re.findall(r'import \{([^}]+)\} from "\./([\w.]+)"', text):
            for wanted in (word.strip() for word in names.split(",")):
                pattern = rf"export (async )?(const|class|function\*?) {wanted}\b"
                assert re.search(pattern, SCRIPTS[module]), f"{name}: {wanted} of {module}"
    labelled = set(re.findall(r'aria-labelledby="([\w-]+)"', HTML))
    assert labelled <= ids


def test_a_model_says_what_a_form_needs(shared):
    card = shared.http.get("/v1/models").json()["data"][0]
    settings = {setting["name"]: setting for setting in card["settings"]}
    assert settings["num_inference_steps"]["kind"] == "integer"
    assert settings["num_inference_steps"]["default"] == 28  # the checkpoint says nothing
    assert settings["guidance_scale"]["kind"] == "number"
    assert settings["prompt"]["help"]
    assert "T2I" in settings["task_type"]["choices"]
    assert "image_path" not in settings
    assert card["tasks"] == [{"name": "T2I", "makes": "image", "image": "no", "video": "no"}]
    assert card["limits"]["images"] == 10
    assert card["accepts_mask"] is False


def test_a_model_that_takes_pictures_says_so(start, editor):
    card = start(model=editor).http.get("/v1/models").json()["data"][0]
    assert [(task["name"], task["image"]) for task in card["tasks"]] == [
        ("T2I", "no"), ("TI2I", "may"), ("I2I", "must")
    ]  # fmt: skip


def test_the_page_is_no_part_of_the_api(shared):
    paths = shared.http.get("/openapi.json").json()["paths"]
    assert "/" not in paths
    assert not [path for path in paths if path.startswith("/page")]
    assert "/v1/jobs/{job_id}/events" in paths
