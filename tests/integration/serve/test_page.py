"""The page at `/` in a headless Chromium, over a gateway under load."""

import asyncio
import os
import shutil
import threading
import time

import httpx
import numpy as np
import pytest
import uvicorn
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from unit.serve.test_serve_allocator import FOUR, ONE, World
from unit.serve.test_serve_gateway import FakePool, Letters, a_body, a_cluster

from serve_app.gateway.gateway import Gateway
from serve_app.http import allocation as allocation_api
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager
from tokenyard.allocation.policies.rules import StaticPlan
from tokenyard.routing.artifact import rule_for
from tokenyard.routing.policies.order_spec import in_words

pytestmark = pytest.mark.integration

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: install the packages chromium and chromium-driver",
        allow_module_level=True,
    )


CHAMPION = rule_for("conversation_mixed_gpus")
"""What `champion` is in the cluster of the tests."""


class Site:
    """A gateway behind uvicorn in a thread, with a client that asks without a pause."""

    def __init__(self, token=None, allocator=None):
        cluster = a_cluster(pools=("large", "small", "spare"))
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch("champion")
        self.gateway = Gateway(cluster, manager, {p.name: FakePool(p.name) for p in cluster.pools})
        api = create_gateway_api(self.gateway, Letters(), Access(token, local_admin=True))
        if allocator is not None:
            api.include_router(
                allocation_api.make_router(
                    allocator, Access(token, local_admin=True), lambda _: None
                )
            )
        config = uvicorn.Config(api, host="127.0.0.1", port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._going = True
        self._load = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._load.start()

    def post(self, path, body):
        return httpx.post(self.url + path, json=body, headers=self._headers, timeout=60)

    def stop_asking(self):
        self._going = False
        self._load.join()

    def stop(self):
        self.stop_asking()
        self._server.should_exit = True
        self._thread.join()
        self.gateway.manager.stop()

    async def _ask(self):
        async with httpx.AsyncClient(base_url=self.url, headers=self._headers) as http:
            while self._going:
                await http.post("/v1/completions", json=a_body())
                await asyncio.sleep(0.05)


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


def test_the_page_shows_live_numbers_within_two_seconds_in_both_themes(site, browser, tmp_path):
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
    until(browser, lambda: CHAMPION in text_of(browser, "#policy"), "no policy is named")
    assert {"large", "small", "spare"} <= set(text_of(browser, "#pools").split())
    until(browser, lambda: ":" in text_of(browser, "#decisions .chip.chosen"), "no scores")
    for chart in ("response", "ttft", "share"):
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
    complaints = [one for one in browser.get_log("browser") if "allocation" not in one["message"]]
    assert complaints == []


def test_a_canary_and_a_rollback_appear_on_the_page(site, browser):
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
    # A canary waits by the champion's order, or it is refused.
    policy = f"sed+{in_words(site.gateway.manager.policy.order)}"
    assert site.post("/v1/policies", {"action": "canary", "policy": policy}).status_code == 200
    until(browser, lambda: "canary" in text_of(browser, "#policies"), "no canary")
    until(browser, lambda: "evidence against it" in text_of(browser, "#policies"), "no evidence")
    assert site.post("/v1/policies", {"action": "promote"}).status_code == 200
    until(browser, lambda: text_of(browser, "#policy").startswith(f"{policy}@"), "not promoted")
    started_s = time.process_time()
    assert site.post("/v1/policies", {"action": "rollback"}).status_code == 200
    assert time.process_time() - started_s < 1.0
    until(browser, lambda: text_of(browser, "#policy").startswith(f"{CHAMPION}@"), "not back")
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


def test_rates_are_of_the_bins_however_long_nothing_came_between_them(site, browser, monkeypatch):
    newest_s = time.time() // 5.0 * 5.0
    known = {"finished": 0, "kept": 0, "ttft_s": None, "response_s": None}
    bins = [
        {**known, "time_s": newest_s - 600.0, "sent": {"large": 100}},
        {**known, "time_s": newest_s, "sent": {"large": 1}},
    ]
    monkeypatch.setattr(site.gateway.history, "rows", lambda: bins)
    browser.get(site.url)
    until(browser, lambda: text_of(browser, "#share-chart .legend"), "no rates")
    assert text_of(browser, "#share-chart .legend") == "large 20.0"


def test_a_server_that_hangs_is_not_live(browser):
    site, hangs = Site(), threading.Event()
    try:
        browser.get(site.url)
        until(browser, lambda: text_of(browser, "#status") == "live", "the page is not live")
        site.stop_asking()
        # It holds the event loop, as what hangs does.
        site.gateway.history.rows = lambda: hangs.wait(20.0) and []
        until(browser, lambda: "does not answer" in text_of(browser, "#status"), "it is live", 12)
    finally:
        hangs.set()
        site.stop()
