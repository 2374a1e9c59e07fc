"""Hearth: runs an SGLang engine with the graph plan you asked for, and keeps it serving."""

__version__ = "0.1.0"
