"""The page in a real browser, against a real controller process that a live fleet talks to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from controller.lab_schema import Headroom, HeadroomVerdict, PolicyHeadroom
from tests.controller.dashboard.live import HOSTILE, Island, LiveFleet, live_controller, live_sample

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.integration]

ROOT = Path(__file__).parents[3]
SCREENSHOTS = ROOT / "out" / "screenshots"
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
TIMEOUT_MS = 20_000
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
OPTIONS = ("--num-slots", "2", "--policy", "fixed_h", "--policy-params", "h=12", "--min-h", "4", "--max-h", "100000")
BUDGET = ("--budget-syncs", "40", "--budget-horizon-s", "600", "--run-id", "demo-run")

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for this module: while it runs, its thread has an event loop that other tests must not meet."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser to look at the dashboard with: apt-get install -y chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages whose scripts must not fail, and which no policy may stop."""
    complaints: list[str] = []
    contexts = []

    def open_(url: str, *, size: dict[str, int] = WIDE, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": size["width"], "height": size["height"]}, **options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda told: complaints.append(told.text) if told.type == "error" else None)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    # What the network refuses is part of some tests; the browser writes it down as an error of its own.
    unexpected = [told for told in complaints if not told.startswith("Failed to load resource")]
    assert unexpected == []


@pytest.fixture(scope="module")
def fleet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    islands = [Island("island-a"), Island("island-b")]
    with (
        live_controller(tmp_path_factory.mktemp("fleet"), *OPTIONS, *BUDGET) as controller,
        LiveFleet(controller, [f"vllm-{number}" for number in range(6)], islands) as fleet,
    ):
        fleet.overrides["vllm-4"] = {"pressure_frac": None, "kv_usage_frac": None, "running": None, "waiting": None}
        fleet.overrides["vllm-5"] = {"pace": None, "gate_busy": None, "gate_reason": None, "slo_requests": None}
        yield fleet


def row(page: Page, table: str, name: str) -> Any:
    return page.locator(f"#{table} tbody tr", has=page.get_by_role("rowheader", name=name, exact=True))


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).first.text_content() or ""


def take_screenshot(page: Page, name: str) -> None:
    """For people to look at: the folder is printed and kept."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    file = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=file, full_page=True)
    print(f"screenshot {file}")
    assert file.stat().st_size > 10_000


def wait_until(page: Page, condition: str, argument: Any = None) -> None:
    """Wait for a condition in the page. Playwright's own waiting needs `eval` there, which its policy forbids."""
    deadline_s = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(condition, argument):
        assert time.monotonic() < deadline_s, f"{condition} did not come true of {argument}"
        page.wait_for_timeout(50)


def wait_live(page: Page) -> None:
    wait_until(page, "document.querySelector('#link-state').textContent === 'live'")


def wait_text(page: Page, selector: str, text: str) -> None:
    wait_until(page, "([where, text]) => document.querySelector(where)?.textContent.includes(text)", [selector, text])


def test_the_page_shows_the_fleet_and_why_it_syncs_or_not(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)
    wait_text(page, "#rounds tbody", "applied")
    assert page.title() == "WA-DiLoCo demo-run"
    assert page.locator("#servers tbody tr").count() == 6
    cells = row(page, "servers", "vllm-4").locator("td").all_text_contents()
    assert cells[:2] + cells[3:5] == ["ready", "unknown", "unknown", "unknown"]
    assert row(page, "servers", "vllm-5").locator("td").all_text_contents()[9:11] == ["unknown", "unknown"]
    assert "known" in row(page, "servers", "vllm-0").text_content()
    for name in ("island-a", "island-b"):
        assert "alive" in row(page, "islands", name).text_content()
    assert text_of(page, "#why").startswith(("No sync now: ", "Sync directed: "))
    sync = page.locator("#decisions tbody tr", has_text="fixed_h_reached").first
    sync.locator("summary").click()
    assert "pressure" in (sync.locator("dl").text_content() or "")
    assert "120 MB" in text_of(page, "#rounds")  # 12 MB out and 48 MB back, twice.
    budget = text_of(page, "#budget")
    assert "Spent" in budget
    assert "left of 10 min 00 s" in budget
    assert "\u00d7" in row(page, "slo", "vllm-0").text_content()
    assert "unknown" in row(page, "slo", "vllm-5").text_content()
    wait_until(page, "document.querySelectorAll('#load svg').length === 2")
    assert page.locator("#load svg path.band").first.get_attribute("d")
    wait_until(page, "document.querySelector('#headroom dl.tiles') !== null")


