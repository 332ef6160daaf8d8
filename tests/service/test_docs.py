"""The page under /docs: complete, from this server alone, for every service."""

from __future__ import annotations

import re

import pytest

from service.static_files import read_static
from tests.service.test_app import get, make_app

STATIC = read_static("service")


def test_the_page_and_its_files_are_served_under_strict_headers() -> None:
    page = get(make_app(), "/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    wanted = re.findall(r"(?:src|href)=\"(/[^\"]+)\"", page.text)
    assert {"/docs/docs.js", "/docs/docs.css", "/openapi.json"} <= set(wanted)
    for path in wanted:
        assert get(make_app(), path).status_code == 200


@pytest.mark.parametrize("name", sorted(STATIC))
def test_nothing_is_loaded_from_elsewhere_and_nothing_is_read_as_html(name: str) -> None:
    text = STATIC[name].body.decode()
    assert "//" not in re.sub(r"(^|\s)//[^\n]*", "", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|\bstyle=|\bon\w+=", text)


@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/..%2Fapp.py", "/redoc"])
def test_nothing_else_is_there(path: str) -> None:
    assert get(make_app(), path).status_code == 404


def test_a_file_that_is_known_already_is_not_sent_again() -> None:
    first = get(make_app(), "/docs/docs.js")
    again = get(make_app(), "/docs/docs.js", {"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
