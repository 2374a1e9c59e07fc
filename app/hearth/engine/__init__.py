"""The engine: how to spell its command line, run it, read its log and ask it questions."""
