"""The dashboard and the alert rules, with promtool and a real Prometheus before a gateway."""

import json
import re
import shutil
import subprocess
import time

import httpx
import pytest
from gateway_site import Site
from scripts import ROOT

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: install the package prometheus", allow_module_level=True
    )

MONITORING = ROOT / "clusters/monitoring"
PANELS = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))["panels"]
ASKED = [
    (panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())
]
METRIC = re.compile(r"tokenyard_\w+")


@pytest.fixture(scope="module")
def site():
    made = Site()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def prometheus(site, tmp_path_factory):
    """URL of a Prometheus that has scraped the gateway and evaluated the rules a few times."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": "tokenyard",
                "static_configs": [{"targets": [site.url.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: httpx.get(f"{url}/-/ready").status_code == 200)
        until(lambda: float(ask(url, "count_over_time(up[1m])")[0]["value"][1]) >= 5)
        yield url
    finally:
        process.terminate()
        process.wait()


def until(condition, seconds=60):
    ends_s = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except (httpx.TransportError, IndexError):
            pass
        assert time.monotonic() < ends_s, "it took too long"
        time.sleep(0.2)


def ask(url, expression):
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=10)
    assert answer.json()["status"] == "success", (expression, answer.text)
    return answer.json()["data"]["result"]


def promtool(*arguments, **options):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, **options)
    return done.returncode, done.stdout + done.stderr


def test_the_alert_rules_are_well_formed_and_fire_when_they_should():
    for what, file in (("check", "alerts.yaml"), ("test", "alerts_test.yaml")):
        code, said = promtool(what, "rules", MONITORING / file)
        assert code == 0, said


def test_the_names_of_metrics_are_as_conventions_want(site):
    code, said = promtool("check", "metrics", input=httpx.get(f"{site.url}/metrics").text)
    assert (code, said) == (0, "")


def test_every_question_of_the_dashboard_has_an_answer_where_there_was_traffic(site, prometheus):
    lines = httpx.get(f"{site.url}/metrics").text.splitlines()
    samples = {re.split("[{ ]", line)[0] for line in lines if not line.startswith("#")}
    without = set()
    for title, expression in ASKED:
        filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
        # Of what never happened there is no series, as of GPUs where there are none.
        if set(METRIC.findall(expression)) <= samples and "failed|timeout" not in expression:
            assert ask(prometheus, filled), (title, expression)
        else:
            ask(prometheus, filled)
            without.add(title)
    assert without <= {
        "Errors", "Refused", "Refused by reason", "Fallbacks by reason", "Sessions", "GPU",
        "GPU power", "Network", "Requests by tenant", "Tokens by tenant", "Refused by tenant",
        "CPU and memory", "Retries, ejections, failed scrapes", "Replicas recommended",
    }  # fmt: skip


def test_every_alert_is_evaluated_without_an_error_and_all_is_well(prometheus):
    def rules():
        found = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in found for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert [rule["name"] for rule in rules() if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules() if rule["state"] != "inactive"] == []
