"""A sweep, looked at in MLflow's own pages with a headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from integration.toy_sweeps import ToyRouter, toy_trial
from mlflow import MlflowClient
from scripts import ROOT
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from serve_app.http.free_port import free_port
from tokenyard import registry
from tokenyard.figures import draw_trade_off
from tokenyard.routing.problem import PROBLEM
from tune_configs import mlflow_log

pytestmark = pytest.mark.integration

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: install the packages chromium and chromium-driver",
        allow_module_level=True,
    )


class Trial:
    """What the log reads of a Tune trial."""

    latest_checkpoint_result = None

    def __init__(self, algorithm):
        self.trial_id = f"ui_{algorithm}"
        self.config = toy_trial(algorithm)

    def __str__(self):
        return f"{self.config['algorithm']} none seed 0"


PARETO = "pareto"


def pareto():
    """Figure as a sweep draws it."""
    measures = {one.key: one for one in PROBLEM.measures(PROBLEM.load_scenario("poisson_085"))}
    x, y = PROBLEM.trade_off
    rows = [{"policy": "fast none seed 0", x: 1.0, y: 4.0}, {"policy": "sed", x: 1.1, y: 3.5}]
    return draw_trade_off(rows, measures[x], measures[y], {"fast none seed 0": "fast"})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Store with a sweep of two trials that each have a curve."""
    folder = tmp_path_factory.mktemp("ui")
    client = MlflowClient(mlflow_log.tracking_uri(folder))
    experiment_id = registry.open_experiment(client, "tokenyard-routing")
    parent = mlflow_log.open_sweep_run(client, experiment_id, str(folder), "night-sweep", {})
    tags = {"sweep": "night-sweep"}
    log = mlflow_log.TrialLog(client.tracking_uri, parent, tags, ToyRouter.hyperparameters)
    for skill, algorithm in enumerate(("fast", "slow")):
        trial = Trial(algorithm)
        log.on_trial_start(0, [], trial)
        for steps in range(1_000, 6_000, 1_000):
            # Plotly draws no points on a straight line, so the curve goes up and down.
            score = -3.0 - skill + (steps // 1_000) % 2
            log.on_trial_result(0, [], trial, {"timesteps_total": steps, "eval/score": score})
        log.on_trial_complete(0, [], trial)
    client.log_figure(parent, pareto(), f"figures/{PARETO}.png")
    image = f"get-artifact?path=figures/{PARETO}.png&run_uuid={parent}"
    client.set_tag(parent, "mlflow.note.content", f"Nobody beats the rule.\n\n![{PARETO}]({image})")
    client.set_terminated(parent)
    return folder, client, experiment_id, parent


@pytest.fixture(scope="module")
def server(store):
    """Address of the UI on that store, started as `make mlflow` starts it, and what it printed."""
    port = free_port()
    log = store[0] / "ui.log"
    with log.open("w") as printed:
        server = subprocess.Popen(
            [sys.executable, "-m", "tune_configs.mlflow_server", str(store[0])],
            env=os.environ
            | {"MLFLOW_PORT": str(port), "MLFLOW_WORKERS": "1", "PYTHONPATH": str(ROOT)},
            cwd=store[0],
            stdout=subprocess.DEVNULL,
            stderr=printed,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(f"{address}/health", server)
        pages = re.findall(r"(?:the last sweep|its trials): (\S+)", log.read_text())
        assert len(pages) == 2
        yield address, pages
    finally:
        # The UI is several processes; it was started as their group's leader.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def url(server):
    return server[0]


def wait_until_up(address, server, seconds=240):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, "the UI did not start"
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{address} did not answer in {seconds} s")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1600,1200")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def wait_for_text(browser, *texts, seconds=90):
    def all_there(driver):
        body = driver.find_element(By.TAG_NAME, "body").text
        return all(text in body for text in texts)

    WebDriverWait(browser, seconds).until(all_there, f"not all of {texts} on {browser.current_url}")


def wait_for_image(browser):
    def is_drawn(driver):
        widths = [
            driver.execute_script("return arguments[0].naturalWidth", image)
            for image in driver.find_elements(By.TAG_NAME, "img")
        ]
        return any(width > 500 for width in widths)

    WebDriverWait(browser, 60).until(is_drawn, "no figure")


def test_trials_are_listed_under_their_sweep(url, browser, store):
    _, _, experiment_id, _ = store
    browser.get(f"{url}/#/experiments/{experiment_id}/runs")
    wait_for_text(browser, "night-sweep")
    # Trials come out from under the sweep when it is unfolded.
    assert "fast none seed 0" not in browser.find_element(By.TAG_NAME, "body").text
    row = "//span[@role='presentation'][.//span[text()='night-sweep']]"
    browser.find_element(By.XPATH, f"{row}//button").click()
    wait_for_text(browser, "fast none seed 0", "slow none seed 0")


def test_two_learning_curves_stand_side_by_side(url, browser, store):
    _, client, experiment_id, parent = store
    runs = [run.info.run_id for run in mlflow_log.trial_runs(client, parent).values()]
    listed = "[" + ",".join(f"%22{run}%22" for run in runs) + "]"
    browser.get(
        f"{url}/#/metric?runs={listed}&metric=%22eval/score%22&experiments=[%22{experiment_id}%22]"
        "&plot_metric_keys=[%22eval/score%22]&x_axis=step"
    )
    wait_for_text(
        browser,
        "Comparing 2 Runs",
        "fast none seed 0 (eval/score)",
        "slow none seed 0 (eval/score)",
    )

    def points_per_curve(driver):
        # MLflow draws every curve twice, plain and smoothed; unsmoothed, they are the same path.
        lines = driver.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace path.js-line")
        paths = {line.get_attribute("d") for line in lines}
        return [path.count("L") + 1 for path in paths]

    wait = WebDriverWait(browser, 60)
    wait.until(lambda driver: points_per_curve(driver) == [5, 5], "no two curves of five points")


def test_a_trial_shows_what_it_learned_with_in_numbers(url, browser, store):
    _, client, experiment_id, parent = store
    run = next(iter(mlflow_log.trial_runs(client, parent).values()))
    browser.get(f"{url}/#/experiments/{experiment_id}/runs/{run.info.run_id}")
    wait_for_text(browser, "gamma", "0.5", "reward.response", "-1.0")


def test_a_sweep_shows_what_its_trials_trade(url, browser, store):
    _, _, experiment_id, parent = store
    browser.get(f"{url}/#/experiments/{experiment_id}/runs/{parent}/artifacts")
    wait_for_text(browser, "figures")
    folder = "//*[text()='figures']"
    browser.find_element(By.XPATH, folder).click()
    wait_for_text(browser, f"{PARETO}.png")
    browser.find_element(By.XPATH, f"//*[text()='{PARETO}.png']").click()

    wait_for_image(browser)


def test_the_pages_that_are_printed_tell_the_story_and_list_the_trials(server, browser, store):
    _, (story, trials) = server
    browser.get(story)
    wait_for_text(browser, "Nobody beats the rule.")
    wait_for_image(browser)
    browser.get(trials)
    wait_for_text(browser, "fast none seed 0", "slow none seed 0", "2 matching runs")
