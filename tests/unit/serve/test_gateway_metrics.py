"""Metrics, alert rules and dashboard name the same things as their page."""

import re

import yaml
from scripts import ROOT

from serve_app.gateway.metrics import Metrics

PAGE = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
ALERTS = (ROOT / "clusters/monitoring/alerts.yaml").read_text(encoding="utf-8")
DASHBOARD = (ROOT / "clusters/monitoring/grafana.json").read_text(encoding="utf-8")
METRIC = re.compile(r"tokenyard_\w+")


def test_the_page_has_every_metric_and_no_other():
    families = list(Metrics().registry.collect())
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    named = {name for name in METRIC.findall(PAGE) if not name.startswith("tokenyard_region")}
    assert named == names
    assert all(one.documentation.endswith(".") for one in families)


def test_rules_and_dashboard_ask_for_metrics_that_exist_and_the_dashboard_for_all():
    known = {re.sub("_(bucket|count)$", "", name) for name in METRIC.findall(PAGE)}
    asked = {re.sub("_(bucket|count)$", "", name) for name in METRIC.findall(ALERTS + DASHBOARD)}
    assert asked <= known
    shown = {re.sub("_(bucket|count)$", "", name) for name in METRIC.findall(DASHBOARD)}
    assert {name for name in known - shown if "region" not in name} == set()


def test_every_alert_has_a_section_that_says_what_to_do():
    (group,) = yaml.safe_load(ALERTS)["groups"]
    sections = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert [rule["alert"] for rule in group["rules"]] == sections
    for rule in group["rules"]:
        anchor = rule["annotations"]["runbook"].removeprefix("docs/monitoring.md#")
        assert anchor == rule["alert"].lower()