def test_news_come_without_a_reload(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)
    page.evaluate("window.isSamePage = true")
    fleet.overrides["vllm-1"] = {"running": 4711}
    try:
        wait_text(page, "#servers", "4,711")
    finally:
        del fleet.overrides["vllm-1"]
    assert page.evaluate("window.isSamePage") is True


def test_another_server_can_be_chosen_for_the_chart_and_rows_can_be_sorted(
    fleet: LiveFleet, open_page: OpenPage
) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)
    page.get_by_role("button", name="vllm-2", exact=True).click()
    assert page.locator("#chosen").input_value() == "vllm-2"
    assert row(page, "servers", "vllm-2").get_attribute("class") == "chosen"
    page.get_by_role("button", name="Server", exact=True).first.click()
    names = page.locator("#servers tbody th").all_text_contents()
    assert names == sorted(names)
    page.get_by_role("button", name="Server", exact=True).first.click()
    assert page.locator("#servers tbody th").all_text_contents() == names[::-1]
    assert page.locator("#servers thead th").first.get_attribute("aria-sort") == "descending"
    page.locator("#filter").fill("host-1")
    wait_until(page, "document.querySelectorAll('#servers tbody tr').length === 2")
    assert "2 of 2 servers that match" in text_of(page, "#servers-note")


def test_text_from_agents_is_text(tmp_path: Path, browser: Browser, open_page: OpenPage) -> None:
    island = Island("island-a", extra={"yield_reason": HOSTILE})
    with (
        live_controller(tmp_path, "--num-slots", "1", "--run-id", HOSTILE) as controller,
        LiveFleet(controller, ["vllm-0"], [island]) as fleet,
    ):
        fleet.overrides["vllm-0"] = {"gate_reason": HOSTILE[:64], "gate_busy": True}
        page = open_page(controller.url)
        wait_text(page, "#islands", "onerror")
        wait_text(page, "#servers", "<img src=x")
        assert HOSTILE in text_of(page, "#run-id")
        assert page.locator("img, b").count() == 0
        assert page.title() != "hacked"


def test_a_lost_connection_is_told_with_the_time_of_the_last_data_and_found_again(
    tmp_path: Path, browser: Browser, open_page: OpenPage
) -> None:
    with (
        live_controller(tmp_path, *OPTIONS) as controller,
        LiveFleet(controller, ["vllm-0", "vllm-1"], [Island("island-a"), Island("island-b")]),
    ):
        page = open_page(controller.url)
        wait_live(page)
        wait_until(page, "document.querySelectorAll('#servers tbody tr').length === 2")
        assert text_of(page, "#banner") == ""
        page.evaluate("window.isSamePage = true")
        controller.kill()
        wait_text(page, "#banner", "Connection lost")
        told = text_of(page, "#banner")
        assert "Last data from " in told
        assert page.locator("#banner").is_visible()
        assert page.locator("#banner").get_attribute("aria-live") == "polite"
        assert "stale" in (page.locator("body").get_attribute("class") or "")
        assert page.get_by_role("button", name="Pause", exact=True).is_disabled()
        assert page.locator("#servers tbody tr").count() == 2
        take_screenshot(page, "dashboard-lost-1280-light")
        controller.start()
        wait_live(page)
        wait_until(page, "document.querySelector('#banner').textContent === ''")
        assert "stale" not in (page.locator("body").get_attribute("class") or "")
        assert page.evaluate("window.isSamePage") is True


def test_the_run_can_be_paused_and_resumed_and_a_refusal_says_what_to_do(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)

    def order(name: str) -> None:
        page.get_by_role("button", name=name, exact=True).first.click()
        page.locator("#confirm-yes").click()

    page.get_by_role("button", name="Pause", exact=True).click()
    page.locator("#confirm-no").click()
    with fleet.controller.client() as http:
        assert http.get("/v1/fleet").json()["paused"] is False
        order("Pause")
        wait_text(page, "#link-state", "paused")
        wait_text(page, "#notice", "Done: training pauses")
        assert http.get("/v1/fleet").json()["paused"] is True
        order("Sync now")
        wait_text(page, "#notice", "Refused: cannot sync: paused. Remedy: resume the run first.")
        order("Resume")
        wait_live(page)
        assert http.get("/v1/fleet").json()["paused"] is False


