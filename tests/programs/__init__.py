"""Whole programs that tests start on several ranks, or without any."""
