"""Whole clusters in one thread: a fake network, clock and file system around the production code."""