def test_a_token_is_asked_for_kept_in_the_tab_and_never_in_an_address(
    tmp_path: Path, browser: Browser, open_page: OpenPage
) -> None:
    secret = "k7-right-token"  # noqa: S105
    with live_controller(tmp_path, token=secret) as controller:
        page = open_page(controller.url)
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.locator("#token").fill("wrong")
        page.get_by_role("button", name="Use", exact=True).click()
        wait_until(
            page, "document.querySelector('#token').value === '' && document.querySelector('#token-dialog').open"
        )
        page.locator("#token").fill(secret)
        page.keyboard.press("Enter")
        wait_live(page)
        page.reload()
        wait_live(page)
        page.get_by_role("button", name="Pause", exact=True).click()
        page.locator("#confirm-yes").click()
        wait_text(page, "#link-state", "paused")
        assert urls
        assert not any(secret in url for url in urls)
        assert page.evaluate("Object.keys(localStorage).length") == 0
        assert page.evaluate("sessionStorage.getItem('wadiloco-token')") == secret
        page.get_by_role("button", name="Token", exact=True).click()
        page.get_by_role("button", name="Forget").click()
        wait_text(page, "#link-state", "stale")


STOPPED_WHILE_IT_IS_REFUSED = """async () => {
    const { EventFeed } = await import(new URL("stream.js", document.querySelector("script[type=module]").src));
    const told = [];
    const on = { open: () => told.push("open"), lost: () => told.push("lost"), refused: () => told.push("refused") };
    let asked = 0;
    const real = window.fetch;
    window.fetch = async (url, { signal }) => {
        asked += 1;
        const json = () => new Promise((_, no) => signal.addEventListener("abort", () => no(signal.reason)));
        return { ok: false, status: 401, json };
    };
    try {
        const feed = new EventFeed("/v1/events", { headers: () => ({}), on });
        feed.start();
        await new Promise((go) => setTimeout(go, 20));
        feed.stop();
        feed.start();
        await new Promise((go) => setTimeout(go, 20));
        feed.stop();
        await new Promise((go) => setTimeout(go, 20));
    } finally {
        window.fetch = real;
    }
    return [asked, told];
}"""


def test_what_a_stopped_feed_still_hears_is_nobodys_business(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)
    assert page.evaluate(STOPPED_WHILE_IT_IS_REFUSED) == [2, []]


def test_ten_thousand_servers_show_the_ones_under_pressure_and_find_the_others(
    tmp_path: Path, browser: Browser, open_page: OpenPage
) -> None:
    with live_controller(tmp_path, "--stale-after-s", "300") as controller, controller.client() as http:
        now_s = time.time()
        for first in range(0, 10_000, 2000):
            samples = [
                live_sample(f"vllm-{number:05}", now_s, number=number, pressure_frac=number / 10_000, forecast=[])
                for number in range(first, first + 2000)
            ]
            http.post("/v1/samples", json={"samples": samples}).raise_for_status()
        page = open_page(controller.url)
        wait_live(page)
        wait_text(page, "#servers-note", "The first 200 of 10,000 servers")
        names = page.locator("#servers tbody th").all_text_contents()
        assert (len(names), names[0]) == (200, "vllm-09999")
        page.locator("#filter").fill("vllm-0000")
        wait_until(page, "document.querySelectorAll('#servers tbody tr').length === 10")
        wait_text(page, "#servers-note", "10 of 10 servers that match")
        assert "vllm-00003" in page.locator("#servers tbody th").all_text_contents()


# Counts what is changed in a table's body between two ticks, by column; rows that are put in count as -1.
WATCH = """() => {
  const body = document.querySelector("#servers tbody");
  window.touched = {};
  const count = (key) => (window.touched[key] = (window.touched[key] ?? 0) + 1);
  const note = (records) => records.forEach((record) => {
    if (record.target === body) return record.addedNodes.forEach(() => count(-1));
    const cell = (record.target.closest ? record.target : record.target.parentElement).closest("td, th");
    count(cell ? cell.cellIndex : "row");
  });
  new MutationObserver(note).observe(body, { childList: true, subtree: true, characterData: true });
}"""


