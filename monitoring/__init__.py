"""Prometheus rules, dashboards and runbooks of Hearth, as code."""
