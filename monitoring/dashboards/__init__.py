"""Grafana dashboards as code: `python -m monitoring.dashboards` writes grafana/dashboards/*.json."""