def test_two_hundred_servers_and_a_hundred_islands_are_drawn_once_and_then_only_what_changes(
    tmp_path: Path, browser: Browser, open_page: OpenPage
) -> None:
    with live_controller(tmp_path, "--num-slots", "100", "--stale-after-s", "300") as controller:
        with controller.client() as http:
            now_s = http.get("/v1/fleet").json()["t_s"]
            samples = [live_sample(f"vllm-{number:03}", now_s, number=number) for number in range(200)]
            http.post("/v1/samples", json={"samples": samples}).raise_for_status()
            for number in range(100):
                body = {"agent_id": f"island-{number:03}", "instance": "first", "node": f"host-{number}"}
                http.post("/v1/agents", json=body).raise_for_status()
            page = open_page(controller.url)
            wait_until(page, "document.querySelectorAll('#servers tbody tr').length === 200")
            wait_until(page, "document.querySelectorAll('#islands tbody tr').length === 100")
            page.locator("#servers tbody").hover()  # Rows keep their places under a pointer.
            page.evaluate(WATCH)
            changed = live_sample("vllm-007", now_s + 1, number=7, running=4711)
            http.post("/v1/samples", json={"samples": [changed]}).raise_for_status()
            wait_text(page, "#servers", "4,711")
            touched = page.evaluate("window.touched")
        age, running = "3", "5"
        assert touched.pop("-1", 0) == 0
        assert touched[running] == 1
        # Ages grow in every row; of the other columns only those of the one server that told something.
        assert all(count <= 2 for column, count in touched.items() if column != age), touched


def test_an_island_that_falls_silent_is_told_as_lost(tmp_path: Path, browser: Browser, open_page: OpenPage) -> None:
    islands = [Island("island-a"), Island("island-b")]
    with (
        live_controller(tmp_path, *OPTIONS, "--lease-timeout-s", "2") as controller,
        LiveFleet(controller, ["vllm-0", "vllm-1"], islands) as fleet,
    ):
        page = open_page(controller.url)
        wait_until(page, "document.querySelectorAll('#islands tbody tr').length === 2")
        fleet.silent |= {"island-b", "vllm-1"}
        wait_text(page, "#recoveries", "lease lost")
        assert "island-b" in text_of(page, "#recoveries")
        assert "Without a lease now: 1." in text_of(page, "#recoveries-note")
        wait_until(page, "document.querySelector('#islands tbody').textContent.includes('lost')")
        wait_text(page, "#servers", "unknown")
        fleet.silent.clear()
        wait_text(page, "#recoveries", "agent returned")
        islands[0].extra["restarts"] = 3
        wait_text(page, "#recoveries", "worker restarted")


HEADROOM = Headroom(
    t_s=1.0,
    window_s=1800.0,
    covered_s=1500.0,
    verdict=HeadroomVerdict.NOTHING_TO_GAIN,
    syncs=6,
    min_gap_s=3.0,
    sync_s=2.0,
    random_cost=3.25,
    policies=(
        PolicyHeadroom(
            policy=HOSTILE,
            shadow=True,
            since_s=0.0,
            syncs=4,
            priced_syncs=4,
            cost=2.5,
            random_cost=3.0,
            oracle_cost=1.0,
            share_closed=0.25,
            as_cheap_frac=0.4,
        ),
    ),
).model_dump(mode="json")


