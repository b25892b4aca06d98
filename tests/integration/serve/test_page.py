"""The page at `/` in a headless Chromium, over a gateway under load."""

import os
import shutil
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from gateway_site import Site
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from unit.serve.test_serve_allocator import FOUR, ONE, World

from tokenyard.allocation.policies.rules import StaticPlan
from tokenyard.routing.artifact import best_tuned_rule
from tokenyard.routing.policies.order_spec import in_words

pytestmark = pytest.mark.integration

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: install the packages chromium and chromium-driver",
        allow_module_level=True,
    )


SCREEN_PX = 900
AXE = Path(os.environ.get("TOKENYARD_PLUGS", ".plugs")) / "axe/axe_playwright_python/axe.min.js"
"""What `make plugs` installs."""
CHAMPION = best_tuned_rule("conversation_mixed_gpus")
"""What `champion` is in the cluster of the tests."""


@pytest.fixture(scope="module")
def site():
    made = Site()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1500,1400")
    # No name but this machine's resolves: the page must work without the internet.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def until(browser, condition, what, seconds=30):
    return WebDriverWait(browser, seconds, 0.1).until(lambda _: condition(), what)


def text_of(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector).text


def deciding(browser):
    """The whole name of the policy that decides, as the tooltip has it."""
    # At once: the table may be made anew between two questions.
    return browser.execute_script(
        "return document.querySelector('#policies tbody tr td span')?.title || ''"
    )


def at_width(browser, width):
    metrics = {"width": width, "height": SCREEN_PX, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_the_page_shows_live_numbers_within_two_seconds_in_both_themes(site, browser, tmp_path):
    browser.get_log("browser")
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
    until(browser, lambda: deciding(browser).startswith(f"{CHAMPION}@"), "no policy is named")
    assert {"large-0", "small-0", "spare-0"} <= set(text_of(browser, "#pools").split())
    until(browser, lambda: "lowest of 3" in text_of(browser, "#decisions"), "no scores")
    for chart in ("response", "ttft", "ended", "sent", "tokens", "queue"):
        assert browser.find_elements(By.CSS_SELECTOR, f"#{chart}-chart path")
    # How old what is shown gets, at worst, looked at for a few seconds.
    ages_s = []
    for _ in range(25):
        shown_s = float(browser.find_element(By.TAG_NAME, "body").get_attribute("data-shown-s"))
        ages_s.append(time.time() - shown_s)
        time.sleep(0.1)
    assert min(ages_s) < 2.0
    assert len(set(np.round(ages_s, 3))) > 1
    folder = os.environ.get("TOKENYARD_SCREENSHOTS", str(tmp_path))
    colours = {}
    for theme in ("light", "dark"):
        while browser.execute_script("return document.documentElement.dataset.theme") != theme:
            browser.find_element(By.ID, "theme").click()
        colours[theme] = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        browser.save_screenshot(f"{folder}/page-{theme}.png")
    assert colours["light"] != colours["dark"]
    assert browser.get_log("browser") == []


def test_on_a_phone_the_page_is_short_and_what_is_folded_unfolds(site, browser):
    try:
        at_width(browser, 400)
        browser.get(site.url)
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".tile")) == 3, "no tile")
        height = browser.execute_script("return document.documentElement.scrollHeight")
        assert height <= 4 * SCREEN_PX
        assert text_of(browser, "#decisions") == ""
        browser.find_element(By.XPATH, "//summary[contains(., 'decisions')]").click()
        until(browser, lambda: "lowest of 3" in text_of(browser, "#decisions"), "it stays folded")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_canary_and_a_rollback_appear_on_the_page(site, browser):
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
    # A canary waits by the champion's order, or it is refused.
    policy = f"sed+{in_words(site.gateway.manager.policy.order)}"
    assert site.post("/v1/policies", {"action": "canary", "policy": policy}).status_code == 200
    until(browser, lambda: "Canary" in text_of(browser, "#policies"), "no canary")
    until(browser, lambda: "evidence against it" in text_of(browser, "#policies"), "no evidence")
    assert site.post("/v1/policies", {"action": "promote"}).status_code == 200
    until(browser, lambda: deciding(browser).startswith(f"{policy}@"), "not promoted")
    started_s = time.process_time()
    assert site.post("/v1/policies", {"action": "rollback"}).status_code == 200
    assert time.process_time() - started_s < 1.0
    until(browser, lambda: deciding(browser).startswith(f"{CHAMPION}@"), "not back")
    assert "rolled back to" in text_of(browser, "#events")


def test_a_page_without_the_token_asks_for_it(browser):
    site = Site(token="secret")
    try:
        browser.get(site.url)
        until(browser, lambda: "token" in text_of(browser, "#status"), "the token is not asked for")
        browser.find_element(By.ID, "token").send_keys("secret")
        browser.find_element(By.CSS_SELECTOR, "#login button").click()
        until(browser, lambda: text_of(browser, "#status") == "live", "the token is not used")
    finally:
        site.stop()


