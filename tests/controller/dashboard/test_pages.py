"""The files of the page: complete, without anything from elsewhere, under strict headers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from controller.schema import Reason
from service.static_files import read_static
from tests.controller.helpers import Client, ManualClock, make_settings, play

STATIC = read_static("controller.dashboard")
MODULES = sorted(name for name in STATIC if name.endswith(".js"))


def test_the_page_is_served_with_headers_under_which_no_other_code_runs(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        page = await client.http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        for name, file in STATIC.items():
            answer = await client.http.get(f"/dashboard/{name}")
            assert (answer.status_code, answer.content) == (200, file.body)
            assert answer.headers["content-security-policy"] == policy
            again = await client.http.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpages.py", "%2e%2e/pages.py", "__init__.py", ""])
def test_nothing_else_is_served(tmp_path: Path, name: str) -> None:
    async def body(client: Client) -> None:
        assert (await client.http.get(f"/dashboard/{name}")).status_code == 404

    play(make_settings(tmp_path), ManualClock(), body)


def test_the_page_has_no_inline_code_or_style_and_asks_nobody_else() -> None:
    html = STATIC["index.html"].body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", html)
    for name, file in STATIC.items():
        if name != "favicon.svg":
            outside = re.findall(r"https?://[^\s\"']+", file.body.decode())
            assert set(outside) <= {"http://www.w3.org/2000/svg"}, name


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_files_that_exist_and_never_read_html(name: str) -> None:
    code = STATIC[name].body.decode()
    assert set(re.findall(r"from \"\./([^\"]+)\"", code)) <= set(STATIC)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", code)


def test_every_element_that_the_modules_look_for_is_in_the_page() -> None:
    html = STATIC["index.html"].body.decode()
    wanted = {found for name in MODULES for found in re.findall(r"byId\(\"([^\"]+)\"\)", STATIC[name].body.decode())}
    assert wanted <= set(re.findall(r"\bid=\"([^\"]+)\"", html))


def test_headings_are_in_order_and_controls_have_names() -> None:
    html = STATIC["index.html"].body.decode()
    levels = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert re.search(r"<html lang=\"en\">", html)
    for found in re.findall(r"<(?:section|dialog)[^>]*aria-labelledby=\"([^\"]+)\"", html):
        assert f'id="{found}"' in html


def test_every_reason_of_a_decision_has_its_sentence() -> None:
    sentences = STATIC["reasons.js"].body.decode().partition("const SENTENCES = {")[2].partition("\n};")[0]
    assert set(re.findall(r"^  (\w+): \(", sentences, re.MULTILINE)) == set(Reason)