def test_the_headroom_is_shown_as_the_controller_measures_it(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page("about:blank")
    # What a controller answers after half an hour.
    page.route("**/v1/headroom", lambda route: route.fulfill(json=HEADROOM))
    page.goto(fleet.controller.url)
    wait_text(page, "#headroom", "There is nothing to gain here")
    told = text_of(page, "#headroom")
    assert "Random schedules3.25" in told
    assert "Best scheduleunknown" in told
    assert f"{HOSTILE} (shadow)" in told
    assert page.locator("#headroom img").count() == 0


FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
  return {
    name: at.id || at.getAttribute("aria-label") || `${at.textContent.trim().slice(0, 30)} ${at.tagName}`,
    tag: at.tagName, box: [box.left, box.top, box.width, box.height],
    outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    visible: box.width > 0 && box.height > 0 && box.left >= 0 && box.bottom > 0 && box.top < innerHeight,
  };
}"""


def test_everything_can_be_reached_and_used_with_the_keyboard(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(fleet.controller.url)
    wait_live(page)
    wait_until(page, "document.querySelectorAll('#decisions summary').length > 0")
    page.keyboard.press("Tab")
    first = page.evaluate(FOCUSED)
    assert (first["name"], first["visible"]) == ("Skip to the content A", True)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["tag"] == "BODY":
            break
        assert focused["outline"], focused
        assert focused["visible"], focused
        reached.append(focused["name"])
    wanted = {"pause", "sync-now", "token-open", "filter", "Pressure BUTTON", "vllm-0 BUTTON", "chosen"}
    assert wanted <= set(reached)
    assert any(name.endswith("SUMMARY") for name in reached)
    page.locator("#decisions summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#decisions details[open] dl").first.is_visible()
    page.locator("#pause").focus()
    page.keyboard.press("Enter")
    assert page.locator("#confirm").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#confirm").is_visible()
    assert page.evaluate("document.activeElement.id") == "pause"


def test_tables_name_their_columns_and_rows_and_motion_is_still_where_it_is_unwanted(
    fleet: LiveFleet, open_page: OpenPage
) -> None:
    page = open_page(fleet.controller.url, reduced_motion="reduce")
    wait_live(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("table")].filter((table) => !table.caption?.textContent
          || [...table.querySelectorAll("th")].some((head) => !head.hasAttribute("scope"))).length"""
    )
    assert unnamed == 0
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].filter((element) => {
          const style = getComputedStyle(element);
          return parseFloat(style.transitionDuration) > 0 || style.animationName !== "none";
        }).length"""
    )
    assert moving == 0


@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_the_page_itself_never_scrolls_sideways(fleet: LiveFleet, open_page: OpenPage, size: dict[str, int]) -> None:
    page = open_page(fleet.controller.url, size=size)
    wait_live(page)
    wait_text(page, "#rounds tbody", "applied")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.locator("#decisions summary").first.click()
    page.get_by_role("button", name="Sync now", exact=True).click()
    assert page.evaluate("document.querySelector('#confirm').getBoundingClientRect().width") <= size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


# Every text that is seen, against what lies behind it: the nearest backgrounds, laid over one another.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), parse("Canvas"));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const worst = [];
  let seen = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility() || element.closest("script, noscript, option")) continue;
    const style = getComputedStyle(element);
    const colour = element.closest("svg") ? style.fill : style.color;
    const back = behind(element.closest("svg")?.parentElement ?? element);
    const [light, dark] = [luminance(over(parse(colour), back)), luminance(back)].sort((a, b) => b - a);
    seen += 1;
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) worst.push([ratio.toFixed(2), node.textContent.trim().slice(0, 40), colour, back.join()]);
  }
  return { seen, worst };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(fleet: LiveFleet, open_page: OpenPage, scheme: str) -> None:
    page = open_page(fleet.controller.url, color_scheme=scheme)
    wait_live(page)
    wait_text(page, "#rounds tbody", "applied")
    page.locator("#decisions summary").first.click()
    page.get_by_role("button", name="Sync now", exact=True).click()
    page.locator("#confirm-no").click()
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 150
    assert found["worst"] == []
    stale = page.evaluate(f"() => {{ document.body.classList.add('stale'); return ({CONTRAST})(); }}")
    assert stale["worst"] == []


def test_the_api_page_needs_no_other_server_and_tries_an_operation(fleet: LiveFleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.controller.url}/docs", size=PHONE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.locator("summary", has_text="/v1/budget").first.wait_for()
    operation = page.locator("details.operation", has_text="PUT/v1/budget")
    operation.locator("summary").first.click()
    take_screenshot(page, "docs-390-light")
    operation.get_by_text("outer_syncs", exact=True).first.wait_for()
    operation = page.locator("details.operation", has_text="GET/v1/policy")
    operation.locator("summary").first.click()
    operation.get_by_role("button", name="Send GET").click()
    wait_until(page, "[...document.querySelectorAll('pre')].some((at) => at.textContent.includes('fixed_h'))")
    assert all(url.startswith(fleet.controller.url) for url in asked)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(CONTRAST)["worst"] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_pictures_of_the_page(fleet: LiveFleet, open_page: OpenPage, size: dict[str, int], scheme: str) -> None:
    page = open_page(fleet.controller.url, size=size, color_scheme=scheme)
    wait_live(page)
    wait_text(page, "#rounds tbody", "applied")
    wait_text(page, "#load", "Arrivals")
    take_screenshot(page, f"dashboard-{size['width']}-{scheme}")