def test_the_plan_its_reason_and_what_was_changed_appear_on_the_page(browser, tmp_path):
    world = World(StaticPlan(FOUR), start=ONE)
    world.slot(requests=60)
    site = Site(allocator=world.allocator)
    try:
        browser.get(site.url)
        until(browser, lambda: "4 of 4" in text_of(browser, "#allocation"), "no GPUs")
        shown = text_of(browser, "#allocation")
        assert "data on 4 GPUs (4 x 1)" in shown
        assert "policy: data on 1 GPUs → data on 4 GPUs" in shown
        assert "all ready" in shown
        assert "demand was 10.00 per second" in shown
        browser.find_element(By.ID, "allocation").screenshot(f"{tmp_path}/allocation.png")
        if "TOKENYARD_SCREENSHOTS" in os.environ:
            browser.save_screenshot(f"{os.environ['TOKENYARD_SCREENSHOTS']}/allocation.png")
    finally:
        site.stop()


def test_charts_run_to_now_with_zero_rates_and_no_line_where_nothing_came(
    site, browser, monkeypatch
):
    newest_s = time.time() // 5.0 * 5.0
    counts = {"finished": 1, "kept": 1, "failed": 0, "refused": 0, "output_tokens": 10, "queued": 0}
    times = {"ttft_s": None, "response_s": {"p50": 1.0, "p95": 2.0, "p99": 3.0}}
    bins = [
        {**counts, **times, "time_s": newest_s - 600.0, "sent": {"large": 100}},
        {**counts, **times, "time_s": newest_s - 400.0, "sent": {"large": 50}},
    ]
    monkeypatch.setattr(site.gateway.history, "look", lambda *_: bins)
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#sent-chart .legend"), "no rates")
    assert text_of(browser, "#sent-chart .legend") == "large 0"
    assert text_of(browser, "#response-chart .legend").split() == "p50 - p95 - p99 -".split()

    def line(chart):
        path = browser.find_element(By.CSS_SELECTOR, f"#{chart}-chart path")
        return path.get_attribute("d")

    assert (line("response").count("M"), line("response").count("L")) == (2, 0)
    assert line("ttft") == ""
    rates = line("sent")[1:].split("L")
    assert len(rates) >= 119
    heights = [rate.split(",")[1] for rate in rates]
    assert len(set(heights)) == 3  # Two rates, and none.
    assert heights.count(heights[-1]) == len(rates) - 2


def test_the_page_of_400_replicas_is_small_and_works_by_keyboard_at_three_widths(browser):
    site = Site(num_replicas=134)
    try:
        at_width(browser, 1400)
        browser.get_log("browser")  # Of the pages before it.
        browser.get(site.url)
        until(browser, lambda: "lowest of 402" in text_of(browser, "#decisions"), "no decision")
        newest = httpx.get(f"{site.url}/v1/console", params={"since_s": time.time() - 5.0})
        assert len(newest.content) < 65_536
        assert all(len(one["candidates"]) == 5 for one in newest.json()["decisions"])
        assert "and 397 more" in text_of(browser, "#decisions")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".tile")) == 402
        assert len(browser.find_elements(By.CSS_SELECTOR, "*")) < 1500
        for width in (1400, 800, 400):
            at_width(browser, width)
            root = "document.documentElement"
            size = f"return [{root}.scrollWidth - {root}.clientWidth, {root}.scrollHeight]"
            beyond, height = browser.execute_script(size)
            assert beyond <= 0, f"it scrolls sideways at {width} px"
            if width == 1400:
                assert height <= 4 * SCREEN_PX
        first, second = browser.find_elements(By.CSS_SELECTOR, ".tile")[:2]
        browser.execute_script("arguments[0].focus()", first)
        assert text_of(browser, "#replica").startswith(f"{first.get_property('row')[0]}: ready")
        first.send_keys(Keys.ARROW_RIGHT)
        assert browser.switch_to.active_element == second
        # A replica keeps the focus, as it stays what it is when it is drawn anew.
        shown = browser.find_element(By.TAG_NAME, "body").get_attribute("data-shown-s")
        body = browser.find_element(By.TAG_NAME, "body")
        until(browser, lambda: body.get_attribute("data-shown-s") != shown, "no refresh")
        assert browser.switch_to.active_element == second
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        site.stop()


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is missing: make plugs")
def test_axe_core_finds_nothing_serious_at_any_width_or_theme(site, browser):
    browser.get(site.url)
    until(browser, lambda: "lowest of 3" in text_of(browser, "#decisions"), "no decision")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    script = "axe.run().then((found) => arguments[0](found.violations))"
    for width in (1400, 800, 400):
        at_width(browser, width)
        for theme in ("light", "dark"):
            browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            found = browser.execute_async_script(script)
            serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
            assert serious == [], (width, theme)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_replica_that_is_ejected_is_named_first(site, browser, monkeypatch):
    ejected = {"large-0": 5.0}
    monkeypatch.setattr(site.gateway.outliers, "ejected_s", lambda name: ejected.get(name, 0.0))
    browser.get(site.url)
    until(browser, lambda: "large: 1 replica ejected" in text_of(browser, "#trouble"), "unnamed")
    assert browser.find_element(By.CSS_SELECTOR, ".tile.failed").text.startswith("large-0")
    assert text_of(browser, "#numbers dd").startswith("2 of 3")


def test_a_server_that_hangs_is_not_live(browser):
    site, hangs = Site(), threading.Event()
    try:
        browser.get(site.url)
        until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
        site.stop_asking()
        # It holds the event loop, as what hangs does.
        site.gateway.history.look = lambda *_: hangs.wait(20.0) and []
        until(browser, lambda: "does not answer" in text_of(browser, "#status"), "it is live", 12)
    finally:
        hangs.set()
        site.stop()
