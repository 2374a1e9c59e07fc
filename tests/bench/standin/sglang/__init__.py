"""A stand-in for SGLang in benchmarks of the supervisor alone: it starts at once and computes nothing."""
